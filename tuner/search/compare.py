"""Whether one configuration is better than another: paired by request, resampled in blocks of time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInput, nearest
from tuner.measures import MAXIMIZED, NAMES
from tuner.records import Outcome, Slo
from tuner.search.requests import CANCELLED, is_good, latency_ms, latency_of

Verdict = Literal["better", "worse", "equivalent", "no clear winner"]
Passes = Sequence[Mapping[str, Sequence[Outcome]]]
"""One mapping slice name → outcomes per repeat."""

Array = NDArray[np.float64]

Fold = Callable[[Array, Array], Array]
"""(value per row, weight per draw and row) → the statistic per draw."""

DRAWS = 1000
BLOCK_S = 10.0
BLOCKS = 20
EQUIVALENT = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """log(other / base) of a metric with its interval at `level`; `verdict` speaks of the other one."""

    metric: str
    base: float
    other: float
    log_ratio: float
    low: float
    high: float
    level: float
    repeats: int
    rows: int
    verdict: Verdict

    @property
    def change(self) -> float:
        """Relative change, −0.1 = ten per cent less."""
        return math.expm1(self.log_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """Rows that both sides served: values by row, block by row, repeat by row."""

    base: Array
    other: Array
    block: NDArray[np.int64]
    repeat: NDArray[np.int64]


def compare(
    base: Passes,
    other: Passes,
    metric: str,
    *,
    slo: Slo | None = None,
    seed: int = 0,
    level: float = 0.95,
    family: int = 1,
    noise: float = 0.0,
    freedom: int | None = None,
) -> Comparison:
    """Compare on the same rows: `base[r]` and `other[r]` are repeat r, side by side in time.

    The interval is the wider one of two: blocks of time (and repeats) resampled together on both sides, and
    Student's over the repeats' own log ratios. `family` is how many comparisons one verdict rests on
    (candidates × metrics; Bonferroni). `noise` is the relative noise of one measurement from elsewhere, for
    single repeats; with its degrees of `freedom` (see `pooled_noise`) it stands in for the repeats' own.
    Throughput-like metrics count per row; their window cancels in the ratio. BadInput where nothing pairs.
    """
    fold, value = _statistic(metric, slo)
    pairs = _pair(base, other, value)
    if not len(pairs.base):
        raise BadInput(f"{metric}: the two sides have no request in common")
    alpha = (1.0 - level) / family
    centre = _log_ratio(fold, pairs, np.ones((1, len(pairs.base))))[0]
    low, high = _interval(fold, pairs, seed, alpha)
    reach = _between_repeats(fold, pairs, alpha, noise, freedom)
    if math.isfinite(centre):
        low, high = min(low, centre - reach), max(high, centre + reach)
    ones = np.ones((1, len(pairs.base)))
    return Comparison(
        metric=metric,
        base=float(fold(pairs.base, ones)[0]),
        other=float(fold(pairs.other, ones)[0]),
        log_ratio=float(centre),
        low=low,
        high=high,
        level=level,
        repeats=int(pairs.repeat.max()) + 1,
        rows=len(pairs.base),
        verdict=verdict(metric, low, high),
    )


def _interval(fold: Fold, pairs: _Pairs, seed: int, alpha: float) -> tuple[float, float]:
    """Percentiles of the resampled log ratios; unbounded once both sides are infinite in a resample."""
    drawn = _log_ratio(fold, pairs, _weights(pairs, np.random.default_rng(seed)))
    if np.isnan(drawn).any():
        return -math.inf, math.inf
    low, high = np.quantile(np.clip(drawn, -99.0, 99.0), [alpha / 2, 1 - alpha / 2])
    return float(low), float(high)


def verdict(metric: str, low: float, high: float) -> Verdict:
    """What an interval of log(other / base) says of the other one."""
    if math.isnan(low) or math.isnan(high):
        return "no clear winner"
    if low > 0 or high < 0:
        up = low > 0
        return "better" if up == (metric in MAXIMIZED) else "worse"
    return "equivalent" if low >= -EQUIVALENT and high <= EQUIVALENT else "no clear winner"


def _pair(base: Passes, other: Passes, value: Callable[[Outcome], float]) -> _Pairs:
    """Rows present on both sides, per repeat and slice; blocks are cut from each slice's own time."""
    columns: list[tuple[float, float, int, int]] = []
    blocks: dict[tuple[str, int], int] = {}
    for repeat, (mine, theirs) in enumerate(zip(base, other, strict=False)):
        for name in sorted(set(mine) & set(theirs)):
            left = {o.row: o for o in mine[name] if o.error != CANCELLED}
            right = {o.row: o for o in theirs[name] if o.error != CANCELLED}
            common = sorted(set(left) & set(right))
            width = _block_s([left[row].scheduled_s for row in common])
            for row in common:
                key = (name, int(left[row].scheduled_s // width))
                number = blocks.setdefault(key, len(blocks))
                columns.append((value(left[row]), value(right[row]), number, repeat))
    table = np.array(columns, dtype=np.float64).reshape(-1, 4)
    table = table[~np.isnan(table[:, :2]).any(axis=1)]
    return _Pairs(
        base=table[:, 0],
        other=table[:, 1],
        block=table[:, 2].astype(np.int64),
        repeat=table[:, 3].astype(np.int64),
    )


def _block_s(times: Sequence[float]) -> float:
    """Ten seconds, or shorter where that leaves fewer than twenty blocks."""
    span = max(times, default=0.0) - min(times, default=0.0)
    return max(min(BLOCK_S, span / BLOCKS), 1e-3)


def _weights(pairs: _Pairs, rng: np.random.Generator) -> Array:
    """How often each row is in each resample: blocks with replacement, times repeats with replacement."""
    blocks, repeats = int(pairs.block.max()) + 1, int(pairs.repeat.max()) + 1
    by_block = rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=DRAWS)
    by_repeat = rng.multinomial(repeats, np.full(repeats, 1 / repeats), size=DRAWS)
    weights: Array = (by_block[:, pairs.block] * by_repeat[:, pairs.repeat]).astype(np.float64)
    kept: Array = weights[weights.sum(axis=1) > 0]
    return kept


def _log_ratio(fold: Fold, pairs: _Pairs, weights: Array) -> Array:
    base, other = fold(pairs.base, weights), fold(pairs.other, weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: Array = np.log(other) - np.log(base)
    return ratio


def _between_repeats(fold: Fold, pairs: _Pairs, alpha: float, noise: float, freedom: int | None) -> float:
    """Half width from the spread of the repeats' own log ratios; 0 with one repeat and no known noise."""
    count = int(pairs.repeat.max()) + 1
    if freedom is not None:
        return student(1 - alpha / 2, freedom) * noise * math.sqrt(2.0 / count)
    known = _normal(1 - alpha / 2) * noise * math.sqrt(2.0 / count)
    if count < 2:
        return known
    masks = np.array([(pairs.repeat == r).astype(np.float64) for r in range(count)])
    ratios = _log_ratio(fold, pairs, masks)
    if not np.all(np.isfinite(ratios)):
        return math.inf
    return max(known, student(1 - alpha / 2, count - 1) * float(np.std(ratios, ddof=1)) / math.sqrt(count))


def pooled_noise(entrants: Sequence[Passes], metric: str, *, slo: Slo | None = None) -> tuple[float, int]:
    """(relative noise of one measurement, degrees of freedom): the spread of each entrant's own repeats,
    pooled over all entrants of a confirmation. Two repeats of one entrant know little, twelve of four more.
    """
    fold, value = _statistic(metric, slo)
    repeats: list[list[float]] = []
    for passes in entrants:
        repeats.append([])
        for repeat in passes:
            rows = [o for outcomes in repeat.values() for o in outcomes if o.error != CANCELLED]
            values = np.array([v for v in map(value, rows) if not math.isnan(v)])
            if len(values):
                repeats[-1].append(float(fold(values, np.ones((1, len(values))))[0]))
    return pooled(repeats)


def pooled(repeats: Sequence[Sequence[float]]) -> tuple[float, int]:
    """`pooled_noise` of numbers of whole replays: one sequence of repeats per entrant."""
    total, freedom = 0.0, 0
    for values in repeats:
        logs = [math.log(v) for v in values if 0 < v < math.inf]
        if len(logs) > 1:
            total += float(np.var(logs, ddof=1)) * (len(logs) - 1)
            freedom += len(logs) - 1
    return (math.sqrt(total / freedom) if freedom else 0.0), freedom


def _normal(p: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)


def student(p: float, freedom: int) -> float:
    """Student's quantile by bisection of its distribution function."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def _student_cdf(t: float, freedom: int) -> float:
    """Exact for whole degrees of freedom, t ≥ 0 (the finite sums over cos θ, θ = atan(t / √ν))."""
    theta = math.atan2(t, math.sqrt(freedom))
    cos2 = math.cos(theta) ** 2
    term, total = 1.0, 0.0
    if freedom % 2:
        for k in range(1, (freedom - 1) // 2 + 1):
            total += term
            term *= cos2 * (2 * k) / (2 * k + 1)
        area = theta + (math.sin(theta) * math.cos(theta) * total if freedom > 1 else 0.0)
        return 0.5 + area / math.pi
    for k in range(freedom // 2):
        total += term
        term *= cos2 * (2 * k + 1) / (2 * k + 2)
    return 0.5 + 0.5 * math.sin(theta) * total


def _statistic(metric: str, slo: Slo | None) -> tuple[Fold, Callable[[Outcome], float]]:
    """How a metric is folded from rows, and the value of one row. BadInput for one that rows do not give."""
    latency = latency_of(metric)
    if latency is not None:
        fold = _mean_of_answered if latency.share is None else _percentile(latency.share)
        return fold, lambda outcome: latency_ms(outcome, latency.kind)
    if metric in ("goodput_rps", "slo_attainment"):
        limits = slo or Slo()
        return _mean, lambda outcome: float(is_good(outcome, limits))
    if metric == "output_tokens_per_s":
        return _mean, lambda outcome: float(outcome.output_tokens)
    if metric == "request_rps":
        return _mean, lambda outcome: float(outcome.ok)
    raise BadInput(f"{metric} cannot be compared request by request{nearest(metric, NAMES)}")


def _mean(values: Array, weights: Array) -> Array:
    found: Array = weights @ values / weights.sum(axis=1)
    return found


def _mean_of_answered(values: Array, weights: Array) -> Array:
    """Means are over the answered requests, as in every measurement; NaN of none."""
    answered = np.isfinite(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = weights[:, answered] @ values[answered] / weights[:, answered].sum(axis=1)
    return found


def _percentile(share: float) -> Fold:
    """Linear interpolation over the rows, each as often as its weight says."""

    def fold(values: Array, weights: Array) -> Array:
        order = np.argsort(values, kind="stable")
        ranked, ends = values[order], np.cumsum(weights[:, order], axis=1)
        place = share * (ends[:, -1] - 1)
        low = np.array(
            [np.searchsorted(e, math.floor(p), side="right") for e, p in zip(ends, place, strict=True)]
        )
        high = np.array(
            [np.searchsorted(e, math.floor(p) + 1, side="right") for e, p in zip(ends, place, strict=True)]
        )
        low, high = np.minimum(low, len(ranked) - 1), np.minimum(high, len(ranked) - 1)
        part = place - np.floor(place)
        with np.errstate(invalid="ignore"):
            step = np.where(part > 0, part * (ranked[high] - ranked[low]), 0.0)
        return np.where(np.isnan(step), np.inf, ranked[low] + step)

    return fold
