"""The Pareto front and its hypervolume."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tuner.measures import is_maximized
from tuner.records import Candidate, Trial, TrialState
from tuner.search import trial_view

Matrix = NDArray[np.float64]


def non_dominated(costs: Matrix) -> NDArray[np.bool_]:
    """Mask of the rows that no other row beats in every column; of equal rows the first is kept."""
    keep = np.zeros(len(costs), dtype=bool)
    kept, count = np.empty_like(costs), 0
    # In this order nothing is beaten by a later row, so each meets only what was kept before it.
    for i in np.lexsort(costs.T[::-1]):
        if not np.all(kept[:count] <= costs[i], axis=1).any():
            keep[i] = True
            kept[count] = costs[i]
            count += 1
    return keep


def measured(trials: Sequence[Trial], objectives: Sequence[str]) -> tuple[Trial, ...]:
    """COMPLETE trials with every objective measured in full, screened ones included."""
    complete = (t for t in trial_view.latest(trials) if t.state is TrialState.COMPLETE)
    return tuple(t for t in complete if trial_view.objective_values(t, objectives) is not None)


def values_of(trials: Sequence[Trial], objectives: Sequence[str]) -> Matrix:
    """Objective values of trials that were measured in full: trials × objectives."""
    found = [trial_view.objective_values(trial, objectives) or () for trial in trials]
    return np.array(found, np.float64).reshape(-1, len(objectives))


def front(trials: Sequence[Trial], objectives: Sequence[str], *, screened: bool = False) -> tuple[Trial, ...]:
    """The COMPLETE trials that no other beats in every objective, in order of number; those that were only
    screened take part where `screened` is set.
    """
    found = [t for t in measured(trials, objectives) if screened or not t.screened]
    signs = [-1.0 if is_maximized(name) else 1.0 for name in objectives]
    keep = non_dominated(values_of(found, objectives) * signs)
    return tuple(t for t, kept in zip(found, keep, strict=True) if kept)


def promotable(
    trials: Sequence[Trial], scale: trial_view.Scale, key: Callable[[Candidate], str]
) -> tuple[float, Trial] | None:
    """The screened trial whose relaunch would add most volume, after that volume as a share of what
    everything measured covers; None where nothing was screened.

    A trial is left out once its candidate (by `key`) was relaunched or its relaunch failed.
    """
    objectives, corner = scale.objectives, np.array(scale.corner)
    settled = {key(t.candidate) for t in trial_view.latest(trials) if not t.screened}
    everything = measured(trials, objectives)
    rows = scale.costs(values_of(everything, objectives))
    base = rows[[i for i, t in enumerate(everything) if not t.screened]]
    have, whole = volume(base, corner), volume(rows, corner)
    found = [
        (volume(np.vstack([base, row]), corner) - have, trial)
        for trial, row in zip(everything, rows, strict=True)
        if trial.screened and key(trial.candidate) not in settled
    ]
    gain, best = max(found, key=lambda each: each[0], default=(0.0, None))
    return None if best is None or whole <= 0 else (gain / whole, best)


def hypervolume(points: ArrayLike, scale: trial_view.Scale) -> float:
    """The volume between the scale's corner and points, in log latencies and linear goodput (its unit is the
    baseline's). `points` are raw objective values.
    """
    costs = scale.costs(np.asarray(points, dtype=np.float64).reshape(-1, len(scale.objectives)))
    return volume(costs, np.array(scale.corner))


def covered(trials: Sequence[Trial], scale: trial_view.Scale) -> float:
    """The hypervolume of everything measured in full, screened trials included."""
    return hypervolume(values_of(measured(trials, scale.objectives), scale.objectives), scale)


def volume(costs: Matrix, reference: Matrix) -> float:
    """Exact hypervolume of rows to be minimised, below a reference corner."""
    inside = costs[np.all(costs < reference, axis=1)]
    if not len(inside):
        return 0.0
    inside = inside[non_dominated(inside)]
    if inside.shape[1] == 1:
        return float(reference[0] - inside.min())
    return _slices(inside[np.argsort(inside[:, -1])], reference)


def _slices(rows: Matrix, reference: Matrix) -> float:
    """Sum over slabs of the last column of the volume of what has entered by then."""
    edges = np.append(rows[:, -1], reference[-1])
    if rows.shape[1] == 2:
        best = np.minimum.accumulate(rows[:, 0])
        return float(np.sum((reference[0] - best) * np.diff(edges)))
    total = 0.0
    for i in range(len(rows)):
        depth = edges[i + 1] - edges[i]
        if depth > 0:
            total += float(depth) * volume(rows[: i + 1, :-1], reference[:-1])
    return total
