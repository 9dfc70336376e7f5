"""One word for the state of a run: on the command line, on every page, in the API and in the metrics."""

import html
import json
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from tests.commands.test_care import call
from tests.history.records import NOW, a_conclusion, a_launch, a_measurement, a_run, a_study, finished, start
from tests.service.world import World
from tuner.commands.progress import LiveLine
from tuner.commands.run import show_end
from tuner.conclusions import PublishedProfile
from tuner.errors import Conflict
from tuner.fleet.nodes import held
from tuner.history.entities import Schedule
from tuner.profiles.registry import key_of
from tuner.records import Node, RunState, TrialState
from tuner.replay.plan import PLANS
from tuner.service.runner import RunOrder
from tuner.tuning.context import RunEstimate, RunEvent
from tuner.tuning.now import RunNow, left_of, path_of, told_live, write

HERE = socket.gethostname()


GONE = -1
"""In a row of RUNS: the number of a process that has ended."""
RUNS: Mapping[str, tuple[str, dict[str, object], bool]] = {
    "its process is gone": ("stopped", {"pid": GONE, "host": HERE}, False),
    "it was stopped by a signal": ("stopped", {"pid": None, "host": HERE}, False),
    "its host has no lease any more": ("stopped", {"pid": 17, "host": "elsewhere"}, False),
    "its process lives": ("running", {"pid": os.getpid(), "host": HERE}, False),
    "its host has the lease": ("running", {"pid": 17, "host": "elsewhere"}, True),
    "it was asked to stop": ("running", {"pid": GONE, "host": HERE, "cancel_requested": True}, False),
    "it ended": ("finished", {"state": RunState.FINISHED}, False),
    "it failed": ("failed", {"state": RunState.FAILED, "reason": "no disk"}, False),
    "it was cancelled": ("cancelled", {"state": RunState.CANCELLED}, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("why", RUNS)
def test_I29_1_a_run_s_state_is_the_same_word_everywhere(why: str, world: World, tmp_path: Path) -> None:
    word, changes, leased = RUNS[why]
    study, store, client = a_study(), world.store, world.client("read")
    client.post("/login", data={"token": world.token("read")})
    begun = world.clock() - timedelta(hours=3)
    run = a_run(store, study, now=begun)
    finished(store, start(store, run, 1), a_measurement(90.0))
    current = start(store, run, 2)
    ended = begun + timedelta(hours=1) if "state" in changes else None
    with subprocess.Popen(["true"]) as process:
        pass
    changes = {name: process.pid if value is GONE else value for name, value in changes.items()}
    store.save_run(replace(run, **changes, ended_at=ended))  # type: ignore[arg-type]
    store.put_schedule(
        Schedule(
            name="nightly",
            node="n1",
            cron="0 1 * * *",
            timezone="UTC",
            spec={"study": "chat.yaml", "hours": 6.0},
            last_run_id=run.id,
            created_at=begun,
        )
    )
    if leased:
        store.acquire_lease(study.node, "elsewhere", now=datetime.now(UTC), ttl_s=3600)

    lost, over = word == "stopped", ended is not None
    shown = client.get(f"/v1/runs/{run.id}").json()
    said = "stopped" if lost else changes.get("state", "RUNNING")
    assert (shown["state"], shown["stopped"]) == (said, lost)
    of_trial = "interrupted" if lost else "RUNNING"
    assert shown["trials"] == {"COMPLETE": 1, of_trial: 1}
    assert client.get(f"/v1/trials/{current.id}").json()["state"] == of_trial
    for asked in (None, "RUNNING", "stopped", "FINISHED", "FAILED", "CANCELLED"):
        listed = client.get("/v1/runs", params={"state": asked} if asked else {}).json()["items"]
        assert [row["state"] for row in listed] == ([said] if asked in (None, said) else []), asked
    for told in (
        json.loads(call(tmp_path, "run", "list", "--json").output)[0],
        json.loads(call(tmp_path, "run", "status", "--json").output)["run"],
    ):
        assert (told["state"], told["stopped"]) == (shown["state"], lost)

    def page(path: str) -> str:
        answer = client.get(path, headers={"accept": "text/html"})
        assert answer.status_code == 200, path
        return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.text)).lower()

    texts = {
        "run list": call(tmp_path, "run", "list").output.splitlines()[1],
        "run status": call(tmp_path, "run", "status").output,
        "studies": page("/studies").partition(study.id[:12])[2],
        "study": page(f"/studies/{study.id[:16]}").partition("slices")[2].partition("the front")[0],
        "live": page(f"/studies/{study.id[:16]}/live"),
        "schedules": page("/schedules").partition("nightly")[2],
    }
    if not over:
        texts["overview"] = page("/").partition("registered node")[2]
        texts["trial"] = page(f"/studies/{study.id[:16]}/trials/{current.number}").partition("started")[2]
        texts["history"] = call(tmp_path, "history").output
        texts["history page"] = page("/history").partition("configuration")[2]
        nights = client.get("/v1/history", params={"model": study.model}).json()["places"][0]["nights"]
        texts["history API"] = nights[0]["outcome"]
    states = {"running", "stopped", "finished", "failed", "cancelled"}
    for name, text in texts.items():
        found = set(re.findall("|".join(states), re.sub(r"\b\d running", "", text.lower())))
        assert found == {word}, (name, text)
    told = client.get("/metrics").text
    counted = dict(re.findall(r'tuner_runs\{state="(\w+)"\} (\S+)', told))
    assert {state.lower(): float(n) for state, n in counted.items() if float(n)} == {word: 1.0}
    trials = dict(re.findall(r'tuner_trials_total\{reason="",state="(\w+)"\} (\S+)', told))
    assert {state: float(n) for state, n in trials.items()} == {"COMPLETE": 1.0, of_trial: 1.0}


