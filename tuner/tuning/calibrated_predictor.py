"""What is known before a candidate is measured: a predictor calibrated on the study's own trials, the fronts
of other studies, and how to measure it for less. Each a function of history, so that suggestions replay.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from tuner.engine import limits
from tuner.errors import BadInput
from tuner.knobs.space import SearchSpace
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

OBSERVED = 3
"""Trials that a calibration is fitted to at most: the baseline and the newest of the front."""
PICKS, PICKED = 1, "simulator: SLO"
"""Predicted choices of the SLO policy that are tried first, and their origin."""
UNSURE = 0.12
"""Relative error of step times, at least, that proposals reckon with: few trials say little of others."""
FIRST_ROUNDS, ROUNDS = 2, 1
"""Rounds of a fit to the baseline, and of each later one, which starts from that."""
STEPS = (1, 8, 16, 32, 64)
"""Numbers of trials at which the predictor is calibrated anew, and from the last on at its multiples."""
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

ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.INFEASIBLE)


def card_for(prepared: Prepared) -> Card | str:
    """The simulator's card for the study's device, or why there is none."""
    engine, facts = prepared.file.engine, prepared.facts
    if "max_speed" in prepared.study.objectives:
        return "the simulator does not predict max_speed"
    if engine.kind == "simulated":
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
    """What a run knows of its study. `fronts` are seeds from other studies, `start` is what an earlier run
    fitted, where calibration begins; `why_not` tells why nothing is predicted, once that was tried.
    """

    prepared: Prepared
    fronts: Sequence[Seed] = ()
    start: Coefficients | None = None
    why_not: str | None = None
    _known: dict[tuple[int, ...], Known | None] = field(default_factory=dict)

    def known(self, trials: Sequence[Trial], number: int) -> Known | None:
        """The predictor for the proposal of a number; None while nothing can be predicted."""
        chosen = observed(trials, cutoff(number), self.prepared.study.objectives)
        return self.calibrated(chosen) if chosen or not failed(trials) else self._uncalibrated()

    def _uncalibrated(self) -> Known | None:
        """The card's datasheet alone, kept."""
        if () not in self._known:
            card = card_for(self.prepared)
            self.why_not = card if isinstance(card, str) else None
            self._known[()] = None
            if not isinstance(card, str):
                predict = Predictor(scene_of(self.prepared, card), self.start or preset(card))
                self._known[()] = Known(predict=Batch(predict), calibration=None)
        return self._known[()]

    def calibrated(self, chosen: Sequence[Trial]) -> Known | None:
        """A predictor fitted to these trials, kept."""
        key = tuple(t.id for t in chosen)
        if key and key not in self._known:
            self._known[key] = self._calibrate(chosen)
        return self._known.get(key)

    def _calibrate(self, chosen: Sequence[Trial]) -> Known | None:
        card = card_for(self.prepared)
        if isinstance(card, str):
            self.why_not = card
            return None
        scene = scene_of(self.prepared, card)
        seen = [
            Observation(candidate=t.candidate, values=t.measurement.values) for t in chosen if t.measurement
        ]
        try:
            first = self.calibrated(chosen[:1]) if len(chosen) > 1 else None
            calibration = (
                fit(scene, seen, start=self.start, rounds=FIRST_ROUNDS)
                if first is None or first.calibration is None
                else fit(scene, seen, start=first.calibration.coefficients, rounds=ROUNDS)
            )
        except BadInput as error:
            self.why_not = str(error)
            return None
        self.why_not = None
        return Known(predict=Batch(predictor_of(scene, calibration)), calibration=calibration)

    def seeds(self, trials: Sequence[Trial]) -> tuple[Seed, ...]:
        """What is tried first: other studies' fronts, then what the SLO policy is predicted to pick; the
        heuristics where nothing is predicted.

        What is predicted here rests on the baseline alone, so that the list stays the same all through.
        """
        prepared = self.prepared
        base = trial_view.baseline_of(trials)
        if base is None and not failed(trials):
            return ()
        near = at_levels(prepared, trials)
        known = self._uncalibrated() if base is None else self.calibrated((base,))
        if known is None:
            guides = heuristics.heuristics(prepared.space, near, prepared.known)
            return (*self.fronts, *guides, *by_concurrency(prepared))
        first = () if base is None else (base,)
        space = around(prepared, near, trials) if screens(prepared, first) else prepared.space
        encoding, objectives = encode(space, trial_view.defaults_of(trials)), prepared.study.objectives
        picks = self.picks(space, known.predict, {})[:PICKS]
        plain = [acquisition.plain(known.predict, encoding, c, objectives) for c in picks]
        picked = [(PICKED, candidate) for candidate in plain]
        return (*self.fronts, *picked, *by_concurrency(prepared))

    def picks(self, space: SearchSpace, predict: Batch, defaults: Mapping[str, Value]) -> list[Candidate]:
        """The study's pool of a space as the SLO policy would rank it by the predictions; what fails is left
        out. The front's volume does not reach there: a pick may be worse than the baseline in an objective.
        """
        pool = acquisition.pool(encode(space, defaults), self.prepared.study.seed)
        pool = [c for c in pool if space.contains(c) and self.prepared.known(c) is None]
        likely = ((i, acquisition.likely(p)) for i, p in enumerate(predict(pool)) if p.feasible)
        ranked = [(_rank(values, self.prepared.study.slo), i) for i, values in likely]
        return [pool[i] for _, i in sorted(ranked)]

    def predictor(
        self, trials: Sequence[Trial], number: int
    ) -> Callable[[Sequence[Candidate]], Sequence[Prediction]] | None:
        """What `suggest` takes."""
        found = self.known(trials, number)
        return None if found is None else found.predict


