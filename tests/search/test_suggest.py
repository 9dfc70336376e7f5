"""The next candidate: order of origins, purity, dedupe, failures as constraints, the end of the space."""

import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.search import world
from tests.search.world import OBJECTIVES, World
from tuner.errors import BadInput
from tuner.records import Candidate, Measurement, Prediction, Slo, Trial, TrialState
from tuner.search import sampler, trial_view
from tuner.search.acquisition import StudyView
from tuner.search.trial_view import encode
from tuner.tuning.next_trial import Suggestion, suggest

SCALE = trial_view.scale(OBJECTIVES, [world.truth({}).values[n] for n in OBJECTIVES], Slo())


def ask(trials: Sequence[Trial], number: int, space: World | None = None, **more: Any) -> Suggestion | None:
    settings: dict[str, Any] = {"seed": 7, "baseline": Candidate(), "known": world.seqs_above_tokens, **more}
    history = StudyView(space=space or World(), trials=trials, objectives=OBJECTIVES, slo=Slo())
    return suggest(history, number=number, **settings)


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
    return trial_view.hypervolume(rows, SCALE)


@pytest.mark.slow
def test_the_search_covers_the_front_and_learns_where_it_fails() -> None:
    points = itertools.product(*world.LEVELS.values())
    everything = [Candidate(dict(zip(world.LEVELS, point, strict=True))) for point in points]
    best = covered([world.trial(i, c) for i, c in enumerate(everything)])
    studies = [study(40, seed=seed) for seed in range(3)]
    late = [t for trials in studies for t in trials[20:] if t.state is TrialState.INFEASIBLE]
    assert len(late) <= 9  # of 60
    assert sum(covered(trials) for trials in studies) >= 3 * 0.6 * best


@pytest.mark.slow
def test_same_history_and_seed_same_answer_in_another_process() -> None:
    code = (
        "from tests.search.test_suggest import study\nprint([t.candidate.digest[:12] for t in study(14)])\n"
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
    scale = trial_view.scale_of(trials, OBJECTIVES, Slo())
    assert scale is not None
    for measurements in ((), (first_part,)):  # no word of where it would have ended: as bad as the worst
        encoding = encode(World(), world.DEFAULTS)
        bare = [*trials[:11], replace(pruned, measurements=measurements)]
        rows = trial_view.encode_trials(encoding, bare, OBJECTIVES)
        assert rows[-1].values is None
        costs = np.array([each.values for each in sampler.frozen(encoding, rows, scale)])
        assert np.all(costs[-1] >= costs.max(axis=0))
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


def test_a_simulator_that_is_right_proposes_all_and_one_that_misranks_loses_its_say() -> None:
    origins = [t.origin for t in study(14, predictor=_predict)]
    assert set(origins[1:]) <= {"simulator"}
    misled = [t.origin for t in study(14, predictor=_mislead)]
    assert misled[1] == "simulator"
    assert set(misled[6:]) <= {"gp"}


@pytest.mark.parametrize("name", ["tpe", "nsga2", "random"])
def test_any_sampler_of_optuna_searches_under_the_same_rules(name: str) -> None:
    """What is known to fail is not launched, nothing twice, and the same history draws the same again."""
    trials = study(12, sampler=name)
    assert {t.origin for t in trials[1:]} <= {name}
    assert len({Candidate({**world.DEFAULTS, **t.candidate}) for t in trials}) == 12
    assert all(world.seqs_above_tokens(t.candidate) is None for t in trials)
    assert ask(trials, 12, sampler=name) == ask(trials, 12, sampler=name)


def test_the_gp_sampler_says_what_it_needs() -> None:
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("torch is installed")
    with pytest.raises(BadInput, match="needs torch"):
        sampler.make("gp", 0)


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
    assert all(t.origin in ("baseline", "gp", "random") for t in blind)
