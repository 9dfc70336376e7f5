"""The next candidate of a study: the baseline, the seeds, then the study's sampler.

It is a function of space, trials, seed and number: the same in any process, and nothing is kept between
calls. Candidates that earlier failures rule out are left out. The simulator, calibrated on the study's
baseline, predicts what was not measured (`StudyPredictor`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

import numpy as np

from tuner.adapters import adapter_of
from tuner.engine.metrics import same_value
from tuner.errors import BadInput, NotFound
from tuner.history.store import Store
from tuner.knobs.space import SearchSpace, level_of
from tuner.measures import class_of, measure_of
from tuner.records import Candidate, Prediction, Slo, Study, Trial, TrialState, Value
from tuner.search import acquisition, trial_view
from tuner.search.acquisition import KnownFailure, Predict, StudyView
from tuner.search.guides import LADDER, LADDER_KNOB, heuristics, next_rung, rungs
from tuner.search.trial_view import Point, encode
from tuner.simulator.calibrate import Calibration, Observation, fit
from tuner.simulator.cost import CARDS, Card, Coefficients, card_of, coefficients_of, preset
from tuner.simulator.predict import Batch, Predictor, Scene
from tuner.traffic.statistics import describe, sequences_for
from tuner.tuning.context import PICKED, RELAUNCHED, launch_cost, screens
from tuner.tuning.study import Prepared
from tuner.tuning.winner import TIE, pick, winner

# Front members that are tried first: of the same node's last study, of another node's, of so many nodes.
OWN_FRONTS, OTHER_FRONTS, OTHER_NODES = 4, 2, 3

# Cache by digest of the trace: every proposal asks for it.
_ENOUGH: dict[str, int | None] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A candidate to launch, who proposed it, the seed of its trial, and the hypervolume that it is expected
    to add (0: not known).
    """

    candidate: Candidate
    origin: str
    seed: int
    gain: float = 0.0


# (origin, candidate); of what was drawn with the expected gain, too (0: not known).
Seed = tuple[str, Candidate]
Drawn = tuple[str, Candidate, float]


def fronts_of(store: Store, prepared: Prepared, before: datetime | None = None) -> tuple[Seed, ...]:
    """Winner and front of this node's last study and of other nodes', for the same model, engine version and
    workload, as candidates of this study's space. They are measured again, never copied. `before`: only what
    had ended by then counts.
    """
    found: list[Seed] = []
    for each in _last_studies(store, prepared.study, before):
        own = each.node == prepared.study.node
        trials = [t for t in store.trials(each.id) if t.ended_at is not None and earlier(t.ended_at, before)]
        for trial in winner_and_front(store, each, trials)[: OWN_FRONTS if own else OTHER_FRONTS]:
            origin = f"{'same node' if own else f'node {each.node}'}: {each.name}/{trial.number}"
            found.append((origin, _as_here(prepared, trial)))
    return tuple(found)


def _last_studies(store: Store, mine: Study, before: datetime | None) -> list[Study]:
    """The last study of this node, and of other nodes (the same GPU class first), that may seed this one:
    it has a front, and on another node a run of it has ended.
    """
    found: dict[str, Study] = {}
    for each in store.studies(model=mine.model):  # the newest comes first
        alike = (each.engine_version, each.workload) == (mine.engine_version, mine.workload)
        if each.id == mine.id or not alike or each.node in found or not earlier(each.created_at, before):
            continue
        if each.compares:  # its arms were chosen by hand, on whichever engine
            continue
        ended = [r.ended_at for r in store.runs(each.id) if r.ended_at is not None]
        over = each.node == mine.node or any(earlier(moment, before) for moment in ended)
        if over and trial_view.front(store.trials(each.id), each.objectives):
            found[each.node] = each
    others = sorted(found.values(), key=lambda s: (s.gpu_class != mine.gpu_class, s.node))
    own = [each for each in others if each.node == mine.node]
    return [*own, *[each for each in others if each.node != mine.node][:OTHER_NODES]]


def winner_and_front(store: Store, study: Study, trials: Sequence[Trial]) -> list[Trial]:
    """A study's winner (of its last run, or the SLO policy's pick), then the rest of its front."""
    members = [t for t in trial_view.front(trials, study.objectives) if not t.is_baseline]
    winners = [each.winner for each in store.conclusions(study.id) if each.winner is not None]
    try:
        best = winners[-1] if winners else pick(trials, "slo", study.slo, study.objectives).number
    except NotFound:
        return []
    ordered = [t for t in trial_view.latest(trials) if t.number == best and not t.is_baseline]
    return [*ordered, *(t for t in members if t.number != best)]