@pytest.mark.parametrize(
    ("pid", "way"),
    [
        pytest.param(None, "the same command continues it", id="stopped"),
        pytest.param(os.getpid(), "or wait", id="running"),
    ],
)
def test_I29_1_who_asks_for_a_second_run_is_told_whether_waiting_helps(
    pid: int | None, way: str, world: World
) -> None:
    run = a_run(world.store, a_study())
    world.store.save_run(replace(run, pid=pid, host=HERE))
    order = RunOrder(
        study_id=run.study_id, study_file=world.home / "chat.yaml", trials=3, deadline=None, actor="me",
        at=world.clock(),
    )  # fmt: skip
    with pytest.raises(Conflict, match=way):
        world.runner.start(order)


def test_A9_every_surface_says_the_same_time_left(world: World) -> None:
    """The line of the command, `run status`, the page and the API: one computation, in the run's process."""
    study, store = a_study(), world.store
    world.clock.at = datetime.now(UTC)
    run = replace(a_run(store, study, now=world.clock()), pid=os.getpid(), host=HERE)
    store.save_run(run)
    finished(store, start(store, run, 1), a_measurement(90.0))
    line = LiveLine(clock=lambda: 100.0)
    known = RunEstimate(trial_s=600.0, confirm_s=3000.0, confirm_launch_s=500.0)
    tell = told_live(
        world.home, run.id, PLANS["quick"], line.take, world.clock, estimate=lambda: known, seconds=line.clock
    )
    tell(RunEvent(kind="run", text="", done=0, total=10))
    tell(RunEvent(kind="started", text="tpe", done=1, total=10, trial=store.trials(study.id)[0]))
    world.clock.forward(seconds=60)
    expected = 10 * 600 + 3000 - 60.0
    assert line.left_s() == expected + 60.0
    told = world.client("read").get(f"/v1/runs/{run.id}").json()
    assert told["left_s"] == expected
    (listed,) = world.client("read").get("/v1/runs").json()["items"]
    assert (listed["trials"], listed["left_s"]) == (told["trials"], expected)
    assert left_of(store, world.home, run, world.clock()) == expected
    world.clock.forward(seconds=-60)
    page = world.client("read")
    page.post("/login", data={"token": world.token("read")})
    shown = page.get(f"/studies/{study.id[:16]}").text
    assert "in about 2 h 30 min" in shown
    assert ", about 2 h 30 min left" in line.how_far()
    assert ", no deadline, about 2 h 30 min left" in call(world.home, "run", "status").stdout
    status = json.loads(call(world.home, "run", "status", "--json").stdout)
    assert status["left_s"] == pytest.approx(9000, abs=600)
    said = "confirmation: launch 1 of 4"
    tell(RunEvent(kind="confirm", text=said, stage="confirmation", done=0, total=4))
    assert line.left_s() == 4 * 500 == page.get(f"/v1/runs/{run.id}").json()["left_s"]


