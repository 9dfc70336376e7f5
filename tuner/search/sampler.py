"""The search as an Optuna sampler, for any Optuna study; and Optuna's own samplers for ours.

    study = optuna.create_study(directions=["minimize", "maximize"], sampler=TunerSampler(
        objectives=("ttft_p95_ms", "goodput_rps"), baseline={"max_num_seqs": 256}))

The one module that samples with optuna; import it late, that takes a second.
"""

import copy
import importlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.search_space import intersection_search_space
from optuna.trial import FrozenTrial

from tuner.errors import BadInput
from tuner.measures import direction_of
from tuner.records import Candidate, Slo, Study, Trial, TrialState, Value
from tuner.search import acquisition, trial_view
from tuner.search.acquisition import Predict
from tuner.search.trial_view import EncodedTrial, Encoding, Point, Scale, encode

SAMPLERS = ("tuner", "tpe", "gp", "nsga2", "random")

# Trials before TPE and GPSampler fit a model; until then they draw at random. Optuna's default for TPE, 10,
# would be a quarter of a budget of 40.
STARTUP = 6

# Levels into which a range of an Optuna study is divided: 32 steps, so that halving reaches a level five
# times.
GRID = 33

EPOCH = datetime(2000, 1, 1)  # Optuna wants a time; any fixed one keeps a proposal reproducible

optuna.logging.set_verbosity(optuna.logging.WARNING)


class TunerSampler(optuna.samplers.BaseSampler):
    """Proposes by expected gain of hypervolume, from a simulator's predictions and what was measured.

    A trial with a constraint above 0 (`trial.set_constraint`) failed. One that was stopped and reports an
    estimate has the user attribute `kind` = "estimate". Parameters that are not in every trial are drawn
    at random.
    """

    def __init__(
        self,
        *,
        objectives: Sequence[str] | None = None,
        slo: Slo | None = None,
        baseline: Mapping[str, Value] | None = None,
        predict: Predict | None = None,
        allowed: Callable[[Candidate], bool] = lambda candidate: True,
        seed: int = 0,
        scale: Scale | None = None,
    ) -> None:
        """`objectives` are the measurement names of the study's values, in order (default: its metric names):
        latencies end in `_ms` and are compared by their logarithm. `slo` and the first trial, which is to be
        `baseline`, set the corner of the hypervolume; `scale` sets it outright. `predict` is a simulator
        (names in `objectives` → values); `allowed` tells which candidates may work at all.
        """
        self._objectives, self._slo, self._scale = objectives, slo or Slo(), scale
        self._baseline, self._predict, self._allowed = dict(baseline or {}), predict, allowed
        self._seed = seed
        self._random = optuna.samplers.RandomSampler(seed=seed)
        self.proposed_by = "random"

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        found = intersection_search_space(study.get_trials(deepcopy=False), include_pruned=True)
        return {name: each for name, each in found.items() if not each.single()}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        self.proposed_by = "random"
        trials = [t for t in study.get_trials(deepcopy=False) if t.number != trial.number]
        first = next((t.params for t in trials if t.state.name == "COMPLETE"), {})
        levels = _Levels({n: levels_of(d) for n, d in search_space.items()})
        encoding = encode(levels, {**first, **self._baseline})
        seen = [e for t in trials if (e := _encoded(encoding, t)) is not None]
        scale = self._scale or self._scale_of(study, seen)
        if not search_space or scale is None:
            return {}
        taken = {each.point for each in seen}
        rng = np.random.default_rng(trial_view.derive(self._seed, trial.number, "gain"))
        problem = acquisition.problem_of(encoding, seen, scale, self._predict)
        found = acquisition.choose(
            problem, self._seed, lambda p: p not in taken and self._allowed(encoding.candidate(p)), rng
        )
        if found is None:
            return {}
        self.proposed_by = found[1]
        return dict(encoding.candidate(found[0]))

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """The baseline's value in the first trial, a random one later."""
        if trial.number == 0 and param_name in self._baseline:
            return self._baseline[param_name]
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def _scale_of(self, study: optuna.Study, seen: Sequence[EncodedTrial]) -> Scale | None:
        """By the first trial with finite values."""
        signs = [d == optuna.study.StudyDirection.MAXIMIZE for d in study.directions]
        names = self._objectives or study.metric_names or [f"value{i}" for i in range(len(signs))]
        if len(names) != len(signs):
            raise BadInput(f"objectives: the study has {len(signs)} values, and {len(names)} are named")
        rows = (t.values for t in seen if t.values is not None and all(np.isfinite(t.values)))
        first = next(rows, None)
        maximized = frozenset(n for n, up in zip(names, signs, strict=True) if up)
        return None if first is None else trial_view.scale(names, first, self._slo, maximized=maximized)


