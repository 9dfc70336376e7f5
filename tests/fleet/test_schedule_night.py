"""A whole night on the simulated engine: fired by the loop, ended by its window, production back in time."""

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.fleet.production import Production
from tests.tuning.studies import STUDY, VIRTUAL, tuner, write
from tuner.cli import app
from tuner.errors import BadInput, NotFound
from tuner.fleet.handover import handed_over
from tuner.fleet.schedule import Firing, Happening, loop
from tuner.history.entities import Schedule
from tuner.history.store import Store
from tuner.records import Run, RunState, TrialState
from tuner.tuning.run import RunLimits, tune
from tuner.tuning.study import load

DUE = datetime(2027, 3, 28, 0, 30, tzinfo=UTC)
LONG = timedelta(seconds=60)
CANARY = "canary-7f3a9c-secret"
KEY = ("--model", "Qwen/Qwen2.5-7B-Instruct", "--alias", "baseline")
FORMATS = ("vllm-yaml", "args", "env", "json", "kustomize", "systemd")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    yield made
    made.close()


@pytest.mark.slow
def test_a_night_fires_and_ends_inside_its_window_with_production_back(store: Store, tmp_path: Path) -> None:
    """The budget is endless, so that the window is what ends the night. The clock says it is that night."""
    began = datetime.now(UTC)

    def clock() -> datetime:
        return DUE - timedelta(seconds=1) + (datetime.now(UTC) - began)

    study = write(tmp_path, STUDY.replace("budget: {trials: 3}", "budget: {trials: 5000}"))
    store.put_schedule(
        Schedule(
            name="nightly", node="local", cron="30 1 * * *", timezone="Europe/Berlin",
            spec={"study": str(study), "hours": LONG.total_seconds() / 3600, "reserve_s": 30.0},
            created_at=DUE - timedelta(hours=5),
        )
    )  # fmt: skip
    production = Production(tmp_path / "production")
    production.register(tmp_path, "local")
    said: list[Happening] = []
    back: list[datetime] = []

    async def start(firing: Firing) -> Run | None:
        prepared = load(study, store=store, now=clock())
        limits = RunLimits(trials=5000, deadline=firing.deadline, early=False)
        with handed_over(store, prepared.node, home=tmp_path, clock=clock) as held:
            run = await tune(prepared, held, home=tmp_path, limits=limits, clock=clock)
        back.append(clock())
        store.scheduled_run(firing.schedule.name, run.id)
        return run

    async def wait(seconds: float) -> None:
        if any(each.kind in ("ended", "failed") for each in said):
            raise asyncio.CancelledError
        await asyncio.sleep(min(seconds, 0.5))

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(loop(store, clock=clock, start_run=start, wait=wait, tell=said.append))
    assert [each.kind for each in said] == ["start", "ended"], said
    (run,) = store.runs()
    assert run.state is RunState.FINISHED
    assert run.ended_at is not None
    assert run.ended_at < DUE + LONG
    assert back[0] < DUE + LONG
    assert production.log == ["drain", "restore"]
    assert production.up
    trials = store.trials(run.study_id)
    assert trials
    assert all(trial.state is not TrialState.RUNNING for trial in trials)
    assert store.schedule("nightly").last_run_id == run.id
    assert store.schedule("nightly").last_due == DUE


def test_a_window_that_cannot_hold_the_trials_is_refused_by_what_was_learned(tmp_path: Path) -> None:
    """The same by hand: after one run, a trial's time on this node is known."""
    study = write(tmp_path, VIRTUAL)
    home = tmp_path / "home"
    assert tuner(home, "tune", study, "--trials", "1").returncode == 0
    refused = tuner(home, "tune", study, "--hours", "0.002", "--min-trials", "50")
    assert refused.returncode == 5, refused.stderr
    assert "the run does not start" in refused.stderr
    assert re.search(r"median of (1 launch|[2-9] launches) on this node", refused.stderr), refused.stderr
    store = Store(f"sqlite:///{home / 'tuner.db'}")
    assert len(store.runs()) == 1
    store.close()


