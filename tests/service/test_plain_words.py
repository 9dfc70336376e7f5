"""No command, page or report shows how Python writes nothing: driven over runs that ended in every way."""

import json
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.commands.test_care import call
from tests.history.records import (
    NOW,
    a_conclusion,
    a_launch,
    a_measurement,
    a_run,
    a_study,
    finished,
    start,
)
from tests.service.world import World
from tuner.conclusions import Judgement
from tuner.history.entities import Schedule
from tuner.history.store import Store
from tuner.profiles import registry
from tuner.records import JSON, Node, RunState, Study, TrialState
from tuner.service.pages import render

FORBIDDEN = re.compile(r"\b(None|nan|NaN|inf|Infinity)\b")
WAYS = ("cancelled", "failed", "unconfirmed", "gone", "running", "endless", "empty")


def a_home(store: Store) -> dict[str, Study]:
    """A study for each way in which a run can end without a winner, and one without a run."""
    made = {way: store.add_study(a_study(way, node=way)) for way in WAYS}
    store.add_node(Node(name="cancelled", gpu_class="h100-80x1"))
    for way, study in made.items():
        if way == "empty":
            continue
        run = a_run(store, study)
        launch = replace(a_launch(study, way), started_at=NOW + timedelta(minutes=1), timeline={})
        store.add_launch(launch)
        base = start(store, run, 0, origin="baseline")
        if way == "failed":
            finished(store, base, state=TrialState.INFEASIBLE)
            state = RunState.FAILED
        elif way == "cancelled":
            store.finish_trial(replace(base, state=TrialState.ABORTED))
            state = RunState.CANCELLED
        else:
            number = float("inf") if way == "endless" else 120.0
            finished(store, base, a_measurement(number, launch_id=way))
            finished(store, start(store, run, 1), a_measurement(number))
            state = RunState.FINISHED
        if way not in ("running", "gone"):
            store.save_run(replace(run, state=state, ended_at=NOW + timedelta(hours=1), trials_limit=None))
        if way == "gone":
            store.cancel_run(run.id)
            store.open_run(
                study.id, trials_limit=None, deadline=None, now=NOW + timedelta(days=1), pid=None, host=""
            )
    return made


def unmeasured(store: Store, study: Study) -> None:
    """A profile of a configuration of which no number is known, and a conclusion without one."""
    run = a_run(store, study, now=NOW + timedelta(days=2))
    trial = store.finish_trial(replace(start(store, run, 9), state=TrialState.INFEASIBLE))
    evidence: dict[str, JSON] = {"confirmed": False, "run": run.id, "sentence": None, "repeats": None}
    for argv in ((), ("--max-num-seqs", "4")):
        registry.publish(
            store, study=study, trial=trial, argv=argv, env={}, evidence=evidence, now=NOW, alias="baseline"
        )
    ended = replace(run, state=RunState.FINISHED, ended_at=NOW + timedelta(days=3))
    nothing = a_conclusion(
        ended, outcome=Judgement.NOTHING_SERVED, winner=None, baseline=None, finalists=(), noise=(),
        sentence="No candidate completed.",
    )  # fmt: skip
    store.save_run(ended, nothing)


@pytest.fixture
def home(world: World) -> World:
    made = a_home(world.store)
    unmeasured(world.store, made["unconfirmed"])
    world.store.put_schedule(
        Schedule(name="nightly", node="failed", cron="0 22 * * *", timezone="UTC",
                 spec={"study": "chat.yaml", "hours": 2}, created_at=NOW)
    )  # fmt: skip
    return world


def reads(store: Store) -> list[list[object]]:
    """Every command that reads, on everything that is there."""
    found: list[list[object]] = [["study", "list"], ["run", "list"], ["profile", "list"], ["node", "list"],
                                 ["schedule", "list"], ["token", "list"], ["history"],
                                 ["history", "--metric", "ttft_p95_ms"]]  # fmt: skip
    for study in store.studies():
        found += [["study", "show", study.name], ["front", study.name, "--timings"],
                  ["report", study.name, "-o", "-"], ["report", study.name, "--format", "md", "-o", "-"],
                  ["run", "list", "--study", study.name]]  # fmt: skip
        for trial in store.trials(study.id):
            found.append(["trial", "show", study.name, trial.number])
    found += [["run", "status", run.id] for run in store.runs()]
    profiles = store.profiles()
    found += [["profile", "show", profile.id] for profile in profiles]
    return [*found, ["profile", "diff", profiles[0].id, profiles[1].id]]


