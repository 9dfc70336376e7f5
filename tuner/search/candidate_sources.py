"""The next candidate: the baseline, the seeds, then the study's sampler.

It is a function of space, trials, seed and number: the same in any process, and nothing is kept between
calls. Candidates that earlier failures rule out are left out.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tuner.records import Candidate, Slo, Trial, TrialState, Value
from tuner.search import acquisition, trial_view
from tuner.search.acquisition import Predict
from tuner.search.trial_view import DERIVED, EncodedTrial, Encoding, Point, Scale, Space, encode

# Knob → +1 where a larger level makes the failure worse, −1 where it makes it better.
Direction = Mapping[str, int]

# What asks for more device memory.
OOM: Direction = {
    "gpu_memory_utilization": 1,
    "kv_cache_memory_bytes": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_cudagraph_capture_size": 1,
    "num_gpu_blocks_override": 1,
}

# What leaves less room for the KV cache.
KV: Direction = {
    "gpu_memory_utilization": -1,
    "kv_cache_memory_bytes": -1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_cudagraph_capture_size": 1,
    "num_gpu_blocks_override": -1,
}


def kind_of(trial: Trial) -> str | None:
    """`oom` or `kv` for a lack of memory, None for any other failure."""
    violated = {key: value for key, value in trial_view.margins(trial).items() if value > 0}
    return next((key for key in ("oom", "kv") if key in violated), None)


class Regions:
    """The candidates that a study's failures rule out."""

    def __init__(self, encoding: Encoding, trials: Sequence[Trial]) -> None:
        self._encoding = encoding
        self._walls: list[tuple[Point, Direction]] = []
        for trial in (t for t in trial_view.latest(trials) if t.state is TrialState.INFEASIBLE):
            kind, point = kind_of(trial), encoding.point(trial.candidate)
            if kind is not None and point is not None:
                self._walls.append((point, OOM if kind == "oom" else KV))
        self._banned = _banned_values(encoding, trials)

    def hold(self, point: Point) -> bool:
        """Whether a point is known to fail."""
        levels = zip(self._encoding.names, self._encoding.levels, point, strict=True)
        banned = any((name, repr(values[index])) in self._banned for name, values, index in levels)
        return banned or any(self._behind(point, *wall) for wall in self._walls)

    def _behind(self, point: Point, wall: Point, direction: Direction) -> bool:
        """Whether a point asks for at least as much as the failed one in every knob that matters, and has the
        same level in all others.
        """
        for name, mine, theirs in zip(self._encoding.names, point, wall, strict=True):
            if mine != theirs and (mine - theirs) * direction.get(name, 0) <= 0:
                return False
        return True


def _banned_values(encoding: Encoding, trials: Sequence[Trial]) -> set[tuple[str, str]]:
    """Levels that failed ≥ 2 times for one cause other than memory and never worked, where they are the
    one best explanation of that cause.
    """
    worked: set[tuple[str, str]] = set()
    failed: dict[str, Counter[tuple[str, str]]] = {}
    for trial in trial_view.latest(trials):
        items = [(n, repr(v)) for n, v in trial.candidate.items() if n in encoding.names]
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
            worked.update(items)
        elif trial.state is TrialState.INFEASIBLE and kind_of(trial) is None:
            failed.setdefault(trial.cause or "error", Counter()).update(items)
    banned = set()
    for counts in failed.values():
        suspects = {item: count for item, count in counts.items() if item not in worked}
        most = max(suspects.values(), default=0)
        best = [item for item, count in suspects.items() if count == most]
        if most >= 2 and len(best) == 1:
            banned.add(best[0])
    return banned


# Why a candidate is known to fail before it is launched, or None.
KnownFailure = Callable[[Candidate], str | None]

# Candidates that an Optuna sampler is asked for before near misses are tried; each costs the time of a fit.
DRAWS = 3

# Spaces up to this size are searched to the last point before the search says that nothing is left.
ENUMERATE = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A candidate to launch, who proposed it, and the seed of its trial."""

    candidate: Candidate
    origin: str
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StudyView:
    """A study's trials as the search sees them; everything that is derived from them is computed once."""

    space: Space
    trials: Sequence[Trial]
    objectives: tuple[str, ...]
    slo: Slo

    @cached_property
    def latest(self) -> tuple[Trial, ...]:
        return trial_view.latest(self.trials)

    @cached_property
    def baseline(self) -> Trial | None:
        """The first baseline that completed."""
        return trial_view.baseline_of(self.trials)

    @cached_property
    def encoding(self) -> Encoding:
        return encode(self.space, trial_view.defaults_of(self.trials))

    @cached_property
    def scale(self) -> Scale | None:
        """Objectives as costs, and the corner; None while nothing was measured."""
        return trial_view.scale_of(self.trials, self.objectives, self.slo)

    @cached_property
    def encoded(self) -> list[EncodedTrial]:
        return trial_view.encode_trials(self.encoding, self.trials, self.objectives)

    @cached_property
    def regions(self) -> Regions:
        return Regions(self.encoding, self.latest)

    @cached_property
    def seen(self) -> frozenset[str]:
        """The keys of all configurations that engines ran: as they were asked for, and as the engines
        reported (of one that was only screened, the knobs that it was asked for).
        """
        found = set()
        for trial in self.latest:
            asked = trial.candidate
            names = asked.keys() if trial.screened else {*asked, *self.encoding.names} - {*DERIVED}
            whole = {**asked, **{n: trial.effective[n] for n in names if n in trial.effective}}
            ran = Candidate(whole)
            found |= {self.key(asked), self.key(ran)}
        return frozenset(found)

    def key(self, candidate: Candidate) -> str:
        """Equal for candidates that give the same configuration, as far as defaults are known."""
        return self.encoding.completed(candidate).digest

    def is_new(self, candidate: Candidate, known: KnownFailure) -> bool:
        """Whether a candidate is inside the space, was not measured yet, and is not known to fail."""
        if self.key(candidate) in self.seen or not self.space.contains(candidate):
            return False
        point = self.encoding.point(candidate)
        return point is not None and not self.regions.hold(point) and known(candidate) is None

    def problem(self, predict: Predict | None) -> acquisition.SearchState | None:
        """What the choice by expected gain depends on; None while nothing was measured."""
        if self.scale is None:
            return None
        return acquisition.SearchState(
            encoding=self.encoding, trials=self.encoded, scale=self.scale, predict=predict
        )


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
    given = ((origin, history.space.canonical(candidate)) for origin, candidate in seeds)
    drawn = _sampled(history, seed, number, known, predictor, sampler)
    for source in (given, drawn, _leftover(history, seed, number)):
        for origin, candidate in source:
            if history.is_new(candidate, known):
                return Suggestion(candidate=candidate, origin=origin, seed=trial_seed)
    return None


