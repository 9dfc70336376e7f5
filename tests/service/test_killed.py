"""The service killed (SIGKILL) at random moments: of promotions, and of asking for runs.

`TUNER_KILLS` sets how many moments there are of each kind (1 by default, 25 by hand), `TUNER_SEED` which.
"""

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fleet.production import Production
from tests.history.fill import fill
from tests.service.test_routes import KEY, MODEL
from tests.service.world import STUDY, Server, prepare, start
from tests.tuning.studies import WATCHDOG_S
from tuner import processes
from tuner.fleet.hooks import path_of
from tuner.history.store import Store
from tuner.records import RunState, TrialState

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("TUNER_KILLS", "1"))
SEED = int(os.environ.get("TUNER_SEED", "7"))
CHAMPION = f"/v1/aliases/champion?model={MODEL}&target=n1&workload=chat"


@dataclass
class Killed:
    """A home whose service is killed and started again, over and over."""

    home: Path
    server: Server
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))

    @property
    def store(self) -> Store:
        return Store(f"sqlite:///{self.home / 'tuner.db'}", create=False)

    def kill_after(self, longest_s: float) -> None:
        time.sleep(self.chance.uniform(0, longest_s))
        self.server.kill()

    def again(self) -> None:
        self.server = start(self.home).ready()


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Killed]:
    found = Killed(tmp_path, start(tmp_path).ready())
    yield found
    found.server.kill()


def test_promotions_are_whole_and_none_that_was_answered_is_lost(
    killed: Killed, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(killed.store)
    token = killed.store.create_token("mover", ["admin"], now=datetime.now(UTC))[1]
    for _ in range(KILLS):
        answered: list[int] = []
        mover = threading.Thread(target=move, args=(killed.server.client(token), answered))
        mover.start()
        killed.kill_after(2.0)
        mover.join(WATCHDOG_S)
        killed.again()
        store = killed.store
        events = store.alias_events(KEY, alias="champion")
        assert [event.generation for event in events] == list(range(1, len(events) + 1))
        for before, after in pairwise(events):
            assert after.from_version == before.to_version
        assert set(answered) <= {event.generation for event in events}
        (standing,) = store.aliases(KEY)
        assert standing == events[-1]
        with killed.server.client(token) as client:
            pulled = client.get(f"/v1/profiles/resolve?model={MODEL}&node=n1&workload=chat")
        assert pulled.json()["version"] == standing.to_version
        store.close()
    with capsys.disabled():
        print(f"\n{KILLS} kills, {len(events)} promotions, none lost")


def move(client: httpx.Client, answered: list[int]) -> None:
    """Moves the champion to and fro until nobody answers."""
    with client, suppress(httpx.TransportError):
        while True:
            seen = client.get(CHAMPION)
            body = {"version": 3 - seen.json()["to_version"], "reason": "to and fro", "force": True}
            done = client.put(CHAMPION, json=body, headers={"If-Match": seen.headers["etag"]})
            if done.status_code == 200:
                answered.append(done.json()["generation"])


def test_a_run_is_started_once_however_often_its_service_dies(
    killed: Killed, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = prepare(killed.home)
    production = serving_production(killed.home)
    with killed.server.client() as client:
        assert client.post("/v1/studies", json={**STUDY, "trace": digest}).status_code == 201
    for moment in range(KILLS):
        key = {"Idempotency-Key": f"moment-{moment}"}
        asked = {"study": "tiny", "trials": 1}
        first: list[str] = []
        asker = threading.Thread(target=ask, args=(killed.server.client(), asked, key, first))
        asker.start()
        killed.kill_after(1.5)
        asker.join(WATCHDOG_S)
        killed.again()
        with killed.server.client() as client:
            answer = client.post("/v1/runs", json=asked, headers=key)
            assert answer.status_code == 202, answer.text
            run_id = answer.json()["id"]
            assert first in ([], [run_id])
            wait_for_controller(killed, run_id)
            assert len(killed.store.runs()) == moment + 1
            killed.kill_after(1.0)
            killed.again()
        with killed.server.client() as client:
            if client.get(f"/v1/runs/{run_id}").json()["state"] in ("RUNNING", "stopped"):
                assert client.post(f"/v1/runs/{run_id}/cancel").status_code in (202, 409)
        wait_for_end(killed, run_id)
        wait_for_production(killed, production)
    store = killed.store
    assert not [trial for trial in store.orphans()]
    for study in store.studies():
        for launch in store.launches(study.id):
            assert not processes.tagged(launch.id)
        for trial in store.trials(study.id):
            assert trial.state is not TrialState.RUNNING
    store.close()
    with capsys.disabled():
        given_back = len(production.log) // 2
        print(f"\n{2 * KILLS} kills, {KILLS} runs; production drained and restored {given_back} times")


def serving_production(home: Path) -> Production:
    """What serves on the node by day, beside the engine that is registered for it."""
    path = path_of(home, "local")
    engine = path.read_text()
    found = Production(home / "production")
    found.register(home, "local")
    path.write_text(engine + path.read_text())
    return found


def wait_for_production(killed: Killed, production: Production) -> None:
    """Until it has its node back, restored once for each time that it was drained."""
    end = time.monotonic() + WATCHDOG_S
    while killed.store.handover("local") is not None or not production.up:
        assert time.monotonic() < end, production.log
        time.sleep(0.1)
    assert production.log == ["drain", "restore"] * (len(production.log) // 2)


def ask(client: httpx.Client, body: dict[str, object], key: dict[str, str], got: list[str]) -> None:
    with client, suppress(httpx.TransportError):
        got.append(client.post("/v1/runs", json=body, headers=key).json()["id"])


def wait_for_controller(killed: Killed, run_id: str) -> None:
    """Until a controller is at work on the run, or the run has ended."""
    end = time.monotonic() + WATCHDOG_S
    while True:
        run = killed.store.run(run_id)
        if run.state is not RunState.RUNNING or (run.pid is not None and psutil.pid_exists(run.pid)):
            return
        assert time.monotonic() < end, run
        time.sleep(0.1)


def wait_for_end(killed: Killed, run_id: str) -> None:
    end = time.monotonic() + WATCHDOG_S
    while killed.store.run(run_id).state is RunState.RUNNING:
        assert time.monotonic() < end, (killed.home / "controllers" / f"{run_id}.log").read_text()
        time.sleep(0.2)
