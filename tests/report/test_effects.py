"""Knob effects on trials with a known truth: one knob decides, one does nothing."""

import itertools
import math
from datetime import UTC, datetime

from tuner.records import Candidate, Measurement, Trial, TrialState
from tuner.report.effects import better, doubt, effects

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def trial(n: int, knobs: dict[str, int], ttft: float, state: TrialState = TrialState.COMPLETE) -> Trial:
    return Trial(
        id=n, study_id="s", run_id="r", number=n, candidate=Candidate(knobs), state=state, started_at=NOW,
        measurements=(Measurement(values={"ttft_p95_ms": ttft, "goodput_rps": 1000 / ttft}),),
    )  # fmt: skip


GRID = list(itertools.product((16, 64, 256), (1, 2, 3, 4)))
TRIALS = [
    trial(n, {"max_num_seqs": seqs, "block_size": block}, 10.0 * seqs * (1 + 0.01 * ((n * 7) % 5)))
    for n, (seqs, block) in enumerate(GRID)
]


def test_the_knob_that_decides_explains_all_and_the_idle_one_nothing() -> None:
    found = {e.knob: e for e in effects(TRIALS, "ttft_p95_ms")}
    assert found["max_num_seqs"].share > 0.99
    assert found["block_size"].share < 0.05
    assert [e.knob for e in effects(TRIALS, "ttft_p95_ms")] == ["max_num_seqs", "block_size"]


def test_levels_are_in_order_and_the_better_one_is_told_either_way() -> None:
    latency, goodput = (effects(TRIALS, name)[0] for name in ("ttft_p95_ms", "goodput_rps"))
    assert list(latency.levels) == ["16", "64", "256"]
    assert better(latency) == "16"
    assert better(goodput) == "16"


def test_trials_that_failed_or_have_no_number_do_not_count() -> None:
    failed = [trial(90 + n, {"max_num_seqs": 999}, 1.0, TrialState.INFEASIBLE) for n in range(9)]
    endless = [trial(80 + n, {"max_num_seqs": 998}, math.inf) for n in range(9)]
    assert effects(TRIALS + failed + endless, "ttft_p95_ms") == effects(TRIALS, "ttft_p95_ms")
    assert effects(TRIALS[:5], "ttft_p95_ms") == []


def test_an_absent_knob_is_a_level_of_its_own() -> None:
    bare = [trial(50 + n, {"block_size": 1}, 100.0) for n in range(3)]
    found = {e.knob: e for e in effects(TRIALS + bare, "ttft_p95_ms")}
    assert next(iter(found["max_num_seqs"].levels)) == "default"


def test_shares_that_few_trials_give_are_not_shown() -> None:
    assert doubt(effects(TRIALS, "ttft_p95_ms")) == ""
    assert doubt(effects(TRIALS[:5], "ttft_p95_ms")).startswith("Fewer than 6 trials completed")
    few = doubt(effects(TRIALS[:8], "ttft_p95_ms"))
    assert few == "No shares, because only 8 trials completed. 2 knobs with 6 values need at least 9 trials."


def test_shares_that_add_to_more_than_the_whole_are_not_shown() -> None:
    """Two knobs that are always turned together each explain everything."""
    together = [
        trial(n, {"max_num_seqs": 16 * (1 + n % 2), "block_size": 1 + n % 2}, 10.0 * (1 + n % 2) + 0.01 * n)
        for n in range(12)
    ]
    said = doubt(effects(together, "ttft_p95_ms"))
    assert said.startswith("No shares, because they add up to 200 %. The knobs changed together")
