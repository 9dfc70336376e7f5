"""The Pareto front, its hypervolume, and the member that a policy picks."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tuner.errors import NotFound
from tuner.measures import is_maximized, measure_of
from tuner.records import Candidate, Slo, Trial, TrialState
from tuner.search import trial_view

# How the winner is picked: by the SLO, at the knee of the front, or by weights of the objectives. The study
# file's reader checks them.
Policy = Literal["slo", "knee"] | Mapping[str, float]

# Two configurations that differ by less (relative) count as equal, and the simpler one is taken: less than
# the confirmation can show (`compare.LEAST`).
TIE = 0.02

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
    return tuple(
        t
        for t in complete
        if t.measurement
        and t.measurement.kind == "full"
        and trial_view.objective_values(t, objectives) is not None
    )


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
    trials: Sequence[Trial],
    scale: trial_view.Scale,
    key: Callable[[Candidate], str] = lambda candidate: candidate.digest,
) -> tuple[tuple[Trial, float], ...]:
    """Screened trials that are worth a relaunch, the one that would add most volume first, each with that
    volume as a share of what everything measured covers.

    A trial is left out once its candidate (by `key`) was relaunched or its relaunch failed, and where it adds
    nothing to what was.
    """
    objectives, corner = scale.objectives, np.array(scale.corner)
    settled = {key(t.candidate) for t in trial_view.latest(trials) if not t.screened}
    everything = measured(trials, objectives)
    rows = scale.costs(values_of(everything, objectives))
    base = rows[[i for i, t in enumerate(everything) if not t.screened]]
    have, whole, found = volume(base, corner), volume(rows, corner), []
    for trial, row in zip(everything, rows, strict=False):
        if trial.screened and key(trial.candidate) not in settled:
            gain = volume(np.vstack([base, row]), corner) - have
            if gain > 0:
                found.append((-gain, trial.number, trial))
    return tuple((trial, -gain / whole) for gain, _, trial in sorted(found, key=lambda f: f[:2]))


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


def choose(
    trials: Sequence[Trial], policy: Policy, slo: Slo, objectives: Sequence[str], *, screened: bool = False
) -> Trial:
    """The trial that a policy picks of the COMPLETE ones; ties go to the simpler. With `screened` those
    that were only screened take part.

    NotFound when there is none.
    """
    members = [t for t in measured(trials, objectives) if screened or not t.screened]
    if not members:
        raise NotFound("no trial of this study completed, so there is nothing to choose from")
    if policy == "slo":
        return _by_slo(members, slo, objectives)
    front_members = front(members, objectives, screened=screened)
    if policy == "knee":  # the smallest sum of costs bulges deepest below the plane through the extremes
        row = np.full(len(objectives), 1 / math.sqrt(len(objectives)))
    else:
        row = np.array([policy.get(name, 0.0) for name in objectives]) / sum(policy.values())
    scores = _normalised(front_members, objectives) @ row
    return _simplest([t for t, s in zip(front_members, scores, strict=True) if s <= min(scores) + TIE])


def meets(trial: Trial, slo: Slo) -> bool:
    """Whether the share of good requests reaches the SLO's attainment."""
    values = trial.measurement.values if trial.measurement else {}
    return values.get("slo_attainment", 0.0) >= slo.attainment


def _by_slo(members: list[Trial], slo: Slo, objectives: Sequence[str]) -> Trial:
    """Highest goodput within the SLO, then lowest p95 E2E; if none meets it, the nearest to meeting it."""
    within = [t for t in members if meets(t, slo)]
    if not within:
        best = max(_value(t, "slo_attainment", 0.0) for t in members)
        within = [t for t in members if _value(t, "slo_attainment", 0.0) >= best - 1e-9]
    goodput = max(_value(t, "goodput_rps", 0.0) for t in within)
    within = [t for t in within if _value(t, "goodput_rps", 0.0) >= goodput * (1 - TIE)]
    latencies = ("e2e_p95_ms", *(n for n in objectives if measure_of(n).unit == "ms"))
    tail = next((n for n in latencies if n in objectives or any(n in _values(t) for t in within)), None)
    if tail:
        fastest = min(_value(t, tail, math.inf) for t in within)
        within = [t for t in within if _value(t, tail, math.inf) <= fastest * (1 + TIE)]
    return _simplest(within)


def _values(trial: Trial) -> Mapping[str, float]:
    return trial.measurement.values if trial.measurement else {}


def _value(trial: Trial, name: str, missing: float) -> float:
    return _values(trial).get(name, missing)


def _normalised(members: Sequence[Trial], objectives: Sequence[str]) -> Matrix:
    """Costs of the members stretched to 0 (best) … 1 (worst) per objective; +inf is 1."""
    values = values_of(members, objectives)
    first = np.where(np.isfinite(values[0]), values[0], 1.0)
    costs = trial_view.scale(objectives, first.tolist(), Slo()).costs(values)
    finite = np.where(np.isfinite(costs), costs, np.nan)
    low, high = (
        np.array([f([v for v in col if not math.isnan(v)], default=0.0) for col in finite.T])
        for f in (min, max)
    )
    return np.where(np.isfinite(costs), (costs - low) / np.where(high > low, high - low, 1.0), 1.0)


def _simplest(members: list[Trial]) -> Trial:
    """Fewest knobs set, then the one measured first."""
    return min(members, key=lambda t: (0 if t.is_baseline else 1, len(t.candidate), t.number))
