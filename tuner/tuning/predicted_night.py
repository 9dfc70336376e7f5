"""What the simulator expects of a study (`tuner predict`): of its candidates, or of a whole night.

A night is a run of the study on virtual engines, in a home that is thrown away. Nothing of it reaches the
history, no profile is published, and nobody is notified.
"""

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from tuner.adapters import adapter_of
from tuner.conclusions import Attribution, Conclusion
from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.knobs.arguments import takes
from tuner.measures import is_maximized
from tuner.records import JSON, Candidate, Prediction, Run, Trial
from tuner.search import trial_view
from tuner.simulator.calibrate import Calibration
from tuner.simulator.cost import CARDS, Card, Coefficients, preset
from tuner.simulator.predict import UNCALIBRATED, Predictor
from tuner.tuning.context import ready_of
from tuner.tuning.next_trial import (
    StudyPredictor,
    card_for,
    fronts_of,
    last_calibration,
    pool_of,
    scene_of,
    winner_and_front,
)
from tuner.tuning.run import RunLimits, tune
from tuner.tuning.study import Prepared, StudyFile, prepare
from tuner.tuning.survey import EngineFile, flag_name, survey
from tuner.tuning.virtual import HIDDEN, STARTUP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A candidate and its prediction."""

    candidate: Candidate
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the simulator expects of a study. `measured` pairs the measured trials with their predictions,
    `basis` says what the predictions rest on.
    """

    study: str
    objectives: tuple[str, ...]
    calibration: Calibration | None
    basis: str
    asked: int
    feasible: int
    baseline: Expected
    front: tuple[Expected, ...]
    measured: tuple[tuple[Trial, Prediction], ...]


