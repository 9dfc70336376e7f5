"""The simulator of a study, calibrated on its baseline, and what it expects (`tuner predict`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

import numpy as np

from tuner.adapters import adapter_of
from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.knobs.space import SearchSpace
from tuner.measures import class_of, is_maximized, many, measure_of
from tuner.records import Candidate, Prediction, Trial, TrialState
from tuner.search import acquisition, pareto, trial_view
from tuner.search.trial_view import encode
from tuner.simulator.calibrate import Calibration, Observation, fit
from tuner.simulator.cost import CARDS, Card, Coefficients, card_of, coefficients_of, preset
from tuner.simulator.predict import UNCALIBRATED, Batch, Predictor, Scene
from tuner.tuning.study import Prepared

# Least relative error of step times that proposals reckon with. A fit to the baseline says
# little about candidates with other batch sizes.
UNSURE = 0.12

# Rounds of a fit to the baseline; more change little (docs/simulator.md).
ROUNDS = 2


def card_for(prepared: Prepared) -> Card | str:
    """The simulator's card for the study's device, or why there is none."""
    engine, facts = prepared.file.engine, prepared.facts
    for name in prepared.study.objectives:
        if not measure_of(name).predicted:
            return f"the simulator does not predict {name}"
    if adapter_of(engine.kind).simulated:
        return card_of(engine.card)
    stages = [v for name, v in engine.args.items() if name.replace("-", "_") == "pipeline_parallel_size"]
    stages += prepared.space.levels.get("pipeline_parallel_size", ())
    if any(size not in (None, 1) for size in stages):
        return "the simulator does not predict pipeline parallel engines"
    if facts.platform == "cpu":
        return CARDS["cpu"]
    titles = {card.title: card for card in CARDS.values()}
    if facts.gpu_name in titles:
        return titles[facts.gpu_name]
    return f"the simulator does not know the card '{facts.gpu_name or facts.platform}'"


def scene_of(prepared: Prepared, card: Card) -> Scene:
    """What the study measures, in the simulator's terms: the slices of the search."""
    engine = prepared.file.engine
    args = {name: value for name, value in engine.args.items() if not isinstance(value, list | dict)}
    return Scene(
        trace=prepared.trace,
        slices=prepared.study.searched_slices,
        facts=prepared.model,
        card=card,
        plan=prepared.plan,
        speed=prepared.file.speed,
        slo=prepared.study.slo,
        args=args,
        env=engine.env,
        gpus=max(1, prepared.facts.gpu_count),
        classes=tuple({one for name in prepared.study.objectives if (one := class_of(name))}),
    )


def predictor_of(scene: Scene, calibration: Calibration, kind: type[Predictor] = Predictor) -> Predictor:
    """The predictor for proposals; its error is at least UNSURE."""
    return kind(scene, calibration.coefficients, error=max(calibration.error, UNSURE))


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedPredictor:
    """A predictor and its calibration; None: it is not calibrated, since the baseline did not serve."""

    predict: Batch
    calibration: Calibration | None


@dataclass(slots=True, kw_only=True)
class StudyPredictor:
    """A study's simulator.

    It is calibrated on the baseline alone, so its predictions stay the same for the whole study; the search
    models its errors (`search.acquisition`). The fit begins at `start`, the coefficients of an earlier run.
    After the first try `why_not` is the reason why nothing is predicted, if so.
    """

    prepared: Prepared
    start: Coefficients | None = None
    why_not: str | None = None
    _known: dict[int, CalibratedPredictor | None] = field(default_factory=dict)

    def calibrated(self, trials: Sequence[Trial]) -> CalibratedPredictor | None:
        """The predictor; None while nothing can be predicted."""
        base = trial_view.baseline_of(trials)
        if base is None and not failed(trials):
            return None
        key = -1 if base is None else base.id
        if key not in self._known:
            self._known[key] = self._calibrated(base)
        return self._known[key]

    def _calibrated(self, base: Trial | None) -> CalibratedPredictor | None:
        """Calibrated on the baseline; not calibrated where the baseline did not serve. None: no simulator."""
        card = card_for(self.prepared)
        self.why_not = card if isinstance(card, str) else None
        if isinstance(card, str):
            return None
        scene = scene_of(self.prepared, card)
        if base is None or base.measurement is None:
            return CalibratedPredictor(
                predict=Batch(Predictor(scene, self.start or preset(card))), calibration=None
            )
        try:
            calibration = self.fit(scene, base)
        except BadInput as error:
            self.why_not = str(error)
            return None
        return CalibratedPredictor(predict=Batch(predictor_of(scene, calibration)), calibration=calibration)

    def basis(self, trials: Sequence[Trial], card: Card) -> str:
        """What the predictions rest on, in words."""
        known = self.calibrated(trials)
        if known is not None and (made := known.calibration) is not None:
            return f"calibrated on {many(made.trials, 'trial')}; step times are about {made.error:.0%} off"
        why = "nothing was measured yet"
        if trials:
            why = "the baseline was not measured yet"
        if failed(trials):
            why = "the baseline did not serve, so there is no measurement to calibrate the simulator on"
        source = "assumed speeds of a CPU" if card.platform == "cpu" else "the card's datasheet"
        return f"not calibrated: {self.why_not or why}; these numbers use {source}"

    def fit(self, scene: Scene, base: Trial) -> Calibration:
        """The calibration on the baseline. BadInput where it has no latency."""
        values = base.measurement.values if base.measurement else {}
        seen = [Observation(candidate=base.candidate, values=values)]
        return fit(scene, seen, start=self.start, rounds=ROUNDS)


