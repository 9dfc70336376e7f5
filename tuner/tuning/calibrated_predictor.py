"""What is known before a candidate is measured: a simulator calibrated on the study's baseline, the fronts of
other studies, and how to measure it for less. Each a function of history, so that suggestions replay.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from tuner.adapters import adapter_of
from tuner.errors import BadInput
from tuner.knobs.space import SearchSpace
from tuner.measures import class_of, measure_of
from tuner.records import Candidate, Prediction, Slo, Trial, TrialState, Value
from tuner.search import acquisition, heuristics, pareto, trial_view
from tuner.search.encoding import encode
from tuner.simulator.batch import Batch
from tuner.simulator.calibrate import Calibration, Observation, fit
from tuner.simulator.cost import CARDS, Card, Coefficients, card_of, preset
from tuner.simulator.predict import Predictor, Scene
from tuner.tuning.live import changeable
from tuner.tuning.seeds import Seed, by_concurrency
from tuner.tuning.study import Prepared

PICKED = "simulator: SLO"
"""Origin of the predicted choice of the SLO policy, which is tried first."""
UNSURE = 0.12
"""Relative error of step times, at least, that proposals reckon with: one trial says little of others."""
ROUNDS = 2
"""Rounds of a fit to the baseline; more change little (docs/simulator.md)."""
LAUNCH_S = 57.0
"""Seconds of a launch where history tells none."""
SETTLE_S = 15.0
"""Warm-up and tail of a replay, roughly."""
ENOUGH = 3
"""Trials after which a study that screened none though it should is taken to be one that cannot."""
SECURED = 0.05
"""Share of the front's volume that a trial must add to be worth an engine of its own."""
RELAUNCHED = "relaunched"
"""Origin of a trial that measures a screened candidate again, in an engine of its own."""


def card_for(prepared: Prepared) -> Card | str:
    """The simulator's card for the study's device, or why there is none."""
    engine, facts = prepared.file.engine, prepared.facts
    for name in prepared.study.objectives:
        if not measure_of(name).predicted:
            return f"the simulator does not predict {name}"
    if adapter_of(engine.kind).simulated:
        return card_of(engine.card)
    if _spread({name: (value,) for name, value in engine.args.items()} | {**prepared.space.levels}):
        return "the simulator does not know pipeline and data parallel engines"
    if facts.platform == "cpu":
        return CARDS["cpu"]
    titles = {card.title: card for card in CARDS.values()}
    if facts.gpu_name in titles:
        return titles[facts.gpu_name]
    return f"the simulator does not know the card '{facts.gpu_name or facts.platform}'"


def _spread(values: Mapping[str, Sequence[object]]) -> bool:
    """Whether any of these may put stages or replicas of an engine on several cards."""
    layouts = ("pipeline_parallel_size", "data_parallel_size")
    sizes = (each for name, each in values.items() if name.replace("-", "_") in layouts)
    return any(size not in (None, 1) for each in sizes for size in each)