@pytest.mark.slow
def test_a_secret_of_the_engine_is_found_nowhere(tmp_path: Path) -> None:
    """Neither in the database, nor in logs, traces, reports, exports, nor in anything that is printed."""
    home = tmp_path / "home"
    secret = STUDY.replace(
        "  kind: simulated\n", f"  kind: simulated\n  env: {{HF_TOKEN: {CANARY}, MY_API_KEY: {CANARY}}}\n"
    )
    study = write(tmp_path, secret)
    done = tuner(home, "tune", study, "--trials", "2", "--json")
    assert done.returncode == 0, done.stderr
    said = [done.stdout, done.stderr]
    pulls: list[list[object]] = [["profile", "resolve", *KEY, "--format", form] for form in FORMATS]
    asked: list[list[object]] = [
        ["tune", study, "--dry-run"],
        ["report", "tiny", "-o", home / "report.html"],
        ["study", "show", "tiny", "--json"],
        ["front", "tiny", "--json"],
        ["run", "list", "--json"],
        ["trial", "show", "tiny", 0, "--json"],
        ["trial", "log", "tiny", 0],
        ["history", "--json"],
        ["profile", "list", "--json"],
        ["node", "list", "--json"],
        ["db", "backup", home / "copy.db"],
        *pulls,
    ]
    for words in asked:
        shown = CliRunner().invoke(app, [str(word) for word in words], env={"TUNER_HOME": str(home)})
        assert shown.exit_code == 0, f"{words}: {shown.output} {shown.exception!r}"
        said.append(shown.output)
    assert CANARY not in "".join(said)
    files = [path for path in home.rglob("*") if path.is_file()]
    assert any(path.name == "engine.log" for path in files)
    assert [str(path) for path in files if CANARY.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--cron", "0 1 * *", "--hours", "4"], "five fields"),
        (["--cron", "0 1 * * *"], "give the window's end"),
        (["--cron", "0 1 * * *", "--until", "5.30"], "such as 05:30"),
        (["--cron", "0 1 * * *", "--hours", "4", "--zone", "Berlin"], "there is no time zone 'Berlin'"),
        (["--cron", "0 1 * * *", "--hours", "4", "--blackout", "24.12."], "not a date such as"),
        (["--cron", "0 1 * * *", "--hours", "4", "--missed", "never"], "run or skip"),
    ],
)
def test_a_wrong_schedule_is_refused(words: list[str], sentence: str, tmp_path: Path) -> None:
    study = write(tmp_path)
    all_words = ["schedule", "add", "nightly", "--study", str(study), *words]
    done = CliRunner().invoke(app, all_words, env={"TUNER_HOME": str(tmp_path)})
    assert isinstance(done.exception, BadInput)
    assert sentence in str(done.exception)
    listed = CliRunner().invoke(app, ["schedule", "list", "--json"], env={"TUNER_HOME": str(tmp_path)})
    assert listed.exception is not None or listed.stdout.strip() == "[]"


def test_a_schedule_is_added_listed_and_removed(tmp_path: Path) -> None:
    study = write(tmp_path)

    def call(*words: object) -> Result:
        all_words = ["schedule", *(str(word) for word in words)]
        return CliRunner().invoke(app, all_words, env={"TUNER_HOME": str(tmp_path)})

    words = ["--study", study, "--cron", "0 1 * * 1-5", "--until", "05:30", "--zone", "Europe/Berlin"]
    done = call("add", "nightly", *words, "--blackout", "2026-01-01/2099-01-01", "--trials", "20")
    assert done.exit_code == 0, done.exception
    assert "schedule nightly: next on" in done.stderr
    assert "until 05:30 CE" in done.stderr
    assert "takes the place" not in done.stderr
    (row,) = json.loads(call("list", "--json").stdout)
    assert (row["node"], row["spec"]["study"], row["spec"]["trials"]) == ("local", str(study), 20)
    table = call("list").stdout  # in the schedule's zone, as `next` tells it
    assert " 01:00 " in table
    assert " 05:30 " in table
    upcoming = json.loads(call("next", "nightly", "--count", "9", "--json").stdout)
    assert len(upcoming) == 9
    assert all(each["blackout"] for each in upcoming)
    assert call("next", "nightly").exit_code == 0
    again = call("add", "nightly", *words)
    assert "replaces the earlier one; next on" in again.stderr
    (row,) = json.loads(call("list", "--json").stdout)
    assert row["spec"]["trials"] is None
    assert call("remove", "nightly").exit_code == 0
    assert isinstance(call("remove", "nightly").exception, NotFound)
