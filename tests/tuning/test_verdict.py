"""What the differences say becomes one word and one text, and it may be that there is no winner."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tuner.conclusions import Arm, Difference, Judgement, Where, Word
from tuner.records import Candidate
from tuner.report import words
from tuner.tuning.finalists import Verdict, exceeding, judge


def difference(metric: str, change: float | None, word: Word, where: Where = "confirm") -> Difference:
    """A difference of a baseline at 100."""
    low, high = (-1.0, None) if change is None else (change - 0.05, change + 0.05)
    after = None if change is None else 100.0 * (1 + change)
    return Difference(
        metric=metric, where=where, before=100.0, after=after, change=change, low=low, high=high, word=word,
        repeats=3,
    )  # fmt: skip


def arm(number: int, *changes: Difference, good: float = 1.0, dropped: str | None = None) -> Arm:
    """An arm under an SLO of 90 %."""
    return Arm(
        trial=number, candidate=Candidate({"max_num_seqs": number}), changed={"max_num_seqs": (0, number)},
        dropped=dropped, attainment=good, misses_slo_by=max(0.0, 0.9 - good), changes=changes,
    )  # fmt: skip


TODAY = arm(0)
BETTER = difference("ttft_p95_ms", -0.4, "better")
WORSE = difference("tpot_p95_ms", 0.15, "worse")
UNCLEAR = difference("goodput_rps", 0.01, "open")


def verdict(
    chosen: Arm,
    base: Arm = TODAY,
    *,
    others: tuple[Arm, ...] = (),
    drift: tuple[str, ...] = (),
    not_worse: Mapping[str, float] | None = None,
    demonstration: bool = False,
) -> Verdict:
    entered = () if chosen.trial == base.trial else (chosen,)
    return judge(
        base, (*entered, *others), chosen, attainment=0.9, drift=drift, not_worse=not_worse,
        demonstration=demonstration,
    )  # fmt: skip


def test_a_clear_winner_is_told_with_its_change_and_interval() -> None:
    found = verdict(arm(1, BETTER, UNCLEAR))
    assert (found.outcome, found.winner) == (Judgement.CLEAR_WINNER, 1)
    assert "ttft_p95_ms −40 % (−45 … −35, better)" in found.sentence
    assert "It meets the SLO." in found.sentence


def test_a_trade_off_is_called_one_in_the_first_line() -> None:
    found = verdict(arm(1, BETTER, WORSE))
    assert (found.outcome, found.winner) == (Judgement.TRADE_OFF, 1)
    assert found.sentence.startswith("A trade-off: trial 1 is worse in tpot_p95_ms")


def test_a_trade_off_within_not_worse_says_so() -> None:
    found = verdict(arm(1, BETTER, WORSE), not_worse={"tpot_p95_ms": 0.2})
    assert "within not_worse: tpot_p95_ms may be 20% worse" in found.sentence.splitlines()[0]


def test_where_no_trial_meets_the_slo_the_sentence_says_so_first() -> None:
    found = verdict(arm(1, BETTER, WORSE, good=0.81), arm(0, good=0.5), others=(arm(2, UNCLEAR, good=0.7),))
    assert found.outcome is Judgement.SLO_MISSED
    assert found.sentence.startswith("No trial meets the SLO: trial 1 comes nearest with 81.0% good requests")
    assert "so 9.0 percentage points are missing" in found.sentence
    assert "A trade-off" in found.sentence
    assert (found.winner, found.nearest) == (1, 1)


def test_where_no_trial_meets_the_slo_and_nothing_is_better_there_is_no_winner() -> None:
    found = verdict(arm(1, UNCLEAR, good=0.81), arm(0, good=0.85))
    assert (found.outcome, found.winner, found.nearest) == (Judgement.SLO_MISSED, None, 0)


def test_no_trial_is_nearest_to_the_slo_if_no_request_of_any_was_good() -> None:
    found = verdict(arm(1, BETTER, good=0.0), arm(0, good=0.0))
    assert found.sentence.startswith("No trial meets the SLO: none had a good request. 90.0% are required.")
    assert (found.outcome, found.winner, found.nearest) == (Judgement.SLO_MISSED, 1, None)


def test_a_winner_that_misses_an_slo_that_another_meets_says_so() -> None:
    found = verdict(arm(1, BETTER, good=0.5))
    assert "Another trial meets the SLO." in found.sentence


def test_drift_is_not_to_be_trusted_whatever_the_differences_say() -> None:
    found = verdict(arm(1, BETTER), drift=("the baseline's ttft_p95_ms was 123 in the search",))
    assert (found.outcome, found.winner) == (Judgement.NOT_TRUSTED, None)
    assert "was 123 in the search" in found.sentence


def test_noise_is_no_winner() -> None:
    found = verdict(arm(1, UNCLEAR))
    assert (found.outcome, found.winner) == (Judgement.NO_CLEAR_WINNER, None)
    assert "within the noise" in found.sentence


def test_unknown_noise_is_told_as_such() -> None:
    found = verdict(arm(1, difference("ttft_p95_ms", None, "open")))
    assert found.outcome is Judgement.NO_CLEAR_WINNER
    assert "not known yet" in found.sentence


def test_only_worse_is_no_winner() -> None:
    found = verdict(arm(1, WORSE))
    assert (found.outcome, found.winner) == (Judgement.BASELINE_STAYS, None)


def test_the_baseline_may_stay() -> None:
    found = verdict(TODAY, others=(arm(1, BETTER),))
    assert (found.outcome, found.winner) == (Judgement.BASELINE_STAYS, None)


def test_the_held_out_slice_can_deny_it() -> None:
    found = verdict(arm(1, BETTER, difference("ttft_p95_ms", 0.2, "worse", "held_out")))
    assert (found.outcome, found.winner) == (Judgement.BASELINE_STAYS, None)
    assert "contradicts" in found.sentence


def test_a_held_out_slice_that_agrees_is_told() -> None:
    found = verdict(arm(1, BETTER, difference("ttft_p95_ms", -0.2, "better", "held_out")))
    assert "Clearly better on the held-out slice: 1 of 1 objective." in found.sentence
    worse = difference("tpot_p95_ms", 0.17, "worse", "held_out")
    found = verdict(arm(1, BETTER, difference("ttft_p95_ms", -0.2, "better", "held_out"), worse))
    assert "1 of 2 objectives. Clearly worse: tpot_p95_ms." in found.sentence


def test_a_better_finalist_that_the_policy_does_not_choose_is_named() -> None:
    found = verdict(arm(1, UNCLEAR), others=(arm(4, BETTER, UNCLEAR),))
    assert (found.outcome, found.winner) == (Judgement.NO_CLEAR_WINNER, None)
    assert "Trial 4 is better in ttft_p95_ms, but the study's policy chooses trial 1." in found.sentence


def test_without_a_baseline_that_served_what_serves_wins() -> None:
    found = verdict(arm(1), arm(0, dropped="32 of 533 requests failed."))
    assert "did not serve this traffic (32 of 533 requests failed); trial 1 did." in found.sentence
    assert (found.outcome, found.winner) == (Judgement.BASELINE_FAILED, 1)


def test_a_demonstration_is_labelled() -> None:
    assert "Demonstration only" in verdict(arm(1, BETTER), demonstration=True).sentence


@pytest.mark.parametrize(
    ("changes", "limits", "names"),
    [
        ([WORSE], {"tpot_p95_ms": 0.1}, ["tpot_p95_ms"]),
        ([WORSE], {"tpot_p95_ms": 0.2}, []),
        ([WORSE], {"ttft_p95_ms": 0.1}, []),
        ([difference("goodput_rps", -0.3, "open")], {"goodput_rps": 0.1}, ["goodput_rps"]),
        ([difference("goodput_rps", 0.3, "better")], {"goodput_rps": 0.0}, []),
        ([difference("ttft_p99_ms", None, "open")], {"ttft_p99_ms": 0.1}, ["ttft_p99_ms"]),
        ([difference("tpot_p95_ms", 0.3, "worse", "held_out")], {"tpot_p95_ms": 0.1}, []),
    ],
)
def test_not_worse_is_held_against_what_was_measured(
    changes: list[Difference], limits: Mapping[str, float], names: list[str]
) -> None:
    assert [c.metric for c in exceeding(arm(1, *changes), limits)] == names


@pytest.mark.parametrize("change", [None, 0.0, -1.0, 12.5])
def test_what_cannot_be_told_is_written_and_not_a_crash(change: float | None) -> None:
    assert "ttft_p95_ms" in words.difference(difference("ttft_p95_ms", change, "open"))


@pytest.mark.parametrize(
    ("low", "high", "within", "said"),
    [
        (-0.0606, -0.005, 0.05, "the same within 7 %"),
        (-0.02, 0.03, 0.04, "the same within 4 %"),
        (-0.04, 0.12, 0.09, "the same within 12 %"),
        (-0.003, 0.002, 0.001, "the same within 1 %"),
        (-0.05, 0.05, 0.11, "open"),
        (-0.05, None, 0.05, "open"),
    ],
)
def test_the_share_within_which_two_are_the_same_contains_the_interval(
    low: float, high: float | None, within: float, said: str
) -> None:
    found = replace(difference("tpot_p95_ms", -0.02, "open"), low=low, high=high, within=within)
    assert words.word(found) == said
    assert words.word(replace(found, word="worse")) == "worse"
