"""Retention, knobs checked, baselines imported: what these commands say and do."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from tests.history import records
from tuner.cli import app
from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.records import Candidate, Launch, Measurement, RunState, TrialState

NOW = datetime.now(UTC)


def call(home: Path, *words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"TUNER_HOME": str(home)})


def aged(path: Path, days: float, text: str = "x" * 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    then = (NOW - timedelta(days=days)).timestamp()
    os.utime(path, (then, then))
    return path


def trial_folder(store: Store, home: Path, number: int, days: float, ttft: float) -> Path:
    """A finished trial with its launch, so many days old; the lowest ttft is its run's best."""
    study, begun = records.a_study(), NOW - timedelta(days=days)
    run = records.a_run(store, study, now=begun)
    folder = home / "trials" / study.id[:16] / f"{number:04d}-0"
    aged(folder / "engine.log", days)
    launch = Launch(id=f"l{number}", study_id=study.id, argv=(), started_at=begun, directory=str(folder))
    store.add_launch(launch)
    store.finish_launch(replace(launch, ended_at=begun))
    trial = store.start_trial(
        study_id=study.id, run_id=run.id, candidate=Candidate({"max_num_seqs": number}), number=number,
        attempt=0, seed=1, origin="search", now=begun, directory=str(folder),
    )  # fmt: skip
    measured = Measurement(values={"ttft_p95_ms": ttft, "goodput_rps": 100 / ttft}, launch_id=launch.id)
    store.finish_trial(replace(trial, state=TrialState.COMPLETE, ended_at=begun, measurements=(measured,)))
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_files_go_by_age_and_what_a_run_rests_on_stays(home: Path) -> None:
    store = Store(f"sqlite:///{home / 'tuner.db'}")
    best, old = trial_folder(store, home, 1, 40, 50.0), trial_folder(store, home, 2, 40, 90.0)
    young = trial_folder(store, home, 3, 3, 95.0)
    (run,) = store.runs()
    store.save_run(replace(run, state=RunState.FINISHED, ended_at=NOW))
    logs = [aged(home / "logs" / "tuner-1.jsonl", 200), aged(home / "nodes" / "gpu-1.log", 91)]
    kept = [aged(home / "logs" / "tuner.jsonl", 200), aged(home / "nodes" / "gpu-1.yaml", 200)]
    told = json.loads(call(home, "gc", "--json").stdout)
    assert (told["trials"]["count"], told["logs"]["count"]) == (1, 2)
    assert told["deleted"] is False
    assert old.is_dir()
    told = json.loads(call(home, "gc", "--apply", "--json").stdout)
    assert told["trials"] == {"count": 1, "bytes": 100}
    assert not old.exists()
    assert best.is_dir()
    assert young.is_dir()
    assert [path.exists() for path in logs] == [False, False]
    assert all(path.exists() for path in kept)
    assert [t.directory for t in store.trials(run.study_id)] == [str(best), None, str(young)]
    assert json.loads(call(home, "gc", "--json").stdout)["trials"]["count"] == 0
    store.close()


def test_what_lies_outside_this_home_is_left_alone(home: Path, tmp_path: Path) -> None:
    store = Store(f"sqlite:///{home / 'tuner.db'}")
    trial_folder(store, home, 1, 1, 50.0)
    other = trial_folder(store, tmp_path / "other", 2, 40, 90.0)
    call(home, "gc", "--apply")
    assert other.is_dir()
    store.close()


def test_closed_captures_go_by_age_and_other_files_stay(home: Path, tmp_path: Path) -> None:
    Store(f"sqlite:///{home / 'tuner.db'}").close()
    folder = tmp_path / "captures"
    old = aged(folder / "chat-20260101T000000Z.jsonl", 60)
    kept = [
        aged(folder / "chat-20260301T000000Z.jsonl", 2),
        aged(folder / "chat-20260101T000000Z.jsonl.part", 60),
        aged(folder / "my-notes.jsonl", 60),
        aged(folder / "readme.md", 60),
    ]
    assert call(home, "gc", "--captures", folder, "--apply").exit_code == 0
    assert not old.exists()
    assert all(path.exists() for path in kept)
    wrong = call(home, "gc", "--captures", tmp_path / "nowhere")
    assert isinstance(wrong.exception, BadInput)


def test_a_space_is_checked_against_an_engine(home: Path, tmp_path: Path) -> None:
    done = call(home, "knobs", "check", "bursty-mixed", "--model", "Qwen/Qwen2.5-7B-Instruct", "--json")
    assert done.exit_code == 0, done.exception
    told = json.loads(done.stdout)
    assert {"version", "platform", "findings"} == told.keys()
    assert all(finding["kind"] != "error" for finding in told["findings"])
    shown = call(home, "knobs", "check", "bursty-mixed")
    assert shown.exit_code == 0
    lacking = tmp_path / "lacking.yaml"
    lacking.write_text('about: x\nvllm: ">=0.99"\nknobs:\n  max_num_seqs: [1, 8]\n')
    refused = call(home, "knobs", "check", lacking)
    assert refused.exit_code == 2, refused.output
    assert "error" in refused.output


def test_knobs_lists_all_of_the_catalogue_with_a_reason_for_what_is_absent(home: Path) -> None:
    rows = json.loads(call(home, "knobs", "--json").stdout)["knobs"]
    assert {"knob", "flag", "default", "choices", "why_not"} == rows[0].keys()
    assert all(row["flag"] or row["why_not"] or row["knob"] == "preemption" for row in rows)


UNIT = """\
[Service]
Environment=HF_TOKEN=hf_canary VLLM_USE_V1=1
ExecStart=/opt/vllm/bin/vllm serve Qwen/Qwen2.5-7B-Instruct --max-num-seqs 64 --max-model-len 16384
"""


def test_what_runs_today_becomes_the_start_of_a_study(home: Path, tmp_path: Path) -> None:
    unit = tmp_path / "vllm.service"
    unit.write_text(UNIT)
    done = call(home, "baseline", "import", unit, "--space", "bursty-mixed")
    assert done.exit_code == 0, done.exception
    study = yaml.safe_load(done.stdout)
    assert study["model"] == "Qwen/Qwen2.5-7B-Instruct"
    assert study["baseline"] == {"max_num_seqs": 64}
    assert study["engine"]["args"] == {"max-model-len": 16384}
    assert "hf_canary" not in done.output
    assert "HF_TOKEN is a secret" in done.stderr
    target = tmp_path / "start.yaml"
    assert call(home, "baseline", "import", unit, "-o", target).exit_code == 0
    assert yaml.safe_load(target.read_text())["model"] == study["model"]
    again = call(home, "baseline", "import", unit, "-o", target)
    assert isinstance(again.exception, BadInput)


def test_one_of_several_engines_is_picked_by_name(home: Path, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    specs = [
        {"name": name, "modelURL": "Qwen/Qwen2.5-7B-Instruct", "vllmConfig": {"maxNumSeqs": seqs}}
        for name, seqs in (("chat", 32), ("batch", 512))
    ]
    values.write_text(yaml.safe_dump({"servingEngineSpec": {"modelSpec": specs}}))
    done = call(home, "baseline", "import", values, "--pick", "batch", "--json")
    assert json.loads(done.stdout)["study"]["baseline"] == {
        "enable_prefix_caching": False,  # what the chart writes where the values say nothing
        "max_num_seqs": 512,
    }
    wrong = call(home, "baseline", "import", values, "--pick", "bach")
    assert "did you mean 'batch'?" in str(wrong.exception)
