"""A report is one file that tells what the history holds, and needs nothing from elsewhere."""

import math
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tuner.commands.front import say_last_confirmed
from tuner.conclusions import Arm, Attribution, Conclusion, Difference, Judgement, RunCost
from tuner.records import (
    Candidate,
    Launch,
    Measurement,
    Profile,
    ProfileKey,
    Run,
    RunState,
    Slice,
    SliceMeasurement,
    Slo,
    Study,
    Trial,
    TrialState,
)
from tuner.report.board import Board, failures, spent
from tuner.report.board import board as board_with
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
    assert "−75 % (−80 … +∞, open)" in text
    assert "(winner)" in text
    assert "Trial 1 is the published winner." in text


def test_a_run_that_confirmed_nothing_hides_no_earlier_confirmation(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
    say_last_confirmed(board_with(study(), TRIALS, (said("It won."), later)))
    say_last_confirmed(board_with(study(), TRIALS, (later,)))
    assert capsys.readouterr().out == "Last confirmed 2026-03-01 12:00: clear winner: It won.\n"


def test_a_winner_off_the_front_is_shown_and_explained() -> None:
    """Trial 4 is worse than trial 1 by its first measurement in everything, and won when measured again."""
    slower = trial(4, {"ttft_p95_ms": 101.0, "tpot_p95_ms": 30.5, "goodput_rps": 5.9})
    arm = Arm(trial=4, candidate=slower.candidate, confirmed={"ttft_p95_ms": 90.0})
    found = replace(data(said(winner=4, finalists=(arm,))), trials=(*TRIALS, slower))
    for text in (render(found), markdown(found)):
        assert "Trial 4 is the published winner. By its first measurement it is not on the front." in text
        assert "But the policy of the study compares the confirmed values of the finalists, and chose" in text
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


def test_a_failed_launch_of_the_confirmation_is_told() -> None:
    def launch(number: int, directory: str, verdict: str | None) -> Launch:
        return Launch(
            id=str(number), study_id="s", argv=(), started_at=NOW, directory=directory, verdict=verdict
        )

    died = "controller: its controller died"
    launches = [
        launch(1, "1-confirm-0123abcd-1-0", died), launch(2, "1-confirm-0123abcd-2-0", None),
        launch(3, "0-confirm-0123abcd-1-0", "stopped"), launch(4, "3-1", "oom: no memory"),
    ]  # fmt: skip
    (found,) = failures(TRIALS[:2], launches)
    assert (found.cause, found.state, found.reason) == ("controller", "confirmation", "its controller died")
    assert [t.number for t in found.trials] == [1]
    assert spent(TRIALS[:2], launches).failed_launches == 2


def test_the_study_file_is_that_of_the_last_run_that_ended() -> None:
    goes_on = replace(RUN, state=RunState.RUNNING)
    ended = replace(RUN, state=RunState.FINISHED, summary={"study_file": {"not_worse": {"tpot_p95_ms": 0.5}}})
    for runs in ([ended, RUN], [goes_on, ended]):
        assert "not_worse:\n  tpot_p95_ms: 0.5" in markdown(replace(data(), runs=runs))
    alone = replace(data(), runs=[goes_on])
    assert "not_worse" not in markdown(alone)
    for text in (markdown(alone), render(alone)):
        assert "run that ended" not in text
        assert "file of the run that has not ended" in text


def board(*trials: Trial) -> Board:
    return Board(
        study=study(), trials=trials, base=TRIALS[0], front=(), conclusion=said(), confirmation=said()
    )


def test_an_attempt_that_ended_early_has_no_confirmed_values_of_a_later_one() -> None:
    lost = replace(TRIALS[1], id=90, state=TrialState.ABORTED, measurements=())
    again = replace(TRIALS[1], id=91, attempt=1)
    found = board(TRIALS[0], lost, again)
    assert found.row(lost).confirmed("ttft_p95_ms") is None
    assert found.row(lost).change("ttft_p95_ms") is None
    assert found.row(again).confirmed("ttft_p95_ms") == 102.5
    assert found.row(TRIALS[0]).confirmed("ttft_p95_ms") == 410.0


def test_a_trial_that_another_run_measured_again_is_named_beside_the_confirmed_values() -> None:
    repeat = Measurement(values={"ttft_p95_ms": 9.0}, purpose="confirm", repeat=1)
    earlier = replace(TRIALS[2], measurements=(*TRIALS[2].measurements, repeat))
    own = replace(TRIALS[1], measurements=(*TRIALS[1].measurements, repeat))
    assert "Another run" not in board(*TRIALS).sources
    assert "Another run" not in board(TRIALS[0], own).sources
    assert "Another run measured trial 2 again; `tuner trial show`" in board(own, earlier).sources
    doubted = replace(
        said(), run_id="r2", outcome=Judgement.NOT_TRUSTED, winner=None,
        finalists=(Arm(trial=2, candidate=Candidate({}), confirmed={"ttft_p95_ms": 9.0}),),
    )  # fmt: skip
    newest = "The newest run measured trial 2 again; `tuner trial show`"
    assert newest in replace(board(own, earlier), conclusion=doubted).sources
    part = SliceMeasurement(
        name="s", window_s=1.0, values={}, outcomes_file="/t/2-confirm-01234567-1-0/s.parquet"
    )
    begun = replace(TRIALS[2], measurements=(*TRIALS[2].measurements, replace(repeat, slices=(part,))))
    for run, measured_by in (("0123456789abcdef", newest), ("f123456789abcdef", "Another run measured")):
        stopped = replace(said(), run_id=run, outcome=Judgement.NOT_CONFIRMED, winner=None, finalists=())
        assert measured_by in replace(board(own, begun), conclusion=stopped).sources


def test_a_finalist_that_was_confirmed_without_a_relaunch_has_a_row_beside_the_front() -> None:
    screened = replace(TRIALS[2], screened=True)
    again = Arm(trial=2, candidate=screened.candidate, confirmed={"ttft_p95_ms": 390.0})
    concluded = replace(said(), finalists=(*said().finalists, again))
    shown = replace(board(*TRIALS[:2], screened), confirmation=concluded, conclusion=concluded)
    assert [(row["trial"], row["role"]) for row in shown.rows()] == [
        (0, "baseline"),
        (1, "winner"),
        (2, "finalist"),
    ]
    assert shown.screened == (
        "Trial 2 was confirmed without a relaunch: the first values are from a running engine."
    )
    text = markdown(replace(data(), trials=shown.trials, conclusions=[concluded]))
    assert "| 2 (finalist) |" in text
    assert shown.screened in text


def test_a_profile_that_leaves_knobs_out_is_of_the_reduced_trial() -> None:
    repeat = Measurement(values={"ttft_p95_ms": 9.0}, purpose="confirm", repeat=1)
    reduced = replace(TRIALS[2], measurements=(*TRIALS[2].measurements, repeat))
    found = Attribution(run_id="r", study_id="s", at=NOW, winner=1, reduced=2, published=True)
    shown = replace(board(TRIALS[0], TRIALS[1], reduced), attribution=found)
    assert "Another run" not in shown.sources
    assert "The attribution measured trial 2 again; `tuner trial show`" in shown.sources
    assert shown.published.startswith("Trial 1 won. ")
    assert shown.published.endswith(
        "The published profile is trial 2: it leaves out the knobs that give nothing."
    )
    kept = replace(shown, attribution=replace(found, published=False))
    assert kept.published.startswith("Trial 1 is the published winner.")


def test_a_winner_with_the_values_of_a_trial_on_the_front_is_not_told_to_be_off_it() -> None:
    twin = replace(TRIALS[1], id=70, number=7)
    shown = replace(board(TRIALS[0], TRIALS[1], twin), front=(twin,))
    assert not shown.chosen_on_front
    assert shown.published == "Trial 1 is the published winner."
