"""A study leaves for Optuna's dashboard, spreadsheets and notebooks, with every trial."""

import csv
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import pyarrow.parquet as pq
import pytest

from tests.commands.test_care import call
from tests.history.records import NOW, a_conclusion, a_measurement, a_run, a_study, finished, start
from tuner.conclusions import PublishedProfile
from tuner.engine.http import fresh_port
from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.profiles.registry import key_of
from tuner.records import Candidate, RunState, Trial, TrialState, Violation
from tuner.report.optuna_study import export


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A history with a measured trial, one that ran out of memory and one that was aborted."""
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    study = a_study()
    run = a_run(store, study)
    finished(store, start(store, run, 0), a_measurement(3.5))
    failed = store.start_trial(
        study_id=study.id, run_id=run.id, candidate=Candidate({"max_num_seqs": 1024}), number=1, attempt=0,
        seed=1, origin="tpe", now=NOW, directory=None,
    )  # fmt: skip
    ended = {"ended_at": NOW + timedelta(seconds=9), "reason": "no memory is left", "cause": "out_of_memory"}
    store.finish_trial(
        replace(failed, state=TrialState.INFEASIBLE, violation=Violation(oom=0.4), **ended)  # type: ignore[arg-type]
    )
    lost = store.start_trial(
        study_id=study.id, run_id=run.id, candidate=Candidate({"max_num_seqs": 8}), number=2, attempt=0,
        seed=2, origin="random", now=NOW, directory=None,
    )  # fmt: skip
    store.finish_trial(replace(lost, state=TrialState.ABORTED, **ended))  # type: ignore[arg-type]
    store.close()
    return tmp_path


def test_every_trial_is_a_row_of_csv_and_parquet(home: Path) -> None:
    done = call(
        home, "study", "export", a_study().name, "--csv", home / "x.csv", "--parquet", home / "x.parquet"
    )
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader((home / "x.csv").read_text().splitlines()))
    assert [r["state"] for r in rows] == ["COMPLETE", "INFEASIBLE", "ABORTED"]
    assert rows[1]["knob.max_num_seqs"] == "1024"
    assert rows[1]["reason"] == "no memory is left"
    table = pq.read_table(home / "x.parquet")
    assert table.num_rows == 3
    assert table.column("number").to_pylist() == [0, 1, 2]
    assert table.column("goodput_rps").to_pylist() == [
        pytest.approx(float(rows[0]["goodput_rps"])),
        None,
        None,
    ]


def test_23_a_knob_that_a_trial_left_to_its_engine_is_exported_as_the_engine_had_it(tmp_path: Path) -> None:
    """Not as the baseline, which sets it, has it."""
    study, url = a_study(), f"sqlite:///{tmp_path / 'optuna.db'}"
    base = Trial(
        id=1, study_id=study.id, run_id="r", number=0, candidate=Candidate({"max_num_seqs": 64}),
        origin="baseline", effective={"max_num_seqs": 64, "block_size": 16}, started_at=NOW,
    )  # fmt: skip
    left = replace(
        base, id=2, number=1, origin="tpe", candidate=Candidate({"block_size": 32}),
        effective={"max_num_seqs": 256, "block_size": 32},
    )  # fmt: skip
    made = optuna.load_study(study_name=export(study, [base, left], url), storage=url)
    assert [t.params for t in made.trials] == [
        {"max_num_seqs": 64, "block_size": 16},
        {"max_num_seqs": 256, "block_size": 32},
    ]


def test_an_export_says_what_it_can_write_and_never_touches_our_own_database(home: Path) -> None:
    nothing = call(home, "study", "export", a_study().name)
    assert nothing.exit_code != 0
    assert "--optuna" in str(nothing.exception)
    own = call(home, "study", "export", a_study().name, "--optuna", f"sqlite:///{home / 'tuner.db'}")
    assert own.exit_code != 0
    assert "own database" in str(own.exception)
    bad = call(home, "study", "export", a_study().name, "--optuna", "nonsense://x")
    assert bad.exit_code != 0
    assert isinstance(bad.exception, BadInput)


def test_an_export_prints_no_warning_of_optuna(home: Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        done = call(home, "study", "export", a_study().name, "--optuna", f"sqlite:///{home / 'optuna.db'}")
    assert done.exit_code == 0, done.output
    assert [each for each in seen if issubclass(each.category, optuna.exceptions.ExperimentalWarning)] == []


def test_a_run_without_a_process_is_stopped_and_one_with_a_process_runs(home: Path) -> None:
    store = Store(f"sqlite:///{home / 'tuner.db'}")
    (run,) = store.runs()
    here = replace(run, pid=os.getpid(), host=socket.gethostname())
    asked = (("run", "list"), ("history",), ("run", "status"))
    with subprocess.Popen(["true"]) as ended:
        pass
    for row, lost in ((run, True), (replace(here, pid=ended.pid), True), (here, False),
                      (replace(here, pid=None), True), (replace(run, host=""), False)):  # fmt: skip
        store.save_run(row)
        for words in asked:
            told = " ".join(call(home, *words).output.split())
            assert ("the same command continues it" in told, "running" in told.lower()) == (lost, not lost)
        state = json.loads(call(home, "run", "list", "--json").output)[0]["state"]
        assert state == ("stopped" if lost else "RUNNING")
    store.acquire_lease(a_study().node, "other", now=datetime.now(UTC), ttl_s=3600)
    store.save_run(run)
    assert "RUNNING" in call(home, "run", "list").output, "another host has the node's lease"
    store.close()


@pytest.mark.parametrize("aliases", [("challenger", "baseline"), ("baseline",), ()])
def test_a_report_pulls_only_what_its_run_published(home: Path, aliases: tuple[str, ...]) -> None:
    store = Store(f"sqlite:///{home / 'tuner.db'}")
    (run,) = store.runs()
    profiles = {name: PublishedProfile(id=number, version=number) for number, name in enumerate(aliases, 1)}
    winner = 2 if "challenger" in aliases else None
    store.add_profile(
        key=key_of(a_study()), candidate=Candidate(), engine_version="0.32.0", gpu_class="h100-80x1",
        study_id=run.study_id, trial_id=None, argv=(), env={}, evidence={}, now=NOW,
    )  # fmt: skip
    store.save_run(
        replace(run, state=RunState.FINISHED, ended_at=NOW),
        a_conclusion(run, winner=winner, profiles=profiles),
    )
    for format in ("md", "html"):
        told = call(home, "report", a_study().name, "-o", "-", "--format", format).output
        use = told.partition("Use and repeat")[2]
        assert re.findall(r"profile export (\d+)", use) == [str(made.id) for made in profiles.values()][:1]
    store.close()


@pytest.fixture
def dashboard(home: Path) -> Iterator[str]:
    """The real optuna-dashboard on an exported study: its address."""
    url = f"sqlite:///{home / 'optuna.db'}"
    for _ in range(2):  # a second export takes the first one's place
        done = call(home, "study", "export", a_study().name, "--optuna", url)
        assert done.exit_code == 0, done.output
    port = fresh_port()
    command = [sys.executable, "-c", "from optuna_dashboard._cli import main; main()"]
    process = subprocess.Popen(
        [*command, url, "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def asked(url: str) -> Any:
    """What the dashboard's API answers, once it is up."""
    end = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def test_an_exported_study_opens_in_optuna_dashboard(home: Path, dashboard: str) -> None:
    pytest.importorskip("optuna_dashboard")
    (summary,) = asked(f"{dashboard}/api/studies")["study_summaries"]
    assert summary["study_name"].startswith(a_study().name)
    study = asked(f"{dashboard}/api/studies/{summary['study_id']}?after=0")
    states = [t["state"] for t in study["trials"]]
    assert states == ["Complete", "Fail", "Fail"]
    loaded = optuna.load_study(study_name=None, storage=f"sqlite:///{home / 'optuna.db'}")
    assert loaded.trials[1].params["max_num_seqs"] == 1024
    assert loaded.trials[1].constraints["oom"] == pytest.approx(0.4)
    assert loaded.trials[1].user_attrs["reason"] == "no memory is left"
    assert loaded.metric_names == list(a_study().objectives)