def cutoff(number: int) -> int:
    """The predictor for a number knows the trials before this one: it is calibrated anew now and then."""
    if number >= STEPS[-1]:
        return number - number % STEPS[-1]
    return max((step for step in STEPS if step <= number), default=0)


def observed(trials: Sequence[Trial], before: int, objectives: Sequence[str]) -> tuple[Trial, ...]:
    """The trials that a calibration rests on: the baseline, and the newest of the front before a number."""
    base = trial_view.baseline_of(trials)
    if base is not None and base.number >= before:
        return ()
    past = [t for t in trials if t.number < before and t.state is not TrialState.RUNNING]
    first = () if base is None else (base,)
    leaders = [t for t in acquisition.leaders(past, objectives) if t not in first]
    return (*first, *sorted(leaders[: OBSERVED - len(first)], key=lambda t: t.number))


def failed(trials: Sequence[Trial]) -> bool:
    """Whether the baseline was tried and cannot serve this traffic."""
    return any(t.is_baseline and t.state is TrialState.INFEASIBLE for t in trials)


def policy(prepared: Prepared) -> pareto.Policy:
    """The study's winner policy as the search takes it."""
    chosen = prepared.file.winner
    return chosen if isinstance(chosen, str) else {"weights": dict(chosen.weights)}


def screens(prepared: Prepared, trials: Sequence[Trial]) -> bool:
    """Whether the next candidate is to be screened in a running engine: it can be, and that is cheaper.

    What is screened and good (it widens the front or is the policy's pick) is measured a second time, in an
    engine of its own. By the share of proposals that were good so far, one in two before there is any, that
    costs more or less than the launch saved.
    """
    if not changeable(prepared):
        return False
    replay = replay_s(prepared)
    launch = launch_s(trials, replay)
    saved = launch / (launch + replay)
    past = [t for t in trial_view.latest(trials) if t.state in ENDED and not t.is_baseline]
    past = [t for t in past if t.origin != RELAUNCHED]
    fine, good, ended, alone = _good(prepared, trials), 1, 2, 0
    for trial in past:
        alone += good / ended < saved and not trial.screened and trial.measurement is not None
        good, ended = good + (trial.number in fine), ended + 1
    cannot = alone >= ENOUGH and not any(t.screened for t in past)
    return good / ended < saved and not cannot


def _good(prepared: Prepared, trials: Sequence[Trial]) -> set[int]:
    """Numbers of the trials that widened the front by `SECURED` when they came, and of the policy's pick."""
    objectives = prepared.study.objectives
    found = [replace(t, screened=False) for t in pareto.measured(trials, objectives)]
    if not found:
        return set()
    good = {pareto.choose(found, policy(prepared), prepared.study.slo, objectives).number}
    scale = trial_view.scale_of(trials, objectives, prepared.study.slo)
    if scale is not None:
        added = pareto.widening(trials, scale)
        good |= {number for number, share in added.items() if share >= SECURED}
    return good


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
    free = {name for name in limits.KNOBS if short or name != "watermark"}
    levels = {
        name: values if name in free else tuple(v for v in values if _is(v, candidate.get(name)))
        for name, values in space.levels.items()
    }
    return replace(space, levels={name: kept or space.levels[name] for name, kept in levels.items()})


def _is(level: Value, value: Value) -> bool:
    return level == value and isinstance(level, bool) == isinstance(value, bool)
