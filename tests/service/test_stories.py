"""The three users' stories over HTTP, on the simulated engine, with the service as a real process."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.world import STUDY, Server, Shifted, World, prepare, serving
from tests.tuning.studies import WATCHDOG_S, command, environment, wait_for
from tuner.fleet.schedule import Happening, loop
from tuner.history.entities import Schedule
from tuner.history.store import Store
from tuner.records import RunState
from tuner.service.routes.schedules import starter
from tuner.service.study_requests import StudyRequest
from tuner.tuning.study import StudyFile, read

pytestmark = pytest.mark.slow

MODEL = "Qwen/Qwen2.5-7B-Instruct"
PULL = f"/v1/profiles/resolve?model={MODEL}&node=local&workload=chat&format=vllm-yaml"
CHAMPION = f"/v1/aliases/champion?model={MODEL}&target=local&workload=chat"


@dataclass
class Event:
    """One server-sent event."""

    id: str
    kind: str
    data: Any


def events(client: httpx.Client, run_id: str, after: str | None = None, limit: int = 10_000) -> list[Event]:
    """The events of a run up to a number of them, or to the end of the stream."""
    headers = {"Last-Event-ID": after} if after else {}
    found: list[Event] = []
    fields: dict[str, str] = {}
    timeout = httpx.Timeout(WATCHDOG_S)
    with client.stream("GET", f"/v1/runs/{run_id}/events", headers=headers, timeout=timeout) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "id" in fields:
                found.append(Event(fields["id"], fields["event"], json.loads(fields["data"])))
                fields = {}
                if len(found) == limit:
                    break
    return found


@dataclass
class Told:
    """A service, and the run that was made through it."""

    server: Server
    token: str
    study: dict[str, Any]
    run: dict[str, Any]
    live: list[Event]

    def client(self) -> httpx.Client:
        return self.server.client(self.token)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """A study made, a run asked for twice with one key, and heard live by one who went away once."""
    home = tmp_path_factory.mktemp("home")
    digest = prepare(home)
    words = command("token", "create", "--name", "ci", "--scope", "admin", "--expires", "1d")
    made = subprocess.run(words, env=environment(home), capture_output=True, text=True, check=True)
    token = made.stdout.strip()
    with serving(home) as server, server.client(token) as client:
        study = client.post("/v1/studies", json={**STUDY, "trace": digest})
        assert study.status_code == 201, study.text
        asked = {"study": "tiny", "trials": 3}
        first = client.post("/v1/runs", json=asked, headers={"Idempotency-Key": "night-1"})
        assert first.status_code == 202, first.text
        again = client.post("/v1/runs", json=asked, headers={"Idempotency-Key": "night-1"})
        assert again.json()["id"] == first.json()["id"]
        run_id = first.json()["id"]
        live = events(client, run_id, limit=2)
        live += events(client, run_id, after=live[-1].id)
        yield Told(server, token, study.json(), client.get(f"/v1/runs/{run_id}").json(), live)


def test_the_run_was_carried_out_and_told_live(told: Told) -> None:
    assert told.run["state"] == "FINISHED"
    assert told.run["study_id"] == told.study["id"]
    kinds = [event.kind for event in told.live]
    assert kinds[:2] == ["started", "finished"]
    assert kinds[-1] == "run"
    assert told.live[-1].data["state"] == "FINISHED"


def test_a_listener_who_came_back_missed_nothing_and_heard_nothing_twice(told: Told) -> None:
    with told.client() as client:
        whole = events(client, told.run["id"])
    assert [event.id for event in told.live] == [event.id for event in whole]
    assert len({event.id for event in whole}) == len(whole)


def test_one_key_is_one_request(told: Told) -> None:
    with told.client() as client:
        other = {"study": "tiny", "trials": 4}
        assert client.post("/v1/runs", json=other, headers={"Idempotency-Key": "night-1"}).status_code == 409


def test_engineer_asks_what_was_best_on_which_night_and_why(told: Told) -> None:
    with told.client() as client:
        asked = {"model": MODEL, "node": "local", "metric": "ttft_p95_ms"}
        (place,) = client.get("/v1/history", params=asked).json()["places"]
        (night,) = place["nights"]
        trial = client.get(f"/v1/trials/{night['trial_id']}").json()
        front = client.get("/v1/studies/tiny/front").json()
        trials = client.get("/v1/studies/tiny/trials").json()["items"]
    assert night["run_id"] == told.run["id"]
    assert trial["candidate"] == night["candidate"]
    confirmed = [each["purpose"] for each in trial["measurements"]].count("confirm") > 0
    best = [each["number"] for each in (*front["front"], front["baseline"])]
    assert "(a demonstration)" in night["sure"]
    assert not night["sure"].startswith("confirmed")
    assert night["outcome"] == f"{told.run['conclusion']['outcome']} (a demonstration)"
    assert confirmed or trial["number"] in best
    assert front["baseline"]["candidate"] == {"max_num_seqs": 4}
    assert told.run["trials"] == {"COMPLETE": len([t for t in trials if t["state"] == "COMPLETE"])}


def test_pipeline_pulls_and_follows_promotion_and_rollback(told: Told) -> None:
    with told.client() as client:
        assert client.get(PULL).status_code == 404
        versions = sorted(each["version"] for each in client.get("/v1/profiles").json()["items"])
        assert versions == [1, 2], "today's configuration and the winner"
        move = {"version": 1, "reason": "runs today", "force": True}
        assert client.put(CHAMPION, json=move, headers={"If-Match": '"0"'}).status_code == 200
        pulled = client.get(PULL)
        assert "max-num-seqs: 4" in pulled.text
        tag = {"If-None-Match": pulled.headers["etag"]}
        assert client.get(PULL, headers=tag).status_code == 304
        move = {"version": 2, "reason": "won", "force": True}
        assert client.put(CHAMPION, json=move, headers={"If-Match": '"1"'}).status_code == 200
        changed = client.get(PULL, headers=tag)
        assert changed.status_code == 200
        assert changed.text != pulled.text
        assert client.post(CHAMPION.replace("?", "/rollback?"), json={"reason": "errors"}).status_code == 200
        back = client.get(PULL, headers={"If-None-Match": changed.headers["etag"]})
        assert back.text == pulled.text
        wrong = client.get(PULL + "&engine_version=0.1.0")
        assert wrong.status_code == 409


def test_every_change_is_in_the_audit_with_actor_and_reason(told: Told) -> None:
    with told.client() as client:
        entries = client.get("/v1/audit").json()["items"]
    assert {"token.create", "study", "run"} <= {entry["action"] for entry in entries}
    assert all(entry["actor"] and entry["reason"] for entry in entries)
    run = next(entry for entry in entries if entry["action"] == "run")
    assert (run["actor"], run["target"]) == ("token:ci", told.run["id"])


def test_no_secret_of_the_engines_environment_is_told(told: Told) -> None:
    with told.client() as client:
        for path in ("/v1/studies", "/v1/studies/tiny/trials", "/v1/profiles", "/metrics", "/v1/nodes"):
            text = client.get(path).text
            assert "canary" not in text
            assert str(told.server.home) not in text
    assert "canary" not in told.server.log.read_text()
    assert b"canary" not in (told.server.home / "tuner.db").read_bytes()
    for log in told.server.home.rglob("*.log"):
        assert b"canary" not in log.read_bytes(), log


def logged(server: Server, text: str) -> Any:
    """The log's line with that text; it is written after the answer was sent."""

    def found() -> list[str]:
        *whole, _ = server.log.read_text().split("\n")
        return [line for line in whole if text in line]

    wait_for(found)
    return json.loads(found()[0])