def test_no_command_shows_how_python_writes_nothing(home: World) -> None:
    for words in reads(home.store):
        done = call(home.home, *words)
        assert done.exit_code == 0, (words, done.output)
        said = done.output if "report" not in words else done.output.partition("<main>")[2] or done.output
        assert not FORBIDDEN.search(said), (words, FORBIDDEN.findall(said), said)


def test_json_of_every_command_holds_no_number_that_is_none(home: World) -> None:
    for words in reads(home.store):
        if words[0] == "report":
            continue
        done = call(home.home, *words, "--json")
        assert done.exit_code == 0, (words, done.output)
        json.loads(done.stdout, parse_constant=pytest.fail)


def test_no_page_shows_how_python_writes_nothing(home: World) -> None:
    client = TestClient(home.app, base_url="http://localhost")
    paths = ["/", "/studies", "/profiles", "/schedules", "/profiles/1", "/profiles/1/diff/2"]
    for study in home.store.studies():
        paths += [f"/studies/{study.id}", f"/history?metric=ttft_p95_ms&node={study.name}&since=2026-03-01"]
        paths += [f"/studies/{study.id}/trials/{t.number}" for t in home.store.trials(study.id)]
    for path in paths:
        answer = client.get(path)
        assert answer.status_code == 200, (path, answer.text)
        shown = re.sub(r"<[^>]*>", " ", answer.text)
        assert not FORBIDDEN.search(shown), (path, FORBIDDEN.findall(shown))


def test_a_run_that_did_not_confirm_says_so_on_every_surface(home: World) -> None:
    client = TestClient(home.app, base_url="http://localhost")
    for way, said in {
        "unconfirmed": "No candidate completed",
        "gone": "Not confirmed: cancelled; its controller was gone.",
        "cancelled": "No candidate completed: the run ended.",
    }.items():
        study = home.store.study(way)
        run = next(r for r in home.store.runs(study.id) if r.state is not RunState.RUNNING)
        texts = [call(home.home, "run", "status", run.id).output, call(home.home, "front", way).output,
                 call(home.home, "report", way, "--format", "md", "-o", "-").output,
                 call(home.home, "report", way, "-o", "-").output, client.get(f"/studies/{study.id}").text,
                 client.get(f"/v1/runs/{run.id}").text,
                 client.get(f"/v1/studies/{way}/front").text]  # fmt: skip
        for text in texts:
            assert said in text, (way, said, text)
            assert "winner)" not in text
    assert "not confirmed" in call(home.home, "run", "list").output


def test_a_model_that_nobody_tuned_is_named(home: World) -> None:
    for words, nearest in {
        ("--model", "Qwen/Qwen2.5-7B-Instrukt"): "did you mean 'Qwen/Qwen2.5-7B-Instruct'",
        ("--node", "canceled"): "did you mean 'cancelled'",
        ("--workload", "chad"): "did you mean 'chat'",
    }.items():
        done = call(home.home, "history", *words)
        assert done.exit_code != 0
        assert nearest in str(done.exception)
    later = call(home.home, "history", "--since", "2030-01-01")
    assert (later.exit_code, later.output) == (
        0,
        "no run has measured goodput_rps since 2030-01-01 yet\n",
    )


def test_the_path_of_a_missing_log_is_said(home: World, tmp_path: Path) -> None:
    done = call(home.home, "trial", "log", "unconfirmed", 0)
    assert done.exit_code != 0
    assert not FORBIDDEN.search(str(done.exception)), done.exception


def test_B11_equal_profiles_are_said_to_be_equal_in_the_words_of_the_page(home: World) -> None:
    profile = str(home.store.profiles()[0].id)
    said = call(home.home, "profile", "diff", profile, profile).output.strip()
    page = Path(render.__file__).parent / "templates" / "diff.html"
    assert said
    assert f"<p>{said}</p>" in page.read_text()
