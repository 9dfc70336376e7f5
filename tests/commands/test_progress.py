"""The progress of a run: one live line with stage and time left; plain lines in a pipe and in a CI."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.commands.test_tables import on_a_terminal
from tests.history.records import a_run, a_study, start
from tests.tuning.studies import VIRTUAL, tuner, write
from tuner.commands.progress import LiveLine, listener
from tuner.history.store import Store
from tuner.replay.prepare import Progress
from tuner.tuning.context import SEARCH, RunEstimate, RunEvent
from tuner.tuning.trial import _words


class Hand:
    """A clock that is moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def event(kind: str, done: int = 0, total: int | None = 10, text: str = "") -> RunEvent:
    stage = text.partition(":")[0] if kind == "confirm" else SEARCH
    return RunEvent(kind=kind, text=text, stage=stage, done=done, total=total)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Hand:
    return Hand()


def test_the_time_left_is_of_the_whole_run(clock: Hand) -> None:
    """By the estimate at first, then by the trials' own pace; the confirmation is in it."""
    line = LiveLine(estimate=RunEstimate(trial_s=60.0, confirm_s=300.0), clock=clock)
    line.take(event("run"))
    assert line.left_s() == 10 * 60 + 300
    assert line.how_far() == "search 0/10 trials, about 15 min left"
    line.take(event("started", done=1))
    clock.now += 20
    assert line.left_s() == 10 * 60 + 300 - 20
    line.take(event("finished", done=1))
    assert line.left_s() == 9 * 20 + 300, "a trial takes 20 s, as measured"
    line.take(event("note", done=2, text="something"))
    assert line.how_far().startswith("search 1/10 trials")
    for number in range(2, 11):
        line.take(event("started", done=number))
        clock.now += 20
        line.take(event("finished", done=number))
    assert line.how_far() == "search 10/10 trials, about 5 min left"
    line.take(event("confirm", done=0, total=6, text="confirmation: launch 1 of 6, repeat 1 of 2"))
    assert line.how_far() == "confirmation 0/6 launches, about 6 min left"
    clock.now += 30
    line.take(event("confirm", done=1, total=6, text="confirmation: launch 2 of 6, repeat 1 of 2"))
    assert line.left_s() == 5 * 30
    line.take(event("confirm", done=0, total=4, text="attribution: launch 1 of 4"))
    assert line.how_far().startswith("attribution 0/4 launches")


def test_a_resumed_run_is_timed_by_its_own_trials(clock: Hand) -> None:
    line = LiveLine(estimate=RunEstimate(trial_s=60.0), clock=clock)
    line.take(event("run", done=7))
    clock.now += 1
    assert line.left_s() == 3 * 60 - 1


def test_the_deadline_bounds_the_time_left_and_it_is_never_negative(clock: Hand) -> None:
    line = LiveLine(estimate=RunEstimate(trial_s=60.0, confirm_s=60.0, window_s=120.0), clock=clock)
    line.take(event("run"))
    assert line.left_s() == 120
    clock.now += 500
    assert line.left_s() == 0
    assert line.how_far() == "search 0/10 trials, nearly done"
    without = LiveLine(clock=clock)
    without.take(event("run", total=None))
    assert without.how_far() == "search 0 trials"


def test_there_are_never_more_trials_than_there_are(clock: Hand) -> None:
    line = LiveLine(estimate=RunEstimate(trial_s=1.0), clock=clock)
    line.take(event("finished", done=12))
    assert "12/12" in line.how_far()
    line.take(event("confirm", done=12, total=9, text="confirmation: launch 13"))
    assert "12/12" in line.how_far()


def test_a_window_is_never_longer_than_it_is() -> None:
    said = [
        _words(Progress(phase=phase, slice="burst", done_s=done, total_s=3.0))
        for phase, done in (("load warm-up", -2.0), ("window", 3.0), ("last answers", 5.0))
    ]
    assert said == ["load warm-up burst", "window burst 3/3 s", "last answers burst"]


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_live_line_is_one_line_at_any_width(width: int, clock: Hand) -> None:
    line = LiveLine(estimate=RunEstimate(trial_s=60.0), clock=clock)
    line.take(event("phase", text="window \x1b[2J " + "x" * 300))
    screen = Console(width=width)
    shown = "".join(segment.text for segment in screen.render(line)).rstrip("\n")
    assert "\n" not in shown
    assert len(shown) <= width
    assert "\x1b" not in shown


def test_a_pipe_gets_plain_lines_with_how_far_the_run_is(tmp_path: Path) -> None:
    done = tuner(tmp_path / "home", "tune", write(tmp_path, VIRTUAL), "--trials", 3)
    assert done.returncode == 0, done.stderr
    assert all(c.isprintable() or c == "\n" for c in done.stdout + done.stderr)
    assert "(search 3/3 trials)" in done.stderr
    assert re.search(r"confirmation: launch 1 of \d+.*\(confirmation 0/\d+ launches\)", done.stderr)


def test_a_pipe_gets_a_line_between_each_launch_and_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    trial = start(store, a_run(store, a_study()), 7)
    store.close()
    at = Progress(phase="warm-up", slice="peak", done_s=0.0, total_s=3.0)
    loading, replaying = (
        replace(event("phase", text="x"), trial=trial, progress=each) for each in (None, at)
    )
    phases = (loading, replaying)
    with listener(tmp_path, ("ttft_p95_ms",)) as tell:
        for each in (replace(event("started"), trial=trial), *phases, *phases, event("confirm"), *phases):
            tell(each)
    said = capsys.readouterr().err.splitlines()
    assert said.count("trial 7 the engine is ready, the replay begins") == 2
    assert [n for n, line in enumerate(said) if "the replay begins" in line] == [1, 3]


@pytest.mark.slow
def test_a_terminal_gets_one_live_line_and_a_ci_none(tmp_path: Path) -> None:
    words = ("tune", str(write(tmp_path, VIRTUAL)), "--trials", "3")
    said = on_a_terminal(80, tmp_path / "home", *words, CI="", TERM="xterm")
    assert re.search(r"search \d/3 trials", said)
    assert "\x1b[2K" in said, "the line is drawn anew"
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", said)
    for word in re.findall(r"\bmax_\S*", plain):
        assert word.partition("=")[0] in ("max_num_seqs", "max_num_batched_tokens"), "a word is broken"
    quiet = on_a_terminal(80, tmp_path / "other", *words, CI="true")
    assert "\x1b[2K" not in quiet
    assert "(search 3/3 trials)" in quiet


def test_the_line_names_the_trial_and_its_attempt(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    trial = start(store, a_run(store, a_study()), 7)
    store.close()
    line = LiveLine()
    line.take(replace(event("phase", text="ready"), trial=trial))
    assert line.detail == "trial 7 ready"
