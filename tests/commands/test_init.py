"""`tuner init`: by options, from a running server, from a command line, by asking; its study can be tuned."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.tuning.studies import TRACE, environment, tuner, wait_for
from tuner.engine.http import fresh_port
from tuner.lint import subject
from tuner.measures import MEASURES
from tuner.replay.plan import PLANS
from tuner.tuning.study import read

MODEL = "Qwen/Qwen2.5-7B-Instruct"
BARE = {"PATH": "/usr/bin:/bin"}
"""No `vllm` on the path."""


def written(folder: Path, *words: object, name: str = "study.yaml") -> dict[str, object]:
    """Write a study with these options. It can be read, and its dry run passes."""
    done = tuner(folder / "home", "init", name, *words, cwd=folder, more=BARE)
    assert done.returncode == 0, done.stderr
    assert f"next: tuner doctor {name}" in done.stderr
    dry = tuner(folder / "home", "tune", name, "--dry-run", cwd=folder)
    assert dry.returncode == 0, dry.stderr
    found = yaml.safe_load((folder / name).read_text())
    assert isinstance(found, dict)
    return found


def test_a_study_by_options_has_a_ttft_of_500_ms_and_is_never_overwritten(tmp_path: Path) -> None:
    found = written(tmp_path, "--model", MODEL, "--trace", TRACE, "--space", "interactive", "--trials", 7)
    assert found["slo"] == {"ttft_ms": 500, "tpot_ms": 50, "attainment": 0.95}
    assert found["space"] == "interactive"
    assert found["budget"] == {"trials": 7}
    assert found["engine"] == {"kind": "simulated", "card": "h100-80"}
    text = (tmp_path / "study.yaml").read_text()
    assert text.count("#") > 10, "each key has a comment"
    again = ("init", "study.yaml", "--model", "other")
    refused = tuner(tmp_path / "home", *again, cwd=tmp_path, more=BARE)
    assert (refused.returncode, "--force" in refused.stderr) == (2, True)
    assert (tmp_path / "study.yaml").read_text() == text
    forced = tuner(tmp_path / "home", *again, "--force", cwd=tmp_path, more=BARE)
    assert forced.returncode == 0
    assert "the study cannot run here yet" in forced.stderr, "the model is not here"
    assert yaml.safe_load((tmp_path / "study.yaml").read_text())["model"] == "other"


def test_a_study_from_a_running_server_has_its_model_and_its_knobs(tmp_path: Path) -> None:
    port = fresh_port()
    words = ["--max-model-len", "16384", "--max-num-seqs", "48", "--port", str(port)]
    program = [sys.executable, "-m", "tuner.simulator.app", MODEL, *words]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            program, env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"}, stderr=log, stdout=log
        ) as server,
    ):
        try:
            wait_for(lambda: subject._get(f"http://127.0.0.1:{port}/v1/models"))
            found = written(tmp_path, "--from-url", f"http://127.0.0.1:{port}")
        finally:
            server.terminate()
    assert found["model"] == MODEL
    assert isinstance(found["baseline"], dict)
    assert found["baseline"]["max_num_seqs"] == 48
    assert "gpu_memory_utilization" not in found["baseline"], "a default is not written"
    assert found["engine"] == {"kind": "simulated", "card": "h100-80", "args": {"max-model-len": 16384}}
    assert found["plan"] == "brief", "the sample is too short for the standard plan"


def test_a_study_from_a_command_line(tmp_path: Path) -> None:
    found = written(tmp_path, "--from", f"vllm serve {MODEL} --max-num-seqs 64 --max-model-len 8192")
    assert (found["model"], found["baseline"]) == (MODEL, {"max_num_seqs": 64})


def test_the_interpreter_of_vllm_on_the_path_is_taken(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text("#!/opt/vllm/bin/python3\n")
    script.chmod(0o755)
    more = {"PATH": f"{script.parent}:/usr/bin:/bin"}
    done = tuner(tmp_path / "home", "init", "--model", MODEL, cwd=tmp_path, more=more)
    assert done.returncode == 0
    assert "the study cannot run here yet" in done.stderr
    engine = read(tmp_path / "study.yaml").engine
    assert (engine.kind, engine.python) == ("vllm", "/opt/vllm/bin/python3")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "give --model"),
        (("--from-url", "http://127.0.0.1:9"), 6, "no answer"),
        (("--from-url", "127.0.0.1:8000"), 2, "such as http://"),
        (("--from-url", "http://127.0.0.1:9", "--from", "vllm serve x"), 2, "give only one of them"),
        (("--model", MODEL, "--trace", "nowhere.csv"), 4, "no file nowhere.csv"),
        (("--model", MODEL, "--space", "interactiv"), 4, "did you mean 'interactive'?"),
        (("--model", MODEL, "--slo", "ttft=fast"), 2, "--slo"),
        (("--model", MODEL, "--plan", "standrad"), 2, "plan"),
        (("--model", "a: [b"), 0, ""),
    ],
)
def test_a_wrong_answer_is_refused_and_nothing_is_written(
    words: tuple[str, ...], code: int, said: str, tmp_path: Path
) -> None:
    done = tuner(tmp_path / "home", "init", *words, cwd=tmp_path, more=BARE)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert (tmp_path / "study.yaml").exists() == (code == 0)


def test_it_asks_on_a_terminal(tmp_path: Path) -> None:
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        words = [sys.executable, "-m", "tuner", "init", "asked.yaml"]
        os.execve(sys.executable, words, environment(tmp_path / "home", BARE))
    os.write(master, f"\n{MODEL}\n\n\ninteractive\nttft=300\nchat\n".encode())
    said = b""
    while True:
        try:
            said += os.read(master, 65536)
        except OSError:  # the other end is closed
            break
    assert os.waitpid(pid, 0)[1] == 0, said.decode()
    os.close(master)
    found = read(tmp_path / "asked.yaml")
    assert (found.model, found.space, found.workload) == (MODEL, "interactive", "chat")
    assert (found.slo.ttft_ms, found.slo.tpot_ms) == (300, None)


def test_objectives_and_plans_are_listed(tmp_path: Path) -> None:
    told = json.loads(tuner(tmp_path, "objectives", "--json").stdout)
    assert [row["name"] for row in told] == list(MEASURES)
    table = tuner(tmp_path, "objectives").stdout
    assert all(name in table for name in MEASURES)
    assert [row["name"] for row in json.loads(tuner(tmp_path, "plans", "--json").stdout)] == list(PLANS)
    assert all(name in tuner(tmp_path, "plans").stdout for name in PLANS)
