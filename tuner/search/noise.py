"""Noise between launches of one configuration: how large it is, how many repeats it asks for, and what is
drift.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

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
        times; infinite where the noise is not known.
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
    """The relative change of a number from `before` (one launch) to its repeats, where it is more than 15 %,
    more than three times the noise, and more than chance gives once in a hundred nights of `metrics` numbers;
    else None. None too where the noise is not known.
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