def test_the_log_is_json_with_the_request_id(told: Told) -> None:
    with told.client() as client:
        client.get("/v1/runs", headers={"X-Request-Id": "find-me-again"})
    found = logged(told.server, "find-me-again")
    assert found["route"] == "/v1/runs"
    assert found["status"] == 200


def test_a_nightly_schedule_fires_and_ends_inside_its_window(tmp_path: Path) -> None:
    """The clock is set to two seconds before 22:00 of a night in March, and goes on from there."""
    digest = prepare(tmp_path)
    clock = Shifted(at=datetime(2026, 3, 10, 21, 59, 58, tzinfo=UTC))
    world = World(tmp_path, clock=clock)
    client = world.client("run")
    assert client.post("/v1/studies", json={**STUDY, "trace": digest}).status_code == 201
    spec = {"study": "tiny", "hours": 0.5, "trials": 1, "min_trials": 1, "reserve_s": 5}
    body = {"node": "local", "cron": "0 22 * * *", "timezone": "UTC", "spec": spec}
    made = client.put("/v1/schedules/nightly", json=body)
    assert made.status_code == 200, made.text
    clock.start()
    happened: list[Happening] = []
    ended = asyncio.Event()

    def tell(happening: Happening) -> None:
        happened.append(happening)
        if happening.kind != "start":
            ended.set()

    async def night() -> None:
        keeper = asyncio.create_task(
            loop(world.store, clock=world.clock, start_run=starter(world.app.state.service), tell=tell,
                 wait=lambda seconds: asyncio.sleep(min(seconds, 0.5)), resumes=0)
        )  # fmt: skip
        await asyncio.wait_for(ended.wait(), WATCHDOG_S)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)

    asyncio.run(night())
    assert [each.kind for each in happened] == ["start", "ended"], happened
    (run,) = world.store.runs()
    schedule: Schedule = world.store.schedule("nightly")
    assert schedule.last_run_id == run.id
    assert run.state is RunState.FINISHED
    due = datetime(2026, 3, 10, 22, tzinfo=UTC)
    assert schedule.last_due == due
    assert run.ended_at is not None
    assert clock.offset is not None
    assert due <= run.ended_at + clock.offset <= due + timedelta(hours=0.5)
    world.store.close()


