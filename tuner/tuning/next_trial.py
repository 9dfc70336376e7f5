"""The next candidate of a study, and how it is measured: functions of its history."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.engine.effective import same
from tuner.errors import NotFound
from tuner.knobs.space import SearchSpace
from tuner.records import Candidate, Trial, TrialState
from tuner.search import acquisition, ladder, pareto, trial_view
from tuner.search.candidate_sources import History, Suggestion, suggest
from tuner.search.order import drift_due
from tuner.tuning.calibrated_predictor import (
    RELAUNCHED,
    SECURED,
    Knowledge,
    around,
    at_levels,
    policy,
    screens,
)
from tuner.tuning.seeds import Seed
from tuner.tuning.study import Prepared

WIDE_EVERY, WIDE_FROM = 5, 9
"""From a number on, every so-many-th proposal may turn any knob; the others keep to what one running engine
can screen."""
PROMOTE_AFTER = 3
"""Screened trials between two relaunches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """What others know: seeds (origin, candidate) that are tried first."""

    seeds: Sequence[Seed] = ()


NO_HELP = Help()


def propose(
    prepared: Prepared, trials: Sequence[Trial], help: Help = NO_HELP, knowledge: Knowledge | None = None
) -> Suggestion | None:
    """What the search proposes after these trials; a function of them alone (and of the seeds given)."""
    if prepared.file.sampler == "ladder":
        return _rung(prepared, trials)
    knowledge = knowledge or Knowledge(prepared=prepared)
    number, history = next_number(trials), history_of(prepared, trials)
    if history.baseline is not None and not prepared.plan.demonstration and drift_due(trials):
        seed = trial_view.derive(prepared.study.seed, number, "trial")
        return Suggestion(candidate=prepared.baseline, origin="baseline", seed=seed)
    promoted = _promoted(history)
    if promoted is not None:
        candidate = minimal(prepared.space, trials, promoted.candidate)
        return Suggestion(candidate=candidate, origin=RELAUNCHED, seed=promoted.seed)
    known = knowledge.known(trials)
    seeds = untried(prepared, history, (*knowledge.fronts, *help.seeds, *knowledge.seeds(trials)))
    for space in (prepared.space,) if seeds else spaces(prepared, trials, number):
        found = suggest(
            replace(history, space=space),
            seed=prepared.study.seed,
            number=number,
            baseline=prepared.baseline,
            known=prepared.known,
            seeds=seeds,
            predictor=known.predict if known else None,
            sampler=prepared.file.sampler,
        )
        if found is not None:
            return replace(found, candidate=minimal(prepared.space, trials, found.candidate))
    return None


def _rung(prepared: Prepared, trials: Sequence[Trial]) -> Suggestion | None:
    """The baseline, then it with the next rung's max_num_seqs; None at the end of the ladder."""
    seed = trial_view.derive(prepared.study.seed, next_number(trials), "trial")
    if not any(t.is_baseline for t in trial_view.latest(trials)):
        return Suggestion(candidate=prepared.baseline, origin="baseline", seed=seed)
    asked = {v: prepared.baseline.with_values(**{ladder.KNOB: v}) for v in prepared.space.levels[ladder.KNOB]}
    levels = sorted(v for v, c in asked.items() if isinstance(v, int) and prepared.known(c) is None)
    level = ladder.next_level(levels, ladder.rungs(trials))
    return None if level is None else Suggestion(candidate=asked[level], origin=ladder.ORIGIN, seed=seed)


def history_of(prepared: Prepared, trials: Sequence[Trial]) -> History:
    """A study's trials with what the search works out of them."""
    study = prepared.study
    return History(space=prepared.space, trials=trials, objectives=study.objectives, slo=study.slo)


def _promoted(history: History) -> Trial | None:
    """The screened trial to measure in an engine of its own now: the front holds relaunched ones only."""
    if history.scale is None or len(since_own(history.latest)) <= PROMOTE_AFTER:
        return None
    found = pareto.promotable(history.trials, history.scale, history.key)
    return next((trial for trial, gain in found if gain >= SECURED), None)


