"""What is learned from failures: walls, refused levels, steps back."""

from dataclasses import replace

from tests.search import world
from tests.search.world import World
from tuner.records import Candidate, Trial, TrialState, Violation
from tuner.search import candidate_sources as feasibility
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


def reason(trials: list[Trial], **knobs: float) -> str | None:
    point = ENCODING.point(Candidate({**world.DEFAULTS, **knobs}))
    assert point is not None
    return feasibility.Regions(ENCODING, trials).reason(point)


def test_more_of_what_ran_out_is_not_tried() -> None:
    wall = [failed(3, max_num_seqs=512)]
    assert "trial 3" in (reason(wall, max_num_seqs=1024) or "")
    assert reason(wall, max_num_seqs=256) is None
    assert reason(wall, max_num_seqs=1024, gpu_memory_utilization=0.85) is None
    assert reason(wall, max_num_seqs=1024, block_size=32) is None


def test_less_cache_than_too_little_is_not_tried() -> None:
    wall = [failed(3, Violation(kv=0.4), gpu_memory_utilization=0.75)]
    assert reason(wall, gpu_memory_utilization=0.7) is not None
    assert reason(wall, gpu_memory_utilization=0.8) is None


def test_a_level_that_only_ever_fails_is_not_tried_again() -> None:
    bad = [failed(n, Violation(), "block_size", block_size=8, max_num_seqs=s) for n, s in ((1, 64), (2, 32))]
    good = [world.trial(n, Candidate({"max_num_seqs": s})) for n, s in ((3, 64), (4, 32))]
    base = world.trial(0, Candidate(world.DEFAULTS), origin="baseline")
    assert reason([base, *bad, *good], block_size=8) == "block_size 8 failed in trials 1, 2"
    assert reason([base, *bad[:1], *good], block_size=8, max_num_seqs=256) is None
    worked = replace(world.trial(9, Candidate({"block_size": 8})), state=TrialState.COMPLETE)
    assert reason([base, *bad, *good, worked], block_size=8) is None


def test_a_step_back_follows_a_lack_of_memory_once() -> None:
    base = world.trial(0, Candidate(), origin="baseline")
    oom = failed(1, gpu_memory_utilization=0.95)
    steps = feasibility.back_off(ENCODING, [base, oom])
    assert steps[0]["gpu_memory_utilization"] == 0.9
    assert steps[1]["max_num_batched_tokens"] == 4096
    kv = failed(1, Violation(kv=0.8), gpu_memory_utilization=0.7)
    assert feasibility.back_off(ENCODING, [base, kv])[0]["gpu_memory_utilization"] == 0.8
    again = replace(failed(2, gpu_memory_utilization=0.9), origin="back-off")
    assert feasibility.back_off(ENCODING, [base, oom, again]) == ()
    assert feasibility.back_off(ENCODING, [base]) == ()
    assert feasibility.back_off(ENCODING, [failed(1, Violation(), "argument")]) == ()
