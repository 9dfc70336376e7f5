"""What one token may hold and change, and that nothing of it is another's. Most tokens have scope `run`."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from apscheduler.triggers.cron import CronTrigger
from starlette.testclient import TestClient

from tests.service.test_pages import visitor
from tests.service.world import NODE, STUDY, World, prepare, serving
from tests.tuning.studies import wait_for
from tuner.errors import BadInput
from tuner.fleet import window
from tuner.history.entities import Schedule
from tuner.records import RunState
from tuner.service import study_requests
from tuner.service.app import MOST_CHANGES
from tuner.service.auth import Attempts
from tuner.service.routes.runs import MOST_STREAMS
from tuner.service.routes.schedules import MOST_SCHEDULES
from tuner.service.study_requests import write_private
from tuner.service.uploads import OF_ONE
from tuner.tuning import study as studies

SCHEDULE: dict[str, Any] = {"node": "local", "cron": "0 22 * * *", "spec": {"study": "tiny", "hours": 1}}
UPLOAD = {"name": "x", "size": 4, "sha256": "0" * 64}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    found = tmp_path_factory.mktemp("home")
    digest = prepare(found)
    (found / "nodes" / "local.yaml").write_text(NODE.replace("simulated,", "simulated, clock: virtual,"))
    return found, digest


@pytest.fixture
def bounded(home: tuple[Path, str]) -> Iterator[World]:
    """A service with a study `tiny` of token `one`."""
    found = World(home[0])
    made = client_of(found, "one").post("/v1/studies", json={**STUDY, "trace": home[1]})
    assert made.status_code == 201, made.text
    yield found
    found.store.close()


def client_of(world: World, name: str) -> TestClient:
    client = world.client()
    client.headers["Authorization"] = f"Bearer {world.token('run', name=name)}"
    return client


@pytest.mark.slow
def test_20_attack_an_idempotency_key_is_its_tokens_own(bounded: World) -> None:
    one, other = client_of(bounded, "one"), client_of(bounded, "other")
    asked, key = {"study": "tiny", "trials": 1}, {"Idempotency-Key": "deploy-1"}

    def run_of(client: TestClient, **body: object) -> str:
        answer = client.post("/v1/runs", json={**asked, **body}, headers=key)
        assert answer.status_code == 202, answer.text
        run_id = str(answer.json()["id"])
        wait_for(lambda: bounded.store.run(run_id).state is not RunState.RUNNING)
        wait_for(lambda: not bounded.runner.alive(bounded.store.run(run_id)))
        return run_id

    first = run_of(one)
    assert run_of(one) == first
    bounded.store.forget_answers(datetime.now(UTC) + timedelta(days=1))  # the service died before it kept it
    assert run_of(one) == first
    theirs = run_of(other)
    assert theirs != first
    assert run_of(other) == theirs
    assert one.post("/v1/runs", json={**asked, "trials": 2}, headers=key).status_code == 409
    assert run_of(client_of(bounded, "one"), trials=2) not in (first, theirs), "a second token of that name"


def test_20_attack_a_token_sets_so_many_schedules(bounded: World) -> None:
    one, other = client_of(bounded, "one"), client_of(bounded, "other")
    for number in range(MOST_SCHEDULES):
        assert one.put(f"/v1/schedules/s{number}", json=SCHEDULE).status_code == 200
    refused = one.put("/v1/schedules/more", json=SCHEDULE)
    assert (refused.status_code, "remove one first" in refused.text) == (409, True)
    assert one.put("/v1/schedules/s0", json={**SCHEDULE, "enabled": False}).status_code == 200
    assert other.put("/v1/schedules/theirs", json=SCHEDULE).status_code == 200
    assert one.delete("/v1/schedules/s0").status_code == 204
    assert one.put("/v1/schedules/more", json=SCHEDULE).status_code == 200


def test_20_attack_a_token_has_so_many_uploads_and_no_others(bounded: World) -> None:
    one, other = client_of(bounded, "one"), client_of(bounded, "other")
    begun = [one.post("/v1/traces/uploads", json=UPLOAD).json()["id"] for _ in range(OF_ONE)]
    refused = one.post("/v1/traces/uploads", json=UPLOAD)
    assert (refused.status_code, "this token has" in refused.text) == (409, True)
    assert other.post("/v1/traces/uploads", json=UPLOAD).status_code == 201
    path = f"/v1/traces/uploads/{begun[0]}"
    assert other.patch(path, content=b"x", headers={"Upload-Offset": "0"}).status_code == 404
    assert other.post(f"{path}/finish").status_code == 404
    assert other.delete(path).status_code == 404
    assert one.patch(path, content=b"x", headers={"Upload-Offset": "0"}).json()["offset"] == 1
    assert [one.delete(f"/v1/traces/uploads/{each}").status_code for each in begun] == [204] * OF_ONE
    assert one.post("/v1/traces/uploads", json=UPLOAD).status_code == 201


def test_20_attack_a_token_makes_so_many_changes_in_a_minute(bounded: World) -> None:
    few = Attempts(bounded.clock, most=3, span=timedelta(minutes=1))
    assert MOST_CHANGES >= 60
    bounded.app.state.service = replace(bounded.app.state.service, changes=few)
    one, other = client_of(bounded, "one"), client_of(bounded, "other")
    for _ in range(3):
        assert other.put("/v1/schedules/theirs", json=SCHEDULE).status_code == 200
    refused = other.put("/v1/schedules/theirs", json=SCHEDULE)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
    assert other.get("/v1/schedules").status_code == 200
    assert one.put("/v1/schedules/s1", json=SCHEDULE).status_code == 200
    bounded.clock.forward(seconds=61)
    assert other.put("/v1/schedules/theirs", json=SCHEDULE).status_code == 200


@pytest.mark.slow
def test_20_attack_a_token_has_so_many_event_streams(tmp_path: Path) -> None:
    world = World(tmp_path)
    from tests.history.fill import fill

    fill(world.store)
    study = world.store.studies()[0]
    now = datetime.now(UTC)
    opened = world.store.open_run(
        study.id, trials_limit=None, deadline=None, now=now, pid=None, host="elsewhere"
    )
    one, other = (world.store.create_token(name, ["read"], now=now)[1] for name in ("one", "other"))
    world.store.close()

    def stream(port: int, token: str) -> tuple[socket.socket, bytes]:
        found = socket.create_connection(("127.0.0.1", port))
        head = (
            f"GET /v1/runs/{opened.id}/events HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {token}",
        )
        found.sendall("\r\n".join((*head, "", "")).encode())
        return found, found.recv(4096)

    def closed(found: socket.socket, said: bytes) -> bytes:
        found.close()
        return said

    with serving(tmp_path) as server:
        held = [stream(server.port, one) for _ in range(MOST_STREAMS)]
        assert all(b" 200 " in said for _, said in held)
        assert b" 429 " in closed(*stream(server.port, one))
        assert b" 200 " in closed(*stream(server.port, other))
        for found, _ in held:
            found.close()
        wait_for(lambda: b" 200 " in closed(*stream(server.port, one)))


def test_20_attack_a_study_of_another_token_keeps_its_name_and_its_file(bounded: World) -> None:
    one, other = client_of(bounded, "one"), client_of(bounded, "other")
    digest = bounded.store.traces()[0].digest
    body = {**STUDY, "trace": digest}
    (path,) = [each for each in (bounded.home / "studies").glob("*.yaml") if len(each.stem) == 64]
    before = path.read_bytes()
    for change in ({"budget": {"trials": 1}}, {"name": "mine", "budget": {"trials": 1}}, {"seed": 9}):
        refused = other.post("/v1/studies", json={**body, **change})
        assert (refused.status_code, "token:one made" in refused.text) == (409, True), (change, refused.text)
    assert path.read_bytes() == before
    assert other.post("/v1/studies", json=body).status_code == 201, "the same study is nothing new"
    assert other.post("/v1/studies", json={**body, "budget": {"trials": 1}}).status_code == 409
    assert other.post("/v1/studies", json={**body, "name": "mine", "seed": 9}).status_code == 201
    assert one.post("/v1/studies", json={**body, "budget": {"trials": 2}}).status_code == 201
    assert one.post("/v1/studies", json=body).status_code == 201


def test_20_attack_a_file_that_two_requests_write_at_once_is_one_of_them(tmp_path: Path) -> None:
    """Both wrote into one file of this process's name: one of them failed, and the other's end stayed."""
    path, wrong = tmp_path / f"{'0' * 64}.yaml", list[object]()
    contents = [str(number).encode() * (200_000 * (number + 1)) for number in range(4)]

    def write(content: bytes) -> None:
        try:
            for _ in range(20):
                write_private(path, content)
                if path.read_bytes() not in contents:
                    wrong.append("torn")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=write, args=(each,)) for each in contents]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600


def test_20_attack_the_audit_names_the_token_and_an_address(bounded: World) -> None:
    one = client_of(bounded, "named")
    assert one.put("/v1/schedules/named", json=SCHEDULE).status_code == 200
    row = bounded.store.audit(limit=1)[0]
    ids = {each.id for each in bounded.store.tokens() if each.name == "named"}
    assert row.detail["token"] in ids
    junk = TestClient(bounded.app, base_url="http://localhost", client=("<script>" + "A" * 30_000, 1))
    junk.headers["Authorization"] = one.headers["Authorization"]
    assert junk.put("/v1/schedules/named", json=SCHEDULE).status_code == 200
    assert "client" not in bounded.store.audit(limit=1)[0].detail


def test_20_attack_a_day_that_never_comes_is_not_searched_for_up_to_the_year_9999(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = 0
    increment = CronTrigger._increment_field_value

    def counted(self: CronTrigger, *given: object) -> object:
        nonlocal steps
        steps += 1
        return increment(self, *given)

    monkeypatch.setattr(CronTrigger, "_increment_field_value", counted)
    never = schedule_of("0 0 31 2,4,6,9,11 *")
    with pytest.raises(BadInput, match="never due in the next five years"):
        window.check(never)
    assert 0 < steps < 1000


def test_20_attack_a_schedule_of_every_minute_is_looked_at_for_an_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each scrape of the metrics counted the 1,440 minutes of a day, for each schedule."""
    seen, dues = 0, window.dues

    def counted(*given: Any) -> Iterator[datetime]:
        nonlocal seen
        for each in dues(*given):
            seen += 1
            yield each

    monkeypatch.setattr(window, "dues", counted)
    now = datetime(2026, 3, 10, 12, tzinfo=UTC)
    assert window.last_due(schedule_of("* * * * *"), now) == now
    assert seen <= 61


