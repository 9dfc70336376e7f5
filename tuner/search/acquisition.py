"""The candidate with the largest expected gain in hypervolume.

A Gaussian process models, for each objective, how far the truth is from a prediction. Several hypotheses are
averaged: the mean is the simulator's or flat (the baseline's value), the error is small or large, and it
reaches a short or a long way along the knobs. Each hypothesis is weighted by how likely it makes the measured
values (its marginal likelihood), so a simulator that is wrong about an objective loses its weight there step
by step. All values are costs (`Scale`): lower is better.

`StudyView` is a study as the search sees it, with the candidates that earlier failures rule out (`Regions`).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tuner.records import Candidate, Prediction, Slo, Trial, TrialState
from tuner.search import trial_view
from tuner.search.trial_view import DERIVED, EncodedTrial, Encoding, Matrix, Point, Scale, Space, encode

# Standard deviations of the error of a mean, as log ratios: from the noise of one measurement (6 %) to a
# factor of 2.7, each about 2.5 times the one before.
SCALES = (0.06, 0.15, 0.4, 1.0)

# How far an error reaches along a knob, as a share of its range: a third of it, or all of it.
LENGTHS = (0.3, 1.0)

# Weight of knobs other than LEADING in a distance: as much, or a third. Both are tried, since a space may
# turn a knob that matters as much.
LESSER = (1.0, 0.3)

# Shares of an error's variance: common to all candidates (the simulator is too fast everywhere), and a sum of
# one part for each knob. The rest (0.3) is of combinations of knobs, which few trials can tell.
COMMON, SINGLE = 0.2, 0.5

# Weight of the flat mean before the first candidate is measured, where there is a simulator: it is trusted by
# nine to one, since it was fitted to the baseline.
FLAT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixture:
    """One objective at `n` points under `h` hypotheses: `weights` h, `mean` and `deviation` h × n.

    `say` is the weight of the hypotheses whose mean is the simulator's, from 0 to 1.
    """

    weights: Matrix
    mean: Matrix
    deviation: Matrix
    say: float

    def draw(self, count: int, rng: np.random.Generator) -> Matrix:
        """`count` draws of the value at every point (count × n); each hypothesis as often as its weight
        says.
        """
        at = (np.arange(count) + rng.random()) / count
        chosen = np.minimum(np.searchsorted(np.cumsum(self.weights), at), len(self.weights) - 1)
        shape = (count, self.mean.shape[1])
        drawn: Matrix = self.mean[chosen] + self.deviation[chosen] * rng.standard_normal(shape)
        return drawn


def mixture(
    there: Matrix,
    here: Matrix,
    values: Matrix,
    variances: Matrix,
    predicted: list[tuple[Matrix, Matrix]],
    leading: NDArray[np.bool_],
) -> Mixture:
    """An objective `here` (p × knobs), by its `values` (n) `there` (n × knobs), measured with `variances`.

    `predicted` are means that the simulator gives (there, here); flat is the baseline's value, which is 0.
    `leading` marks the knobs that matter most.
    """
    means = [((1 - FLAT) / len(predicted), *each) for each in predicted]
    means.append((FLAT if predicted else 1.0, np.zeros(len(values)), np.zeros(len(here))))
    logs, centres, widths = [], [], []
    for length, lesser in itertools.product(LENGTHS, LESSER):
        stretch = np.where(leading, 1.0, lesser) / length
        near, across = _alike(there * stretch, there * stretch), _alike(there * stretch, here * stretch)
        for scale in SCALES:
            factor = np.linalg.cholesky(scale**2 * near + np.diag(variances))
            solved = np.linalg.solve(factor, scale**2 * across)
            width = np.sqrt(np.maximum(scale**2 - (solved**2).sum(axis=0), 0.0))
            for chance, past, future in means:
                errors = np.linalg.solve(factor, values - past)
                logs.append(np.log(chance) - 0.5 * errors @ errors - np.log(np.diag(factor)).sum())
                centres.append(future + errors @ solved)
                widths.append(width)
    weights = np.exp(np.array(logs) - max(logs))
    weights /= weights.sum()
    say = 1.0 - float(weights[len(predicted) :: len(means)].sum()) if predicted else 0.0
    return Mixture(weights=weights, mean=np.array(centres), deviation=np.array(widths), say=say)


def _alike(a: Matrix, b: Matrix) -> Matrix:
    """Correlation of the errors at two sets of points (kernel matrix): the common part, one part for each
    knob, and the rest.
    """
    apart = (a[:, None, :] - b[None, :, :]) ** 2
    single = np.exp(-apart / 2).mean(axis=2)
    found: Matrix = COMMON + SINGLE * single + (1 - COMMON - SINGLE) * np.exp(-apart.sum(axis=2) / 2)
    return found


# The knobs that matter most by vLLM's own tuning guide: every combination of them is always looked at.
LEADING = ("max_num_seqs", "max_num_batched_tokens")

# Candidates that are looked at: all of a small space, a random part of a large one. The simulator predicts
# each of them once in a study.
POOL = 256

# Members of the front whose neighbours are looked at too, the newest first: it bounds what the simulator must
# predict for each trial.
LEADERS = 8

# Trials, the newest, that the Gaussian processes are fitted to; the time of a fit grows with their cube.
MOST_TRIALS = 64

# Draws of every candidate's objectives, over which its gain is averaged.
DRAWS = 16

# Random points by which a gained volume is measured: one standard deviation of the result is at most 1.6 % of
# the box they lie in.
SAMPLES = 1024

# Standard deviation of the log of a measurement: of a whole replay (twice `early_stopping.NOISE`, since
# screened and relaunched trials are mixed), and of the estimate of a stopped one.
NOISES = {"full": 0.06, "estimate": 0.2}

# What a prediction counts before any candidate was measured, as (trials that worked, trials that failed). A
# predicted failure keeps a tenth of its expected gain; one such candidate that works makes that half.
PRIOR = {True: (4.0, 0.5), False: (0.1, 0.9)}

# A knob is turned only if the simulator expects more than this gain (a log ratio) in some objective; less is
# within the error of its own arithmetic.
WORTHLESS = 0.005

Predict = Callable[[Sequence[Candidate]], Sequence[Prediction]]


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchState:
    """All that the choice of a candidate depends on; `predict` is the simulator, if there is one."""

    encoding: Encoding
    trials: Sequence[EncodedTrial]
    scale: Scale
    predict: Predict | None = None

    @cached_property
    def known(self) -> list[EncodedTrial]:
        """The newest trials with objectives, measured or estimated, those that failed included."""
        return [t for t in self.trials if t.values is not None][-MOST_TRIALS:]

    @cached_property
    def measured(self) -> Matrix:
        """Costs of what worked and was measured in full."""
        rows = [t.values for t in self._whole]
        return self.scale.costs(np.array(rows, np.float64).reshape(-1, len(self.scale.objectives)))

    @property
    def _whole(self) -> list[EncodedTrial]:
        """The newest of each candidate, so that a launch of its own replaces a screened trial."""
        done = (t for t in self.trials if t.state is TrialState.COMPLETE and t.values is not None)
        return list({t.point: t for t in done}.values())

    @cached_property
    def leaders(self) -> list[Point]:
        """Where the front of everything measured lies, screened trials included."""
        keep = trial_view.non_dominated(self.measured)
        return [t.point for t, kept in zip(self._whole, keep, strict=True) if kept][::-1][:LEADERS]

    def places(self, points: Sequence[Point]) -> Matrix:
        """Points × knobs that have several levels, each from 0 (its first level) to 1."""
        sizes = np.array(self.encoding.sizes)
        found: Matrix = np.array(points, np.float64)[:, sizes > 1] / (sizes[sizes > 1] - 1)
        return found

    def expected(self, points: Sequence[Point]) -> tuple[Matrix, NDArray[np.bool_]]:
        """(`Scale.ratios` as mean × point × objective, whether each point should work): no mean and all True
        without a simulator. The simulator's error at the baseline is subtracted from all its predictions.
        """
        if self.predict is None:
            return np.empty((0, len(points), len(self.scale.objectives))), np.ones(len(points), bool)
        found = self.predict([self.encoding.candidate(p) for p in points])
        means = np.array([_means(p, self.scale) for p in found])
        shifted = np.where(means < trial_view.FAR, means - self._shift, means)
        return shifted.swapaxes(0, 1), np.array([p.feasible for p in found], bool)

    @cached_property
    def _shift(self) -> Matrix:
        """The simulator's error at the baseline; 0 if it predicts a failure."""
        first = self.encoding.first
        if self.predict is None or first is None:
            return np.zeros(1)
        means = _means(self.predict([self.encoding.candidate(first)])[0], self.scale)
        return np.where(np.abs(means) < trial_view.FAR, means, 0.0)