def test_two_runs_of_one_night_are_rows_of_their_own_and_one_point(world: World) -> None:
    """The point of every metric is of the newest run; the other keeps its row, on the page and in the API."""
    study, store, client = a_study(), world.store, world.client("read")
    client.post("/login", data={"token": world.token("read")})
    made: list[str] = []
    for hour, values in enumerate(((1275.0, 1.65), (738.0, 1.56))):
        run = a_run(store, study, now=NOW + timedelta(hours=hour))
        both = {"ttft_p95_ms": values[0], "goodput_rps": values[1]}
        finished(store, start(store, run, hour), replace(a_measurement(1.0), values=both))
        store.save_run(replace(run, state=RunState.FINISHED, ended_at=run.started_at + timedelta(minutes=9)))
        made.append(run.id)
    for metric, shown in (("goodput_rps", ("1.65", "1.56")), ("ttft_p95_ms", ("1,275", "738"))):
        asked = {"model": study.model, "metric": metric, "since": f"{NOW:%Y-%m-%dT00:00:00Z}"}
        (place,) = client.get("/v1/history", params=asked).json()["places"]
        assert [row["run_id"] for row in (*place["other_runs"], *place["nights"])] == made, metric
        page = client.get(f"/history?metric={metric}", headers={"accept": "text/html"}).text
        drawing, table = page.partition("<tbody>")[::2]
        assert f": {shown[1]}" in drawing
        assert f": {shown[0]}" not in drawing
        assert [table.count(f'value="{each}"') for each in made] == [1, 1]
        for value in shown:
            assert f"→ {value}</td>" in table, value


def test_several_attempts_count_as_one_trial(world: World, tmp_path: Path) -> None:
    study, store, client = a_study(), world.store, world.client("read")
    client.post("/login", data={"token": world.token("read")})
    run = a_run(store, study)
    store.save_run(replace(run, pid=os.getpid(), host=HERE))
    finished(store, start(store, run, 0, origin="baseline"), a_measurement(90.0))
    for attempt in (0, 1):
        finished(store, start(store, run, 1, attempt=attempt), state=TrialState.ABORTED)
    start(store, run, 1, attempt=2)
    ref = f"/studies/{study.id[:16]}"
    for told in (
        json.loads(call(tmp_path, "run", "status", "--json").output)["trials"],
        client.get(f"/v1/runs/{run.id}").json()["trials"],
    ):
        assert told == {"COMPLETE": 1, "RUNNING": 1}
    said = "1 COMPLETE, 1 RUNNING (2 earlier attempts)"
    shown = {path: client.get(path, headers={"accept": "text/html"}).text for path in (ref, f"{ref}/trials")}
    assert "All 2 trials" in shown[ref]
    assert re.findall(r'<th scope="row">(\d \w+)</th>', shown[ref]) == ["1 COMPLETE", "2 ABORTED"], (
        "not ended"
    )
    assert "of 4 attempts" in shown[f"{ref}/trials"]
    assert said in shown[ref]
    assert said in call(tmp_path, "run", "status").output
    for given in (("-o", "-"), ("--format", "md", "-o", "-")):
        assert said in call(tmp_path, "report", study.id[:12], *given).output


