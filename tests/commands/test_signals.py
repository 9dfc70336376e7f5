"""A signal ends a run with exit code 8 at any moment, and never with a traceback."""

import asyncio
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import typer

from tests.tuning.studies import WATCHDOG_S, command, environment, wait_for, write
from tuner.__main__ import RUNS, is_run
from tuner.commands.common import ends_by_signal, interruptible
from tuner.errors import INTERRUPTED, NotFound
from tuner.history.store import Store
from tuner.records import TrialState


def is_caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; before, the kernel ends it."""
    (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in each]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_a_signal_whose_exception_was_ignored_cancels_the_work_that_begins_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []
    swallowed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)

    async def work() -> None:
        await asyncio.sleep(0)
        begun.append("work")

    def ignored(_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    def command() -> None:
        with ends_by_signal():
            gone = type("Gone", (), {})()
            ref = weakref.ref(gone, ignored)
            del gone
            assert ref() is None
            interruptible(work(), lambda event: None)

    with pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == 8
    assert len(swallowed) == 1
    assert begun == []


def test_a_run_is_known_by_its_words() -> None:
    for words in RUNS:
        assert is_run([*words, "x"])
        assert is_run(["--no-color", *words])
    for words in ([], ["--no-color"], ["schedule", "list"], ["run", "tune"], ["--version"]):
        assert not is_run(words)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after_s", [0.05, 1.0, 3.0, 8.0])
def test_a_signal_ends_a_run_with_8_at_any_moment(
    tmp_path: Path, number: signal.Signals, after_s: float
) -> None:
    words = command("tune", str(write(tmp_path)), "--trials", "200", "--all-trials")
    with subprocess.Popen(
        words, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        wait_for(lambda: process.poll() is not None or is_caught(process.pid, signal.SIGTERM))
        time.sleep(after_s)
        process.send_signal(number)
        process.send_signal(number)  # as one who is impatient
        out, _ = process.communicate(timeout=WATCHDOG_S)
    assert process.returncode == INTERRUPTED, out
    assert "Traceback" not in out
    assert "Aborted!" not in out
    try:
        store = Store(f"sqlite:///{tmp_path / 'tuner.db'}", create=False)
        trials = [t for s in store.studies() for t in store.trials(s.id)]
    except NotFound:
        return
    assert TrialState.RUNNING not in [t.state for t in trials]