def _as_here(prepared: Prepared, trial: Trial) -> Candidate:
    """Another study's trial as a candidate of this one. Knobs that this space does not turn get this study's
    values; knobs that the trial left to its engine, and this space must set, get the values that the engine
    reported.
    """
    levels = prepared.space.levels
    stated = {n: v for n, v in trial.effective.items() if n in levels and None not in levels[n]}
    named = {n: v for n, v in trial.candidate.items() if n in levels}
    return prepared.space.canonical({**stated, **named})


def last_calibration(store: Store, prepared: Prepared, before: datetime | None) -> Coefficients | None:
    """The coefficients that the last run of another study on this node, else on its GPU class, fitted for the
    same model and engine version. None if there is none that can be read. `before`: only what had ended by
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


def earlier(moment: datetime, before: datetime | None) -> bool:
    """Whether a moment was before another one, if there is one."""
    return before is None or moment < before


def by_concurrency(prepared: Prepared) -> tuple[Seed, ...]:
    """Today's configuration with the max_num_seqs that the trace's concurrency asks for, at the next level of
    the space; nothing if the space does not turn it or the trace is too small.
    """
    trace, levels = prepared.trace, prepared.space.levels.get("max_num_seqs", ())
    if trace.digest not in _ENOUGH:
        _ENOUGH[trace.digest] = sequences_for(describe(trace))
    enough = _ENOUGH[trace.digest]
    fitting = [v for v in levels if isinstance(v, int) and enough is not None and v >= enough]
    if not fitting:
        return ()
    candidate = prepared.space.canonical(prepared.baseline.with_values(max_num_seqs=min(fitting)))
    return ((f"traffic: {enough} at once are enough", candidate),)


# Trials between two measurements of the baseline, which show drift: one trial in 25 is spent on that.
DRIFT_EVERY = 24


def drift_due(trials: Sequence[Trial], every: int = DRIFT_EVERY) -> bool:
    """Whether the baseline is to be measured again: `every` finished trials since it last was."""
    finished = [t for t in trial_view.latest(trials) if t.ended_at is not None]
    looks = [i for i, t in enumerate(finished) if t.is_baseline]
    return bool(looks) and len(finished) - 1 - looks[-1] >= every


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
            return f"calibrated on the baseline; predicted step times are off by about {made.error:.0%}"
        why = "nothing was measured yet"
        if trials:
            why = "the baseline was not measured yet"
        if failed(trials):
            why = "the baseline did not serve, so there is no measurement to calibrate the simulator on"
        source = "assumed speeds of a CPU" if card.platform == "cpu" else "the card's datasheet"
        if self.start is not None:
            source = "the calibration of the last study of this model and engine"
        return f"not calibrated: {self.why_not or why}; these numbers use {source}"

    def fit(self, scene: Scene, base: Trial) -> Calibration:
        """The calibration on the baseline. BadInput if it has no latency."""
        values = base.measurement.values if base.measurement else {}
        seen = [Observation(candidate=base.candidate, values=values)]
        return fit(scene, seen, start=self.start, rounds=ROUNDS)


def pool_of(prepared: Prepared, space: SearchSpace, trials: Sequence[Trial]) -> list[Candidate]:
    """The study's pool of candidates in a space: those that may work, each configuration once."""
    encoding = encode(space, trial_view.defaults_of(trials))
    points = acquisition.pool(encoding, prepared.study.seed)
    pool = {c.digest: c for c in map(encoding.candidate, points)}.values()
    return [c for c in pool if space.contains(c) and prepared.known_failure(c) is None]


def failed(trials: Sequence[Trial]) -> bool:
    """Whether the baseline was measured and cannot serve this traffic."""
    return any(t.is_baseline and t.state is TrialState.INFEASIBLE for t in trials)


# Optuna's samplers tell no gain. With them, every WIDE_EVERYth proposal from trial WIDE_FROM on may turn any
# knob. The others stay with what the running engine can screen, which took a third of the time (docs/results/
# live-limits.md). The first eight go to the limits, since these are what most configurations differ by.
WIDE_EVERY, WIDE_FROM = 5, 9

# Screened trials between two relaunches. More would leave the front, which shows relaunched trials only,
# behind the search; fewer would give back what screening saves.
PROMOTE_AFTER = 3

# Share of the front's hypervolume that a screened trial must add to be worth a launch. With 5 %, the mean
# study took 3 % longer (docs/results/search.md). With MUCH, it is relaunched at once; with REST, if there is
# nothing else to try.
SECURED, MUCH, REST = 0.1, 0.25, 0.05


