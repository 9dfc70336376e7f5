"""The next candidate: the baseline, the seeds, then by turns TPE's proposals and a predictor's, or a Gaussian
process's where no predictor is to be trusted.

A function of (space, trials, seed, number): the same answer in any process, nothing kept between calls.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tuner.records import Candidate, Prediction, Slo, Trial, TrialState
from tuner.search import acquisition, feasibility, trial_view
from tuner.search.encoding import Encoding, Point, Space, encode

Known = Callable[[Candidate], str | None]
"""Why a candidate is known to fail before it is launched, or None."""

Predictor = Callable[[Sequence[Candidate]], Sequence[Prediction]]

TPE_EVERY, TPE_FROM = 4, 11
"""Every so-many-th proposal is TPE's, however well the predictor ranks, once it has enough to go by."""

LEADING = ("max_num_seqs", "max_num_batched_tokens")
"""The knobs that matter most, by every guide: all their combinations come first without a predictor."""

DRAWS = 3
"""TPE draws per ask; each costs the time of a fit."""

ENUMERATE = 20_000
"""Spaces up to this size are searched to the last point before nothing is said to be left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A candidate to launch, who proposed it, and the seed of its trial."""

    candidate: Candidate
    origin: str
    seed: int


def suggest(
    space: Space,
    trials: Sequence[Trial],
    *,
    seed: int,
    number: int,
    objectives: Sequence[str],
    slo: Slo,
    baseline: Candidate,
    known: Known,
    seeds: Sequence[tuple[str, Candidate]] = (),
    predictor: Predictor | None = None,
) -> Suggestion | None:
    """The candidate of trial `number`, or None when nothing is left that is unseen and may work.

    `known` and `predictor` must themselves be functions of the candidate (and of the same history).
    """
    ask = _Ask(
        encoding=encode(space, trial_view.defaults_of(trials)),
        trials=trial_view.latest(trials),
        objectives=tuple(objectives),
        slo=slo,
        known=known,
        seed=seed,
        number=number,
        predictor=predictor,
    )
    trial_seed = trial_view.derive(seed, number, "trial")
    if not any(t.is_baseline for t in ask.trials):
        return Suggestion(candidate=baseline, origin="baseline", seed=trial_seed)
    for origin, candidate in seeds:
        if ask.is_new(space.canonical(candidate)):
            return Suggestion(candidate=space.canonical(candidate), origin=origin, seed=trial_seed)
    for origin, candidate in ask.proposed():
        return Suggestion(candidate=candidate, origin=origin, seed=trial_seed)
    return None