def test_a_trial_of_a_stopped_run_is_interrupted_in_words_and_says_how_to_go_on(
    world: World, tmp_path: Path
) -> None:
    """B2, B3, B4: after a kill nothing says that a trial runs; a screened trial is named beside the front."""
    study, store, client = a_study(), world.store, world.client("read")
    client.post("/login", data={"token": world.token("read")})
    with subprocess.Popen(["true"]) as process:
        pass
    run = a_run(store, study)
    alive = store.save_run(replace(run, pid=os.getpid(), host=HERE))
    finished(store, start(store, run, 0, origin="baseline"), a_measurement(9.0), state=TrialState.INFEASIBLE)
    screened = finished(store, replace(start(store, run, 1), screened=True), a_measurement(90.0))
    current = start(store, run, 2)
    ref = f"/studies/{study.id[:16]}"
    write(path_of(tmp_path, run.id), RunNow(run=run.id, at=world.clock(), phase="launching", trial=2))

    def texts() -> dict[str, str]:
        given = {
            "study show": ("study", "show", study.id[:12]),
            "trial show": ("trial", "show", study.id[:12], str(current.number)),
            "run status": ("run", "status"),
            "report": ("report", study.id[:12], "-o", "-"),
            "markdown": ("report", study.id[:12], "--format", "md", "-o", "-"),
        }
        found = {name: call(tmp_path, *words).output for name, words in given.items()}
        for name, path in (
            ("study page", ref),
            ("trial page", f"{ref}/trials/2"),
            ("bench", f"{ref}/trials"),
        ):
            found[name] = client.get(path, headers={"accept": "text/html"}).text
        return found

    for name, text in texts().items():
        assert "interrupted" not in text, name
        assert "RUNNING" in text, name
        assert ("Launching the engine" in text) is (name in ("study page", "trial page")), name
    assert "no run has ended yet. The newest run has not ended." in call(tmp_path, "history").output
    assert call(tmp_path, "front", study.id[:12]).output.startswith("The newest run has not ended.")
    write(path_of(tmp_path, run.id), RunNow(run=run.id, at=world.clock()))  # it has told nothing of the trial
    page = re.sub(r"<[^>]+>", "", texts()["study page"])
    assert "Measuring: trial 2 (" in page
    assert "Starting" not in page
    store.save_run(replace(alive, pid=process.pid))
    for name, text in texts().items():
        assert "interrupted" in text, name
        assert "Launching the engine" not in text, name
        assert "RUNNING" not in text.replace("state=RUNNING", ""), name
        assert "the same command continues it" in text or name == "bench", name
    assert "no run has ended yet. The newest run was stopped; the same" in call(tmp_path, "history").output
    assert call(tmp_path, "front", study.id[:12]).output.startswith("The newest run was stopped; the same")
    told = json.loads(call(tmp_path, "trial", "show", study.id[:12], "2", "--json").output)
    assert told["state"] == "interrupted"

    start(store, run, 3, origin="relaunched", max_num_seqs=65)  # trial 1 again, not measured yet
    said = "The search only screened trial 1 in a running engine; the front shows relaunched trials."
    shown = {name: text for name, text in texts().items() if name in ("report", "markdown", "study page")}
    for name, text in {**shown, "front": call(tmp_path, "front", study.id[:12]).output}.items():
        assert said in text, name
    number = str(screened.number)
    for name, text in {
        "study show": call(tmp_path, "study", "show", study.id[:12]).output,
        "trial show": call(tmp_path, "trial", "show", study.id[:12], number).output,
        "trial page": client.get(f"{ref}/trials/{number}", headers={"accept": "text/html"}).text,
        "bench": client.get(f"{ref}/trials", headers={"accept": "text/html"}).text,
    }.items():
        assert "COMPLETE, screened" in text, name