def _means(prediction: Prediction, scale: Scale) -> Matrix:
    """A prediction as two means (`Scale.ratios`): as it is, and averaged over an engine that is slower or
    faster by the simulator's error. The second is worse for a configuration whose queue grows without end
    at a little less speed.
    """
    whole = prediction.values
    rows = (prediction.fast or whole, whole, prediction.slow or whole)
    # A number that is not predicted is expected to stay at the baseline's value. A predicted failure has
    # none.
    unsaid = scale.baseline if whole else [np.nan] * len(scale.objectives)
    pairs = list(zip(scale.objectives, unsaid, strict=True))
    fast, middle, slow = scale.ratios([[row.get(name, value) for name, value in pairs] for row in rows])
    return np.array([middle, (fast + 2 * middle + slow) / 4])


def candidates(problem: SearchState, seed: int) -> list[Point]:
    """The points that are looked at: the study's pool (the same for every trial, so that predictions are
    reused), all combinations of the leading knobs, and the neighbours of the front.
    """
    near = [p for leader in problem.leaders for p in neighbours(leader, problem.encoding.sizes)]
    return list(dict.fromkeys([*plane(problem), *pool(problem.encoding, seed), *near]))


def pool(encoding: Encoding, seed: int) -> list[Point]:
    """All of a small space, POOL random points of a large one, the same whatever the order of its knobs."""
    if encoding.size <= POOL:
        return [tuple(int(i) for i in point) for point in np.ndindex(*encoding.sizes)]
    drawn = [
        np.random.default_rng(trial_view.derive(seed, 0, f"pool {name}")).integers(size, size=POOL)
        for name, size in zip(encoding.names, encoding.sizes, strict=True)
    ]
    return [tuple(int(i) for i in point) for point in zip(*drawn, strict=True)]


