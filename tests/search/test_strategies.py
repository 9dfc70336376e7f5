"""Starts, promotions, order and drift."""

from dataclasses import replace

from tests.search import world
from tests.search.world import OBJECTIVES, World
from tuner.records import Candidate, Slo, Value
from tuner.search import trial_view
from tuner.search.guides import heuristics
from tuner.tuning.next_trial import drift_due


def test_starts_are_known_advice() -> None:
    advice = heuristics(World(), Candidate())
    assert [c["max_num_seqs"] for _, c in advice] == [64, 1024]
    assert all(World().contains(c) for _, c in advice)
    assert heuristics(World(levels={"block_size": (8, 16)}), Candidate()) == ()


def test_the_first_candidates_of_a_node_with_several_cards_use_them() -> None:
    """Split over all cards for latency, a replica on each for throughput; fewer where that fails."""
    levels: dict[str, tuple[Value, ...]] = {
        "max_num_seqs": (64, 1024), "tensor_parallel_size": (1, 2, 4, 8), "data_parallel_size": (1, 2, 4, 8),
    }  # fmt: skip
    found = dict(heuristics(World(levels=levels), Candidate()))
    sizes = {name: (c["tensor_parallel_size"], c["data_parallel_size"]) for name, c in found.items()}
    assert sizes == {"heuristic: latency": (8, 1), "heuristic: throughput": (1, 8)}
    heads = lambda c: "does not divide 28 heads" if c.get("tensor_parallel_size") == 8 else None  # noqa: E731
    (_, split), _ = heuristics(World(levels=levels), Candidate(), heads)
    assert split["tensor_parallel_size"] == 4
    alone = World(levels={"tensor_parallel_size": (1, 2)})
    assert [c["tensor_parallel_size"] for _, c in heuristics(alone, Candidate())] == [2, 2]


def test_promotions_are_screened_members_that_would_widen_the_front() -> None:
    base = world.trial(0, Candidate(), origin="baseline")
    good = replace(
        world.trial(1, Candidate({"max_num_batched_tokens": 2048, "max_num_seqs": 128})), screened=True
    )
    best = replace(
        world.trial(2, Candidate({"max_num_batched_tokens": 1024, "max_num_seqs": 64})), screened=True
    )
    poor = replace(world.trial(3, Candidate({"max_num_seqs": 1024})), screened=True)
    scale = trial_view.scale(OBJECTIVES, [world.truth({}).values[n] for n in OBJECTIVES], Slo())
    key = lambda candidate: candidate.digest  # noqa: E731
    share, found = trial_view.promotable([base, good, best, poor], scale, key)
    assert found == good
    assert 0.3 < share < 1
    relaunched = replace(world.trial(4, good.candidate), screened=False)
    share, found = trial_view.promotable([base, good, poor, relaunched], scale, key)
    assert found == poor
    assert share <= 0
    assert trial_view.promotable([], scale, key) == (0.0, None)
    assert trial_view.promotable([], None, key) == (0.0, None)


def test_the_baseline_is_looked_at_again_now_and_then() -> None:
    trials = [world.trial(0, Candidate(), origin="baseline")]
    trials += [world.trial(n, Candidate({"max_num_seqs": 64})) for n in range(1, 9)]
    assert not drift_due(trials[:8], every=8)
    assert drift_due(trials, every=8)
    assert not drift_due([*trials, world.trial(9, Candidate(), origin="baseline")], every=8)
