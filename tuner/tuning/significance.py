"""Whether one configuration is better than another (paired by request, resampled in blocks of time), and how
much launches of one configuration differ.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, geometric_mean

import numpy as np
from numpy.typing import NDArray

from tuner.conclusions import Word
from tuner.errors import BadInput, nearest
from tuner.measures import NAMES, class_of, counts_requests, is_maximized, measure_of
from tuner.metrics import LATENCY_MS, counted, is_good, percentiles, resampled
from tuner.records import Outcome, Slo

# A run whose repeats are this many times as noisy as earlier nights is judged by its own repeats alone:
# pooled with quieter nights its intervals would be too narrow.
NOISIER = 1.5
# Relative change of the baseline below which nothing is called drift: the interval of the confirmation, which
# compares arms of the same night, stands up to smaller ones.
DRIFT_LEAST = 0.15
# A change is called drift only if it is this many times the noise.
DRIFT_TIMES = 3.0
# How often a night without drift may be called drifted, over all its objectives together.
DRIFT_CHANCE = 0.01
# The relative difference that the planned repeats are to show.
SOUGHT = 0.10
# Chance that the planned repeats show it: four nights of five.
POWER = 0.8
# More repeats are not counted, only reported as "more than 100".
MOST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Standard deviation of the log of one launch's number, and the degrees of freedom behind it.

    Without any (`freedom` 0) nothing is known, which is not the same as no noise.
    """

    share: float = 0.0
    freedom: int = 0

    def reach(self, alpha: float, repeats: int) -> float:
        """Half width of the two-sided interval of a log ratio of two configurations, each launched `repeats`
        times; infinite if the noise is not known.
        """
        if not self.freedom or repeats < 1:
            return math.inf
        return student(1 - alpha / 2, self.freedom) * self.share * math.sqrt(2.0 / repeats)


def spread_of(groups: Sequence[Sequence[float]]) -> Spread:
    """The spread within groups, pooled: each group holds one configuration's numbers, one per launch."""
    total, freedom = 0.0, 0
    for values in groups:
        logs = [math.log(v) for v in values if 0 < v < math.inf]
        if len(logs) > 1:
            total += float(np.var(logs, ddof=1)) * (len(logs) - 1)
            freedom += len(logs) - 1
    return Spread(share=math.sqrt(total / freedom), freedom=freedom) if freedom else Spread()


def together(own: Spread, earlier: Spread) -> Spread:
    """What a run's own repeats and the node's earlier ones say; the run's alone on a noisier night."""
    if not earlier.freedom or (own.freedom and own.share > NOISIER * earlier.share):
        return own
    freedom = own.freedom + earlier.freedom
    total = own.share**2 * own.freedom + earlier.share**2 * earlier.freedom
    return Spread(share=math.sqrt(total / freedom), freedom=freedom)


def repeats_needed(
    spread: Spread, *, alpha: float, arms: int = 2, earlier: int = 0, sought: float = SOUGHT
) -> int | None:
    """How often each of `arms` configurations is to be launched to show a difference of `sought` in four of
    five nights; `earlier` degrees of freedom are known beforehand. None: more than a hundred times, or the
    noise is not known.
    """
    if not spread.freedom:
        return None
    for repeats in range(1, MOST + 1):
        freedom = earlier + arms * (repeats - 1)
        if freedom < 1:
            continue
        quantile = student(1 - alpha / 2, freedom) + NormalDist().inv_cdf(POWER)
        if quantile * spread.share * math.sqrt(2.0 / repeats) <= math.log1p(sought):
            return repeats
    return None


def drifted(before: float, again: Sequence[float], spread: Spread, *, metrics: int = 1) -> float | None:
    """The relative change of a number from `before` (one launch) to its repeats, if it is drift: the change
    is more than 15 %, more than three times the noise, and more than chance gives once in a hundred nights
    of `metrics` numbers. Otherwise None, also if the noise is not known.
    """
    logs = [math.log(v) for v in again if 0 < v < math.inf]
    if not logs or not 0 < before < math.inf or not spread.freedom:
        return None
    moved = math.fsum(logs) / len(logs) - math.log(before)
    quantile = student(1 - DRIFT_CHANCE / metrics / 2, spread.freedom) * math.sqrt(1 + 1 / len(logs))
    change = math.expm1(moved)
    beyond = abs(moved) > max(DRIFT_TIMES, quantile) * spread.share
    return change if beyond and abs(change) > DRIFT_LEAST else None