def plane(problem: SearchState) -> list[Point]:
    """Every combination of the leading knobs, the others as the baseline has them."""
    names, sizes, first = problem.encoding.names, problem.encoding.sizes, problem.encoding.first
    if first is None or not set(LEADING) & set(names):
        return []
    axes = [
        range(size) if name in LEADING else (level,)
        for name, size, level in zip(names, sizes, first, strict=True)
    ]
    return list(itertools.product(*axes))


def neighbours(point: Point, sizes: Sequence[int]) -> list[Point]:
    """Every point one level away in one knob."""
    moves = ((knob, point[knob] + step) for knob in range(len(sizes)) for step in (-1, 1))
    return [(*point[:k], i, *point[k + 1 :]) for k, i in moves if 0 <= i < sizes[k]]


def mixtures(problem: SearchState, points: Sequence[Point]) -> list[Mixture]:
    """What is expected at points, one mixture for each objective."""
    seen = problem.known
    there, here = problem.places([t.point for t in seen]), problem.places(points)
    past, future = problem.expected([t.point for t in seen])[0], problem.expected(points)[0]
    real = problem.scale.ratios(np.array([t.values for t in seen], np.float64))
    variances = np.array([NOISES[t.kind] ** 2 for t in seen])
    pairs = zip(problem.encoding.names, problem.encoding.sizes, strict=True)
    leading = np.array([name in LEADING for name, size in pairs if size > 1])
    if not leading.any():
        leading = ~leading
    both = [list(zip(past[..., k], future[..., k], strict=True)) for k in range(real.shape[1])]
    return [mixture(there, here, real[:, k], variances, each, leading) for k, each in enumerate(both)]


def gains(
    problem: SearchState, points: Sequence[Point], expected: Sequence[Mixture], rng: np.random.Generator
) -> Matrix:
    """Expected hypervolume gain of each point over what is measured, times how likely it works."""
    drawn = np.stack([each.draw(DRAWS, rng) for each in expected], axis=2)
    costs = problem.scale.costs_at(drawn)
    works = chances_to_work(problem)
    chances = np.array([works[bool(feasible)] for feasible in problem.expected(points)[1]])
    found: Matrix = chances * _gain(costs, problem.measured, np.array(problem.scale.corner), rng)
    return found


def chances_to_work(problem: SearchState) -> dict[bool, float]:
    """By the trials so far and `PRIOR`: how likely a candidate works if it is predicted to work (True), and
    if it is predicted to fail (False).
    """
    ended = [t for t in problem.trials if t.state is not TrialState.RUNNING]
    counts = {kind: list(prior) for kind, prior in PRIOR.items()}
    for trial, feasible in zip(ended, problem.expected([t.point for t in ended])[1], strict=True):
        counts[bool(feasible)][trial.failed] += 1
    return {kind: works / (works + fails) for kind, (works, fails) in counts.items()}