def forecast(
    prepared: Prepared, trials: Sequence[Trial], *, count: int, start: Coefficients | None = None
) -> Forecast:
    """Predict the baseline and up to `count` candidates of the space, as the search does. `start`: see
    `StudyPredictor`. BadInput if the simulator knows no such card.
    """
    card = card_for(prepared)
    if isinstance(card, str):
        raise BadInput(f"study {prepared.study.name} cannot be predicted: {card}")
    objectives = prepared.study.objectives
    predictor = StudyPredictor(prepared=prepared, start=start)
    known = predictor.calibrated(trials)
    calibration = known.calibration if known else None
    scene = scene_of(prepared, card)
    coefficients = calibration.coefficients if calibration else start or preset(card)
    quick = Predictor(scene, coefficients, spreads=False)
    pool = pool_of(prepared, prepared.space, trials)
    pool = pool[:: max(1, len(pool) // count)][:count]
    expected = [Expected(candidate=c, prediction=p) for c, p in zip(pool, quick(pool), strict=True)]
    works = [
        each
        for each in expected
        if each.prediction.feasible
        and all(math.isfinite(each.prediction.values.get(name, math.nan)) for name in objectives)
    ]
    full = Predictor(scene, coefficients, error=calibration.error if calibration else UNCALIBRATED)
    done = trial_view.measured(trials, objectives)
    return Forecast(
        study=prepared.study.name,
        objectives=objectives,
        calibration=calibration,
        basis=predictor.basis(trials, card),
        asked=len(pool),
        feasible=len(works),
        baseline=_sure(full, prepared.baseline),
        front=tuple(_sure(full, each.candidate) for each in _best_expected(works, objectives)),
        measured=tuple(zip(done, quick([t.candidate for t in done]), strict=True)),
    )


def _sure(predictor: Predictor, candidate: Candidate) -> Expected:
    return Expected(candidate=candidate, prediction=predictor([candidate])[0])


def _best_expected(works: Sequence[Expected], objectives: Sequence[str]) -> list[Expected]:
    """The candidates that no other beats in every objective, in order of the first one."""
    if not works:
        return []
    signs = np.array([-1.0 if is_maximized(name) else 1.0 for name in objectives])
    costs = signs * np.array([[each.prediction.values[name] for name in objectives] for each in works])
    keep = trial_view.non_dominated(costs)
    kept = [(row[0], i) for i, (row, k) in enumerate(zip(costs.tolist(), keep, strict=True)) if k]
    return [works[i] for _, i in sorted(kept)]


LAYOUTS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedNight:
    """A run that was only computed. `hours` are virtual; `left_out` are arguments and knobs that the
    simulated engine does not take; `basis` says what the simulator rests on (`calibration` None: on nothing
    that was measured).
    """

    study: str
    card: str
    calibration: Calibration | None
    basis: str
    run: Run
    trials: tuple[Trial, ...]
    conclusion: Conclusion | None
    attribution: Attribution | None
    launches: int
    hours: float
    left_out: tuple[str, ...]


async def predict_night(
    prepared: Prepared, store: Store | None, *, base: Path, now: datetime, limits: RunLimits
) -> PredictedNight:
    """Run a study on a virtual clock. It begins as a new study with the front that the history knows, on an
    engine that is calibrated on the study's baseline. `base` is where the study file's paths begin.

    BadInput if the simulator knows no such card, layout or objective. Errors of a run pass through.
    """
    card = card_for(prepared)
    if isinstance(card, str):
        raise BadInput(f"study {prepared.study.name} cannot be predicted: {card}")
    past = store.trials(prepared.study.id) if store else ()
    predictor = StudyPredictor(
        prepared=prepared, start=last_calibration(store, prepared, None) if store else None
    )
    known = predictor.calibrated(past)
    calibration = known.calibration if known else None
    ready = ready_of(store.launches(prepared.study.id)) if store else []
    startup_s = statistics.median(ready) if ready else STARTUP_S
    fitted = calibration.coefficients if calibration else predictor.start or preset(card)
    file, left_out = _simulated(prepared, card, fitted, startup_s)
    ready_to_run = prepare(file, name=prepared.study.name, base=base, store=store, now=now)
    own = winner_and_front(store, prepared.study, past) if store else []
    # A night of the real study would know its front so far.
    front = [(f"this study: trial {each.label}", each.candidate) for each in own]
    seeds = (*fronts_of(store, prepared, now), *front) if store else ()
    with tempfile.TemporaryDirectory(prefix="tuner-predicted-") as folder:
        thrown_away = Store(f"sqlite:///{folder}/tuner.db")
        try:
            run = await tune(
                ready_to_run, thrown_away, home=Path(folder), limits=limits, clock=lambda: now, seeds=seeds
            )
            launches = thrown_away.launches(run.study_id)
            return PredictedNight(
                study=prepared.study.name,
                card=card.title,
                calibration=calibration,
                basis=predictor.basis(past, card),
                run=run,
                trials=tuple(thrown_away.trials(run.study_id)),
                conclusion=thrown_away.conclusion(run.id),
                attribution=thrown_away.attribution(run.id),
                launches=len(launches),
                hours=((run.ended_at or now) - run.started_at) / timedelta(hours=1),
                left_out=left_out,
            )
        finally:
            thrown_away.close()


def _simulated(
    prepared: Prepared, card: Card, fitted: Coefficients, startup_s: float
) -> tuple[StudyFile, tuple[str, ...]]:
    """The study's file with a virtual engine, and what that engine does not take."""
    file = prepared.file
    for key, value in {**file.engine.args, **file.baseline}.items():
        if key.replace("-", "_") in LAYOUTS and value not in (None, 1):
            raise BadInput(f"no prediction for {key} {value}: a predicted night has only one card")
    name = next(each for each, known in CARDS.items() if known is card)
    plain = EngineFile(kind="simulated", clock="virtual", card=name)
    facts = survey(plain, base=Path()).facts
    args = {key: value for key, value in file.engine.args.items() if flag_name(key) in facts.flags}
    baseline = {key: value for key, value in file.baseline.items() if takes(key, value, facts)}
    env = {
        **(file.engine.env if adapter_of(file.engine.kind).simulated else {}),
        "TUNER_SIM_COEFFICIENTS": json.dumps(fitted.to_json()),
        "TUNER_SIM_STARTUP_S": str(startup_s),
        HIDDEN: "[]",  # what is hidden from the tuner is hidden from its prediction
    }
    engine = plain.model_copy(update={"args": args, "env": env})
    left_out = (*(set(file.engine.args) - set(args)), *(set(file.baseline) - set(baseline)))
    changed = {"engine": engine, "baseline": baseline, "trace": str(prepared.trace_path)}
    return file.model_copy(update=changed), tuple(sorted(left_out))


def as_data(found: PredictedNight) -> dict[str, JSON]:
    """A predicted night as JSON; `simulated` is always true."""
    said = found.conclusion.to_json() if found.conclusion else None
    if said is not None:
        said["profiles"] = {}  # published nowhere
    return {
        "simulated": True,
        "study": found.study,
        "card": found.card,
        "calibration": found.calibration.to_json() if found.calibration else None,
        "basis": found.basis,
        "reason": found.run.reason,
        "hours": found.hours,
        "launches": found.launches,
        "left_out": list(found.left_out),
        "conclusion": said,
        "trials": [
            {
                "number": t.number,
                "origin": t.origin,
                "state": t.state.value,
                "candidate": dict(t.candidate),
                "reason": t.reason,
                "values": dict(t.measurement.values) if t.measurement else {},
            }
            for t in found.trials
        ],
    }