def since_own(trials: Sequence[Trial]) -> Sequence[Trial]:
    """The trials from the last on that had an engine of its own; all where none had."""
    return trials[max((i for i, t in enumerate(trials) if not t.screened), default=0) :]


def expected_gain(prepared: Prepared, trials: Sequence[Trial], knowledge: Knowledge) -> float | None:
    """The most hypervolume that a new candidate is expected to add, as a share of what is covered; None where
    that does not rest on the simulator.
    """
    known, history = knowledge.known(trials), history_of(prepared, trials)
    problem = history.problem(known.predict if known else None)
    if problem is None:
        return None
    at, covered = history.encoding.candidate, pareto.covered(trials, problem.scale)
    rng = np.random.default_rng(trial_view.derive(prepared.study.seed, next_number(trials), "gain"))
    gain = acquisition.best_gain(
        problem, prepared.study.seed, lambda point: history.is_new(at(point), prepared.known), rng
    )
    return gain / covered if gain is not None and covered > 0 else None


def untried(prepared: Prepared, history: History, seeds: Sequence[Seed]) -> list[Seed]:
    """The seeds that are new and may work, as points of the space."""
    placed = ((origin, at_levels(prepared, history.trials, candidate)) for origin, candidate in seeds)
    left = {c: (origin, c) for origin, c in reversed(list(placed)) if history.is_new(c, prepared.known)}
    return list(left.values())[::-1]


def spaces(prepared: Prepared, trials: Sequence[Trial], number: int) -> tuple[SearchSpace, ...]:
    """Where to look, in this order: what one running engine can screen around the best so far, and all."""
    turned = number >= WIDE_FROM and number % WIDE_EVERY == WIDE_EVERY - 1
    if turned or not screens(prepared, trials):
        return (prepared.space,)
    return (around(prepared, best(prepared, trials), trials), prepared.space)


def best(prepared: Prepared, trials: Sequence[Trial]) -> Candidate:
    """The winner so far by the study's policy, screened trials included; the baseline before there is one."""
    key = key_of(prepared, trials)
    found = winner(prepared, [t for t in trials if not t.is_baseline], key)
    return at_levels(prepared, trials, found.candidate if found else None)


def winner(prepared: Prepared, trials: Sequence[Trial], key: Callable[[Candidate], str]) -> Trial | None:
    """What the study's policy picks of trials, screened ones included unless they were relaunched since.
    `key` is `key_of` the whole history.
    """
    settled = {key(t.candidate) for t in trials if not t.screened and t.state is not TrialState.ABORTED}
    kept = [t for t in trials if not t.screened or key(t.candidate) not in settled]
    plain = [replace(t, screened=False) for t in kept]
    study = prepared.study
    try:
        found = pareto.choose(plain, policy(prepared), study.slo, study.objectives)
    except NotFound:
        return None
    return next(t for t in kept if t.id == found.id)


def key_of(prepared: Prepared, trials: Sequence[Trial]) -> Callable[[Candidate], str]:
    """Equal for candidates that the engine would run alike, as far as its defaults are known."""
    return history_of(prepared, trials).key


def minimal(space: SearchSpace, trials: Sequence[Trial], candidate: Candidate) -> Candidate:
    """The candidate without what the engine does of its own accord, by the baseline's own words; what the
    baseline was asked for stays, and what another knob is turned on by.
    """
    own = trial_view.own_of(trials)
    kept = {n: v for n, v in candidate.items() if n not in own or not same(v, own[n])}
    asked = list(kept)
    while asked:
        for parent in space.conditions.get(asked.pop(), {}):
            if parent in candidate and parent not in kept:
                kept[parent] = candidate[parent]
                asked.append(parent)
    return Candidate(kept)


def next_number(trials: Sequence[Trial]) -> int:
    """The number after the last one."""
    return max((t.number for t in trials), default=-1) + 1
