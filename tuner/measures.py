"""Every number that a measurement can hold: one entry each, with all that the tuner knows of it.

An entry is what a study needs to name the number as an objective (docs/extending.md shows how to add one).
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tuner.records import Outcome, Slo

Direction = Literal["minimize", "maximize"]

# A key of the study file without which a number has no value: the price, or a limit per request.
Need = Literal["price_per_gpu_hour", "slo"]

LATENCIES = ("ttft", "tpot", "itl", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One number of a measurement.

    `name` is its name in study files, tables and JSON, `words` says what it is, `unit` stands behind
    values. `latency` is (kind, percentile as a share; None = the mean) if it is a statistic of whole
    requests. `limit` is the field of the SLO that limits it: values within that limit always count in the
    search. `needs` is a key of the study file: without this key, there is no value. If `predicted` is
    False, the simulator cannot predict it, so a study with this objective is searched without the
    simulator.

    `compute` makes it from the requests of a window (without those that their own client cancelled), the
    window's seconds and the SLO. If it returns None, there is no value. Without `compute` the replay or the
    engine room makes it. `per_request` is the value of one request, for a number that is a mean over
    requests (or such a mean times a constant). Two configurations are then compared request by request.
    """

    name: str
    words: str = ""
    unit: str = ""
    direction: Direction = "minimize"
    latency: tuple[str, float | None] | None = None
    limit: str | None = None
    needs: Need | None = None
    predicted: bool = True
    compute: Callable[[Sequence[Outcome], float, Slo], float | None] | None = None
    per_request: Callable[[Outcome, Slo], float] | None = None


LATENCIES_OF_REQUESTS = ("ttft", "tpot", "e2e")

# What is measured of each class of requests too, under names such as `interactive.ttft_p95_ms`.
OF_A_CLASS = frozenset(
    {f"{kind}_{stat}_ms" for kind in LATENCIES_OF_REQUESTS for stat in STATISTICS}
    | {"goodput_rps", "slo_attainment", "request_rps", "output_tokens_per_s", "requests", "failed"}
)

# Names of classes of requests (`Trace.classes`).
CLASS = re.compile(r"interactive|bulk|adapter\d+|tenant\d+")


# Numbers that are measured only when the engine's metrics are read. The simulator predicts them from every
# step.
SAMPLED = frozenset({"kv_usage_mean", "kv_usage_max", "queue_depth_mean", "queue_depth_max"})


class _Entries(dict[str, Measure]):
    """Entries by name. The entry of a class of requests (`interactive.ttft_p95_ms`) is made from that of all
    requests."""

    def __contains__(self, name: object) -> bool:
        one, _, metric = str(name).rpartition(".")
        return super().__contains__(name) or bool(CLASS.fullmatch(one) and metric in OF_A_CLASS)

    def __missing__(self, name: str) -> Measure:
        if name not in self:
            raise KeyError(name)
        one, _, metric = name.rpartition(".")
        whole = self[metric]
        words = f"{whole.words}, of the {one} requests"
        return replace(whole, name=name, words=words, latency=None, compute=None, per_request=None)


# All entries by name. Read it when needed, do not copy it: entries may be added later.
MEASURES = _Entries()

# The names of all entries; those of classes of requests are in it, too many to be listed.
NAMES: Collection[str] = MEASURES


def register(entry: Measure) -> Measure:
    """Add an entry. ValueError when its name is taken."""
    if entry.name in MEASURES:
        raise ValueError(f"there is already a measurement '{entry.name}'")
    MEASURES[entry.name] = entry
    return entry


# The unit by the ending of a name, for names without an entry.
UNITS = {
    "_ms": "ms",
    "_rps": "requests/s",
    "_tokens_per_s": "tokens/s",
    "_gib": "GiB",
    "_j_per_token": "J/token",
    "_seconds": "s",
}


def measure_of(name: str) -> Measure:
    """The entry of a name. For a name without one, what follows from the name: the unit by its ending, and
    the SLO's limit of a latency (`ttft_…_ms`); it is minimised.
    """
    if name in MEASURES:
        return MEASURES[name]
    kind, _, _ = name.partition("_")
    unit = next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "")
    return Measure(name=name, unit=unit, limit=_limit_of(kind))


def many(count: float, what: str, form: str = ".0f") -> str:
    """A count with its noun: `1 request`, `2000 requests`, `3 launches`, `2 studies`, in a `form`."""
    ending = "" if count == 1 else "es" if what.endswith("ch") else "s"
    if ending and what.endswith("dy"):
        what, ending = what[:-1], "ies"
    return f"{count:{form}} {what}{ending}"


def trials_named(labels: Sequence[str]) -> str:
    """`trial 3`, or `trials 3.1, 5`."""
    return f"trial{'s' if labels[1:] else ''} {', '.join(labels)}"


def in_order(names: Iterable[str], first: Iterable[str] = ()) -> list[str]:
    """Names of measurements, each once: those of `first` in their order, then in the order of the entries;
    what has none of its own comes last, by name.
    """
    known = set(names)
    ours = [name for name in dict.fromkeys(first) if name in known]
    places = {name: place for place, name in enumerate(MEASURES)}
    return [*ours, *sorted(known - {*ours}, key=lambda name: (places.get(name, len(places)), name))]