@dataclass(kw_only=True)
class _Ask:
    """One ask's view of history, with what is worked out once."""

    encoding: Encoding
    trials: tuple[Trial, ...]
    objectives: tuple[str, ...]
    slo: Slo
    known: Known
    seed: int
    number: int
    predictor: Predictor | None
    _seen: set[str] = field(default_factory=set)
    _twins: set[tuple[str, ...] | None] | None = None

    def __post_init__(self) -> None:
        self._regions = feasibility.Regions(self.encoding, self.trials)
        for trial in self.trials:
            self._seen.add(self.encoding.completed(trial.candidate).digest)
            asked = trial.candidate
            ran = Candidate({name: trial.effective.get(name, value) for name, value in asked.items()})
            if ran != asked:
                self._seen.add(self.encoding.completed(ran).digest)

    def rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(trial_view.derive(self.seed, self.number, purpose))

    def is_new(self, candidate: Candidate) -> bool:
        """Unseen as asked and as it would run, inside the space, and not known to fail."""
        if self.encoding.completed(candidate).digest in self._seen or not self.encoding.space.contains(
            candidate
        ):
            return False
        point = self.encoding.point(candidate)
        return point is not None and self._regions.reason(point) is None and self.known(candidate) is None

    def is_worth_a_launch(self, candidate: Candidate) -> bool:
        """New, and no twin: the predictor, while it is trusted, tells it from everything measured."""
        return self.is_new(candidate) and not self._is_twin(candidate)

    def _worth_a_launch(self, pool: Sequence[Candidate]) -> list[Candidate]:
        """Those of a pool that are, predicted all at once: the predictor may share them among processes."""
        new = [c for c in pool if self.is_new(c)]
        if self.predictor is not None and self._trusted:
            self.predictor(new)
        return [c for c in new if not self._is_twin(c)]

    def _is_twin(self, candidate: Candidate) -> bool:
        if self.predictor is None or not self._trusted:
            return False
        if self._twins is None:
            ended = [t for t in self.trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
            expected = self.predictor([t.candidate for t in ended])
            self._twins = {acquisition.twin_key(p, self.objectives) for p in expected} - {None}
        return acquisition.twin_key(self.predictor([candidate])[0], self.objectives) in self._twins

    @cached_property
    def _trusted(self) -> bool:
        return self.predictor is not None and acquisition.trusted(
            self.predictor, self.trials, self.objectives
        )

    def scale(self) -> trial_view.Scale:
        """The study's cost scale, of units while nothing was measured."""
        found = trial_view.scale_of(self.trials, self.objectives, self.slo)
        return found or trial_view.scale(self.objectives, [1.0] * len(self.objectives), self.slo)

    def proposed(self) -> Iterator[tuple[str, Candidate]]:
        """New candidates, the best first, by whoever's turn it is and then by the others."""
        yield from (
            ("back-off", c) for c in feasibility.back_off(self.encoding, self.trials) if self.is_new(c)
        )
        turned = self.number >= TPE_FROM and self.number % TPE_EVERY == TPE_EVERY - 1
        lost = self.predictor is not None and not self._trusted and not turned
        if not lost and not turned:
            yield from (("simulator", c) for c in self._predicted())
        if not turned:
            yield from ((acquisition.INSTEAD if lost else "gp", c) for c in self._by_measurements())
        yield from ((acquisition.INSTEAD if lost else "tpe", c) for c in self._sampled())
        yield from (("random", c) for c in self._leftover())

    def _predicted(self) -> Iterator[Candidate]:
        if self.predictor is None:
            return
        for found in acquisition.ranked(
            self.predictor,
            self._worth_a_launch(self._pool()),
            self.trials,
            encoding=self.encoding,
            scale=self.scale(),
            rng=self.rng("gain"),
        ):
            simpler = acquisition.plain(self.predictor, self.encoding, found, self.objectives)
            yield simpler if self.is_worth_a_launch(simpler) else found

    def _by_measurements(self) -> Iterator[Candidate]:
        """New candidates by a Gaussian process through what was measured."""
        first = trial_view.baseline_of(self.trials)
        if first is None or first.measurement is None:
            return
        yield from acquisition.ranked(
            acquisition.flat(first.measurement.values),
            self._worth_a_launch(self._plane()) or self._worth_a_launch(self._pool()),
            self.trials,
            encoding=self.encoding,
            scale=self.scale(),
            rng=self.rng("gp"),
            off=acquisition.UNTOLD,
        )

    def _plane(self) -> list[Candidate]:
        """Every combination of the two knobs that matter most, the others as near the baseline's as the space
        allows.
        """
        base = self.encoding.point(Candidate())
        if base is None:
            return []
        axes = [
            range(len(levels)) if name in LEADING else (level,)
            for name, levels, level in zip(self.encoding.names, self.encoding.levels, base, strict=True)
        ]
        return [self.encoding.candidate(point) for point in itertools.product(*axes)]

    def _pool(self) -> list[Candidate]:
        """The study's pool (so predictions can be kept) and the neighbours of the front."""
        found = {c.digest: c for c in acquisition.pool(self.encoding, self.seed)}
        for trial in acquisition.leaders(self.trials, self.objectives):
            point = self.encoding.point(trial.candidate)
            near = self.encoding.neighbours(point) if point is not None else []
            found.update({c.digest: c for c in map(self.encoding.candidate, near)})
        return list(found.values())

    def _sampled(self) -> Iterator[Candidate]:
        """TPE's new draws, then near misses of the seen ones."""
        from tuner.search import tpe

        history = trial_view.encode_trials(self.encoding, self.trials, self.scale())
        if not self.encoding.names or not any(h.values is not None for h in history):
            return
        points: list[Point] = []
        for point in tpe.draws(
            self.encoding, history, trial_view.derive(self.seed, self.number, "tpe"), DRAWS
        ):
            points.append(point)
            candidate = self.encoding.candidate(point)
            if self.is_worth_a_launch(candidate):
                yield candidate
        rng = self.rng("near")
        for point in points:
            near: list[Point] = self.encoding.neighbours(point)
            for index in rng.permutation(len(near)):
                candidate = self.encoding.candidate(near[int(index)])
                if self.is_worth_a_launch(candidate):
                    yield candidate

    def _leftover(self) -> Iterator[Candidate]:
        """Anything new at all: every point of a small space, many random ones of a large space."""
        rng = self.rng("leftover")
        sizes = [len(values) for values in self.encoding.levels]
        if self.encoding.size <= ENUMERATE:
            order = rng.permutation(self.encoding.size)
            points = (
                (tuple(int(i) for i in np.unravel_index(int(n), sizes)) for n in order) if sizes else iter(())
            )
        else:
            points = (self.encoding.random(rng) for _ in range(ENUMERATE // 10))
        yield from (c for c in map(self.encoding.candidate, points) if self.is_new(c))
