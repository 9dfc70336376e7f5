"""How every measurement is computed from single requests; `measures` holds their names.

The only place with these formulas (docs/replay.md); replay, search, simulator and report all use it. TTFT and
E2E count from the scheduled time. A failed request is +inf in percentiles and bad in goodput; means are over
the answered requests. Requests that their own client cancelled count in no measurement.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tuner.measures import MEASURES, OF_A_CLASS, STATISTICS
from tuner.records import Outcome, Slo

Floats = NDArray[np.float64]

# `Outcome.error` of a request that its own client cancelled, as in the trace.
CANCELLED = "cancelled by the client, as recorded"

# `Outcome.error` of a request that had not ended when its replay did.
CUT = "cut at the end of the tail"

# A p99 of fewer requests depends on less than ten of them; it is left out unless it is asked for by name.
P99_NEEDS = 1000


# The engine's numbers that become one for all slices by the length of their windows.
WEIGHTED = (
    *("kv_usage_mean", "queue_depth_mean", "batch_tokens_mean", "batch_tokens_p50", "batch_tokens_p95"),
    *("batch_requests_p50", "batch_requests_p95", "step_ms_p50", "step_ms_p95", "kv_fragmentation"),
    *("blocks_allocated_per_s", "blocks_evicted_per_s", "offload_gib_per_s"),
)


def counted(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes that count: all but those that their own client cancelled."""
    return [outcome for outcome in outcomes if outcome.error != CANCELLED]


def ttft_ms(outcome: Outcome) -> float:
    """Scheduled time → first chunk that carries a completion token; +inf when it failed."""
    if not outcome.ok or outcome.first_token_s is None:
        return math.inf
    return (outcome.first_token_s - outcome.scheduled_s) * 1000


def e2e_ms(outcome: Outcome) -> float:
    """Scheduled time → last chunk that carries a completion token; +inf when it failed."""
    if not outcome.ok or outcome.last_token_s is None:
        return math.inf
    return (outcome.last_token_s - outcome.scheduled_s) * 1000


def tpot_ms(outcome: Outcome) -> float:
    """(last − first chunk) / (tokens after the first chunk); NaN if nothing follows, +inf if failed."""
    if not outcome.ok or outcome.first_token_s is None or outcome.last_token_s is None:
        return math.inf
    later = int(outcome.chunk_tokens[1:].sum())
    return (outcome.last_token_s - outcome.first_token_s) / later * 1000 if later else math.nan


# The latencies of a request, in milliseconds: one value per request each.
LATENCY_MS: Mapping[str, Callable[[Outcome], float]] = MappingProxyType(
    {"ttft": ttft_ms, "tpot": tpot_ms, "e2e": e2e_ms}
)


def itl_ms(outcomes: Sequence[Outcome]) -> tuple[Floats, Floats]:
    """(gap per token of each chunk, tokens of the chunk); tokens that a failure owes are +inf gaps."""
    gaps: list[Floats] = []
    weights: list[Floats] = []
    for outcome in outcomes:
        if outcome.ok:
            tokens = outcome.chunk_tokens[1:].astype(np.float64)
            gaps.append(np.diff(outcome.chunk_s) / tokens * 1000)
            weights.append(tokens)
        else:
            gaps.append(np.array([math.inf]))
            weights.append(np.array([float(max(1, outcome.expected_output - outcome.output_tokens))]))
    if not gaps:
        return np.empty(0), np.empty(0)
    return np.concatenate(gaps), np.concatenate(weights)


