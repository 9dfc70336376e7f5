"""What a new user types next: completion, the link of `serve`, the command of the login page, `--now`."""

import http.client
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.tuning.studies import VIRTUAL, command, environment, tuner, wait_for, write
from tuner.commands.serve import link
from tuner.engine.http import fresh_port
from tuner.history.store import Store

LOGIN = Path(__file__).parents[2] / "tuner" / "service" / "pages" / "templates" / "login.html"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("tuner fr", "front"),
        ("tuner profile res", "resolve"),
        ("tuner tune --dry", "--dry-run"),
        ("tuner pla", "plans"),
    ],
)
def test_a_shell_completes_commands_and_options(typed: str, expected: str, tmp_path: Path) -> None:
    asked = {
        "_TUNER_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    done = subprocess.run(
        command(), env=environment(tmp_path, asked), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [expected]


def test_bash_takes_the_script(tmp_path: Path) -> None:
    program = tmp_path / "tuner"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tuner "$@"\n')
    program.chmod(0o755)
    script = 'eval "$(tuner completion bash)"; COMP_WORDS=(tuner fr) COMP_CWORD=1; _tuner_completion tuner'
    more = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "-c", f"{script}; echo $COMPREPLY"],
        env=environment(tmp_path, more),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "front", done.stderr
    for shell in ("zsh", "fish"):
        assert "_TUNER_COMPLETE" in tuner(tmp_path, "completion", shell).stdout


def test_serve_prints_one_link_that_opens(tmp_path: Path) -> None:
    port = fresh_port()
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(
            command("serve", "--port", port), env=environment(tmp_path / "home"), stderr=log
        ) as served,
    ):
        try:
            wait_for(lambda: "open http" in (tmp_path / "log").read_text())
            said = (tmp_path / "log").read_text()
            (found,) = re.findall(r"https?://\S+", said)
            with urlopen(found, timeout=60) as answer:
                assert isinstance(answer, http.client.HTTPResponse)
                assert answer.status == 200
                assert "<html" in answer.read().decode()
        finally:
            served.terminate()


def test_the_link_is_one_that_a_browser_opens() -> None:
    assert link("127.0.0.1", 8642, secure=False) == "http://127.0.0.1:8642/"
    assert link("::1", 8642, secure=True) == "https://[::1]:8642/"
    assert not link("0.0.0.0", 8642, secure=False).startswith("http://0.0.0.0")


def test_the_command_of_the_login_page_works(tmp_path: Path) -> None:
    (line,) = re.findall(r"<code>(tuner [^<]*)</code>", LOGIN.read_text())
    done = tuner(tmp_path, *shlex.split(line)[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tuner_")


def test_a_night_that_a_blackout_leaves_out_is_no_failure(tmp_path: Path) -> None:
    """A timer that meets a planned pause does not alarm; docs/schedules.md says so."""
    home, study = tmp_path / "home", write(tmp_path, VIRTUAL)
    words = ("add", "night", "--study", study, "--cron", "* * * * *", "--hours", 4)
    assert tuner(home, "schedule", *words, "--blackout", "2020-01-01/2099-12-31").returncode == 0
    store = Store(f"sqlite:///{home / 'tuner.db'}", create=False)
    row = store.schedule("night")
    store.put_schedule(replace(row, created_at=row.created_at - timedelta(minutes=5)))
    store.close()
    done = tuner(home, "schedule", "run", "night")
    assert "blackout" in done.stderr, done.stderr
    assert done.returncode == 0


def test_a_schedule_runs_now_although_nothing_is_due(tmp_path: Path) -> None:
    home, study = tmp_path / "home", write(tmp_path, VIRTUAL.replace("trials: 3", "trials: 2"))
    words = ("add", "night", "--study", study, "--cron", "0 1 1 1 *", "--hours", 4)
    assert tuner(home, "schedule", *words).returncode == 0
    idle = tuner(home, "schedule", "run", "night")
    assert idle.returncode == 0
    assert "nothing is due (--now starts a run)" in idle.stderr
    done = tuner(home, "schedule", "run", "night", "--now")
    assert done.returncode == 0, done.stderr
    assert "schedule night: FINISHED" in done.stderr
    assert tuner(home, "run", "status").stdout.count("FINISHED") == 1
