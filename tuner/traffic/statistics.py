"""The numbers of a trace (rates, bursts, lengths, concurrency, prefix reuse), advice on knobs, and what has
changed between two traces.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tuner.measures import many
from tuner.records import JSON
from tuner.traffic.structure import new_tokens, prefers_live_history, reuse_by_capacity
from tuner.traffic.trace import STATUSES, Trace

# What `trace show` prints: percentiles, windows for peaks and bursts, and cache sizes in tokens from a small
# card to several large ones (None: unlimited).
PERCENTILES = (1, 10, 50, 90, 95, 99, 100)
WINDOWS_S = (1, 10, 60)
CAPACITIES = (100_000, 400_000, 1_600_000, 6_400_000, None)

# A rough time per request where the trace did not observe one: seconds per input and output token.
PREFILL_S, DECODE_S = 1 / 8000, 0.025


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The numbers of `trace show`.

    `dispersion`: variance / mean of arrival counts per window (1 = Poisson). `concurrency` has percentiles of
    the requests in flight, weighted by time; `concurrency_source` says whether their times were observed or
    estimated. `reuse` maps the size of a KV cache in tokens ("any" = unlimited) to the share of input tokens
    that it finds; None: the trace has no block ids. `new_tokens` is what each turn adds to its conversation;
    None: the trace has no turns. `total_len` is prompt and answer of one request together. Rates are None if
    all requests arrive at one moment. A peak is None if the trace is shorter than its window.
    """

    requests: int
    duration_s: float
    request_rps: float | None
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    peak_rps: Mapping[str, float | None]
    arrival_cv: float | None
    dispersion: Mapping[str, float | None]
    input_len: Mapping[str, float]
    output_len: Mapping[str, float]
    total_len: Mapping[str, float]
    max_tokens: Mapping[str, float] | None
    concurrency: Mapping[str, float]
    concurrency_source: str
    observed_ttft_ms: Mapping[str, float] | None
    observed_e2e_ms: Mapping[str, float] | None
    statuses: Mapping[str, int]
    clients: int
    sessions: int
    multi_turn_share: float
    new_tokens: Mapping[str, float] | None
    prefers_live_history: bool
    priorities: Mapping[str, int]
    parallel_share: float
    beam_share: float
    adapters: int
    block_size: int
    reuse: Mapping[str, float] | None
    observed_cached_share: float | None
    resolution_s: float
    quality: Mapping[str, JSON] = field(default_factory=dict)
    advice: tuple[str, ...] = ()

    def as_json(self) -> dict[str, JSON]:
        """All fields as plain JSON."""
        return cast(dict[str, JSON], asdict(self) | {"advice": list(self.advice)})


