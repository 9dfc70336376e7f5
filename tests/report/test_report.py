"""A report is one file that tells what the history holds, and needs nothing from elsewhere."""

import math
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tuner.conclusions import Arm, Conclusion, Difference, Judgement, RunCost
from tuner.records import (
    Candidate,
    Measurement,
    Profile,
    ProfileKey,
    Run,
    RunState,
    Slice,
    Slo,
    Study,
    Trial,
    TrialState,
)
from tuner.report.board import failures
from tuner.report.document import ReportData, cell, markdown, render
from tuner.report.words import number

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
OBJECTIVES = ("ttft_p95_ms", "tpot_p95_ms", "goodput_rps")


def study() -> Study:
    return Study(
        id="ab" * 32, name="<chat> & co", model="m/7b", node="local", gpu_class="h100-80x1", workload="chat",
        engine_version="0.32.0", trace_digest="cd" * 32, space_digest="ef" * 32,
        slices=(Slice(name="peak", start_s=0, duration_s=60),), objectives=OBJECTIVES, slo=Slo(), seed=0,
        identity={}, spec={}, created_at=NOW,
    )  # fmt: skip


def trial(n: int, values: dict[str, float], state: TrialState = TrialState.COMPLETE) -> Trial:
    measured = (Measurement(values=values),) if values else ()
    return Trial(
        id=n + 1, study_id="ab" * 32, run_id="r", number=n, candidate=Candidate({"max_num_seqs": 8 * n}),
        state=state, origin="baseline" if n == 0 else "tpe", measurements=measured, started_at=NOW,
        reason=None if values else "refused <it>",
    )  # fmt: skip


TRIALS = (
    trial(0, {"ttft_p95_ms": 400.0, "tpot_p95_ms": 20.0, "goodput_rps": 4.0}),
    trial(1, {"ttft_p95_ms": 100.0, "tpot_p95_ms": 30.0, "goodput_rps": 6.0}),
    trial(2, {"ttft_p95_ms": math.inf, "tpot_p95_ms": 10.0, "goodput_rps": 1.0}),
    trial(3, {}, TrialState.INFEASIBLE),
)


RUN = Run(id="r", study_id="ab" * 32, state=RunState.FINISHED, started_at=NOW)


def said(sentence: str = "It | won.", **changes: object) -> Conclusion:
    """Trial 1 won over the baseline in TTFT, on the held-out slice too."""
    won = {"metric": "ttft_p95_ms", "before": 410.0, "after": 102.5, "change": -0.75, "low": -0.8}
    rows = [
        Difference(**won, where="confirm", high=-0.7, word="better", repeats=3),  # type: ignore[arg-type]
        Difference(**won, where="held_out", high=None, word="open", repeats=3),  # type: ignore[arg-type]
    ]
    best = Arm(trial=1, candidate=TRIALS[1].candidate, confirmed={"ttft_p95_ms": 102.5}, changes=tuple(rows))
    today = Arm(trial=0, candidate=TRIALS[0].candidate, confirmed={"ttft_p95_ms": 410.0})
    fields: dict[str, object] = {
        "run_id": RUN.id, "study_id": RUN.study_id, "at": NOW, "outcome": Judgement.CLEAR_WINNER,
        "sentence": sentence, "winner": 1, "baseline": today, "finalists": (best,), "repeats": 3,
        "cost": RunCost(search_s=3600.0, confirm_s=900.0, gpus=1),
    }  # fmt: skip
    return Conclusion(**(fields | changes))  # type: ignore[arg-type]


def data(*conclusions: Conclusion, winner: Profile | None = None) -> ReportData:
    return ReportData(
        study=study(), trials=TRIALS, conclusions=conclusions, launches=[], commands=["tuner front chat"],
        generated_at=NOW, winner=winner,
    )  # fmt: skip


def page(*conclusions: Conclusion, winner: Profile | None = None) -> str:
    return render(data(*conclusions, winner=winner))


def test_it_needs_no_network_and_its_only_script_is_its_own() -> None:
    text = page()
    assert re.findall(r"""(?:src|href)=["']?http|url\(|<link|@import""", text) == []
    assert text.count("<script") == 1
    assert "default-src 'none'" in text
    assert len(text) < 200_000


