"""When a search has said what it can say."""

import math
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import numpy as np

from tuner.records import Trial, TrialState
from tuner.search import pareto, told

MINIMUM = 12
"""Trials before « nothing more to gain » is believed."""

WINDOW = 10
"""Trials in a row that must have brought less than the noise."""

NOISE = 0.03
"""Relative noise of one measurement where the baseline's repeats do not tell."""

SEEDED = ("baseline", "confirm", "drift")


def reason_to_stop(
    trials: Sequence[Trial],
    objectives: Sequence[str],
    *,
    done: int,
    limit: int | None = None,
    now: datetime | None = None,
    deadline: datetime | None = None,
    needed_s: float = 0.0,
    expected_gain: Callable[[], float | None] = lambda: None,
    noise: float | None = None,
) -> str | None:
    """One sentence, or None to go on.

    `done` counts the trials of this run and `limit` bounds it. `needed_s` is what another trial and the
    confirmation take before `deadline`. `expected_gain` works out a predictor's best expected gain, as a
    share of the hypervolume. `noise` is the relative noise of one measurement (see `noise_of`).
    """
    if limit is not None and done >= limit:
        return f"the budget of {limit} trials is spent"
    if now is not None and deadline is not None and now + timedelta(seconds=needed_s) >= deadline:
        return f"the window ends at {deadline:%H:%M}, too soon for another trial and the confirmation"
    return _nothing_to_gain(trials, objectives, expected_gain, NOISE if noise is None else noise)


def _nothing_to_gain(
    trials: Sequence[Trial],
    objectives: Sequence[str],
    expected_gain: Callable[[], float | None],
    noise: float,
) -> str | None:
    finished = [t for t in told.latest(trials) if t.state is not TrialState.RUNNING]
    searched = [t for t in finished if t.origin not in SEEDED]
    if len(searched) < max(MINIMUM, WINDOW) or _reference(finished, objectives) is None:
        return None
    recent = {t.number for t in searched[-WINDOW:]}
    before = volume_of([t for t in finished if t.number not in recent], objectives, finished)
    after = volume_of(finished, objectives, finished)
    floor = noise_volume(finished, objectives, noise)
    if after - before > floor:
        return None
    expected = expected_gain()
    if expected is not None and expected * after > floor:
        return None
    hope = "" if expected is None else f", and no more than {expected * after:.3g} is expected of any other"
    return (
        f"the last {WINDOW} trials widened the front by {after - before:.3g} of hypervolume,"
        f" less than the noise of the measurements ({floor:.3g}){hope}"
    )


def volume_of(trials: Sequence[Trial], objectives: Sequence[str], all_trials: Sequence[Trial]) -> float:
    """Hypervolume of measured trials, screened ones included, below 1.1 × the reference of `all_trials`."""
    reference = _reference(all_trials, objectives)
    if reference is None:
        return 0.0
    points = [told.objective_values(t, objectives) or () for t in pareto.measured(trials, objectives)]
    return pareto.hypervolume(points, objectives, reference) if points else 0.0


def _reference(trials: Sequence[Trial], objectives: Sequence[str]) -> tuple[float, ...] | None:
    """The baseline's objectives, or the first measured ones where no baseline served; None unless finite."""
    base = told.baseline_of(trials)
    known = [base] if base else pareto.measured(trials, objectives)
    rows = [told.objective_values(t, objectives) for t in known]
    return next((r for r in rows if r is not None and all(map(math.isfinite, r))), None)


def noise_volume(trials: Sequence[Trial], objectives: Sequence[str], noise: float) -> float:
    """How much hypervolume the front gains when one objective is better by `noise`, mean over objectives."""
    reference = _reference(trials, objectives)
    found = pareto.measured(trials, objectives)
    if reference is None or not found:
        return 0.0
    scale = told.scale(objectives, reference)
    costs = scale.costs([told.objective_values(t, objectives) or () for t in found])
    corner = np.array(scale.reference)
    lucky = [pareto.volume(costs - shift, corner) for shift in noise * np.eye(len(objectives))]
    return float(np.mean(lucky)) - pareto.volume(costs, corner)


def noise_of(baseline: Trial, name: str) -> float | None:
    """Relative standard deviation of a metric over the baseline's full repeats; None below two of them."""
    values = [m.values[name] for m in baseline.measurements if m.kind == "full" and name in m.values]
    if len(values) < 2 or not all(0 < v < float("inf") for v in values):
        return None
    return float(np.std(np.log(values), ddof=1))