def counts_requests(name: str) -> bool:
    """Whether a number is a sum over requests per second or per request, so that repeats are one long replay:
    all their good requests by all their time.
    """
    entry = measure_of(name.rpartition(".")[2])
    return entry.name in ("goodput_rps", "slo_attainment") or entry.per_request is not None


def class_of(name: str) -> str:
    """The class of requests that a measurement name is about, "" for all requests."""
    return name.rpartition(".")[0]


def direction_of(name: str) -> Direction:
    """Whether a measurement is to be minimised or maximised. KeyError for an unknown name."""
    return MEASURES[name].direction


def is_maximized(name: str) -> bool:
    """Whether more is better; False for a name without an entry."""
    return measure_of(name).direction == "maximize"


def _limit_of(kind: str) -> str | None:
    return f"{kind}_ms" if kind in LATENCIES_OF_REQUESTS else None


def _latency(kind: str, statistic: str) -> Measure:
    share = None if statistic == "mean" else float(statistic[1:]) / 100
    title = {
        "ttft": "time to the first token",
        "tpot": "time per output token of a request",
        "itl": "gap between two tokens",
        "e2e": "time from the scheduled send to the last token",
    }[kind]
    return Measure(
        name=f"{kind}_{statistic}_ms", words=f"{statistic} of the {title}", unit="ms", limit=_limit_of(kind),
        latency=None if kind == "itl" else (kind, share),  # gaps are weighted by their tokens
    )  # fmt: skip


for _kind in LATENCIES:
    for _statistic in STATISTICS:
        register(_latency(_kind, _statistic))

for _entry in (
    Measure(
        name="goodput_rps", words="requests per second that kept every limit of the SLO", unit="requests/s",
        direction="maximize",
    ),
    Measure(
        name="slo_attainment", words="share of requests that kept every limit of the SLO", unit="of 1",
        direction="maximize",
    ),
    Measure(
        name="request_rps", words="answered requests per second", unit="requests/s", direction="maximize",
        per_request=lambda outcome, slo: float(outcome.ok),
    ),
    Measure(
        name="output_tokens_per_s", words="output tokens per second", unit="tokens/s", direction="maximize",
        per_request=lambda outcome, slo: float(outcome.output_tokens),
    ),
    Measure(
        name="input_tokens_per_s", words="prompt tokens per second", unit="tokens/s", direction="maximize"
    ),
    Measure(name="requests", words="requests that count", unit="requests", direction="maximize"),
    Measure(name="failed", words="requests without a complete answer", unit="requests"),
    Measure(name="unfinished", words="requests that still ran at the end", unit="requests"),
    Measure(name="preemptions", words="requests that lost their KV cache and began again", unit="times"),
    Measure(name="kv_usage_mean", words="mean share of the KV cache in use", unit="of 1"),
    Measure(name="kv_usage_max", words="highest share of the KV cache in use", unit="of 1"),
    Measure(
        name="prefix_hit_rate", words="share of prompt tokens found in the prefix cache", unit="of 1",
        direction="maximize",
    ),
    Measure(name="queue_depth_mean", words="mean number of waiting requests", unit="requests"),
    Measure(name="queue_depth_max", words="highest number of waiting requests", unit="requests"),
    Measure(name="batch_tokens_mean", words="mean number of tokens in a step", unit="tokens"),
    Measure(name="batch_tokens_p50", words="median number of tokens in a step", unit="tokens"),
    Measure(name="batch_tokens_p95", words="p95 of the number of tokens in a step", unit="tokens"),
    Measure(name="batch_requests_p50", words="median number of requests in a step", unit="requests"),
    Measure(name="batch_requests_p95", words="p95 of the number of requests in a step", unit="requests"),
    Measure(name="step_ms_p50", words="median duration of a step", unit="ms"),
    Measure(name="step_ms_p95", words="p95 of the duration of a step", unit="ms"),
    Measure(name="kv_fragmentation", words="share of the held KV blocks that no token fills", unit="of 1"),
    Measure(name="blocks_allocated_per_s", words="KV blocks given to requests per second", unit="blocks/s"),
    Measure(name="blocks_evicted_per_s", words="cached KV blocks dropped per second", unit="blocks/s"),
    Measure(name="offload_gib_per_s", words="KV cache moved to and from the host per second", unit="GiB/s"),
    Measure(name="gpu_memory_gib", words="GPU memory in use", unit="GiB"),
    Measure(name="gpu_utilization", words="share of time in which the GPU was busy", unit="of 1"),
    Measure(name="energy_j_per_token", words="energy for an output token", unit="J/token"),
    Measure(
        name="cost_per_million_tokens", words="price of a million output tokens",
        unit="price/million tokens", needs="price_per_gpu_hour",
    ),
    Measure(name="ready_s", words="time from the launch until the engine answers", unit="s"),
    Measure(name="gpu_seconds", words="time of the trial, times its GPUs if it has any", unit="s"),
    Measure(
        name="max_speed", words="highest speed of the trace at which every slice keeps the SLO",
        unit="× the trace", direction="maximize", needs="slo", predicted=False,
    ),
    Measure(
        name="token_agreement", words="share of tokens that agree with the baseline's answers",
        direction="maximize",
    ),
    Measure(name="logprob_distance", words="mean distance to the baseline's log probabilities"),
):  # fmt: skip
    register(_entry)


def number(value: object) -> str:
    """A measured value for reading: four significant digits, ∞ for a failed one, an en dash for none."""
    if not isinstance(value, int | float):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