def without_idle_knobs(problem: SearchState, point: Point) -> Point:
    """The point with the baseline's level for every knob of which the simulator expects no gain."""
    start = problem.expected([point])[0][1, 0]
    for knob, level in enumerate(problem.encoding.first or ()):
        moved = (*point[:knob], level, *point[knob + 1 :])
        costs, works = problem.expected([moved])
        if moved != point and works[0] and np.all(costs[1, 0] <= start + WORTHLESS):
            point = moved
    return point


def _gain(costs: Matrix, real: Matrix, corner: Matrix, rng: np.random.Generator) -> Matrix:
    """Mean over draws of the volume that only the candidate dominates; `costs` is draw × candidate × cost."""
    flat = costs.reshape(-1, costs.shape[2])
    finite = np.vstack([rows[np.all(np.isfinite(rows), axis=1)] for rows in (flat, real)])
    if not len(finite):
        return np.zeros(costs.shape[1])
    low = np.minimum(finite.min(axis=0), corner)
    points = low + rng.random((SAMPLES, len(corner))) * (corner - low)
    for row in real:
        points = points[~np.all(row <= points, axis=1)]
    if not len(points):
        return np.zeros(costs.shape[1])
    found = np.zeros(len(flat))
    may = np.all(flat <= points.max(axis=0), axis=1)
    hits = np.ones((int(may.sum()), len(points)), dtype=bool)
    for column in range(len(corner)):
        hits &= flat[may, None, column] <= points[None, :, column]
    found[may] = hits.sum(axis=1)
    shares = found.reshape(costs.shape[:2]).mean(axis=0)
    gained: Matrix = shares / SAMPLES * float(np.prod(corner - low))
    return gained


def choose(
    problem: SearchState, seed: int, number: int, works: Callable[[Candidate], bool] = lambda candidate: True
) -> tuple[str, Candidate, float] | None:
    """(the origin `simulator` or `gp`, the candidate to measure as trial `number`, its expected gain in
    hypervolume); None if no gain is expected. `works` tells which candidates may work at all.

    While the simulator has at least half of the weight, two rules hold. Points that it cannot tell apart
    from a measured one are left out. Knobs of which it expects no gain keep the baseline's level.
    """
    taken, at = {each.point for each in problem.trials}, problem.encoding.candidate

    def allowed(point: Point) -> bool:
        return point not in taken and works(at(point))

    rng = np.random.default_rng(trial_view.derive(seed, number, "gain"))
    points, found, trusted = scored(problem, seed, allowed, rng)
    if not points or found.max() <= 0:
        return None
    new = found * _apart(problem, points) if trusted else found
    if not trusted or new.max() <= 0:
        return "gp", at(points[int(found.argmax())]), float(found.max())
    best = points[int(new.argmax())]
    simpler = without_idle_knobs(problem, best)
    return "simulator", at(simpler if allowed(simpler) else best), float(new.max())


def scored(
    problem: SearchState, seed: int, allowed: Callable[[Point], bool], rng: np.random.Generator
) -> tuple[list[Point], Matrix, bool]:
    """(the points that are looked at, the expected gain of each, whether the simulator has at least half of
    the weight). No points while nothing was measured.
    """
    points = [p for p in candidates(problem, seed) if allowed(p)] if problem.known else []
    if not points:
        return [], np.zeros(0), False
    expected = mixtures(problem, points)
    trusted = problem.predict is not None and sum(each.say for each in expected) >= 0.5 * len(expected)
    return points, gains(problem, points, expected, rng), trusted


def _apart(problem: SearchState, points: Sequence[Point]) -> NDArray[np.bool_]:
    """Which points the simulator can tell apart (to four digits) from everything measured; of a predicted
    failure it says nothing.
    """
    seen = [t.point for t in problem.trials if t.values is not None]
    twins = {tuple(row) for row in problem.expected(seen)[0][0].round(4) if row.max() < trial_view.FAR}
    return np.array([tuple(row) not in twins for row in problem.expected(points)[0][0].round(4)])


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
    """Levels that failed ≥ 2 times for one cause other than memory and never worked, if they are the
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
        """See `trial_view.baseline_of`."""
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
        """The keys of all configurations that engines ran, as they were asked for and as the engines
        reported them. A configuration that was only screened has just the knobs that were asked for.
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

    def problem(self, predict: Predict | None) -> SearchState | None:
        """What the choice by expected gain depends on; None while nothing was measured."""
        if self.scale is None:
            return None
        return SearchState(encoding=self.encoding, trials=self.encoded, scale=self.scale, predict=predict)
