"""What the comparisons say becomes a verdict in plain words, and it may be that there is no winner."""

import math
from datetime import UTC, datetime

import pytest

from tuner.records import Candidate, Measurement, Slo, Trial
from tuner.search.compare import Comparison
from tuner.search.compare import verdict as word_of
from tuner.tuning.verdict import Compared, judge, words

NOW = datetime(2026, 3, 1, tzinfo=UTC)
SLO = Slo(attainment=0.9)


def trial(number: int, attainment: float = 1.0) -> Trial:
    return Trial(
        id=number, study_id="s", run_id="r", number=number, candidate=Candidate({"max_num_seqs": number}),
        origin="baseline" if number == 0 else "tpe", started_at=NOW,
        measurements=(Measurement(values={"slo_attainment": attainment}),),
    )  # fmt: skip


def compared(metric: str, low: float, high: float, where: str = "confirm", number: int = 1) -> Compared:
    made = Comparison(
        metric=metric, base=1.0, other=1.0, log_ratio=(low + high) / 2, low=low, high=high, level=0.95,
        repeats=3, rows=100, verdict=word_of(metric, low, high),
    )  # fmt: skip
    return number, where, made


BETTER = compared("ttft_p95_ms", -0.6, -0.4)
WORSE = compared("tpot_p95_ms", 0.1, 0.2)
UNCLEAR = compared("goodput_rps", -0.1, 0.1)


def test_a_clear_winner_is_published_and_confirmed() -> None:
    found = judge(trial(1), trial(0), [BETTER, UNCLEAR], SLO, demonstration=False)
    assert (found.word, found.wins, found.confirmed) == ("clear winner", True, True)
    assert "ttft_p95_ms −39 % (−45 … −33, better)" in found.sentence
    assert "It meets the SLO." in found.sentence


def test_what_is_worse_is_told() -> None:
    found = judge(trial(1, 0.5), trial(0), [BETTER, WORSE], SLO, demonstration=False)
    assert (found.word, found.wins) == ("winner with a trade-off", True)
    assert "does not meet the SLO" in found.sentence


def test_noise_is_no_winner() -> None:
    found = judge(trial(1), trial(0), [UNCLEAR], SLO, demonstration=False)
    assert (found.word, found.wins, found.confirmed) == ("no clear winner", False, False)
    assert "within the noise" in found.sentence


def test_only_worse_is_no_winner() -> None:
    assert not judge(trial(1), trial(0), [WORSE], SLO, demonstration=False).wins


def test_the_baseline_may_stay() -> None:
    found = judge(trial(0), trial(0), [BETTER], SLO, demonstration=False)
    assert (found.word, found.wins) == ("no clear winner", False)


def test_the_held_out_slice_can_deny_it() -> None:
    held = compared("ttft_p95_ms", 0.1, 0.3, where="held_out")
    found = judge(trial(1), trial(0), [BETTER, held], SLO, demonstration=False)
    assert not found.wins
    assert "denies" in found.sentence


def test_a_held_out_slice_that_agrees_is_told() -> None:
    held = compared("ttft_p95_ms", -0.3, -0.1, where="held_out")
    assert "1 of 1 objectives" in judge(trial(1), trial(0), [BETTER, held], SLO, demonstration=False).sentence


def test_without_a_baseline_what_serves_wins_unconfirmed() -> None:
    found = judge(trial(1), None, [], SLO, demonstration=False)
    assert (found.wins, found.confirmed) == (True, False)


def test_a_demonstration_is_labelled_and_not_confirmed() -> None:
    found = judge(trial(1), trial(0), [BETTER], SLO, demonstration=True)
    assert (found.wins, found.confirmed) == (True, False)
    assert "Demonstration only" in found.sentence


@pytest.mark.parametrize(("low", "high"), [(-math.inf, math.inf), (-0.5, math.inf), (math.nan, math.nan)])
def test_what_cannot_be_told_is_written_and_not_a_crash(low: float, high: float) -> None:
    assert "ttft_p95_ms" in words(compared("ttft_p95_ms", low, high)[2])