def test_a_node_s_state_is_the_same_word_everywhere(world: World, tmp_path: Path) -> None:
    """A8: free only while nobody holds it; the holder's start is a date."""
    store, client = world.store, world.client("read")
    client.post("/login", data={"token": world.token("read")})
    store.add_node(Node(name="n1", gpu_class="cpu"))

    def words() -> list[str]:
        page = client.get("/", headers={"accept": "text/html"}).text
        return [
            client.get("/v1/nodes").json()[0]["state"],
            client.get("/v1/nodes/n1").json()["state"],
            call(tmp_path, "node", "list").output.splitlines()[1].split()[2],
            json.loads(call(tmp_path, "node", "list", "--json").output)[0]["state"],
            page.partition("cpu, ")[2].partition("<")[0],
        ]

    assert words() == ["free"] * 5
    with held(store, "n1", clock=lambda: datetime.now(UTC), ttl_s=1e6):
        assert words() == ["leased"] * 5
        begun = datetime.fromtimestamp(psutil.Process().create_time(), UTC)
        holder = f"{HERE} pid {os.getpid()} since {begun:%Y-%m-%d %H:%M}"
        shown = (call(tmp_path, "node", "list"), call(tmp_path, "node", "list", "--json"))
        assert all(holder in each.output for each in shown)
        assert client.get("/v1/nodes/n1").json()["lease"].startswith(holder)
        store.set_node_state("n1", "fault")
        assert words() == ["fault"] * 5


@pytest.mark.parametrize(
    ("evidence", "said"),
    [({"confirmed": False, "slo_met": True}, "its gates refuse to promote it: its gain over the baseline"),
     ({"confirmed": True, "slo_met": True}, "waits to be promoted")],
)  # fmt: skip
def test_the_overview_says_whether_the_gates_let_a_version_be_promoted(
    evidence: dict[str, bool], said: str, world: World
) -> None:
    """B14: a version that the gates refuse does not wait to be promoted."""
    store, client = world.store, world.client("read")
    client.post("/login", data={"token": world.token("read")})
    study = store.add_study(a_study())
    trial = finished(store, start(store, a_run(store, study), 1), a_measurement(90.0))
    key = key_of(study)
    store.add_profile(
        key=key, candidate=trial.candidate, engine_version="0.32.0", gpu_class=study.gpu_class,
        study_id=study.id, trial_id=trial.id, argv=(), env={}, evidence=evidence, now=world.clock(),
    )  # fmt: skip
    store.move_alias(key, "challenger", 1, expected=0, actor="me", reason="found", now=world.clock())
    page = client.get("/", headers={"accept": "text/html"}).text
    assert said in page
    assert ("waits to be promoted" in page) is evidence["confirmed"]


def test_repeats_of_several_nights_are_told_apart(world: World, tmp_path: Path) -> None:
    """B9: the second confirmation of a trial has columns of its own, with its time, and beside each the
    baseline's repeat of that night. The printed commands name an attempt that is not the last.
    """
    study, store, client = a_study(), world.store, world.client("read")
    client.post("/login", data={"token": world.token("read")})
    run = a_run(store, study)
    base = finished(store, start(store, run, 0, origin="baseline"), a_measurement(3135.0))
    lost = finished(store, start(store, run, 1), state=TrialState.ABORTED)
    trial = finished(store, start(store, run, 1, attempt=1), a_measurement(90.0))
    for night in (1, 2):
        today = replace(a_launch(study, f"B{night}"), started_at=NOW + timedelta(days=night, minutes=-5))
        store.add_launch(today)
        repeated = a_measurement(240.0 + night, purpose="confirm", repeat=1, launch_id=today.id)
        store.add_measurement(base.id, repeated)
        launch = replace(a_launch(study, f"L{night}"), started_at=NOW + timedelta(days=night))
        store.add_launch(launch)
        store.add_measurement(trial.id, a_measurement(95.0, purpose="confirm", repeat=1, launch_id=launch.id))
        shown = (
            call(tmp_path, "trial", "show", study.id[:12], "1").output,
            client.get(f"/studies/{study.id[:16]}/trials/1", headers={"accept": "text/html"}).text,
        )
        for text in shown:
            for each in (1, 2):
                bare = re.sub(r"<[^>]+>", "", text)
                named = f"1, {NOW + timedelta(days=each):%Y-%m-%d %H:%M}" in bare
                assert named is (night == 2), bare
    page = client.get(f"/studies/{study.id[:16]}/trials/1").text
    row = page.partition('<small class="soft">ttft_<wbr>p95_<wbr>ms')[2].partition("</tr>")[0]
    assert re.findall(r"<td>([^<]*)</td>", row) == ["3,135", "90", "241", "95", "242", "95"]
    assert "--attempt" not in page
    page = client.get(f"/studies/{study.id[:16]}/trials/1?attempt={lost.attempt}").text
    assert page.count(f"{study.id[:12]} 1 --attempt 0") == 2


