"""How sure a measured number is: time-block bootstrap, because requests near in time are alike.

Resampling single requests gives intervals several times too narrow on such data; whole blocks of time are
drawn instead. Comparisons of two configurations belong to `search.compare`, which pairs rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.records import Outcome, Slo
from tuner.replay.jobs import CANCELLED
from tuner.replay.measure import e2e_ms, is_good, itl_ms, percentile, tpot_ms, ttft_ms

MIN_BLOCK_S = 10.0
MIN_BLOCKS = 20
_SAMPLES = {"ttft": ttft_ms, "tpot": tpot_ms, "e2e": e2e_ms}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A percentile interval. `enough` is False under MIN_BLOCKS blocks: read it as a lower bound of doubt."""

    low: float
    high: float
    blocks: int
    block_s: float

    @property
    def enough(self) -> bool:
        return self.blocks >= MIN_BLOCKS


def block_seconds(outcomes: Sequence[Outcome]) -> float:
    """Length of a block: 10 s, or twice the p95 latency of answered requests where that is longer."""
    answered = np.array([e2e_ms(o) for o in outcomes if o.ok])
    return max(MIN_BLOCK_S, 2 * percentile(answered, 0.95) / 1000 if len(answered) else 0.0)


def interval(
    outcomes: Sequence[Outcome],
    window_s: float,
    name: str,
    slo: Slo,
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    block_s: float | None = None,
) -> Interval:
    """The interval of one measurement name: a latency's mean or percentile, goodput_rps or slo_attainment.

    Deterministic for a seed. KeyError for a name of another kind. NaN bounds without outcomes.
    """
    kept = [o for o in outcomes if o.error != CANCELLED]
    length = block_seconds(kept) if block_s is None else block_s
    blocks = max(1, int(np.ceil(window_s / length)))
    block_of = np.array([min(blocks - 1, max(0, int(o.scheduled_s / length))) for o in kept], np.int64)
    sample, weights, owner = _sample(kept, name, slo)
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=resamples)
    found = np.array([_statistic(name, sample, weights * d[block_of[owner]], window_s) for d in drawn])
    found = found[~np.isnan(found)]
    if len(found) == 0:
        return Interval(low=np.nan, high=np.nan, blocks=blocks, block_s=length)
    tail = (1 - level) / 2
    return Interval(
        low=percentile(found, tail), high=percentile(found, 1 - tail), blocks=blocks, block_s=length
    )


def _sample(
    kept: Sequence[Outcome], name: str, slo: Slo
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Values, their weights, and the index of the outcome that each belongs to."""
    kind = name.split("_", 1)[0]
    if name in ("goodput_rps", "slo_attainment"):
        values = np.array([float(is_good(o, slo)) for o in kept])
    elif kind == "itl":
        parts = [itl_ms([o]) for o in kept]
        owner = np.repeat(np.arange(len(kept)), [len(gaps) for gaps, _ in parts])
        return np.concatenate([g for g, _ in parts]), np.concatenate([w for _, w in parts]), owner
    else:
        values = np.array([_SAMPLES[kind](o) for o in kept])
    defined = ~np.isnan(values)
    return values[defined], np.ones(int(defined.sum())), np.flatnonzero(defined)


def _statistic(
    name: str, sample: NDArray[np.float64], weights: NDArray[np.float64], window_s: float
) -> float:
    held = weights > 0
    if not held.any():
        return np.nan
    if name == "goodput_rps":
        return float((sample * weights).sum() / window_s)
    if name == "slo_attainment":
        return float(np.average(sample, weights=weights))
    statistic = name.split("_")[1]
    if statistic == "mean":
        finite = held & np.isfinite(sample)
        return float(np.average(sample[finite], weights=weights[finite])) if finite.any() else np.inf
    return percentile(sample[held], int(statistic[1:]) / 100, weights[held])