def describe(trace: Trace, *, speed: float = 1.0) -> Statistics:
    """Every number, for the trace replayed at `speed`."""
    arrival, span = trace.arrival_s / speed, trace.duration_s / speed
    in_flight, source = concurrency(trace, speed)
    sized = reuse_by_capacity(trace, CAPACITIES).items()
    reuse = {"any" if size is None else str(size): share for size, share in sized}
    cached, gaps, added = trace.obs_cached >= 0, np.diff(arrival), new_tokens(trace)
    read = max(1, trace.input_len[cached].sum(dtype=np.int64))
    numbers = Statistics(
        requests=len(trace),
        duration_s=trace.duration_s / speed,
        request_rps=len(trace) / span if span else None,
        input_tokens_per_s=float(trace.input_len.sum(dtype=np.int64)) / span if span else None,
        output_tokens_per_s=float(trace.output_len.sum(dtype=np.int64)) / span if span else None,
        peak_rps={f"{window}s": _peak(arrival, window) for window in WINDOWS_S},
        arrival_cv=float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else None,
        dispersion={f"{window}s": dispersion(arrival, window) for window in WINDOWS_S},
        input_len=percentiles(trace.input_len),
        output_len=percentiles(trace.output_len),
        total_len=percentiles(trace.input_len.astype(np.int64) + trace.output_len),
        max_tokens=_known(trace.max_tokens, trace.max_tokens >= 0),
        concurrency=in_flight,
        concurrency_source=source,
        observed_ttft_ms=_known(trace.obs_ttft_s * 1e3, ~np.isnan(trace.obs_ttft_s)),
        observed_e2e_ms=_known(trace.obs_e2e_s * 1e3, ~np.isnan(trace.obs_e2e_s)),
        statuses={name: int((trace.status == code).sum()) for code, name in enumerate(STATUSES)},
        clients=len(np.unique(trace.client[trace.client >= 0])),
        sessions=len(np.unique(trace.session[trace.session >= 0])),
        multi_turn_share=_share(trace.parent >= 0),
        new_tokens=_known(added, added >= 0),
        prefers_live_history=prefers_live_history(trace),
        priorities={str(one): int((trace.priority == one).sum()) for one in np.unique(trace.priority)},
        parallel_share=_share(trace.n > 1),
        beam_share=_share(trace.beam > 0),
        adapters=len(np.unique(trace.lora[trace.lora >= 0])),
        block_size=trace.block_size,
        reuse=reuse if len(trace.blocks) else None,
        observed_cached_share=float(trace.obs_cached[cached].sum() / read) if cached.any() else None,
        resolution_s=cast(float, trace.meta.get("resolution_s", 0.0)),
        quality=cast(Mapping[str, JSON], trace.meta.get("quality", {})),
    )
    return replace(numbers, advice=advise(numbers))


def percentiles(values: NDArray[np.generic]) -> dict[str, float]:
    """mean and p1 ... p100, linear interpolation; empty when there is no value."""
    if not len(values):
        return {}
    found = np.percentile(values.astype(np.float64), PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(values.astype(np.float64).mean()), **named}


def dispersion(arrival_s: NDArray[np.float64], window_s: float) -> float | None:
    """Variance / mean of arrival counts in complete windows; None if there are fewer than two windows."""
    counts = _counts(arrival_s, window_s)
    if len(counts) < 2 or not counts.mean():
        return None
    return float(counts.var() / counts.mean())