def is_good(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request met every limit set for it. An answer of one chunk meets any limit on TPOT."""
    if not outcome.ok:
        return False
    slo = slo.of(outcome.classes)
    limits = ((slo.ttft_ms, ttft_ms), (slo.tpot_ms, tpot_ms), (slo.e2e_ms, e2e_ms))
    return all(limit is None or not latency(outcome) > limit for limit, latency in limits)


def _share(statistic: str) -> float | None:
    return None if statistic == "mean" else int(statistic[1:]) / 100


def percentile(values: Floats, share: float, weights: Floats | None = None) -> float:
    """Linear interpolation between order statistics, `share` in [0, 1]; +inf once it touches a failure.

    With integer weights it equals repeating each value that often. NaN of no values.
    """
    if len(values) == 0:
        return math.nan
    return float(
        percentiles(values, share, np.ones((1, len(values))) if weights is None else weights[None])[0]
    )


def percentiles(values: Floats, share: float, weights: Floats) -> Floats:
    """`percentile` for every row of `weights`, an array of (row, value)."""
    order = np.argsort(values, kind="stable")
    ranked, ends = values[order], np.cumsum(weights[:, order], axis=1)
    place = share * (ends[:, -1] - 1)
    below = np.floor(place)
    edges = [np.count_nonzero(ends <= places[:, None], axis=1) for places in (below, below + 1)]
    low, high = ranked[np.minimum(np.array(edges), len(ranked) - 1)]
    with np.errstate(invalid="ignore"):
        step = np.where(place > below, (place - below) * (high - low), 0.0)
    found: Floats = np.where(np.isnan(step), low, low + step)
    return found


def statistic(values: Floats, share: float | None, weights: Floats | None = None) -> float:
    """The percentile at `share`, or the mean of the finite values (None), of all values that are not NaN.

    NaN of no values; the mean of failures alone is +inf.
    """
    known = ~np.isnan(values) if share is not None else np.isfinite(values)
    kept, counts = values[known], None if weights is None else weights[known]
    if share is not None:
        return percentile(kept, share, counts)
    if len(kept):
        return float(np.average(kept, weights=counts))
    return math.inf if np.isinf(values).any() else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestColumns:
    """Requests that count, as columns: one entry per request, and one per gap between tokens.

    Milliseconds are +inf if a request failed; `tpot` is NaN if no token follows the first chunk.
    """

    answered: NDArray[np.bool_]
    good: NDArray[np.bool_]
    ttft: Floats
    tpot: Floats
    e2e: Floats
    input_tokens: Floats
    output_tokens: Floats
    itl: Floats
    itl_tokens: Floats

    @staticmethod
    def pooled(parts: Sequence["RequestColumns"]) -> "RequestColumns":
        """The requests of all parts, in order."""
        names = [field.name for field in fields(RequestColumns)]
        return RequestColumns(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})

    def among(self, mask: NDArray[np.bool_]) -> "RequestColumns":
        """Some of the requests, without gaps: those are not known by request."""
        names = [field.name for field in fields(self) if not field.name.startswith("itl")]
        none = np.empty(0)
        return RequestColumns(**{n: getattr(self, n)[mask] for n in names}, itl=none, itl_tokens=none)

    def values(
        self, window_s: float, *, p99_needs: int = P99_NEEDS, asked: Collection[str] = ()
    ) -> dict[str, float]:
        """Measurements by name; rates are divided by `window_s`, the sum of the windows. A p99 is absent
        under `p99_needs` requests unless it is in `asked`.
        """
        count = len(self.answered)
        values = {"requests": float(count), "failed": float(count - self.answered.sum())}
        samples = (("ttft", self.ttft, None), ("tpot", self.tpot, None), ("e2e", self.e2e, None))
        for kind, sample, weights in (*samples, ("itl", self.itl, self.itl_tokens)):
            for each in STATISTICS:
                name = f"{kind}_{each}_ms"
                if each != "p99" or count >= p99_needs or name in asked:
                    values[name] = statistic(sample, _share(each), weights)
        values = {name: value for name, value in values.items() if not math.isnan(value)}
        good = int(self.good.sum())
        if window_s > 0:
            values["goodput_rps"] = good / window_s
            values["request_rps"] = float(self.answered.sum()) / window_s
            values["output_tokens_per_s"] = float(self.output_tokens[self.answered].sum()) / window_s
            values["input_tokens_per_s"] = float(self.input_tokens[self.answered].sum()) / window_s
        if count:
            values["slo_attainment"] = good / count
        return values


def columns_of(outcomes: Sequence[Outcome], slo: Slo) -> RequestColumns:
    """The columns of outcomes that count (`counted`)."""
    itl, itl_tokens = itl_ms(outcomes)
    return RequestColumns(
        answered=np.array([o.ok for o in outcomes], np.bool_),
        good=np.array([is_good(o, slo) for o in outcomes], np.bool_),
        ttft=np.array([ttft_ms(o) for o in outcomes]),
        tpot=np.array([tpot_ms(o) for o in outcomes]),
        e2e=np.array([e2e_ms(o) for o in outcomes]),
        input_tokens=np.array([o.input_tokens for o in outcomes], np.float64),
        output_tokens=np.array([o.output_tokens for o in outcomes], np.float64),
        itl=itl,
        itl_tokens=itl_tokens,
    )


def fold(
    outcomes: Sequence[Outcome], window_s: float, slo: Slo, asked: Collection[str] = ()
) -> dict[str, float]:
    """The client's measurements of the outcomes of windows that last `window_s` together, and of each class
    of requests among them (`measures.OF_A_CLASS`, as `interactive.ttft_p95_ms`).
    """
    values = _folded(outcomes, window_s, slo, asked)
    for name in sorted({each for outcome in outcomes for each in outcome.classes}):
        ours = [outcome for outcome in outcomes if name in outcome.classes]
        wanted = [metric.removeprefix(f"{name}.") for metric in asked]
        found = _folded(ours, window_s, slo, wanted)
        values |= {f"{name}.{metric}": value for metric, value in found.items() if metric in OF_A_CLASS}
    return values


def _folded(
    outcomes: Sequence[Outcome], window_s: float, slo: Slo, asked: Collection[str]
) -> dict[str, float]:
    kept = counted(outcomes)
    values = columns_of(kept, slo).values(window_s, asked=asked)
    values["unfinished"] = float(sum(outcome.error == CUT for outcome in kept))
    for entry in MEASURES.values():
        if entry.compute is not None and (value := entry.compute(kept, window_s, slo)) is not None:
            values[entry.name] = value
    return values


def pool_engine(parts: Sequence[tuple[Mapping[str, float | None], float]]) -> dict[str, float]:
    """The engine's numbers of several (numbers, window_s): counters summed, means weighted by window."""
    values: dict[str, float] = {}

    def known(name: str) -> list[tuple[float, float]]:
        return [(value, window) for engine, window in parts if (value := engine.get(name)) is not None]

    if preemptions := known("preemptions"):
        values["preemptions"] = sum(value for value, _ in preemptions)
    for name in WEIGHTED:
        if (found := known(name)) and (total := sum(window for _, window in found)) > 0:
            values[name] = sum(value * window for value, window in found) / total
    for name in ("kv_usage_max", "queue_depth_max"):
        if found := known(name):
            values[name] = max(value for value, _ in found)
    hits, queries = known("prefix_hits"), known("prefix_queries")
    if hits and queries and (asked := sum(value for value, _ in queries)) > 0:
        values["prefix_hit_rate"] = sum(value for value, _ in hits) / asked
    return values


def resampled(groups: NDArray[np.int64], draws: int, rng: np.random.Generator) -> Floats:
    """How often each entry is in each of `draws` bootstrap samples that take whole groups with replacement.

    `groups` numbers the group of each entry from 0, such as its block of time: requests near in time are
    alike, and drawing single requests gives intervals several times too narrow. Shape (draws, entries).
    """
    count = int(groups.max()) + 1 if len(groups) else 1
    drawn = rng.multinomial(count, np.full(count, 1 / count), size=draws)
    return drawn[:, groups].astype(np.float64)
