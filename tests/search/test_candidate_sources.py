"""The next candidate: order of origins, purity, dedupe, failures as constraints, the end of the space."""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.search import world
from tests.search.world import OBJECTIVES, World
from tuner.records import Candidate, Measurement, Prediction, Slo, Trial, TrialState
from tuner.search import acquisition, pareto, trial_view
from tuner.search.candidate_sources import TPE_EVERY, TPE_FROM, Suggestion, suggest
from tuner.search.encoding import encode

SCALE = trial_view.scale(OBJECTIVES, [world.truth({}).values[n] for n in OBJECTIVES], Slo())


def ask(trials: Sequence[Trial], number: int, space: World | None = None, **more: Any) -> Suggestion | None:
    settings: dict[str, Any] = {"seed": 7, "baseline": Candidate(), "known": world.seqs_above_tokens, **more}
    return suggest(space or World(), trials, number=number, objectives=OBJECTIVES, slo=Slo(), **settings)


def study(length: int, **more: Any) -> list[Trial]:
    trials: list[Trial] = []
    for number in range(length):
        found = ask(trials, number, **more)
        assert found is not None
        trials.append(world.trial(number, found.candidate, origin=found.origin))
    return trials


def test_baseline_then_seeds_then_search() -> None:
    seeds = [
        ("twin-night", Candidate({"max_num_seqs": 64})),
        ("twin-night", Candidate({"max_num_seqs": 256})),  # what the baseline runs by default
        ("heuristic", Candidate({"max_num_batched_tokens": 512, "max_num_seqs": 1024})),  # known to fail
        ("heuristic", Candidate({"max_num_batched_tokens": 1024})),
    ]
    trials = study(4, seeds=seeds)
    assert [t.origin for t in trials] == ["baseline", "twin-night", "heuristic", "gp"]
    assert trials[2].candidate == Candidate({"max_num_batched_tokens": 1024})


def test_a_running_baseline_is_not_asked_for_twice() -> None:
    running = replace(
        world.trial(0, Candidate(), origin="baseline"), state=TrialState.RUNNING, measurements=()
    )
    found = ask([running], 1, seeds=[("heuristic", Candidate({"max_num_seqs": 64}))])
    assert found is not None
    assert found.origin == "heuristic"
    found = ask([running], 1)
    assert found is not None
    assert found.origin == "random"


def test_no_candidate_comes_twice_and_no_known_failure_is_launched() -> None:
    trials = study(40)
    ran = {Candidate({**world.DEFAULTS, **t.candidate}) for t in trials}
    assert len(ran) == 40
    assert all(world.seqs_above_tokens(t.candidate) is None for t in trials)


def covered(trials: Sequence[Trial]) -> float:
    rows = [[t.measurement.values[n] for n in OBJECTIVES] for t in trials if t.measurement]
    return pareto.hypervolume(rows, SCALE)


def test_the_search_covers_the_front_and_learns_where_it_fails() -> None:
    points = itertools.product(*world.LEVELS.values())
    everything = [Candidate(dict(zip(world.LEVELS, point, strict=True))) for point in points]
    best = covered([world.trial(i, c) for i, c in enumerate(everything)])
    studies = [study(40, seed=seed) for seed in range(3)]
    late = [t for trials in studies for t in trials[20:] if t.state is TrialState.INFEASIBLE]
    assert len(late) <= 6
    assert sum(covered(trials) for trials in studies) >= 3 * 0.6 * best


def test_same_history_and_seed_same_answer_in_another_process() -> None:
    code = (
        "from tests.search.test_candidate_sources import study\n"
        "print([t.candidate.digest[:12] for t in study(14)])\n"
    )
    seen = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert seen == {f"{[t.candidate.digest[:12] for t in study(14)]}\n"}


def test_order_of_history_and_aborted_attempts_do_not_matter() -> None:
    trials = study(12)
    aborted = replace(trials[5], state=TrialState.ABORTED, measurements=(), attempt=0)
    retried = [*(t for t in trials if t.number != 5), replace(trials[5], attempt=1), aborted]
    assert ask(retried[::-1], 12) == ask(trials, 12)


def test_another_number_is_another_draw() -> None:
    trials = study(12)
    assert ask(trials, 12) != ask(trials, 14)


def test_running_trials_are_pending_not_forgotten() -> None:
    trials = study(12)
    first = ask(trials, 12)
    assert first is not None
    pending = replace(
        world.trial(12, first.candidate), state=TrialState.RUNNING, measurements=(), effective={}
    )
    second = ask([*trials, pending], 13)
    assert second is not None
    assert second.candidate != first.candidate


def test_a_pruned_trial_tells_its_estimate() -> None:
    trials = study(12)
    pruned = replace(
        trials[11],
        state=TrialState.PRUNED,
        measurements=(Measurement(values={n: 1.0 for n in OBJECTIVES}, kind="estimate"),),
    )
    first_part = Measurement(values={n: 1.0 for n in OBJECTIVES}, kind="partial")
    for measurements in ((), (first_part,)):  # no word of where it would have ended: as bad as the worst
        encoding, scale = (
            encode(World(), world.DEFAULTS),
            trial_view.scale(OBJECTIVES, [1.0] * len(OBJECTIVES), Slo()),
        )
        bare = [*trials[:11], replace(pruned, measurements=measurements)]
        costs = [
            row.values for row in trial_view.encode_trials(encoding, bare, scale) if row.values is not None
        ]
        assert all(
            last >= max(column) for last, column in zip(costs[-1], zip(*costs, strict=True), strict=True)
        )
    assert ask([*trials[:11], pruned], 12) is not None