@pytest.mark.parametrize(
    ("argv", "larger"),
    [
        (("--max-num-batched-tokens", "2048", "--max-num-seqs", "256"), "max_num_seqs=256"),
        (("--max-num-seqs", "65"), ""),
        (("--enforce-eager", "--max-num-seqs"), ""),
    ],
)
def test_a_trial_that_was_not_measured_says_in_what_larger_engine_it_was_to_be_screened(
    world: World, tmp_path: Path, argv: tuple[str, ...], larger: str
) -> None:
    study, store, client = a_study(), world.store, world.client("read")
    client.post("/login", data={"token": world.token("read")})
    run = a_run(store, study)
    trial = start(store, run, 1)
    store.add_launch(replace(a_launch(study, "L1"), argv=argv, started_at=trial.started_at))

    def texts() -> tuple[str, str]:
        page = client.get(f"/studies/{study.id[:16]}/trials/1", headers={"accept": "text/html"}).text
        return call(tmp_path, "trial", "show", study.id[:12], "1").output, page

    for text in texts():
        assert (f"It is to be screened in an engine with {larger}." in text) is bool(larger)
    finished(store, trial, state=TrialState.ABORTED)
    for text in texts():
        assert (f"It should have been screened in an engine with {larger}." in text) is bool(larger)
        assert larger or "screened in an engine" not in text


def test_a_version_that_equals_an_earlier_one_says_so_everywhere(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run's evidence is new, so it is a version of its own; a third has another argument."""
    store, client = world.store, world.client("read")
    client.post("/login", data={"token": world.token("read")})
    study = store.add_study(a_study())
    for version, argv in enumerate(([], [], ["--seed", "7"]), start=1):
        run = a_run(store, study, now=NOW + timedelta(days=version))
        trial = finished(store, start(store, run, version, max_num_seqs=32), a_measurement(90.0))
        made = store.add_profile(
            key=key_of(study), candidate=trial.candidate, engine_version="0.32.0", gpu_class=study.gpu_class,
            study_id=study.id, trial_id=trial.id, argv=argv, env={}, now=NOW,
            evidence={"run": run.id, "confirmed": True, "slo_met": True},
        )  # fmt: skip
        assert made.version == version
        alias = "champion" if version == 1 else "challenger"
        event = store.alias(made.key, alias)
        store.move_alias(
            made.key,
            alias,
            version,
            expected=event.generation if event else 0,
            actor="me",
            reason="r",
            now=NOW,
        )
        said = a_conclusion(run, profiles={"challenger": PublishedProfile(id=made.id, version=version)})
        ended = store.save_run(replace(run, state=RunState.FINISHED, ended_at=said.at), said)
        capsys.readouterr()
        show_end(store, study, ended)
        texts = {
            "is a new measurement of the configuration of version 1 ": capsys.readouterr().out,
            "the same configuration as version 1": call(tmp_path, "profile", "show", made.id).output,
            "the same as version 1": client.get(f"/profiles/{made.id}").text,
            "it has the champion's configuration": html.unescape(client.get("/").text),
        }
        assert [part for part, text in texts.items() if part in text] == (list(texts) if version == 2 else [])