def test_what_users_wrote_is_escaped() -> None:
    text = page()
    assert "<chat>" not in text
    assert "&lt;chat&gt; &amp; co" in text
    assert "refused &lt;it&gt;" in text


def test_every_trial_its_reason_and_its_numbers_are_there() -> None:
    text = page()
    assert "∞" in text
    assert "INFEASIBLE" in text
    assert "tuner front chat" in text
    assert " %" not in text.partition("What the knobs did")[0].partition("<h1>")[2], "nothing was compared"


def test_the_markdown_twin_tells_the_same_and_breaks_no_table() -> None:
    text = markdown(data(said()))
    assert "> clear winner: It \\| won." in text
    assert "# &lt;chat&gt; & co" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    wanted = (
        "| 1 (winner) | 100 | 102.5 | −75 % (−80 … −70, better) | 30 | – |  | 6 | – |  | max\\_num\\_seqs=8 |"
    )
    assert wanted in rows
    assert "1 GPU-hours of search, 0.25 GPU-hours of confirmation" in text
    assert "refused &lt;it&gt;" in text
    assert cell("a\nb") == "a b"


def test_the_verdict_is_told_or_its_absence() -> None:
    assert "No run of this study has reached its verdict yet" in page()
    text = page(said("It won."))
    assert "clear winner: It won." in text
    assert "the held-out slice" in text
    assert "−75 % (−80 … +∞, no measurable difference)" in text
    assert "(winner)" in text
    assert "Trial 1 is the published winner." in text


def test_a_run_that_confirmed_nothing_hides_no_earlier_confirmation() -> None:
    later = said(
        "Not confirmed: the window is too short.", outcome=Judgement.NOT_CONFIRMED, winner=None, finalists=(),
        at=NOW + timedelta(days=1),
    )  # fmt: skip
    for text in (page(said("It won."), later), markdown(data(said("It won."), later))):
        first = text.index("Not confirmed: the window is too short.")
        assert first < text.index("Last confirmed 2026-03-01 12:00 UTC: clear winner: It won.")
        assert text.count("Not confirmed") == 1
    alone = page(later)
    assert "(winner)" not in alone
    assert "Last confirmed" not in alone


def test_a_winner_off_the_front_is_shown_and_explained() -> None:
    """Trial 4 is worse than trial 1 by its first measurement in everything, and won when measured again."""
    slower = trial(4, {"ttft_p95_ms": 101.0, "tpot_p95_ms": 30.5, "goodput_rps": 5.9})
    arm = Arm(trial=4, candidate=slower.candidate, confirmed={"ttft_p95_ms": 90.0})
    found = replace(data(said(winner=4, finalists=(arm,))), trials=(*TRIALS, slower))
    for text in (render(found), markdown(found)):
        assert "Trial 4 is the published winner: by its first measurement it is not on the front" in text
        assert "(winner)" in text


def test_the_winner_is_served_by_its_profile_s_command() -> None:
    """Not by the launch that measured it, whose scheduler class is the tuner's own."""
    profile = Profile(
        id=1, key=ProfileKey(model="m/7b", target="local", workload="chat"), version=1,
        candidate=Candidate({"max_num_seqs": 8}), engine_version="0.32.0", gpu_class="h100-80x1",
        study_id="ab" * 32, trial_id=2, argv=("--max-num-seqs", "8"), env={"VLLM_X": "a b"}, evidence={},
        digest="d", created_at=NOW,
    )  # fmt: skip
    assert "env 'VLLM_X=a b' vllm serve m/7b --max-num-seqs 8" in markdown(data(said(), winner=profile))
    assert "vllm serve" not in markdown(data(said()))


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (math.inf, "∞"), (1234.4, "1,234"), (0.12345, "0.1235"), (3, "3")]
)
def test_numbers_for_reading(value: object, shown: str) -> None:
    assert number(value) == shown


def test_a_trial_in_whose_middle_the_run_was_stopped_did_not_fail() -> None:
    stopped = replace(trial(4, {}, TrialState.ABORTED), cause="stopped", reason="the run was stopped")
    found = failures([*TRIALS, stopped])
    assert [(cause.state, len(cause.trials)) for cause in found] == [("INFEASIBLE", 1)]
    assert [cause.cause for cause in failures([replace(stopped, cause="node_lost")])] == ["node_lost"]
