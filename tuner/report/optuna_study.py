"""A study as an Optuna study, for optuna-dashboard and other tools."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial

from tuner.errors import BadInput
from tuner.measures import direction_of
from tuner.records import Candidate, Study, Trial, TrialState
from tuner.search import trial_view

optuna.logging.set_verbosity(optuna.logging.WARNING)

# Every other state is FAIL there.
STATES = {
    TrialState.COMPLETE: optuna.trial.TrialState.COMPLETE,
    TrialState.PRUNED: optuna.trial.TrialState.PRUNED,
    TrialState.RUNNING: optuna.trial.TrialState.RUNNING,
}


def export(study: Study, trials: Sequence[Trial], url: str) -> str:
    """Write a study with all attempts of all trials, in place of an earlier export of it; returns the name
    that it has there. BadInput if the storage cannot be opened.

    A trial's parameters are what its engine ran with, as far as known. User attributes hold everything
    measured. A trial that was measured and is INFEASIBLE is COMPLETE there, with a violated constraint.
    """
    name = f"{study.name}-{study.id[:12]}"
    try:
        storage = optuna.storages.RDBStorage(url)
    except Exception as error:  # SQLAlchemy and drivers raise their own kinds
        raise BadInput(f"--optuna {url}: {str(error).splitlines()[0]}") from error
    if name in (each.study_name for each in optuna.get_all_study_summaries(storage)):
        optuna.delete_study(study_name=name, storage=storage)
    made = optuna.create_study(
        study_name=name, storage=storage, directions=[direction_of(n) for n in study.objectives]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        made.set_metric_names(list(study.objectives))
    for key in ("model", "node", "gpu_class", "workload", "engine_version", "trace_digest"):
        made.set_user_attr(key, getattr(study, key))
    own, named = trial_view.own_of(trials), {n for t in trials for n in t.candidate}
    wholes = {t.id: {**t.effective, **own, **t.candidate} for t in trials}
    ran = {i: Candidate({n: v for n, v in whole.items() if n in named}) for i, whole in wholes.items()}
    space = _space(list(ran.values()))
    for trial in sorted(trials, key=lambda t: (t.number, t.attempt)):
        made.add_trial(_frozen(trial, study, ran[trial.id], space))
    return name


def _space(candidates: Sequence[Candidate]) -> dict[str, BaseDistribution]:
    """Numbers as ranges of what was tried, everything else as choices."""
    found: dict[str, BaseDistribution] = {}
    for name in sorted({n for c in candidates for n in c}):
        values = list(dict.fromkeys(c[name] for c in candidates if name in c))
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) < len(values):
            found[name] = CategoricalDistribution(sorted(values, key=repr))
        elif all(isinstance(v, int) for v in numbers):
            found[name] = IntDistribution(int(min(numbers)), int(max(numbers)))
        else:
            found[name] = FloatDistribution(float(min(numbers)), float(max(numbers)))
    return found


def _frozen(trial: Trial, study: Study, ran: Candidate, space: dict[str, BaseDistribution]) -> FrozenTrial:
    measured = trial.measurement
    values = trial_view.objective_values(trial, study.objectives)
    state = STATES.get(trial.state, optuna.trial.TrialState.FAIL)
    if values is not None and trial.state is TrialState.INFEASIBLE:
        state = optuna.trial.TrialState.COMPLETE
    if state is optuna.trial.TrialState.COMPLETE and values is None:
        state = optuna.trial.TrialState.FAIL
    numbers = measured.values if measured else {}
    attrs: dict[str, Any] = {
        "number": trial.number, "attempt": trial.attempt, "state": trial.state.value, "origin": trial.origin,
        "screened": trial.screened, "gpu_seconds": trial.gpu_seconds, "reason": trial.reason,
        "cause": trial.cause,
        "kind": measured.kind if measured else None,
        "measured": {n: v if math.isfinite(v) else None for n, v in numbers.items()},
    }  # fmt: skip
    floats = {n for n in ran if isinstance(space[n], FloatDistribution)}
    params = {n: float(v) if n in floats and v is not None else v for n, v in ran.items()}
    done = state is optuna.trial.TrialState.COMPLETE
    ended = None if state is optuna.trial.TrialState.RUNNING else trial.ended_at or trial.started_at
    found = FrozenTrial(
        number=-1, trial_id=-1, state=state, value=None, values=list(values) if done and values else None,
        datetime_start=trial.started_at.replace(tzinfo=None),
        datetime_complete=ended.replace(tzinfo=None) if ended else None,
        params=params, distributions={n: space[n] for n in ran},
        user_attrs=attrs, system_attrs={}, intermediate_values={},
    )  # fmt: skip
    if trial.state not in (TrialState.RUNNING, TrialState.ABORTED):
        for key, margin in trial_view.margins(trial).items():
            found.set_constraint(key, margin)
    return found