def propose(
    prepared: Prepared,
    trials: Sequence[Trial],
    seeds: Sequence[Seed] = (),
    predictor: StudyPredictor | None = None,
    *,
    again: bool = False,
) -> Suggestion | None:
    """The next candidate after these trials, or None when nothing new is left that may work. It depends on
    the trials and the given seeds alone. `again`: it is the baseline, although the study has one.
    """
    if again:
        return _baseline(prepared, trials)
    if prepared.file.sampler == "ladder":
        return _rung(prepared, trials)
    predictor = predictor or StudyPredictor(prepared=prepared)
    number, view = next_number(trials), view_of(prepared, trials)
    if view.baseline is not None and not prepared.plan.demonstration and drift_due(trials):
        return _baseline(prepared, trials)
    share, screened = trial_view.promotable(view.trials, view.scale, view.key)
    made = max((i for i, t in enumerate(view.latest) if t.is_baseline or t.origin == RELAUNCHED), default=0)
    soon = sum(t.screened for t in view.latest[made:]) < PROMOTE_AFTER
    if screened is not None and share >= (MUCH if soon else SECURED):
        return _relaunched(prepared, trials, screened)
    known = predictor.calibrated(trials)
    left = untried(prepared, view, (*seeds, *first_candidates(predictor, trials)))
    narrow = not left and screens(prepared, trials)
    found = [
        suggest(
            replace(view, space=space), seed=prepared.study.seed, number=number, baseline=prepared.baseline,
            known=prepared.known_failure, seeds=left, predictor=known.predict if known else None,
            sampler=prepared.file.sampler,
        )
        for space in ([around(prepared, best(prepared, trials), trials)] if narrow else []) + [prepared.space]
    ]  # fmt: skip
    chosen = better(prepared, trials, found)
    if chosen is None and screened is not None and share >= REST:
        return _relaunched(prepared, trials, screened)
    return chosen and replace(chosen, candidate=minimal(prepared.space, trials, chosen.candidate))


def better(
    prepared: Prepared, trials: Sequence[Trial], found: Sequence[Suggestion | None]
) -> Suggestion | None:
    """Of what a running engine can screen and of the whole space: the larger expected gain in a second. If
    the gains are not known, what can be screened, and now and then the whole space.
    """
    screened, whole = found[0], found[-1]
    if screened is None or whole is None:
        return screened or whole
    if prepared.file.sampler == "tuner":
        return whole if whole.gain > screened.gain * launch_cost(prepared, trials) else screened
    number = next_number(trials)
    return whole if number >= WIDE_FROM and number % WIDE_EVERY == WIDE_EVERY - 1 else screened


# Candidates that an Optuna sampler is asked for before near misses are tried; each costs the time of a fit.
DRAWS = 3

# Spaces up to this size are searched to the last point before the search says that nothing is left.
ENUMERATE = 20_000


def suggest(
    history: StudyView,
    *,
    seed: int,
    number: int,
    baseline: Candidate,
    known: KnownFailure,
    seeds: Sequence[tuple[str, Candidate]] = (),
    predictor: Predict | None = None,
    sampler: str = "tuner",
) -> Suggestion | None:
    """The candidate of trial `number`, or None when nothing is left that is unseen and may work.

    `known` and `predictor` must themselves be functions of the candidate (and of the same history). `sampler`
    is one of `sampler.SAMPLERS`.
    """
    trial_seed = trial_view.derive(seed, number, "trial")
    if not any(t.is_baseline for t in history.latest):
        return Suggestion(candidate=baseline, origin="baseline", seed=trial_seed)
    given = ((origin, history.space.canonical(candidate), 0.0) for origin, candidate in seeds)
    drawn = _sampled(history, seed, number, known, predictor, sampler)
    for source in (given, drawn, _leftover(history, seed, number)):
        for origin, candidate, gain in source:
            if history.is_new(candidate, known):
                return Suggestion(candidate=candidate, origin=origin, seed=trial_seed, gain=gain)
    return None