def in_flight(trace: Trace, speed: float = 1.0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(times in seconds, requests in flight after each of them) of the whole trace. The duration of a request
    is the observed one if it is known, otherwise an estimate from its lengths.
    """
    estimate = trace.input_len * PREFILL_S + trace.output_len * DECODE_S
    took = np.where(np.isnan(trace.obs_e2e_s), estimate, trace.obs_e2e_s)
    starts = trace.arrival_s / speed
    times = np.concatenate([starts, starts + took])
    steps = np.concatenate([np.ones(len(starts), np.int64), -np.ones(len(starts), np.int64)])
    order = np.lexsort((steps, times))
    return times[order], np.cumsum(steps[order])


def concurrency(trace: Trace, speed: float = 1.0) -> tuple[dict[str, float], str]:
    """Percentiles of the requests in flight, weighted by time, while requests arrive; and the source of the
    durations.

    If all requests arrive at one moment, the time until the last one has ended is used.
    """
    if len(trace) < 2:
        return {}, "none"
    times, level = in_flight(trace, speed)
    until = np.append(times[1:], times[-1])
    end = trace.duration_s / speed or float(times[-1])
    inside = np.clip(until, None, end) - np.clip(times, None, end)
    order = np.argsort(level, kind="stable")
    weight = np.cumsum(inside[order])
    found = {}
    for percent in PERCENTILES:
        place = np.searchsorted(weight, weight[-1] * percent / 100)
        found[f"p{percent}"] = float(level[order][min(int(place), len(level) - 1)])
    found["p100"] = float(level.max())
    mean = float((level * inside).sum() / max(inside.sum(), 1e-12))
    known = _share(~np.isnan(trace.obs_e2e_s))
    source = (
        "observed" if known == 1 else "estimated" if known == 0 else f"{known:.0%} observed, rest estimated"
    )
    return {"mean": mean, **found}, source


def _counts(arrival_s: NDArray[np.float64], window_s: float) -> NDArray[np.int64]:
    whole = int(arrival_s[-1] // window_s) if len(arrival_s) else 0
    inside = arrival_s[arrival_s < whole * window_s]
    return np.bincount((inside / window_s).astype(np.int64), minlength=whole).astype(np.int64)


def _peak(arrival_s: NDArray[np.float64], window_s: float) -> float | None:
    counts = _counts(arrival_s, window_s)
    return float(counts.max() / window_s) if len(counts) else None


def _known(values: NDArray[np.generic], known: NDArray[np.bool_]) -> dict[str, float] | None:
    return percentiles(values[known]) if known.any() else None


def _share(mask: NDArray[np.bool_]) -> float:
    return float(mask.mean()) if len(mask) else 0.0


def series(trace: Trace, *, bins: int = 240) -> dict[str, list[float]]:
    """The data for pictures of a trace, per equal span of time: `start_s`, `request_rps`,
    `input_tokens_per_s`, `output_tokens_per_s`, and `concurrency` at the end of each span.
    """
    edges = np.linspace(0.0, max(trace.duration_s, 1e-9), bins + 1)
    span = edges[1] - edges[0]
    times, level = in_flight(trace)
    at = np.searchsorted(times, edges[1:], side="right") - 1
    drawn = {
        "request_rps": np.histogram(trace.arrival_s, edges)[0] / span,
        "input_tokens_per_s": np.histogram(trace.arrival_s, edges, weights=trace.input_len)[0] / span,
        "output_tokens_per_s": np.histogram(trace.arrival_s, edges, weights=trace.output_len)[0] / span,
        "concurrency": np.where(at >= 0, level[at], 0) if len(level) else np.zeros(bins),
    }
    return {"start_s": edges[:-1].tolist()} | {name: values.tolist() for name, values in drawn.items()}


def advise(numbers: Statistics) -> tuple[str, ...]:
    """Advice on knobs in sentences, the most useful first; empty for fewer than 20 requests."""
    if numbers.requests < 20:
        return ()
    return (
        *_batch_advice(numbers),
        *_length_advice(numbers),
        *_burst_advice(numbers),
        *_reuse_advice(numbers),
        *_data_advice(numbers),
    )


def sequences_for(numbers: Statistics) -> int | None:
    """A larger max_num_seqs than this does not help, by p99 concurrency; None if that is not known."""
    p99 = numbers.concurrency.get("p99")
    return 1 << (max(1, round(p99 * 1.5)) - 1).bit_length() if p99 else None


def _batch_advice(numbers: Statistics) -> Iterator[str]:
    enough = sequences_for(numbers)
    if enough is not None:
        yield (
            f"p99 concurrency {numbers.concurrency['p99']:.0f} ({numbers.concurrency_source}):"
            f" max_num_seqs above {enough} helps only if the engine is slower than assumed"
        )
    if numbers.parallel_share > 0:
        yield (
            f"{numbers.parallel_share:.1%} of requests ask for n > 1 answers: each answer takes a sequence "
            "of its own in max_num_seqs"
        )
    if numbers.beam_share > 0:
        yield (
            f"{numbers.beam_share:.1%} of requests are beam searches. vLLM does not stream them, so no study"
            " replays them. `tuner trace reshape --beam sample` turns them into sampled answers, and"
            " `--beam drop` leaves them out"
        )


def _length_advice(numbers: Statistics) -> Iterator[str]:
    longest, mean = numbers.input_len["p99"], numbers.input_len["mean"]
    yield (
        f"prompts: mean {mean:,.0f}, p99 {longest:,.0f} tokens. If max_num_batched_tokens is below "
        f"{longest:,.0f}, the longest prompts are split into chunks. If it is above, each of these "
        f"prompts delays decoding by one long step"
    )
    declared = numbers.max_tokens
    if declared and declared["p50"] > 4 * max(1.0, numbers.output_len["p50"]):
        yield (
            f"clients ask for max_tokens {declared['p50']:,.0f} (median), but answers have "
            f"{numbers.output_len['p50']:,.0f} tokens (median): do not size memory by max_tokens"
        )
    top = numbers.total_len["p100"]
    yield f"the longest request has {top:,.0f} tokens with its answer: a larger max_model_len is not needed"


def _burst_advice(numbers: Statistics) -> Iterator[str]:
    second, minute = numbers.dispersion.get("1s"), numbers.dispersion.get("60s")
    if second and second > 3:
        yield (
            f"arrivals come in bursts (variance {second:.1f} × Poisson's in 1 s): use p95 or p99 as "
            f"objectives, and slices that contain bursts"
        )
    if minute and minute > 5:
        yield (
            f"the rate changes over time (variance {minute:.1f} × Poisson's in 60 s): one slice is not enough"
        )


def _reuse_advice(numbers: Statistics) -> Iterator[str]:
    if numbers.reuse is None:
        yield "no block ids: prefix reuse is unknown and every prompt is replayed as unique"
        return
    best = numbers.reuse["any"]
    if best < 0.01:
        yield f"prefix reuse {best:.1%} with any cache: enable_prefix_caching does not help"
        return
    sized = [(int(size), share) for size, share in numbers.reuse.items() if size != "any"]
    enough = next((size for size, share in sized if share >= 0.8 * best), None)
    where = (
        f"a KV cache of {enough:,} tokens is enough for most of this reuse"
        if enough
        else "even a KV cache of 6,400,000 tokens is too small for most of this reuse"
    )
    yield f"prefix reuse up to {best:.1%} of input tokens: {where}"


def _data_advice(numbers: Statistics) -> Iterator[str]:
    if numbers.prefers_live_history:
        yield (
            f"{numbers.multi_turn_share:.0%} of requests are later turns, and answers are long. With "
            "`history: live` in the study, the engine reuses its own answers, as in production"
        )
    elif numbers.reuse is not None and not numbers.sessions:
        yield (
            "the trace has block ids, but no sessions: `tuner trace reshape --infer-sessions` finds sessions"
        )
    if numbers.resolution_s > 0.005:
        yield (
            f"the source has time stamps in steps of {numbers.resolution_s:g} s, so shorter bursts are"
            " lost. Arrivals are spread within each step"
        )
    bad = numbers.requests - numbers.statuses.get("ok", 0)
    if bad:
        kept = "it is" if bad == 1 else "they are"
        yield f"{many(bad, 'request')} failed in production; {kept} kept and marked"


# A rate or length that changed by less has not moved.
MATERIAL = 0.10

# A share of requests or tokens that changed by less (of 1) has not moved.
MATERIAL_SHARE = 0.05

# Chance alone gives 3.3 standard errors once in a thousand comparisons.
_SIGMAS = 3.3

# The window in which bursts of arrivals are counted; `trace show` prints this one too.
_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """One number of two traces. `change` = (after − before) / before; for a share it is after − before; None
    if before is 0. `moved`: the change matters, and chance cannot explain it.
    """

    name: str
    unit: str
    before: float
    after: float
    change: float | None
    moved: bool

    @property
    def sentence(self) -> str:
        """The number before and after, and the size of its change."""
        if self.unit == "share":
            return f"{self.name}: {self.before:.1%} → {self.after:.1%} of all"
        size = "" if self.change is None else f" ({self.change:+.1%})"
        return f"{self.name}: {self.before:,.4g} → {self.after:,.4g} {self.unit}{size}"


def compare(before: Trace, after: Trace) -> tuple[Shift, ...]:
    """Every number of both traces, in one order; `moved` marks those that changed. The result is empty if a
    trace is empty.
    """
    if not len(before) or not len(after):
        return ()
    return (
        *_rates(before, after),
        *_lengths("prompt length", before.input_len, after.input_len),
        *_lengths("answer length", before.output_len, after.output_len),
        *_shares(before, after),
        *_reuse_moved(before, after),
    )


def _rates(before: Trace, after: Trace) -> Iterator[Shift]:
    if not before.duration_s or not after.duration_s:
        return
    rates, noise = [], 0.0
    for one in (before, after):
        rate = len(one) / one.duration_s
        uneven = max(1.0, dispersion(one.arrival_s, _WINDOW_S) or 1.0)
        rates.append(rate)
        noise += uneven * rate / one.duration_s
    sure = abs(rates[1] - rates[0]) > _SIGMAS * math.sqrt(noise)
    yield _of("request rate", "requests/s", rates[0], rates[1], sure)


def _lengths(name: str, before: NDArray[np.int32], after: NDArray[np.int32]) -> Iterator[Shift]:
    """Median and p95. They count as changed only if chance cannot explain the difference of the distributions
    (Kolmogorov-Smirnov, 0.1 %).
    """
    both = np.sort(np.concatenate([before, after]))
    ranks = [np.searchsorted(np.sort(one), both, side="right") / len(one) for one in (before, after)]
    distance = float(np.abs(ranks[0] - ranks[1]).max())
    sure = distance > 1.95 * math.sqrt((len(before) + len(after)) / (len(before) * len(after)))
    for percent in (50, 95):
        values = (float(np.percentile(before, percent)), float(np.percentile(after, percent)))
        yield _of(f"{name} p{percent}", "tokens", *values, sure)


def _shares(before: Trace, after: Trace) -> Iterator[Shift]:
    """Shares of requests: by class (priority), adapters, turns, parallel answers and failures."""
    for priority in np.union1d(before.priority, after.priority).tolist():
        yield _share_moved(
            f"requests of priority {priority}", before.priority == priority, after.priority == priority
        )
    yield _share_moved("requests for an adapter", before.lora >= 0, after.lora >= 0)
    yield _share_moved("later turns of a conversation", before.parent >= 0, after.parent >= 0)
    yield _share_moved("requests for several answers", before.n > 1, after.n > 1)
    ok = STATUSES.index("ok")
    yield _share_moved("requests that did not end well", before.status != ok, after.status != ok)


def _reuse_moved(before: Trace, after: Trace) -> Iterator[Shift]:
    if not len(before.blocks) or not len(after.blocks):
        return
    found = [reuse_by_capacity(one, [None])[None] for one in (before, after)]
    yield Shift(
        name="prompt tokens that a prefix cache of any size finds",
        unit="share",
        before=found[0],
        after=found[1],
        change=found[1] - found[0],
        moved=abs(found[1] - found[0]) >= MATERIAL_SHARE and min(len(before), len(after)) >= 20,
    )


def _share_moved(name: str, before: NDArray[np.bool_], after: NDArray[np.bool_]) -> Shift:
    first, second = float(before.mean()), float(after.mean())
    pooled = (before.sum() + after.sum()) / (len(before) + len(after))
    noise = math.sqrt(pooled * (1 - pooled) * (1 / len(before) + 1 / len(after)))
    moved = abs(second - first) >= MATERIAL_SHARE and abs(second - first) > _SIGMAS * noise
    return Shift(name=name, unit="share", before=first, after=second, change=second - first, moved=moved)


def _of(name: str, unit: str, before: float, after: float, sure: bool) -> Shift:
    change = (after - before) / before if before else None
    moved = sure and (change is None or abs(change) >= MATERIAL)
    return Shift(name=name, unit=unit, before=before, after=after, change=change, moved=moved)