@lru_cache(maxsize=1024)
def student(p: float, freedom: int) -> float:
    """Student's quantile by bisection of its distribution function."""
    low, high = 0.0, 1e6
    for _ in range(100):
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


# One mapping slice name → outcomes per repeat.
Passes = Sequence[Mapping[str, Sequence[Outcome]]]

Array = NDArray[np.float64]

# (value per row, weight per draw and row) → the statistic per draw.
Fold = Callable[[Array, Array], Array]

# Resamples for an interval: its ends then vary by about 2 % of its width (normal, at 95 %).
DRAWS = 1000

# Requests are resampled in blocks of ten seconds, so that requests which queued together stay together; in
# shorter ones where a slice would have fewer than twenty, too few to resample.
BLOCK_S, BLOCKS = 10.0, 20

# Relative difference below which nothing is called better or worse: nobody changes an engine for less.
LEAST = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """log(other / base) of a metric with its interval; `word` speaks of the other one.

    `base` and `other` are those of `_centre`, so that their ratio is `change`. `within` is the
    share that the difference does not exceed either way (infinite if that is not known).
    """

    metric: str
    base: float
    other: float
    log_ratio: float
    low: float
    high: float
    repeats: int
    rows: int
    word: Word
    within: float

    @property
    def change(self) -> float:
        """(other − base) / base."""
        return math.expm1(self.log_ratio) if self.log_ratio < EXPONENT else math.inf


# The exponential of a larger number is no float.
EXPONENT = 700.0


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
    spread: Spread,
    slo: Slo | None = None,
    seed: int = 0,
    level: float = 0.95,
    family: int = 1,
    metrics: int = 1,
) -> Comparison:
    """Compare on the same rows: `base[r]` and `other[r]` are repeat r, side by side in time.

    The interval is the wider one of two: blocks of time (and repeats) resampled together on both sides, and
    Student's by the noise between launches (`spread`; unbounded if that is not known). `family` is how
    many comparisons one verdict rests on (finalists × metrics × looks; Bonferroni), `metrics` how many of
    them are of one pair (`sameness`). Throughput-like metrics count per row; their window cancels in the
    ratio. BadInput if nothing pairs.
    """
    fold, value = _statistic(metric.rpartition(".")[2], slo)
    pairs = _pair(base, other, value, class_of(metric))
    if not len(pairs.base):
        raise BadInput(f"{metric}: the two sides have no request in common")
    alpha, repeats = (1.0 - level) / family, int(pairs.repeat.max()) + 1
    before, after, centre = _centre(fold, pairs, repeats)
    whole = float(_log_ratio(fold, pairs, np.ones((1, len(pairs.base))))[0])
    drawn = _log_ratio(fold, pairs, _weights(pairs, np.random.default_rng(seed)))

    def interval(alpha: float) -> tuple[float, float]:
        low, high = _ends(drawn, alpha)
        if not math.isfinite(centre):
            return (low, high) if spread.freedom else (-math.inf, math.inf)
        inside = (whole - low, high - whole) if math.isfinite(whole) else (math.inf, math.inf)
        reach = spread.reach(alpha, repeats)
        return centre - max(inside[0], reach), centre + max(inside[1], reach)

    low, high = interval(alpha)
    return Comparison(
        metric=metric, base=before, other=after, log_ratio=centre, low=low, high=high, repeats=repeats,
        rows=len(pairs.base), word=word_of(metric, centre, low, high),
        within=_within(*interval(sameness(alpha, metrics))),
    )  # fmt: skip


def sameness(alpha: float, metrics: int) -> float:
    """The alpha of the interval that must lie within a margin for two configurations to be the same, by the
    alpha of the interval that must exclude zero for a difference.

    Two one-sided tests, so each end may err with the whole alpha; and two are the same only if all their
    `metrics` are (an intersection-union test), so these are not charged for each other.
    """
    return min(1.0, 2 * alpha * metrics)


def _within(low: float, high: float) -> float:
    """The share that a change between two log ratios does not exceed either way."""
    return max(-math.expm1(low), math.expm1(high)) if high < EXPONENT else math.inf