def _sampled(
    history: StudyView, seed: int, number: int, known: KnownFailure, predictor: Predict | None, sampler: str
) -> Iterator[Drawn]:
    """What the study's sampler draws. After the draws of Optuna's own samplers also their neighbours, since
    these samplers may repeat a trial.
    """
    encoding, problem = history.encoding, history.problem(predictor)
    if not encoding.names or problem is None:
        return
    if sampler == "tuner":
        found = acquisition.choose(problem, seed, number, lambda each: history.is_new(each, known))
        yield from [] if found is None else [found]
        return
    from tuner.search import sampler as samplers

    drawn: list[Point] = []
    plain = samplers.make(sampler, trial_view.derive(seed, number, sampler))
    frozen = samplers.frozen(encoding, history.encoded, problem.scale)
    for point in samplers.draws(plain, encoding, frozen, DRAWS):
        drawn.append(point)
        yield sampler, encoding.candidate(point), 0.0
    rng = np.random.default_rng(trial_view.derive(seed, number, "near"))
    for point in drawn:
        near = acquisition.neighbours(point, encoding.sizes)
        yield from ((sampler, encoding.candidate(near[int(i)]), 0.0) for i in rng.permutation(len(near)))


def _leftover(history: StudyView, seed: int, number: int) -> Iterator[Drawn]:
    """Random candidates: every point of a small space, many of a large space."""
    encoding = history.encoding
    rng = np.random.default_rng(trial_view.derive(seed, number, "leftover"))
    if not encoding.names:
        return
    if encoding.size <= ENUMERATE:
        order = rng.permutation(encoding.size)
        points = (tuple(int(i) for i in np.unravel_index(int(n), encoding.sizes)) for n in order)
    else:
        points = (tuple(int(i) for i in rng.integers(encoding.sizes)) for _ in range(ENUMERATE // 10))
    yield from (("random", encoding.candidate(point), 0.0) for point in points)


def view_of(prepared: Prepared, trials: Sequence[Trial]) -> StudyView:
    """The study's trials as the search sees them."""
    study = prepared.study
    return StudyView(space=prepared.space, trials=trials, objectives=study.objectives, slo=study.slo)


def next_number(trials: Sequence[Trial]) -> int:
    """The number after the last one."""
    return max((t.number for t in trials), default=-1) + 1


def first_candidates(predictor: StudyPredictor, trials: Sequence[Trial]) -> tuple[Seed, ...]:
    """The candidates that are tried first: what the SLO policy would pick by the predictions, or what the
    tuning guides advise if there are no predictions; then what the traffic's concurrency asks for.
    """
    prepared, base = predictor.prepared, trial_view.baseline_of(trials)
    if base is None and not failed(trials):
        return ()
    near, known = at_levels(prepared, trials), predictor.calibrated(trials)
    if known is None:
        guides = heuristics(prepared.space, near, prepared.known_failure)
        return (*guides, *by_concurrency(prepared))
    narrow = screens(prepared, () if base is None else (base,))
    space = around(prepared, near, trials) if narrow else prepared.space
    picked = _predicted_pick(prepared, space, known.predict, trials)
    return (*([] if picked is None else [(PICKED, picked)]), *by_concurrency(prepared))


def _predicted_pick(
    prepared: Prepared, space: SearchSpace, predict: Predict, trials: Sequence[Trial]
) -> Candidate | None:
    """What the SLO policy would pick of the study's pool by the predictions, without knobs that bring
    nothing. None if every candidate is predicted to fail. The expected hypervolume gain does not find it:
    it may be worse than the baseline in an objective by more than the reference point allows.
    """
    pool, slo = pool_of(prepared, space, trials), prepared.study.slo
    ranked = [(_rank(likely(p), slo), i) for i, p in enumerate(predict(pool)) if p.feasible]
    if not ranked:
        return None
    best = pool[min(ranked)[1]]
    names = tuple(dict.fromkeys((*prepared.study.objectives, "goodput_rps")))
    values = predict([best])[0].values
    scale = trial_view.scale(names, [values.get(n, math.nan) for n in names], slo)
    encoding = encode(space, trial_view.defaults_of(trials))
    point = encoding.point(best)
    state = acquisition.SearchState(encoding=encoding, trials=(), scale=scale, predict=predict)
    return best if point is None else encoding.candidate(acquisition.without_idle_knobs(state, point))


def likely(prediction: Prediction) -> dict[str, float]:
    """The mean of three predictions: as predicted (twice), for a slower and for a faster engine."""
    slow, fast = prediction.slow, prediction.fast
    return {n: (slow.get(n, v) + 2 * v + fast.get(n, v)) / 4 for n, v in prediction.values.items()}


def _rank(values: Mapping[str, float], slo: Slo) -> tuple[float, float, float]:
    """The order of `winner.pick`: attainment up to the SLO's, goodput in steps of 2 %, then p95 end-to-end
    time. The lowest is best.
    """
    attained = round(min(values.get("slo_attainment", 0.0), slo.attainment), 2)
    goodput = values.get("goodput_rps", 0.0)
    step = round(math.log(goodput) / math.log1p(TIE)) if goodput > 0 else -math.inf
    return (-attained, -step, values.get("e2e_p95_ms", math.inf))


def _baseline(prepared: Prepared, trials: Sequence[Trial]) -> Suggestion:
    seed = trial_view.derive(prepared.study.seed, next_number(trials), "trial")
    return Suggestion(candidate=prepared.baseline, origin="baseline", seed=seed)


def _rung(prepared: Prepared, trials: Sequence[Trial]) -> Suggestion | None:
    """The baseline, then the baseline with the ladder's next max_num_seqs; None at the end of the ladder."""
    base = _baseline(prepared, trials)
    if not any(t.is_baseline for t in trial_view.latest(trials)):
        return base
    asked = {v: prepared.baseline.with_values(**{LADDER_KNOB: v}) for v in prepared.space.levels[LADDER_KNOB]}
    levels = sorted(v for v, c in asked.items() if isinstance(v, int) and prepared.known_failure(c) is None)
    level = next_rung(levels, rungs(trials))
    return None if level is None else replace(base, candidate=asked[level], origin=LADDER)


def _relaunched(prepared: Prepared, trials: Sequence[Trial], screened: Trial) -> Suggestion:
    """A screened trial's candidate, to be measured in an engine of its own."""
    candidate = minimal(prepared.space, trials, screened.candidate)
    return Suggestion(candidate=candidate, origin=RELAUNCHED, seed=screened.seed)


def untried(prepared: Prepared, view: StudyView, seeds: Sequence[Seed]) -> list[Seed]:
    """The seeds that are new and may work, as points of the space; of equal ones the first."""
    left: dict[Candidate, Seed] = {}
    for origin, seed in seeds:
        candidate = at_levels(prepared, view.trials, seed)
        if view.is_new(candidate, prepared.known_failure):
            left.setdefault(candidate, (origin, candidate))
    return list(left.values())


def best(prepared: Prepared, trials: Sequence[Trial]) -> Candidate:
    """The best candidate so far by the study's policy, screened trials included; the baseline before there is
    one.
    """
    key = view_of(prepared, trials).key
    found = winner(prepared, [t for t in trials if not t.is_baseline], key)
    return at_levels(prepared, trials, found.candidate if found else None)


def minimal(space: SearchSpace, trials: Sequence[Trial], candidate: Candidate) -> Candidate:
    """The candidate without values that the engine uses by itself, as the baseline's engine reported them.
    Knobs that the baseline sets stay, and so do knobs that a condition of the space needs.
    """
    own = dict(trial_view.own_of(trials))
    if trial_view.BUDGET in own:
        own[trial_view.BUDGET] = encode(space, trial_view.defaults_of(trials)).budget(candidate)
    kept = {n: v for n, v in candidate.items() if own.get(n) is None or not same_value(v, own[n])}
    asked = list(kept)
    while asked:
        for parent in space.conditions.get(asked.pop(), {}):
            if parent in candidate and parent not in kept:
                kept[parent] = candidate[parent]
                asked.append(parent)
    return Candidate(kept)


def at_levels(prepared: Prepared, trials: Sequence[Trial], candidate: Candidate | None = None) -> Candidate:
    """A candidate (default: the baseline) as a point of the space. A knob that it does not set stays unset
    if the space allows that; every other knob has the level nearest to the value that the engine uses.
    """
    space, asked = prepared.space, prepared.baseline if candidate is None else candidate
    free = [name for name, values in space.levels.items() if None in values]
    encoding = encode(space, trial_view.defaults_of(trials), unset=free)
    point = encoding.point(space.canonical(asked))
    return asked if point is None else encoding.candidate(point)


def around(prepared: Prepared, candidate: Mapping[str, Value], trials: Sequence[Trial]) -> SearchSpace:
    """The part of the space that one running engine can screen: every knob that needs a launch keeps the
    candidate's value. The watermark keeps it too until a request was preempted.
    """
    space = prepared.space
    short = any(t.measurement and t.measurement.values.get("preemptions", 0.0) > 0 for t in trials)
    free = {name for name in adapter_of(prepared.facts.kind).live_knobs if short or name != "watermark"}
    levels = dict(space.levels)
    for name, values in levels.items():
        if name not in free and (index := level_of(values, candidate.get(name))) is not None:
            levels[name] = (values[index],)
    return replace(space, levels=levels)