def scene_of(prepared: Prepared, card: Card) -> Scene:
    """What the study measures, as the simulator is told it: the slices that are searched."""
    engine = prepared.file.engine
    args = {name: value for name, value in engine.args.items() if not isinstance(value, list | dict)}
    return Scene(
        trace=prepared.trace,
        slices=tuple(s for s in prepared.study.slices if not s.held_out),
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
    """What proposals are predicted with, no surer of itself than a fit to few trials may be."""
    return kind(scene, calibration.coefficients, error=max(calibration.error, UNSURE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A predictor, and what it was calibrated to; None: to nothing, as not even the baseline served."""

    predict: Batch
    calibration: Calibration | None


@dataclass(slots=True, kw_only=True)
class Knowledge:
    """What a run knows of its study: a simulator, calibrated on the baseline alone, so that what it says
    stays the same all through (what it gets wrong is learned beside it: `search.residuals`). `fronts` are
    seeds from other studies, `start` is what an earlier run fitted; `why_not` tells why nothing is predicted,
    once that was tried.
    """

    prepared: Prepared
    fronts: Sequence[Seed] = ()
    start: Coefficients | None = None
    why_not: str | None = None
    _known: dict[int, Known | None] = field(default_factory=dict)

    def known(self, trials: Sequence[Trial]) -> Known | None:
        """The predictor; None while nothing can be predicted."""
        base = trial_view.baseline_of(trials)
        if base is None and not failed(trials):
            return None
        key = -1 if base is None else base.id
        if key not in self._known:
            self._known[key] = self._calibrated(base)
        return self._known[key]

    def _calibrated(self, base: Trial | None) -> Known | None:
        """Fitted to the baseline; by the card's datasheet alone where that did not serve."""
        card = card_for(self.prepared)
        self.why_not = card if isinstance(card, str) else None
        if isinstance(card, str):
            return None
        scene = scene_of(self.prepared, card)
        if base is None or base.measurement is None:
            return Known(predict=Batch(Predictor(scene, self.start or preset(card))), calibration=None)
        try:
            calibration = self.fit(scene, base)
        except BadInput as error:
            self.why_not = str(error)
            return None
        return Known(predict=Batch(predictor_of(scene, calibration)), calibration=calibration)

    def fit(self, scene: Scene, base: Trial) -> Calibration:
        """The calibration on the baseline. BadInput where it has no latency."""
        values = base.measurement.values if base.measurement else {}
        seen = [Observation(candidate=base.candidate, values=values)]
        return fit(scene, seen, start=self.start, rounds=ROUNDS)

    def seeds(self, trials: Sequence[Trial]) -> tuple[Seed, ...]:
        """What is tried first: other studies' fronts, then what the SLO policy is predicted to pick; the
        heuristics where nothing is predicted.
        """
        base = trial_view.baseline_of(trials)
        if base is None and not failed(trials):
            return ()
        near, known = at_levels(self.prepared, trials), self.known(trials)
        if known is None:
            guides = heuristics.heuristics(self.prepared.space, near, self.prepared.known)
            return (*self.fronts, *guides, *by_concurrency(self.prepared))
        first = () if base is None else (base,)
        narrow = screens(self.prepared, first)
        space = around(self.prepared, near, trials) if narrow else self.prepared.space
        picked = self._pick(space, known.predict, trials)
        own = [] if picked is None else [(PICKED, picked)]
        return (*self.fronts, *own, *by_concurrency(self.prepared))

    def _pick(self, space: SearchSpace, predict: Batch, trials: Sequence[Trial]) -> Candidate | None:
        """What the SLO policy would pick of the study's pool by the predictions, without knobs that bring
        nothing; what fails is left out. The front's volume does not reach there: a pick may be worse than the
        baseline in an objective.
        """
        encoding = encode(space, trial_view.defaults_of(trials))
        sizes = [len(values) for values in encoding.levels]
        points = acquisition.pool(encoding.names, sizes, self.prepared.study.seed)
        pool = list({c.digest: c for c in map(encoding.candidate, points)}.values())
        pool = [c for c in pool if space.contains(c) and self.prepared.known(c) is None]
        expected = [(i, likely(p)) for i, p in enumerate(predict(pool)) if p.feasible]
        ranked = sorted((_rank(values, self.prepared.study.slo), i) for i, values in expected)
        if not ranked:
            return None
        best = ranked[0][1]
        names = tuple(dict.fromkeys((*self.prepared.study.objectives, "goodput_rps")))
        values = predict([pool[best]])[0].values
        scale = trial_view.scale(names, [values.get(n, math.nan) for n in names], self.prepared.study.slo)
        point = encoding.point(pool[best])
        problem = acquisition.problem_of(encoding, (), scale, predict)
        return pool[best] if point is None else encoding.candidate(
            acquisition.without_idle_knobs(problem, point)
        )  # fmt: skip


def likely(prediction: Prediction) -> dict[str, float]:
    """The mean over an engine as predicted, one that is slower and one that is faster."""
    slow, fast = prediction.slow, prediction.fast
    return {n: (slow.get(n, v) + 2 * v + fast.get(n, v)) / 4 for n, v in prediction.values.items()}


def failed(trials: Sequence[Trial]) -> bool:
    """Whether the baseline was tried and cannot serve this traffic."""
    return any(t.is_baseline and t.state is TrialState.INFEASIBLE for t in trials)


def policy(prepared: Prepared) -> pareto.Policy:
    """The study's winner policy as the search takes it."""
    chosen = prepared.file.winner
    return chosen if isinstance(chosen, str) else {"weights": dict(chosen.weights)}


def screens(prepared: Prepared, trials: Sequence[Trial]) -> bool:
    """Whether the next candidate is to be screened in a running engine: it can be, and a launch takes longer
    than the second replay, in an engine of its own, that follows where it is good.
    """
    if not changeable(prepared):
        return False
    replay = replay_s(prepared)
    own = [t for t in trial_view.latest(trials) if not t.is_baseline and t.origin != RELAUNCHED]
    alone = sum(not t.screened and t.measurement is not None for t in own)
    cannot = alone >= ENOUGH and not any(t.screened for t in own)
    return launch_s(trials, replay) > replay and not cannot


def replay_s(prepared: Prepared) -> float:
    """Seconds of one replay of the slices that are searched, about."""
    searched = [s for s in prepared.study.slices if not s.held_out]
    windows = sum(s.duration_s for s in searched) / prepared.file.speed
    return windows + len(searched) * (prepared.plan.load_warmup_s + SETTLE_S)


def launch_s(trials: Sequence[Trial], replay: float) -> float:
    """Seconds of a launch, by the relaunched trials so far."""
    spans = [
        t.gpu_seconds - replay
        for t in trials
        if t.state is TrialState.COMPLETE and not t.screened and not t.is_baseline
    ]
    return max(1.0, median(spans)) if spans else LAUNCH_S


def at_levels(prepared: Prepared, trials: Sequence[Trial], candidate: Candidate | None = None) -> Candidate:
    """A candidate (default: the baseline) as a point of the space: what it leaves open stays open where the
    space allows that, every other knob is at the level nearest to what it runs with.
    """
    space, asked = prepared.space, prepared.baseline if candidate is None else candidate
    told_ = {
        name: v
        for name, v in trial_view.defaults_of(trials).items()
        if None not in space.levels.get(name, ())
    }
    encoding = encode(space, told_)
    point = encoding.point(space.canonical(asked))
    return asked if point is None else encoding.candidate(point)


def _rank(values: Mapping[str, float], slo: Slo) -> tuple[float, float, float]:
    """As `pareto.choose` ranks: attainment up to the SLO's, goodput to 2 %, then the tail; lowest is best."""
    attained = round(min(values.get("slo_attainment", 0.0), slo.attainment), 2)
    goodput = values.get("goodput_rps", 0.0)
    step = round(math.log(goodput) / math.log1p(pareto.TIE)) if goodput > 0 else -math.inf
    return (-attained, -step, values.get("e2e_p95_ms", math.inf))


def around(prepared: Prepared, candidate: Mapping[str, Value], trials: Sequence[Trial]) -> SearchSpace:
    """The space with every knob that needs a launch held where a candidate has it: one running engine can
    screen all of it. The watermark is held too until something was preempted.
    """
    space = prepared.space
    short = any(t.measurement and t.measurement.values.get("preemptions", 0.0) > 0 for t in trials)
    free = {name for name in adapter_of(prepared.facts.kind).live_knobs if short or name != "watermark"}
    levels = {
        name: values if name in free else tuple(v for v in values if _is(v, candidate.get(name)))
        for name, values in space.levels.items()
    }
    return replace(space, levels={name: kept or space.levels[name] for name, kept in levels.items()})


def _is(level: Value, value: Value) -> bool:
    return level == value and isinstance(level, bool) == isinstance(value, bool)