def compare_values(
    metric: str,
    base: Sequence[float],
    other: Sequence[float],
    *,
    spread: Spread,
    level: float = 0.95,
    family: int = 1,
    metrics: int = 1,
    least: float = 0.0,
) -> Comparison | None:
    """Compare a number of whole replays, one per repeat: Student's interval of the log ratio by the noise
    between launches, no narrower than `least` (a log ratio). None if nothing pairs.
    """
    pairs = [(a, b) for a, b in zip(base, other, strict=False) if a > 0 and b > 0]
    if not pairs:
        return None
    mean = fmean if counts_requests(metric) else geometric_mean
    before, after = (mean(values) for values in zip(*pairs, strict=True))
    centre, alpha = math.log(after / before), (1 - level) / family
    reach, near = (max(spread.reach(a, len(pairs)), least) for a in (alpha, sameness(alpha, metrics)))
    low, high = centre - reach, centre + reach
    return Comparison(
        metric=metric, base=before, other=after, log_ratio=centre, low=low, high=high, repeats=len(pairs),
        rows=0, word=word_of(metric, centre, low, high), within=_within(centre - near, centre + near),
    )  # fmt: skip


def _centre(fold: Fold, pairs: _Pairs, repeats: int) -> tuple[float, float, float]:
    """(base, other, log ratio): of means over requests those of all rows pooled; else geometric means of the
    repeats' own values, and of all rows pooled where a repeat has none that is positive and finite.
    """
    masks = np.array([(pairs.repeat == r).astype(np.float64) for r in range(repeats)])
    both = [fold(rows, masks[masks.sum(axis=1) > 0]) for rows in (pairs.base, pairs.other)]
    if fold is not _mean and all(np.all(np.isfinite(v) & (v > 0)) for v in both):
        before, after = (float(np.mean(np.log(v))) for v in both)
        return math.exp(before), math.exp(after), after - before
    ones = np.ones((1, len(pairs.base)))
    ratio = float(_log_ratio(fold, pairs, ones)[0])
    return float(fold(pairs.base, ones)[0]), float(fold(pairs.other, ones)[0]), ratio


def _ends(drawn: Array, alpha: float) -> tuple[float, float]:
    """Percentiles of the resampled log ratios; unbounded once both sides are infinite in a resample."""
    if np.isnan(drawn).any():
        return -math.inf, math.inf
    low, high = np.quantile(np.clip(drawn, -99.0, 99.0), [alpha / 2, 1 - alpha / 2])
    return float(low), float(high)


def word_of(metric: str, centre: float, low: float, high: float) -> Word:
    """What log(other / base) and its interval say of the other one; less than 2 % decides nothing."""
    if not (low > 0 or high < 0) or abs(centre) < math.log1p(LEAST):
        return "open"
    return "better" if (centre > 0) == is_maximized(metric) else "worse"


def _pair(base: Passes, other: Passes, value: Callable[[Outcome], float], among: str) -> _Pairs:
    """Rows present on both sides, per repeat and slice, of one class of requests ("": all); blocks are cut
    from each slice's own time.
    """
    columns: list[tuple[float, float, int, int]] = []
    blocks: dict[tuple[str, int], int] = {}
    for repeat, (mine, theirs) in enumerate(zip(base, other, strict=False)):
        for name in sorted(set(mine) & set(theirs)):
            left, right = (
                {o.row: o for o in counted(side) if not among or among in o.classes}
                for side in (mine[name], theirs[name])
            )
            common = sorted(set(left) & set(right))
            times = [left[row].scheduled_s for row in common]
            width = max(min(BLOCK_S, (max(times, default=0.0) - min(times, default=0.0)) / BLOCKS), 1e-3)
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


def _weights(pairs: _Pairs, rng: np.random.Generator) -> Array:
    """How often each row is in each resample: blocks with replacement, times repeats with replacement."""
    weights = resampled(pairs.block, DRAWS, rng) * resampled(pairs.repeat, DRAWS, rng)
    kept: Array = weights[weights.sum(axis=1) > 0]
    return kept


def _log_ratio(fold: Fold, pairs: _Pairs, weights: Array) -> Array:
    base, other = fold(pairs.base, weights), fold(pairs.other, weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: Array = np.log(other) - np.log(base)
    return ratio


def _statistic(metric: str, slo: Slo | None) -> tuple[Fold, Callable[[Outcome], float]]:
    """How a metric is folded from rows, and the value of one row. BadInput for one that rows do not give."""
    limits, entry = slo or Slo(), measure_of(metric)
    if entry.latency is not None:
        kind, share = entry.latency
        fold = _mean_of_answered if share is None else lambda values, w: percentiles(values, share, w)
        return fold, LATENCY_MS[kind]
    if metric in ("goodput_rps", "slo_attainment"):
        return _mean, lambda o: float(is_good(o, limits))
    if (value := entry.per_request) is not None:
        return _mean, lambda o: value(o, limits)
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
