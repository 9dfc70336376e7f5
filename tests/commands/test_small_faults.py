"""Faults of the command line that are small, and were met: each with its siblings."""

import json
import socket
import sqlite3
from pathlib import Path

import pytest
import yaml

from tests.tuning.studies import STUDY, tuner, write
from tuner.engine.http import fresh_port
from tuner.history.best_per_night import Configuration, changes
from tuner.records import Candidate
from tuner.tuning.study import parse

FIRST_STUDY = Path(__file__).parents[2] / "docs" / "start" / "study.md"


def test_serve_on_a_port_that_is_taken_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = tuner(tmp_path, "serve", "--port", port)
    assert done.returncode == 5
    assert f"tuner: port {port} of 127.0.0.1 is taken by another program" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_on_an_address_that_is_not_here_says_so(tmp_path: Path) -> None:
    made = tuner(tmp_path, "token", "create", "--name", "ci", "--scope", "read")
    assert made.returncode == 0
    done = tuner(tmp_path, "serve", "--host", "192.0.2.1", "--port", fresh_port())
    assert done.returncode == 2
    assert "cannot listen on 192.0.2.1" in done.stderr


@pytest.mark.parametrize("below", [False, True])
def test_doctor_on_a_home_that_is_a_file(tmp_path: Path, below: bool) -> None:
    path = tmp_path / "home"
    path.write_text("not a folder")
    done = tuner(path / "deeper" if below else path, "doctor", "--json")
    assert done.returncode == 11, done.stderr
    found = json.loads(done.stdout)
    checks = found["checks"] if isinstance(found, dict) else found
    home = next(check for check in checks if check["name"] == "home")
    assert home["found"] == f"{path} is a file, not a folder"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("to", ["home", "nowhere", "file"])
def test_doctor_on_a_home_that_is_a_link_to_no_folder(tmp_path: Path, to: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "home").symlink_to(tmp_path / to)
    done = tuner(tmp_path / "home", "doctor", "--json")
    assert done.returncode == 11, done.stderr
    assert f"{tmp_path / 'home'} is a " in done.stdout


def test_what_the_simulated_engine_lacks_is_not_vllms_fault(tmp_path: Path) -> None:
    shown = tuner(tmp_path, "knobs").stdout
    assert "the simulated engine does not have it" in shown
    assert "vLLM" not in shown
    study = write(tmp_path, STUDY.replace("max-model-len: 16384", "max-model-len: 16384, enable-dbo: true"))
    said = tuner(tmp_path, "tune", study, "--dry-run").stderr
    assert "the simulated engine has no argument 'enable-dbo'" in said


def test_the_database_is_copied(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert tuner(home, "token", "create", "--name", "ci", "--scope", "read").returncode == 0
    copied = tmp_path / "copy.db"
    done = tuner(home, "db", "copy", f"sqlite:///{copied}")
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(copied) as database:
        assert database.execute("SELECT name FROM tokens").fetchall() == [("ci",)]
    again = tuner(home, "db", "copy", f"sqlite:///{copied}")
    assert again.returncode == 5
    assert "the target is not empty" in again.stderr


def test_two_configurations_differ_in_all_that_an_engine_runs_with() -> None:
    one = Configuration(
        engine_version="0.27.1",
        trace_digest="a" * 64,
        gpu_class="h100",
        candidate=Candidate({"max_num_seqs": 4, "block_size": 16}),
        arguments={"dtype": "auto"},
        environment={"A": "1"},
    )
    other = Configuration(
        engine_version="0.32.0",
        trace_digest="b" * 64,
        gpu_class="a100",
        candidate=Candidate({"max_num_seqs": 8}),
        arguments={"dtype": "bfloat16"},
        environment={},
    )
    found = [(each.kind, each.name, each.before, each.after) for each in changes(one, other)]
    assert found == [
        ("engine", "version", "0.27.1", "0.32.0"),
        ("traffic", "trace", "a" * 12, "b" * 12),
        ("gpu", "class", "h100", "a100"),
        ("knob", "block_size", "16", None),
        ("knob", "max_num_seqs", "4", "8"),
        ("argument", "dtype", "auto", "bfloat16"),
        ("environment", "A", "1", None),
    ]
    assert changes(one, one) == ()


SPACE = """\
knobs:
  max_num_seqs: [4, 16]
  scheduling_policy: [fcfs, priority]
  enable_prefix_caching: [true, false]
"""


def test_m24_knobs_that_this_trace_cannot_judge_are_said_aloud(tmp_path: Path) -> None:
    study = write(tmp_path, space=SPACE)
    for more in ((), ("--json",)):
        done = tuner(tmp_path, "tune", study, "--dry-run", *more)
        assert done.returncode == 0, done.stderr
        said = done.stdout if more else done.stderr
        for name, why in (
            ("scheduling_policy", "every request of the trace has the same priority"),
            ("enable_prefix_caching", "no prompts of the trace share a prefix"),
        ):
            assert name in said
            assert why in said
    told = json.loads(done.stdout)["unjudged"]
    assert set(told) == {"scheduling_policy", "enable_prefix_caching"}


def test_m14_a_new_study_has_a_ttft_of_500_ms_and_one_without_keeps_its_meaning() -> None:
    examples = [
        block
        for block in FIRST_STUDY.read_text().split("```yaml\n")[1:]
        if "slo:" in block.split("```", 1)[0]
    ]
    assert examples
    for block in examples:
        assert yaml.safe_load(block.split("```", 1)[0])["slo"]["ttft_ms"] == 500
    bare = parse(STUDY.replace("slo: {ttft_ms: 500, tpot_ms: 50}\n", ""), name="x")
    assert bare.slo.ttft_ms is None