def earlier(moment: datetime, before: datetime | None) -> bool:
    """Whether a moment was before another one, if there is one."""
    return before is None or moment < before


def pool_of(prepared: Prepared, space: SearchSpace, trials: Sequence[Trial]) -> list[Candidate]:
    """The study's pool of candidates in a space: those that may work, each configuration once."""
    encoding = encode(space, trial_view.defaults_of(trials))
    points = acquisition.pool(encoding, prepared.study.seed)
    pool = {c.digest: c for c in map(encoding.candidate, points)}.values()
    return [c for c in pool if space.contains(c) and prepared.known_failure(c) is None]


def failed(trials: Sequence[Trial]) -> bool:
    """Whether the baseline was measured and cannot serve this traffic."""
    return any(t.is_baseline and t.state is TrialState.INFEASIBLE for t in trials)


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


def forecast(prepared: Prepared, trials: Sequence[Trial], *, count: int) -> Forecast:
    """Predict the baseline and up to `count` candidates of the space. BadInput where the simulator knows no
    such card.
    """
    card = card_for(prepared)
    if isinstance(card, str):
        raise BadInput(f"study {prepared.study.name} cannot be predicted: {card}")
    objectives = prepared.study.objectives
    predictor = StudyPredictor(prepared=prepared)
    known = predictor.calibrated(trials)
    calibration = known.calibration if known else None
    scene = scene_of(prepared, card)
    coefficients = calibration.coefficients if calibration else preset(card)
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
    done = pareto.measured(trials, objectives)
    return Forecast(
        study=prepared.study.name,
        objectives=objectives,
        calibration=calibration,
        basis=predictor.basis(trials, card),
        asked=len(pool),
        feasible=len(works),
        baseline=_sure(full, prepared.baseline),
        front=tuple(_sure(full, each.candidate) for each in _front(works, objectives)),
        measured=tuple(zip(done, quick([t.candidate for t in done]), strict=True)),
    )


def _sure(predictor: Predictor, candidate: Candidate) -> Expected:
    return Expected(candidate=candidate, prediction=predictor([candidate])[0])


def _front(works: Sequence[Expected], objectives: Sequence[str]) -> list[Expected]:
    """The candidates that no other beats in every objective, in order of the first one."""
    if not works:
        return []
    signs = np.array([-1.0 if is_maximized(name) else 1.0 for name in objectives])
    costs = signs * np.array([[each.prediction.values[name] for name in objectives] for each in works])
    keep = pareto.non_dominated(costs)
    kept = [(row[0], i) for i, (row, k) in enumerate(zip(costs.tolist(), keep, strict=True)) if k]
    return [works[i] for _, i in sorted(kept)]


def last_calibration(store: Store, prepared: Prepared, before: datetime | None) -> Coefficients | None:
    """The coefficients that the last run of another study on this node, else on its GPU class, fitted for the
    same model and engine version. None where there is none that can be read. `before`: only what had ended by
    then counts.
    """
    study = prepared.study
    alike = [
        each
        for each in store.studies(model=study.model)
        if (each.engine_version, each.gpu_class) == (study.engine_version, study.gpu_class)
        and each.id != study.id
        and earlier(each.created_at, before)
    ]
    for each in sorted(alike, key=lambda s: s.node != study.node):
        for run in store.runs(each.id):
            kept = run.summary.get("calibration")
            if run.ended_at is None or not earlier(run.ended_at, before) or not isinstance(kept, dict):
                continue
            if (found := coefficients_of(kept.get("coefficients"))) is not None:
                return found
    return None
