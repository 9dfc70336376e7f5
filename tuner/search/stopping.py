"""When a search has said what it can say."""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import numpy as np

from tuner.records import Slo, Trial, TrialState
from tuner.search import pareto, trial_view

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
    slo: Slo,
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
    return _nothing_to_gain(
        trials, trial_view.scale_of(trials, objectives, slo), expected_gain, NOISE if noise is None else noise
    )


def _nothing_to_gain(
    trials: Sequence[Trial],
    scale: trial_view.Scale | None,
    expected_gain: Callable[[], float | None],
    noise: float,
) -> str | None:
    finished = [t for t in trial_view.latest(trials) if t.state is not TrialState.RUNNING]
    searched = [t for t in finished if t.origin not in SEEDED]
    if len(searched) < max(MINIMUM, WINDOW) or scale is None:
        return None
    recent = {t.number for t in searched[-WINDOW:]}
    before = pareto.covered([t for t in finished if t.number not in recent], scale)
    after = pareto.covered(finished, scale)
    floor = noise_volume(finished, scale, noise)
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


def noise_volume(trials: Sequence[Trial], scale: trial_view.Scale, noise: float) -> float:
    """How much hypervolume the front gains when one objective is better by `noise`, mean over objectives."""
    found = pareto.measured(trials, scale.objectives)
    if not found:
        return 0.0
    costs = scale.costs([trial_view.objective_values(t, scale.objectives) or () for t in found])
    corner = np.array(scale.corner)
    lucky = [pareto.volume(costs - shift, corner) for shift in noise * np.eye(len(corner))]
    return float(np.mean(lucky)) - pareto.volume(costs, corner)


def noise_of(baseline: Trial, name: str) -> float | None:
    """Relative standard deviation of a metric over the baseline's full repeats; None below two of them."""
    values = [m.values[name] for m in baseline.measurements if m.kind == "full" and name in m.values]
    if len(values) < 2 or not all(0 < v < float("inf") for v in values):
        return None
    return float(np.std(np.log(values), ddof=1))