def _sampled(
    history: StudyView, seed: int, number: int, known: KnownFailure, predictor: Predict | None, sampler: str
) -> Iterator[tuple[str, Candidate]]:
    """What the study's sampler draws. After the draws of Optuna's own samplers also their neighbours, since
    these samplers may repeat a trial.
    """
    from tuner.search import sampler as samplers

    encoding, problem = history.encoding, history.problem(predictor)
    if not encoding.names or problem is None:
        return
    if sampler == "tuner":
        own = samplers.TunerSampler(allowed=lambda each: history.is_new(each, known), seed=seed)
        found = own.propose(problem, number)
        yield from [] if found is None else [(own.proposed_by, found)]
        return
    drawn: list[Point] = []
    plain = samplers.make(sampler, trial_view.derive(seed, number, sampler))
    frozen = samplers.frozen(encoding, history.encoded, problem.scale)
    for point in samplers.draws(plain, encoding, frozen, DRAWS):
        drawn.append(point)
        yield sampler, encoding.candidate(point)
    rng = np.random.default_rng(trial_view.derive(seed, number, "near"))
    for point in drawn:
        near = acquisition.neighbours(point, encoding.sizes)
        yield from ((sampler, encoding.candidate(near[int(i)])) for i in rng.permutation(len(near)))


def _leftover(history: StudyView, seed: int, number: int) -> Iterator[tuple[str, Candidate]]:
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
    yield from (("random", encoding.candidate(point)) for point in points)


# Knob → the value that tuning guides advise for latency and for throughput; the nearest level is taken.
LEAN: Mapping[str, Mapping[str, float]] = {
    "latency": {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "max_num_active_seqs": 64},
    "throughput": {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.95},
}

# Knobs that put all GPUs to use, in order of preference: steps split over them, or a replica on each.
# The levels of a space that was restricted to a node end at its number of GPUs.
CARDS: Mapping[str, tuple[str, ...]] = {
    "latency": ("tensor_parallel_size", "data_parallel_size"),
    "throughput": ("data_parallel_size", "tensor_parallel_size"),
}


def heuristics(
    space: Space, baseline: Candidate, known: Callable[[Candidate], str | None] = lambda candidate: None
) -> tuple[tuple[str, Candidate], ...]:
    """The latency-lean and the throughput-lean variant of the baseline, with their origin; where the space
    turns the layout, on as many cards as are not `known` to fail.
    """
    encoding = encode(space, {})
    found = []
    for name, targets in LEAN.items():
        moved: dict[str, Value] = {}
        for knob, target in targets.items():
            levels = [v for v in space.levels.get(knob, ()) if _number(v)]
            if levels:
                moved[knob] = min(levels, key=lambda v: abs(np.log(float(v or 0) / target)))
        kept = {k: v for k, v in baseline.items() if k in encoding.names}
        layouts = _layouts(space, CARDS[name])
        if moved or any(layouts):
            tried = [space.canonical(Candidate({**kept, **moved, **layout})) for layout in layouts]
            works = (candidate for candidate in tried if known(candidate) is None)
            found.append((f"heuristic: {name}", next(works, tried[-1])))
    return tuple(found)


def _layouts(space: Space, knobs: Sequence[str]) -> list[dict[str, Value]]:
    """Sizes of the first of these knobs that is turned, the largest first, all others at their smallest."""
    turned = [knob for knob in knobs if any(_number(v) for v in space.levels.get(knob, ()))]
    if not turned:
        return [{}]
    first, *others = turned
    small = {knob: next(v for v in space.levels[knob] if _number(v)) for knob in others}
    return [{first: size, **small} for size in reversed(space.levels[first]) if _number(size)]


def _number(value: Value) -> bool:
    return trial_view.is_number(value) and float(value or 0) > 0


# Trials between two measurements of the baseline, which show drift: one trial in 25 is spent on that.
DRIFT_EVERY = 24


def drift_due(trials: Sequence[Trial], every: int = DRIFT_EVERY) -> bool:
    """Whether the baseline is to be measured again: `every` finished trials since it last was."""
    finished = [t for t in trial_view.latest(trials) if t.ended_at is not None]
    looks = [i for i, t in enumerate(finished) if t.is_baseline]
    return bool(looks) and len(finished) - 1 - looks[-1] >= every
