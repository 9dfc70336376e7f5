"""What a night would probably do: the whole run of a study on virtual engines, in a home that is thrown away.

Nothing of it reaches the history, no profile is published, and nobody is notified.
"""

import json
import statistics
import tempfile
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from tuner.adapters import adapter_of
from tuner.conclusions import Conclusion
from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.knobs.arguments import takes
from tuner.records import JSON, Run, Trial
from tuner.search import pareto
from tuner.simulator.calibrate import Calibration
from tuner.simulator.cost import CARDS, Card, Coefficients, preset
from tuner.tuning.calibrated_predictor import StudyPredictor, card_for
from tuner.tuning.context import ready_of
from tuner.tuning.next_trial import fronts_of
from tuner.tuning.run import RunLimits, tune
from tuner.tuning.study import Prepared, flag_name, prepare, survey
from tuner.tuning.studyfile import EngineFile, StudyFile
from tuner.tuning.virtual import HIDDEN, STARTUP_S

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
    launches: int
    hours: float
    left_out: tuple[str, ...]


async def predict_night(
    prepared: Prepared, store: Store | None, *, base: Path, now: datetime, limits: RunLimits
) -> PredictedNight:
    """Run a study on a virtual clock. It begins as a new study with the front that the history knows, on an
    engine that is calibrated on the study's baseline. `base` is where the study file's paths begin.

    BadInput where the simulator knows no such card, layout or objective. Errors of a run pass through.
    """
    card = card_for(prepared)
    if isinstance(card, str):
        raise BadInput(f"study {prepared.study.name} cannot be predicted: {card}")
    past = store.trials(prepared.study.id) if store else ()
    predictor = StudyPredictor(prepared=prepared)
    known = predictor.calibrated(past)
    calibration = known.calibration if known else None
    ready = ready_of(store.launches(prepared.study.id)) if store else []
    startup_s = statistics.median(ready) if ready else STARTUP_S
    fitted = calibration.coefficients if calibration else preset(card)
    file, left_out = _simulated(prepared, card, fitted, startup_s)
    ready_to_run = prepare(file, name=prepared.study.name, base=base, store=store, now=now)
    own = [t for t in pareto.front(past, prepared.study.objectives) if not t.is_baseline]
    # A night of the real study would know its front so far.
    front = [(f"this study: trial {each.number}", each.candidate) for each in own]
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
            raise BadInput(f"no prediction for {key} {value}: the simulated engine has only one card")
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
