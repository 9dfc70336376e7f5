"""The next candidate of a study, and how it is measured: functions of its history."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.engine.effective import same
from tuner.errors import NotFound
from tuner.knobs.space import SearchSpace
from tuner.records import Candidate, Trial, TrialState
from tuner.search import acquisition, ladder, pareto, trial_view
from tuner.search.candidate_sources import Suggestion, suggest
from tuner.search.encoding import encode
from tuner.search.feasibility import Regions
from tuner.search.order import by_group, drift_due
from tuner.tuning.calibrated_predictor import (
    LAUNCH_S,
    PICKED,
    RELAUNCHED,
    SECURED,
    Knowledge,
    Known,
    around,
    at_levels,
    policy,
    screens,
)
from tuner.tuning.live import group
from tuner.tuning.seeds import Seed
from tuner.tuning.study import Prepared

WIDE_EVERY, WIDE_FROM = 5, 9
"""From a number on, every so-many-th proposal may turn any knob; the others keep to what one running engine
can screen."""
PICK_EVERY, LOOKED = 6, 8
"""Every so-many-th proposal is the first of so many predicted picks of the SLO policy that is new, to the
predictor too."""
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
    number = next_number(trials)
    served = trial_view.baseline_of(trials) is not None
    if served and not prepared.plan.demonstration and drift_due(trials):
        seed = trial_view.derive(prepared.study.seed, number, "trial")
        return Suggestion(candidate=prepared.baseline, origin="baseline", seed=seed)
    promoted = _promoted(prepared, trials)
    if promoted is not None:
        candidate = minimal(prepared.space, trials, promoted.candidate)
        return Suggestion(candidate=candidate, origin=RELAUNCHED, seed=promoted.seed)
    seeds = untried(prepared, trials, (*knowledge.fronts, *help.seeds, *knowledge.seeds(trials)))
    looked = (prepared.space,) if seeds else spaces(prepared, trials, number)
    if not seeds and number % PICK_EVERY == 0:
        seeds = _picked(prepared, trials, knowledge, looked[0])
    for space in looked:
        found = suggest(
            space,
            trials,
            seed=prepared.study.seed,
            number=number,
            objectives=prepared.study.objectives,
            slo=prepared.study.slo,
            baseline=prepared.baseline,
            known=prepared.known,
            seeds=seeds,
            predictor=knowledge.predictor(trials, number),
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


def _promoted(prepared: Prepared, trials: Sequence[Trial]) -> Trial | None:
    """The screened trial to measure in an engine of its own now: the front holds relaunched ones only."""
    scale = trial_view.scale_of(trials, prepared.study.objectives, prepared.study.slo)
    if scale is None or len(since_own(trial_view.latest(trials))) <= PROMOTE_AFTER:
        return None
    found = pareto.promotable(trials, scale, key_of(prepared, trials))
    return next((trial for trial, gain in found if gain >= SECURED), None)


def since_own(trials: Sequence[Trial]) -> Sequence[Trial]:
    """The trials from the last on that had an engine of its own; all where none had."""
    return trials[max((i for i, t in enumerate(trials) if not t.screened), default=0) :]


def _picked(
    prepared: Prepared, trials: Sequence[Trial], knowledge: Knowledge, space: SearchSpace
) -> list[Seed]:
    """What the SLO policy would pick by the predictions, where it decides and they are trusted."""
    known = _trusted(prepared, trials, knowledge)
    if prepared.file.winner != "slo" or known is None:
        return []
    objectives = prepared.study.objectives
    measured = known.predict([t.candidate for t in pareto.measured(trials, objectives)])
    twins = {acquisition.twin_key(p, objectives) for p in measured}
    picks = knowledge.picks(space, known.predict, trial_view.defaults_of(trials))
    predicted = zip(picks, known.predict(picks), strict=True)
    new = [(PICKED, c) for c, p in predicted if acquisition.twin_key(p, objectives) not in twins]
    return untried(prepared, trials, new[:LOOKED])[:1]


def _trusted(prepared: Prepared, trials: Sequence[Trial], knowledge: Knowledge) -> Known | None:
    """The predictor while its ranking holds."""
    known = knowledge.known(trials, next_number(trials))
    objectives = prepared.study.objectives
    return known if known is not None and acquisition.trusted(known.predict, trials, objectives) else None


def expected_gain(prepared: Prepared, trials: Sequence[Trial], knowledge: Knowledge) -> float | None:
    """The most hypervolume that a new candidate around the best so far is expected to add, as a share of what
    is covered; None where nobody who is trusted expects anything.
    """
    known, number = _trusted(prepared, trials, knowledge), next_number(trials)
    scale = trial_view.scale_of(trials, prepared.study.objectives, prepared.study.slo)
    if known is None or scale is None:
        return None
    key = key_of(prepared, trials)
    seen = {key(t.candidate) for t in trials}
    near = encode(around(prepared, best(prepared, trials), trials), trial_view.defaults_of(trials))
    new = [c for c in acquisition.pool(near, prepared.study.seed) if key(c) not in seen]
    new = [c for c in new if prepared.known(c) is None]
    rng = np.random.default_rng(trial_view.derive(prepared.study.seed, number, "gain"))
    gains = acquisition.expected_gains(known.predict, new, trials, encoding=near, scale=scale, rng=rng)
    covered = pareto.covered(trials, scale)
    return float(gains.max()) / covered if len(gains) and covered > 0 else None


def untried(prepared: Prepared, trials: Sequence[Trial], seeds: Sequence[Seed]) -> list[Seed]:
    """The seeds that are new and may work, as points of the space, those that one running engine can screen
    together.
    """
    encoding = encode(prepared.space, trial_view.defaults_of(trials))
    regions = Regions(encoding, trials)
    seen = {encoding.completed(t.candidate).digest for t in trial_view.latest(trials)}
    left: dict[Candidate, Seed] = {}
    for origin, candidate in seeds:
        asked = at_levels(prepared, trials, candidate)
        point = encoding.point(asked)
        new = prepared.space.contains(asked) and encoding.completed(asked).digest not in seen
        if new and point is not None and regions.reason(point) is None and prepared.known(asked) is None:
            left.setdefault(asked, (origin, asked))
    ordered = by_group(
        list(left),
        lambda c: group(prepared, c, trial_view.defaults_of(trials)),
        compile_s=LAUNCH_S,
        late_s=1.0,
    )
    return [left[candidate] for candidate in ordered]


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
    encoding = encode(prepared.space, trial_view.defaults_of(trials))
    return lambda candidate: encoding.completed(candidate).digest


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
