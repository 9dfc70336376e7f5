"""Effects of the knobs, by completed trials: the share that each knob explains, and the values per level.

The share is the correlation ratio: the variance between the levels of a knob, divided by the whole variance
of the (log) measurement, minus what as many levels would explain by chance. The search chose the trials, so
this is no designed experiment: it shows where differences are, not that the knob alone caused them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.measures import direction_of, many
from tuner.records import Trial, TrialState
from tuner.report.board import values

MIN_TRIALS = 6
PER_LEVEL = 2
"""Trials that are needed for every level after the first of a knob."""
DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One knob and one measurement: `share` in 0..1 and the measured values per level, in order of level."""

    knob: str
    metric: str
    share: float
    trials: int
    levels: Mapping[str, tuple[float, ...]]


def effects(trials: Sequence[Trial], metric: str) -> list[Effect]:
    """Every knob that was turned, the largest share first; empty with fewer than MIN_TRIALS measured trials.

    `doubt` says whether the shares may be shown.
    """
    rows = [
        (t, v)
        for t in trials
        if t.state is TrialState.COMPLETE
        and (v := values(t).get(metric)) is not None
        and math.isfinite(v)
        and v > 0
    ]
    if len(rows) < MIN_TRIALS:
        return []
    knobs = sorted({name for t, _ in rows for name in t.candidate})
    found = [_effect(knob, metric, rows) for knob in knobs]
    return sorted((e for e in found if len(e.levels) > 1), key=lambda e: (-e.share, e.knob))


def doubt(found: Sequence[Effect]) -> str:
    """Why the shares of one measurement are not shown; empty if they are shown."""
    if not found:
        return f"Fewer than {MIN_TRIALS} trials completed with this measurement, or no knob was turned."
    needed = 1 + PER_LEVEL * sum(len(each.levels) - 1 for each in found)
    if found[0].trials < needed:
        return (
            f"No shares, because only {many(found[0].trials, 'trial')} completed."
            f" {many(len(found), 'knob')} with {sum(len(each.levels) for each in found)} values need at"
            f" least {needed} trials."
        )
    if (whole := sum(each.share for each in found)) > 1.0:
        return (
            f"No shares, because they add up to {whole * 100:.0f} %. The knobs changed together, so their"
            " effects cannot be separated."
        )
    return ""


def _effect(knob: str, metric: str, rows: Sequence[tuple[Trial, float]]) -> Effect:
    groups: dict[object, list[float]] = {}
    for trial, value in rows:
        groups.setdefault(trial.candidate.get(knob, DEFAULT), []).append(value)
    ordered = sorted(groups.items(), key=lambda pair: _order(pair[0]))
    return Effect(
        knob=knob,
        metric=metric,
        share=_share([np.log(column) for _, column in ordered]),
        trials=len(rows),
        levels={str(level): tuple(column) for level, column in ordered},
    )


def _order(level: object) -> tuple[int, float, str]:
    if isinstance(level, int | float) and not isinstance(level, bool):
        return 1, float(level), ""
    return (0 if level == DEFAULT else 2), 0.0, str(level)


def _share(columns: Sequence["np.ndarray[tuple[int], np.dtype[np.float64]]"]) -> float:
    """Adjusted correlation ratio (epsilon squared), not below 0."""
    every = np.concatenate(columns)
    whole = float(((every - every.mean()) ** 2).sum())
    left = len(every) - len(columns)
    if whole <= 1e-18 or left < 1:
        return 0.0
    inside = sum(float(((c - c.mean()) ** 2).sum()) for c in columns)
    noise = inside / left
    return max(0.0, (whole - inside - (len(columns) - 1) * noise) / whole)


def better(effect: Effect) -> str:
    """The level with the best median."""
    medians = {level: float(np.median(column)) for level, column in effect.levels.items()}
    choose = max if direction_of(effect.metric) == "maximize" else min
    return choose(medians, key=lambda level: medians[level])