def test_nothing_left_is_none() -> None:
    space = World(levels={"max_num_seqs": (64, 256), "block_size": (16, 32)})
    trials: list[Trial] = []
    while (found := ask(trials, len(trials), space)) is not None:
        trials.append(world.trial(len(trials), found.candidate, origin=found.origin))
    assert len(trials) == 4  # the baseline runs 256 / 16


def test_an_empty_space_has_a_baseline_and_nothing_else() -> None:
    space = World(levels={})
    first = ask([], 0, space)
    assert first is not None
    assert ask([world.trial(0, first.candidate, origin="baseline")], 1, space) is None


def test_inactive_knobs_are_dropped_before_they_are_compared() -> None:
    space = World(
        levels={"max_num_seqs": (64, 256), "block_size": (16, 32)},
        inactive=lambda c: ("block_size",) if c.get("max_num_seqs") == 64 else (),
    )
    trials: list[Trial] = []
    while (found := ask(trials, len(trials), space)) is not None:
        trials.append(world.trial(len(trials), found.candidate, origin=found.origin))
    assert len(trials) == 3


def test_two_candidates_with_one_effective_configuration_are_one() -> None:
    space = World(levels={"max_num_seqs": (256, 512, 1024)})
    clamped = replace(world.trial(1, Candidate({"max_num_seqs": 1024})), effective={"max_num_seqs": 512})
    trials = [world.trial(0, Candidate(), origin="baseline"), clamped]
    assert ask(trials, 2, space) is None


def _predict(candidates: Sequence[Candidate]) -> Sequence[Prediction]:
    """The truth with other coefficients: everything twice as slow."""
    found = []
    for candidate in candidates:
        real = world.truth(candidate)
        found.append(replace(real, values={n: 2 * v for n, v in real.values.items()}))
    return found


def _mislead(candidates: Sequence[Candidate]) -> Sequence[Prediction]:
    return [
        replace(real, feasible=True, values={n: 1000.0 / real.values.get(n, 1.0) for n in OBJECTIVES})
        for real in map(world.truth, candidates)
    ]


def test_a_predictor_takes_turns_with_tpe() -> None:
    origins = [t.origin for t in study(2 * TPE_EVERY + TPE_FROM, predictor=_predict)]
    assert set(origins[TPE_FROM::TPE_EVERY]) <= {"tpe", "back-off"}
    assert origins.count("simulator") >= TPE_FROM - 3
    assert set(origins[1:TPE_FROM]) <= {"simulator", "back-off"}


def test_without_a_predictor_the_leading_knobs_come_first_and_what_was_measured_guides() -> None:
    trials = study(8)
    early = [t for t in trials[1:] if t.origin == "gp"]
    assert len(early) >= 5
    for trial in early:
        own = {n: v for n, v in trial.candidate.items() if world.DEFAULTS[n] != v}
        assert set(own) <= {"max_num_seqs", "max_num_batched_tokens"}
    # A mean of draws over the plane does better than its points at random.
    plane = [
        Candidate({"max_num_seqs": seqs, "max_num_batched_tokens": tokens})
        for seqs in world.LEVELS["max_num_seqs"]
        for tokens in world.LEVELS["max_num_batched_tokens"]
    ]
    works = [c for c in plane if world.truth(c).feasible and world.seqs_above_tokens(c) is None]

    def volume(candidates: Sequence[Candidate]) -> float:
        rows = [[world.truth(c).values[n] for n in OBJECTIVES] for c in candidates]
        return pareto.hypervolume(rows, SCALE)

    rng = np.random.default_rng(0)
    draws = [volume([works[int(i)] for i in rng.permutation(len(works))[: len(early)]]) for _ in range(50)]
    ours = [t.candidate for t in early if t.state is TrialState.COMPLETE]
    assert volume(ours) > float(np.median(draws))


def test_a_predictor_that_misranks_is_switched_off_for_good() -> None:
    trials = study(15, predictor=_mislead)
    origins = [t.origin for t in trials]
    first = origins.index("gp-instead")
    assert "simulator" not in origins[first:]
    found = ask(trials, 16, predictor=_predict)
    assert found is not None
    assert found.origin == "gp-instead"


def test_a_changed_space_keeps_its_history() -> None:
    trials = study(12)
    wider = World(levels={**world.LEVELS, "max_num_seqs": (8, 48, 96, 200, 300), "new": (None, 1, 2)})
    found = ask(trials, 12, wider)
    assert found is not None
    assert wider.contains(found.candidate)


def test_what_the_predictor_cannot_tell_apart_is_measured_once() -> None:
    space = World(levels={**world.LEVELS, "inert": (1, 2, 3, 4), "idle": (1, 2, 3, 4)})
    trials = study(14, space=space, predictor=_predict)
    acting = [tuple(v for k, v in t.candidate.items() if k in world.LEVELS) for t in trials]
    assert len(set(acting)) == len(acting)
    blind = study(14, space=space)
    assert all(t.origin in ("baseline", "gp", "tpe", "back-off", "random") for t in blind)


def test_a_ranking_is_judged_by_what_differs() -> None:
    level = [replace(t, measurements=(Measurement(values=dict.fromkeys(OBJECTIVES, 1.0 + 0.001 * t.number)),))
             for t in (world.trial(n, Candidate()) for n in range(8))]  # fmt: skip
    assert acquisition.trust(_predict, level, OBJECTIVES) is None
    apart = [t for t in study(14) if t.state is TrialState.COMPLETE]
    assert acquisition.trust(_predict, apart, OBJECTIVES) == 1.0
    assert (acquisition.trust(_mislead, apart, OBJECTIVES) or 0) < -0.9
    assert acquisition.trust(_predict, apart[:3], OBJECTIVES) is None
