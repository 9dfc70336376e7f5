"""The next candidate: the baseline, the seeds, a step back after a lack of memory, then the study's sampler.

A function of (space, trials, seed, number): the same answer in any process, nothing kept between calls.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tuner.records import Candidate, Slo, Trial
from tuner.search import acquisition, feasibility, trial_view
from tuner.search.acquisition import Predict
from tuner.search.encoding import Encoding, Point, Space, encode
from tuner.search.trial_view import EncodedTrial, Scale

Known = Callable[[Candidate], str | None]
"""Why a candidate is known to fail before it is launched, or None."""

DRAWS = 3
"""Draws of an Optuna sampler per ask; each costs the time of a fit."""

ENUMERATE = 20_000
"""Spaces up to this size are searched to the last point before nothing is said to be left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A candidate to launch, who proposed it, and the seed of its trial."""

    candidate: Candidate
    origin: str
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class History:
    """A study's trials in its space, with what is worked out of them once."""

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
    def regions(self) -> feasibility.Regions:
        return feasibility.Regions(self.encoding, self.latest)

    @cached_property
    def seen(self) -> frozenset[str]:
        """What engines ran, by `Encoding.completed`: as asked, and as they said."""
        found = set()
        for trial in self.latest:
            asked = trial.candidate
            ran = Candidate({name: trial.effective.get(name, value) for name, value in asked.items()})
            found |= {self.key(asked), self.key(ran)}
        return frozenset(found)

    def key(self, candidate: Candidate) -> str:
        """Equal for candidates that the engine would run alike, as far as its defaults are known."""
        return self.encoding.completed(candidate).digest

    def is_new(self, candidate: Candidate, known: Known) -> bool:
        """Unseen as asked and as it would run, inside the space, and not known to fail."""
        if self.key(candidate) in self.seen or not self.space.contains(candidate):
            return False
        point = self.encoding.point(candidate)
        return point is not None and self.regions.reason(point) is None and known(candidate) is None

    def problem(self, predict: Predict | None) -> acquisition.Problem | None:
        """What `acquisition` is asked; None while nothing was measured."""
        if self.scale is None:
            return None
        return acquisition.problem_of(self.encoding, self.encoded, self.scale, predict)


def suggest(
    history: History,
    *,
    seed: int,
    number: int,
    baseline: Candidate,
    known: Known,
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
    back = (("back-off", c) for c in feasibility.back_off(history.encoding, history.latest))
    drawn = _sampled(history, seed, number, known, predictor, sampler)
    for source in (given, back, drawn, _leftover(history, seed, number)):
        for origin, candidate in source:
            if history.is_new(candidate, known):
                return Suggestion(candidate=candidate, origin=origin, seed=trial_seed)
    return None


def _sampled(
    history: History, seed: int, number: int, known: Known, predictor: Predict | None, sampler: str
) -> Iterator[tuple[str, Candidate]]:
    """What the study's sampler draws; of Optuna's own also near misses of what was seen."""
    from tuner.search import sampler as samplers

    encoding = history.encoding
    if not encoding.names or history.scale is None:
        return
    if sampler == "tuner":
        found = samplers.propose(
            encoding, history.encoded, history.scale, seed=seed, predict=predictor,
            allowed=lambda candidate: history.is_new(candidate, known),
        )  # fmt: skip
        yield from [] if found is None else [found]
        return
    drawn: list[Point] = []
    own = trial_view.derive(seed, number, sampler)
    told = samplers.frozen(encoding, history.encoded, history.scale)
    for point in samplers.draws(samplers.make(sampler, own), encoding, told, DRAWS):
        drawn.append(point)
        yield sampler, encoding.candidate(point)
    rng = np.random.default_rng(trial_view.derive(seed, number, "near"))
    for point in drawn:
        near = acquisition.neighbours(point, [len(values) for values in encoding.levels])
        yield from ((sampler, encoding.candidate(near[int(i)])) for i in rng.permutation(len(near)))


def _leftover(history: History, seed: int, number: int) -> Iterator[tuple[str, Candidate]]:
    """Anything at all: every point of a small space, many random ones of a large space."""
    encoding = history.encoding
    rng = np.random.default_rng(trial_view.derive(seed, number, "leftover"))
    sizes = [len(values) for values in encoding.levels]
    if not sizes:
        return
    if encoding.size <= ENUMERATE:
        order = rng.permutation(encoding.size)
        points = (tuple(int(i) for i in np.unravel_index(int(n), sizes)) for n in order)
    else:
        points = (encoding.random(rng) for _ in range(ENUMERATE // 10))
    yield from (("random", encoding.candidate(point)) for point in points)
