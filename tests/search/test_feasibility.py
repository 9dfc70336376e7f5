"""What is learned from failures: walls and refused levels."""

from dataclasses import replace

from tests.search import world
from tests.search.world import World
from tuner.records import Candidate, Trial, TrialState, Violation
from tuner.search import acquisition as feasibility
from tuner.search.trial_view import encode

ENCODING = encode(World(), world.DEFAULTS)


def failed(
    number: int, violation: Violation | None = None, cause: str = "out_of_memory", **knobs: float
) -> Trial:
    trial = world.trial(number, Candidate({"block_size": 8}))
    return replace(
        trial,
        candidate=Candidate({**world.DEFAULTS, **knobs}),
        violation=violation or Violation(oom=0.2),
        cause=cause,
        state=TrialState.INFEASIBLE,
    )


def known(trials: list[Trial], **knobs: float) -> bool:
    point = ENCODING.point(Candidate({**world.DEFAULTS, **knobs}))
    assert point is not None
    return feasibility.Regions(ENCODING, trials).hold(point)


def test_more_of_what_ran_out_is_not_tried() -> None:
    wall = [failed(3, max_num_seqs=512)]
    assert known(wall, max_num_seqs=1024)
    assert not known(wall, max_num_seqs=256)
    assert not known(wall, max_num_seqs=1024, gpu_memory_utilization=0.85)
    assert not known(wall, max_num_seqs=1024, block_size=32)


def test_less_cache_than_too_little_is_not_tried() -> None:
    wall = [failed(3, Violation(kv=0.4), gpu_memory_utilization=0.75)]
    assert known(wall, gpu_memory_utilization=0.7)
    assert not known(wall, gpu_memory_utilization=0.8)


def test_a_level_that_only_ever_fails_is_not_tried_again() -> None:
    bad = [failed(n, Violation(), "block_size", block_size=8, max_num_seqs=s) for n, s in ((1, 64), (2, 32))]
    good = [world.trial(n, Candidate({"max_num_seqs": s})) for n, s in ((3, 64), (4, 32))]
    base = world.trial(0, Candidate(world.DEFAULTS), origin="baseline")
    assert known([base, *bad, *good], block_size=8)
    assert not known([base, *bad[:1], *good], block_size=8, max_num_seqs=256)
    worked = replace(world.trial(9, Candidate({"block_size": 8})), state=TrialState.COMPLETE)
    assert not known([base, *bad, *good, worked], block_size=8)
