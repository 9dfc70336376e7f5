"""Which trial wins: by the SLO, at the knee of the front, or by weights of the objectives."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from tuner.errors import NotFound
from tuner.measures import measure_of
from tuner.records import Candidate, Slo, Trial, TrialState
from tuner.search import trial_view
from tuner.search.trial_view import Matrix, front, measured, values_of
from tuner.tuning.study import Prepared

# How the winner is picked: by the SLO, at the knee of the front, or by weights of the objectives. The study
# file's reader checks them.
Policy = Literal["slo", "knee"] | Mapping[str, float]


# Two configurations that differ by less (relative) count as equal, and the simpler one is taken: less than
# the confirmation can show (`significance.LEAST`).
TIE = 0.02


def pick(
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


def meets(trial: Trial, slo: Slo) -> bool:
    """Whether the share of good requests reaches the SLO's attainment."""
    values = trial.measurement.values if trial.measurement else {}
    return values.get("slo_attainment", 0.0) >= slo.attainment


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


def winner(prepared: Prepared, trials: Sequence[Trial], key: Callable[[Candidate], str]) -> Trial | None:
    """The trial that the study's policy picks. Screened ones take part unless they were relaunched since.
    `key` is `StudyView.key` of the whole history.
    """
    settled = {key(t.candidate) for t in trials if not t.screened and t.state is not TrialState.ABORTED}
    kept = [t for t in trials if not t.screened or key(t.candidate) not in settled]
    study = prepared.study
    try:
        return pick(kept, policy(prepared), study.slo, study.objectives, screened=True)
    except NotFound:
        return None


def policy(prepared: Prepared) -> Policy:
    """The study's rule for the winner as `pick` takes it."""
    chosen = prepared.file.winner
    return chosen if isinstance(chosen, str) else chosen.weights
