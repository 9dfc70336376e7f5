"""Every `tuner` command of docs/mission.md, run as it stands there on a home with one tuned study."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.engine.real import INTERPRETER
from tests.service.test_one_truth import NOISE, NOISY, PLANTED, drive
from tests.tuning.studies import TRACE, command, environment, write
from tuner.engine.http import fresh_port
from tuner.tuning.virtual import HIDDEN

PAGE = (Path(__file__).parents[1] / "docs" / "mission.md").read_text()
LINES = list(dict.fromkeys(re.findall(r"`tuner ([^`]+)`", PAGE)))
SERVERS = ("serve", "capture --upstream URL")
ELSEWHERE = (
    "tune docs/examples/fleet.yaml --on auto", "tune STUDY.yaml --on auto", "tune STUDY.yaml", "demo",
)  # fmt: skip
"""Typed by the cluster tests, by the fixture below (in this process) and by the demonstration's own test."""


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands for the page's placeholders: a study, its run, its trace and its profile."""
    home = tmp_path_factory.mktemp("mission")
    study = write(home, NOISY, PLANTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNER_HOME", str(home))
        patch.delenv("TUNER_DATABASE_URL", raising=False)
        patch.setenv(HIDDEN, json.dumps([NOISE]))
        said = drive(home)
    challenger = said.profiles["challenger"]
    return {
        "STUDY.yaml": str(study), "STUDY": said.study_id, "RUN": said.run_id, "ID": str(challenger.id),
        "MODEL": "Qwen/Qwen2.5-7B-Instruct", "TRACE": str(TRACE), "NAME": "ci", "N": "0", "PY": INTERPRETER,
        "URL": "http://127.0.0.1:9", "home": str(home),
    }  # fmt: skip


def typed(line: str, names: dict[str, str]) -> list[str]:
    return [names.get(word, word) for word in line.split()]


def test_the_page_has_no_placeholder_that_nobody_fills(names: dict[str, str]) -> None:
    words = {word for line in LINES for word in line.split()}
    assert {word for word in words if word.isupper()} <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in LINES if line not in (*SERVERS, *ELSEWHERE)])
def test_a_command_of_the_page_ends_well(line: str, names: dict[str, str]) -> None:
    if "PY" in line.split() and not Path(INTERPRETER).is_file():
        pytest.skip("TUNER_TEST_VLLM names no interpreter; `make test-vllm` installs one")
    home = Path(names["home"])
    words = typed(line, names)
    if line.startswith("trace reshape"):
        words += ["-o", str(home / "reshaped.parquet")]
    if line.startswith("profile resolve"):
        words += ["--workload", "chat", "--alias", "challenger"]
    if line.startswith("profile promote"):
        words += ["--workload", "chat", "--reason", "shown"]
    done = subprocess.run(
        command(*words), env=environment(home), capture_output=True, text=True, cwd=home, check=False
    )
    assert done.returncode == 0, f"tuner {line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert done.stdout.strip() or done.stderr.strip()


@pytest.mark.slow
@pytest.mark.parametrize("line", SERVERS)
def test_a_server_of_the_page_listens_and_ends_with_a_signal(line: str, names: dict[str, str]) -> None:
    assert line in LINES
    port, home = fresh_port(), Path(names["home"])
    process = subprocess.Popen(
        command(*typed(line, names), "--port", port), env=environment(home), stdout=subprocess.DEVNULL
    )
    try:
        while True:
            assert process.poll() is None
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