@dataclass(frozen=True)
class _Levels:
    """An Optuna search space as ordered levels."""

    levels: Mapping[str, tuple[Value, ...]]

    def contains(self, candidate: Candidate) -> bool:
        return all(name in self.levels for name in candidate)

    def canonical(self, candidate: Candidate) -> Candidate:
        return candidate


def levels_of(distribution: BaseDistribution) -> tuple[Value, ...]:
    """The levels of a distribution: all values of a short list, GRID values of a range."""
    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)
    if not isinstance(distribution, IntDistribution | FloatDistribution):
        raise BadInput(f"no levels of a {type(distribution).__name__}")
    low, high, step = distribution.low, distribution.high, distribution.step or 0
    if step and (high - low) / step < 4 * GRID and not distribution.log:
        found = [low + i * step for i in range(round((high - low) / step) + 1)]
    else:
        found = [float(v) for v in (np.geomspace if distribution.log else np.linspace)(low, high, GRID)]
    if isinstance(distribution, IntDistribution):
        near = (round((v - low) / (step or 1)) * (step or 1) for v in found)
        return tuple(dict.fromkeys(int(min(low + v, high)) for v in near))
    return tuple(found)


def _encoded(encoding: Encoding, trial: FrozenTrial) -> EncodedTrial | None:
    """An Optuna trial as the search sees it; None for one that failed (FAIL) or is outside the search
    space.
    """
    states = {"COMPLETE": TrialState.COMPLETE, "PRUNED": TrialState.PRUNED}
    point = encoding.point(trial.params) if set(encoding.names) <= set(trial.params) else None
    if point is None or trial.state.name == "FAIL":
        return None
    state = states.get(trial.state.name, TrialState.RUNNING)
    failed = any(value > 0 for value in trial.constraints.values())
    kind = str(trial.user_attrs.get("kind", "full"))
    if state is TrialState.COMPLETE:
        state = TrialState.INFEASIBLE if failed else TrialState.PRUNED if kind != "full" else state
    values = trial.values if trial.state.name == "COMPLETE" and kind != "none" else None
    return EncodedTrial(
        point=point,
        state=state,
        values=tuple(values) if values else None,
        kind=kind,
        constraints=trial.constraints,
    )


# ---- Optuna's own samplers for a study of the tuner


def make(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """One of Optuna's own samplers by its name in a study file. BadInput where a part of it is missing."""
    if name == "tpe":
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, constant_liar=True, n_startup_trials=STARTUP
        )
    if name == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=12)
    if name == "gp":
        try:
            importlib.import_module("torch")
        except ImportError:
            raise BadInput(
                "sampler: gp is Optuna's GPSampler, which needs torch: pip install 'vllm-config-tuner[gp]'"
            ) from None
        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP, deterministic_objective=False)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    raise BadInput(f"sampler: {name!r} is not one of {', '.join(SAMPLERS)}")


def draws(
    sampler: optuna.samplers.BaseSampler, encoding: Encoding, trials: Sequence[FrozenTrial], limit: int
) -> Iterator[Point]:
    """Up to `limit` points that a sampler proposes one after the other, each with the ones before as
    running.
    """
    width = len(next(t.values for t in trials if t.values is not None))
    study = optuna.create_study(directions=["minimize"] * width, sampler=sampler)
    study.add_trials(trials)
    for _ in range(limit):
        asked = study.ask(_indices(encoding))
        yield tuple(int(asked.params[knob]) for knob in encoding.names)


def _indices(encoding: Encoding) -> dict[str, BaseDistribution]:
    """Knobs as indices into their levels, so that Optuna's samplers know the order of the levels."""
    pairs = zip(encoding.names, encoding.levels, strict=True)
    return {knob: IntDistribution(0, len(values) - 1) for knob, values in pairs}


