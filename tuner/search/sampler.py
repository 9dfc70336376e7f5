"""The search as an Optuna sampler, for any Optuna study; and Optuna's own samplers for ours.

    study = optuna.create_study(directions=["minimize", "maximize"], sampler=TunerSampler(
        objectives=("ttft_p95_ms", "goodput_rps"), baseline={"max_num_seqs": 256}))

Import it late: Optuna takes a second.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.search_space import intersection_search_space
from optuna.trial import FrozenTrial

from tuner.errors import BadInput
from tuner.records import Candidate, Slo, TrialState, Value
from tuner.search import acquisition, trial_view
from tuner.search.acquisition import Predict, SearchState
from tuner.search.trial_view import EncodedTrial, Encoding, Point, Scale, encode

SAMPLERS = ("tuner", "tpe", "gp", "nsga2", "random")

# Trials before TPE and GPSampler fit a model; until then they draw at random. Optuna's default for TPE, 10,
# would be a quarter of a budget of 40.
STARTUP = 6

# Levels into which a range of an Optuna study is divided: 32 steps, so that halving reaches a level five
# times.
GRID = 33

optuna.logging.set_verbosity(optuna.logging.WARNING)


class TunerSampler(optuna.samplers.BaseSampler):
    """Proposes by expected gain of hypervolume, from a simulator's predictions and what was measured.

    A trial with a constraint above 0 (`trial.set_constraint`) failed. Parameters that are not in every trial
    are drawn at random.
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
        """`objectives` are the measurement names of the study's values, in order (default: its metric names).
        `slo` and the first trial, which is to be `baseline`, set the corner of the hypervolume; `scale` sets
        it outright. `predict` is a simulator (names in `objectives` → values); `allowed` tells which
        candidates may work at all.
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
        problem = SearchState(encoding=encoding, trials=seen, scale=scale, predict=self._predict)
        found = acquisition.choose(problem, self._seed, trial.number, self._allowed)
        if found is None:
            return {}
        self.proposed_by, candidate, _ = found
        return dict(candidate)

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
            raise BadInput(
                f"the Optuna study has {len(signs)} objectives, but `objectives` names {len(names)}"
            )
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
        raise BadInput(f"a {type(distribution).__name__} cannot be searched")
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
    values = tuple(trial.values) if state is TrialState.COMPLETE else None
    if state is not TrialState.RUNNING and any(value > 0 for value in trial.constraints.values()):
        state = TrialState.INFEASIBLE
    return EncodedTrial(point=point, state=state, values=values, constraints=trial.constraints)


# ---- Optuna's own samplers for a study of the tuner


def make(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """One of Optuna's own samplers by its name in a study file. BadInput if a part of it is missing."""
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


def frozen(encoding: Encoding, history: Sequence[EncodedTrial], scale: Scale) -> list[FrozenTrial]:
    """Trials as Optuna's samplers get them. Their values are `Scale.ratios`, to be minimised. A trial that
    failed or has no values is at the corner, or at the worst value that was seen, and its constraints are
    violated.
    """
    raw = [None if t.failed else t.values for t in history]
    whole = [values for values in raw if values is not None and np.isfinite(values).all()]
    filler = np.max(scale.ratios(np.vstack([np.array(scale.corner) * scale.signed_units, *whole])), axis=0)
    space, found = _indices(encoding), list[FrozenTrial]()
    for row, known in zip(history, raw, strict=True):
        running = row.state is TrialState.RUNNING
        values = filler if known is None else np.where(np.isfinite(known), scale.ratios(known), filler)
        trial = optuna.create_trial(
            state=optuna.trial.TrialState.RUNNING if running else optuna.trial.TrialState.COMPLETE,
            values=None if running else values.tolist(),
            params=dict(zip(encoding.names, row.point, strict=True)),
            distributions=space,
        )
        for key, value in row.constraints.items():
            trial.set_constraint(key, value)
        found.append(trial)
    return found