def test_a_schedule_over_http_takes_no_path(tmp_path: Path) -> None:
    world = World(tmp_path)
    body = {"node": "local", "cron": "0 22 * * *", "spec": {"study": "/etc/passwd", "hours": 1}}
    refused = world.client("run").put("/v1/schedules/nightly", json=body)
    assert refused.status_code == 400
    assert "path" in refused.json()["detail"]
    world.store.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "../../etc"}, "is not allowed on node"),
        ({"model": "Qwen/Qwen2.5-8B-Instruct"}, "did you mean 'Qwen/Qwen2.5-7B-Instruct'"),
        ({"node": "other"}, "no engine is registered"),
        ({"trace": "../x"}, "trace"),
        ({"space": "../x"}, "space"),
        ({"space": {"accept": ["worker_cls"], "knobs": {"worker_cls": ["x"]}}}, "accept"),
        ({"space": {"knobs": {"worker_cls": ["x"]}}}, "worker_cls"),
        ({"baseline": {"middleware": "x"}}, "not a knob"),
        ({"engine": {"kind": "vllm", "python": "/bin/sh"}}, "engine"),
        ({"history": "raw"}, "history"),
        ({"plan": {"base": "quick", "sped": 2}}, "sped"),
    ],
)
def test_a_study_over_http_takes_no_path_command_environment_or_engine(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    digest = prepare_once(tmp_path)
    world = World(tmp_path)
    refused = world.client("run").post("/v1/studies", json={**STUDY, "trace": digest, **change})
    assert refused.status_code in (400, 404, 422), refused.text
    assert words in refused.text
    assert not world.store.studies()
    world.store.close()


def test_a_study_over_http_takes_every_other_key_of_a_study_file() -> None:
    """`not_worse` was missing, and all samplers but two."""
    sent, written = StudyRequest.model_fields, StudyFile.model_fields
    assert set(written) - set(sent) == {"engine"}
    assert set(sent) - set(written) == set()
    for name in ("sampler", "history", "live_limits", "winner", "quality"):
        assert sent[name].annotation == written[name].annotation, name


def test_a_study_over_http_keeps_its_limits_of_what_may_get_worse(tmp_path: Path) -> None:
    digest = prepare(tmp_path)
    study = {**STUDY, "trace": digest}
    world = World(tmp_path)
    made = world.client("run").post("/v1/studies", json={**study, "not_worse": {"ttft_p95_ms": "10%"}})
    assert made.status_code == 201, made.text
    kept = read(world.home / "studies" / f"{made.json()['id']}.yaml")
    assert kept.not_worse == {"ttft_p95_ms": 0.1}
    wrong = world.client("run").post("/v1/studies", json={**study, "not_worse": {"ttft_p95": 0.1}})
    assert wrong.status_code == 400
    assert "ttft_p95_ms" in wrong.json()["detail"]
    world.store.close()


def prepare_once(home: Path) -> str:
    """A node's file alone: these requests are refused before their trace matters."""
    from tests.service.world import NODE

    (home / "nodes").mkdir()
    (home / "nodes" / "local.yaml").write_text(NODE)
    return "latest:chat"


def test_serve_without_a_token_stays_on_loopback_and_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, "--host", "0.0.0.0") as server:
        assert httpx.get(f"{server.url}/v1/runs").status_code == 200
        said = server.log.read_text()
    assert "listening on 127.0.0.1 instead of 0.0.0.0" in said
    assert sys.platform != "linux" or "0.0.0.0:" not in said.replace("instead of 0.0.0.0", "")


@pytest.mark.parametrize("words", [(), ("--host", "0.0.0.0")])
def test_serve_with_no_token_that_is_valid_stays_on_loopback_and_trusts_nobody(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}", create=True)
    now = datetime.now(UTC)
    revoked, _ = store.create_token("left", ["read"], now=now)
    store.revoke_token(revoked.id, now=now)
    store.create_token("old", ["admin"], now=now - timedelta(days=2), expires_at=now - timedelta(days=1))
    store.close()
    with serving(tmp_path, *words) as server:
        assert httpx.get(f"{server.url}/v1/runs").status_code == 401
        said = server.log.read_text()
    assert "no token is valid" in said
    assert "http://127.0.0.1:" in said
    assert "(listening on 0.0.0.0" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_with_0_after_an_orderly_stop(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path) as server:
        server.process.send_signal(number)
        assert server.process.wait(timeout=WATCHDOG_S) == 0, server.log.read_text()
