"""The ladder: double max_num_seqs until p95 end-to-end time worsens, then bisect between the best level and
the next one above.

This is what the tuning guides advise. It turns one knob and leaves the others as the baseline has them. Like
every search here it is a function of the trials so far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.records import Trial, TrialState
from tuner.search import trial_view

KNOB = "max_num_seqs"
ORIGIN = "ladder"
# A rung is worse when its p95 is this share above the best one's: more than the noise of one measurement.
WORSE = 0.1
TAIL = "e2e_p95_ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One level that was tried, and its tail in milliseconds (+inf: it did not serve the traffic)."""

    level: int
    tail: float
    trial: Trial


def rungs(trials: Sequence[Trial]) -> tuple[Rung, ...]:
    """What the ladder has tried, in the order of the levels."""
    found: dict[int, Rung] = {}
    for trial in trial_view.latest(trials):
        level = trial.candidate.get(KNOB)
        if trial.origin == ORIGIN and isinstance(level, int) and trial.state is not TrialState.RUNNING:
            served = trial.measurement if trial.state is TrialState.COMPLETE else None
            values = served.values if served else {}
            found[level] = Rung(level=level, tail=values.get(TAIL, math.inf), trial=trial)
    return tuple(found[level] for level in sorted(found))


def next_level(levels: Sequence[int], tried: Sequence[Rung]) -> int | None:
    """The level to try next, of `levels` in ascending order; None where the ladder is at its end.

    While no rung above the best one is worse the next one is at least twice the highest; then halfway between
    the best one and the next above it that was tried.
    """
    if not tried:
        return levels[0] if levels else None
    best = min(tried, key=lambda rung: (rung.tail, rung.level))
    limit = best.tail * (1 + WORSE)
    above_best = [r for r in tried if r.level > best.level]
    if all(r.tail <= limit for r in above_best):
        top = tried[-1].level
        above = [level for level in levels if level > top]
        return next((level for level in above if level >= 2 * top), above[-1] if above else None)
    between = [level for level in levels if best.level < level < above_best[0].level]
    return between[len(between) // 2] if between else None