def propose(
    encoding: Encoding, history: Sequence[EncodedTrial], scale: Scale, *, seed: int, predict: Predict | None,
    allowed: Callable[[Candidate], bool],
) -> tuple[str, Candidate] | None:  # fmt: skip
    """What `TunerSampler` proposes (by whom, what) in an Optuna study of these trials; None where it would
    draw at random.
    """

    def at(indices: Candidate) -> Candidate:
        return encoding.candidate(tuple(int(indices.get(n) or 0) for n in encoding.names))

    own = TunerSampler(
        objectives=scale.objectives,
        scale=scale,
        baseline=dict(zip(encoding.names, encoding.first or (), strict=False)),
        predict=None if predict is None else lambda found: predict([at(c) for c in found]),
        allowed=lambda indices: allowed(at(indices)),
        seed=seed,
    )
    point = next(draws(own, encoding, frozen(encoding, history, scale, raw=True), 1))
    return None if own.proposed_by == "random" else (own.proposed_by, encoding.candidate(point))


class _SharedTrial(FrozenTrial):
    """A trial that is never changed, so it need not be copied: deep copies took most of the time of a
    proposal.
    """

    def __deepcopy__(self, memo: dict[int, object]) -> "_SharedTrial":
        return copy.copy(self)


def frozen(
    encoding: Encoding, history: Sequence[EncodedTrial], scale: Scale, *, raw: bool = False
) -> list[FrozenTrial]:
    """Trials as Optuna's samplers get them: COMPLETE and PRUNED with their costs, to be minimised; what
    failed or has none at a filler beyond the worst that was seen, its constraints violated. `raw`: for
    `TunerSampler`, values as measured, also of what failed.
    """
    works = [t.values is not None and not t.failed for t in history]
    costs = [scale.costs(t.values) if w and t.values else None for t, w in zip(history, works, strict=True)]
    whole = [c for c in costs if c is not None and np.isfinite(c).all()]
    seen = np.array(whole or [np.array(scale.corner)])
    spread = np.ptp(seen, axis=0)
    filler = seen.max(axis=0) + 0.1 * np.where(spread > 0, spread, 1.0)
    space, found = _indices(encoding), list[FrozenTrial]()
    for row, known in zip(history, costs, strict=True):
        running = row.state is TrialState.RUNNING
        values = filler if known is None else np.where(np.isfinite(known), known, filler)
        if raw and row.values is not None:
            values = np.array(row.values)
        trial = _SharedTrial(
            number=-1,
            trial_id=-1,
            state=optuna.trial.TrialState.RUNNING if running else optuna.trial.TrialState.COMPLETE,
            value=None,
            values=None if running else [float(v) for v in values],
            datetime_start=EPOCH,
            datetime_complete=None if running else EPOCH,
            params=dict(zip(encoding.names, row.point, strict=True)),
            distributions=space,
            user_attrs={"kind": row.kind if row.values is not None else "none"},
            system_attrs={},
            intermediate_values={},
        )
        for key, value in row.constraints.items():
            trial.set_constraint(key, value)
        found.append(trial)
    return found


# Every other state is FAIL there.
STATES = {
    TrialState.COMPLETE: optuna.trial.TrialState.COMPLETE,
    TrialState.PRUNED: optuna.trial.TrialState.PRUNED,
    TrialState.RUNNING: optuna.trial.TrialState.RUNNING,
}


def export(study: Study, trials: Sequence[Trial], url: str) -> str:
    """Write a study with all attempts of all trials, anew where an earlier export of it is; returns the name
    that it has there. BadInput where the storage cannot be opened.

    A trial's parameters are what its engine ran with, as far as known; user attributes hold everything
    measured. What was measured and is INFEASIBLE is COMPLETE there with a violated constraint.
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
    whole = measured is not None and measured.kind == "full" and values is not None
    state = STATES.get(trial.state, optuna.trial.TrialState.FAIL)
    if whole and trial.state is TrialState.INFEASIBLE:
        state = optuna.trial.TrialState.COMPLETE
    if state is optuna.trial.TrialState.COMPLETE and not whole:
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
