"""What a study's candidates would measure, by the simulator: the predicted front beside what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.errors import BadInput
from tuner.measures import is_maximized
from tuner.records import Candidate, Prediction, Trial
from tuner.search import acquisition, pareto, trial_view
from tuner.search.encoding import encode
from tuner.simulator.calibrate import Calibration
from tuner.simulator.cost import preset
from tuner.simulator.predict import UNCALIBRATED, Predictor
from tuner.tuning.calibrated_predictor import Knowledge, card_for, scene_of
from tuner.tuning.study import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A candidate and what is expected of it."""

    candidate: Candidate
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A study in virtual time. `measured` holds the trials that were measured beside their predictions."""

    study: str
    objectives: tuple[str, ...]
    calibration: Calibration | None
    asked: int
    feasible: int
    baseline: Expected
    front: tuple[Expected, ...]
    measured: tuple[tuple[Trial, Prediction], ...]


def forecast(prepared: Prepared, trials: Sequence[Trial], *, count: int) -> Forecast:
    """Predict the baseline and up to `count` candidates of the space. BadInput where the simulator knows no
    such card.
    """
    card = card_for(prepared)
    if isinstance(card, str):
        raise BadInput(f"study {prepared.study.name} cannot be predicted: {card}")
    objectives = prepared.study.objectives
    known = Knowledge(prepared=prepared).known(trials)
    calibration = known.calibration if known else None
    scene = scene_of(prepared, card)
    coefficients = calibration.coefficients if calibration else preset(card)
    quick = Predictor(scene, coefficients, spreads=False)
    encoding = encode(prepared.space, trial_view.defaults_of(trials))
    points = acquisition.pool(encoding.names, [len(v) for v in encoding.levels], prepared.study.seed)
    pool = list({c.digest: c for c in map(encoding.candidate, points)}.values())
    pool = [c for c in pool if prepared.space.contains(c) and prepared.known(c) is None]
    pool = pool[:: max(1, len(pool) // count)][:count]
    expected = [Expected(candidate=c, prediction=p) for c, p in zip(pool, quick(pool), strict=True)]
    works = [each for each in expected if each.prediction.feasible and _whole(each.prediction, objectives)]
    full = Predictor(scene, coefficients, error=calibration.error if calibration else UNCALIBRATED)
    done = pareto.measured(trials, objectives)
    return Forecast(
        study=prepared.study.name,
        objectives=objectives,
        calibration=calibration,
        asked=len(pool),
        feasible=len(works),
        baseline=_sure(full, prepared.baseline),
        front=tuple(_sure(full, each.candidate) for each in _front(works, objectives)),
        measured=tuple(zip(done, quick([t.candidate for t in done]), strict=True)),
    )


def _whole(prediction: Prediction, objectives: Sequence[str]) -> bool:
    return all(np.isfinite(prediction.values.get(name, np.nan)) for name in objectives)


def _sure(predictor: Predictor, candidate: Candidate) -> Expected:
    return Expected(candidate=candidate, prediction=predictor([candidate])[0])


def _front(works: Sequence[Expected], objectives: Sequence[str]) -> list[Expected]:
    """Those that no other beats, in order of the first objective."""
    if not works:
        return []
    costs = np.array(
        [[_cost(each.prediction.values[name], name) for name in objectives] for each in works], np.float64
    )
    keep = pareto.non_dominated(costs)
    kept = [(row[0], i) for i, (row, k) in enumerate(zip(costs.tolist(), keep, strict=True)) if k]
    return [works[i] for _, i in sorted(kept)]


def _cost(value: float, name: str) -> float:
    return -value if is_maximized(name) else value