def schedule_of(cron: str) -> Schedule:
    return Schedule(
        name="s", node="local", cron=cron, timezone="Europe/Berlin", spec={"study": "tiny", "hours": 1},
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip


def test_20_attack_a_long_query_is_not_kept(world: World) -> None:
    from tests.history.fill import fill

    fill(world.store)
    client = world.client("read")
    profile = world.store.profiles()[0]
    asked = f"/v1/profiles/resolve?model={profile.key.model}&node=n1&workload=chat"
    assert client.get(asked).status_code == 200
    kept = world.app.state.service.pulls._kept
    assert len(kept) == 1
    assert client.get(f"{asked}&x={'y' * 10_000}").status_code == 200
    assert len(kept) == 1


def test_20_attack_terms_and_sides_are_counted_before_they_are_read(filled: World) -> None:
    client, _ = visitor(filled, "read")
    study = filled.store.studies()[0]
    refused = client.get(f"/studies/{study.id[:16]}/trials?where={'a+' * 21}")
    assert (refused.status_code, "at most 20" in refused.text) == (400, True)
    refused = client.get("/compare?" + "&".join(f"profile={number}" for number in range(100, 160)))
    assert (refused.status_code, "not 60" in refused.text) == (400, True)


def test_20_attack_so_many_studies_are_prepared_at_once(
    bounded: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve studies of a trace of a million requests took 1.5 GB of the service."""
    monkeypatch.setattr(study_requests, "WAIT_S", 0.1)
    digest, began, go_on = bounded.store.traces()[0].digest, threading.Semaphore(0), threading.Event()
    prepare_one = studies.prepare

    def slow(*given: Any, **named: Any) -> Any:
        began.release()
        assert go_on.wait(60)
        return prepare_one(*given, **named)

    monkeypatch.setattr(studies, "prepare", slow)
    answers: list[int] = []

    def post(seed: int) -> None:
        body = {**STUDY, "trace": digest, "name": f"s{seed}", "seed": seed}
        answers.append(client_of(bounded, "one").post("/v1/studies", json=body).status_code)

    threads = [threading.Thread(target=post, args=(n,)) for n in range(study_requests.PREPARED_AT_ONCE)]
    for each in threads:
        each.start()
        assert began.acquire(timeout=60)
    post(99)
    assert answers == [503]
    go_on.set()
    for each in threads:
        each.join()
    post(98)
    assert answers == [503, *[201] * (len(threads) + 1)]
