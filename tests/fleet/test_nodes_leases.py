"""One controller has a node: the lease and its fence, the lock of a GPU, and what loses them."""

import os
import signal
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Connection, text

from tests.history.postgres import Server
from tests.history.records import a_run, a_study
from tests.tuning.studies import WATCHDOG_S, environment, wait_for, write
from tuner import processes
from tuner.errors import Conflict
from tuner.fleet import nodes
from tuner.history.base import hold
from tuner.history.store import Store
from tuner.records import TrialState

TTL_S = 4.0


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'tuner.db'}"
    server: Server = request.getfixturevalue("postgres")
    return server.url()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    found = Store(url)
    found.upgrade()
    yield found
    found.close()


def test_the_second_controller_is_told_who_has_the_node(store: Store) -> None:
    with (
        nodes.held(store, "n", clock=now),
        pytest.raises(Conflict, match=f"leased to '.* pid {os.getpid()}"),
    ):
        store.acquire_lease("n", "another", now=now(), ttl_s=10)
    assert store.leases(now=now()) == ()


def test_the_lease_of_a_process_that_died_is_taken_over_at_once(store: Store) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = nodes.holder().replace(f"pid {os.getpid()}", f"pid {gone.pid}")
    store.acquire_lease("n", dead, now=now(), ttl_s=3600)
    with nodes.held(store, "n", clock=now):
        (mine,) = store.leases(now=now())
        assert (mine.holder, mine.fence) == (nodes.holder(), 2)


def test_a_holder_is_known_by_its_start_in_either_form_of_a_lease() -> None:
    """Earlier releases wrote the seconds since 1970, which may still be in force."""
    mine, begun = nodes.holder(), psutil.Process().create_time()
    who, _, since = mine.rpartition(" since ")
    assert datetime.fromisoformat(since.replace(" UTC", "+00:00")).timestamp() == round(begun)
    for form, dead in ((since, False), (f"{begun:.0f}", False), (f"{begun - 60:.0f}", True),
                       ("2026-03-01 22:00:00 UTC", True)):  # fmt: skip
        assert nodes.is_dead(f"{who} since {form}") is dead, form


def test_the_lease_of_another_host_is_left_alone(store: Store) -> None:
    store.acquire_lease("n", "elsewhere pid 1 since 0", now=now(), ttl_s=3600)
    with pytest.raises(Conflict, match="elsewhere"), nodes.held(store, "n", clock=now):
        pass


def test_a_lease_lives_as_long_as_its_holder(store: Store) -> None:
    with nodes.held(store, "n", clock=now, ttl_s=0.4) as held:
        (first,) = store.leases(now=now())
        wait_for(lambda: now() > first.acquired_at + timedelta(seconds=1.2))
        held.prove()


def test_who_lost_the_lease_cannot_write_any_of_it(store: Store) -> None:
    at = [now()]
    with nodes.held(store, "n", clock=lambda: at[0], ttl_s=3600) as held:
        held.add_study(a_study())
        at[0] += timedelta(seconds=3601)
        for write_something in (
            lambda: held.add_study(a_study(name="other")),
            lambda: a_run(held, a_study()),
            held.prove,
        ):
            with pytest.raises(Conflict, match="ran out; nothing was written"):
                write_something()
    assert [study.name for study in store.studies()] == [a_study().name]
    assert store.runs() == ()


@contextmanager
def controller(folder: Path, study: Path, url: str) -> "Iterator[subprocess.Popen[str]]":
    """A controller that has its lease."""
    words = [sys.executable, "-m", "tests.fleet.controller", str(study), str(folder), url, str(TTL_S)]
    started = subprocess.Popen(
        words, env=environment(folder), cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGCONT)
            started.kill()
        started.communicate()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.slow
def test_a_paused_controller_that_wakes_up_cannot_write(store: Store, url: str, tmp_path: Path) -> None:
    """SIGSTOP past its lease; another one takes the node; then SIGCONT."""
    study = write(tmp_path)
    with controller(tmp_path, study, url) as paused:
        assert line(paused) == "leased"
        wait_for(lambda: _running(store) >= 2)
        wait_for(lambda: _paused_outside_a_write(paused, store))
        wait_for(lambda: not store.leases(now=now()))
        with controller(tmp_path, study, url) as again:
            assert line(again) == "leased"
            assert f"is being tuned by process {paused.pid} on this host" in line(again)
        with nodes.held(store, "local", clock=now):
            before = written(store, tmp_path)
            paused.send_signal(signal.SIGCONT)
            assert paused.wait(WATCHDOG_S) == Conflict.exit_code
            said = line(paused)
            assert said.startswith("told: the lease on node 'local' (fence 1)")
            after = written(store, tmp_path)
            assert [name for name in before if after[name] != before[name]] == []
        launches = [launch.id for launch in store.launches(store.study("tiny").id)]
        assert [p for launch in launches for p in processes.tagged(launch)] == []


def written(store: Store, home: Path) -> dict[str, object]:
    """All that a run may write: rows, profiles, aliases, and files but for those of the trial under way."""
    study = store.study("tiny")
    trials = store.trials(study.id)
    own = {Path(t.directory or "") for t in trials if t.state is TrialState.RUNNING}
    own |= {Path(each.directory or "") for each in store.open_launches()}
    files = [f for f in (home / "trials").rglob("*") if f.is_file() and f.parent not in own]
    return {
        "trials": trials, "launches": store.launches(study.id), "runs": store.runs(study.id),
        "profiles": store.profiles(), "aliases": store.alias_events(), "nodes": store.nodes(),
        **{str(file): file.read_bytes() for file in files},
    }  # fmt: skip


@pytest.mark.postgres
def test_who_is_paused_in_the_middle_of_a_write_holds_nobody_up_for_ever(postgres: Server) -> None:
    """The server ends a transaction that stands still; what it was to write is tried again, and refused."""
    url = postgres.url()
    paused, other = Store(url), Store(url)
    lease = paused.acquire_lease("n", "paused", now=now(), ttl_s=60)
    later, tries = now() + timedelta(seconds=61), 0

    def write_slowly(connection: Connection) -> None:
        nonlocal tries
        tries += 1
        hold(connection, lease, now())
        assert other.acquire_lease("n", "next", now=later, ttl_s=60).fence == 2
        connection.execute(text("SELECT 1"))

    with pytest.raises(Conflict, match="'next' now has it with fence 2"):
        paused.database.write(write_slowly)
    assert tries == 2
    paused.close()
    other.close()


def _paused_outside_a_write(paused: "subprocess.Popen[str]", store: Store) -> bool:
    """Pause it; one that holds SQLite's write lock goes on, as nobody else could ever write."""
    paused.send_signal(signal.SIGSTOP)
    if store.database.path is None:
        return True
    connection = sqlite3.connect(store.database.path, timeout=0.2)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()
    except sqlite3.OperationalError:
        paused.send_signal(signal.SIGCONT)
        return False
    finally:
        connection.close()
    return True


def _running(store: Store) -> int:
    """How many trials there are, once the last one runs."""
    studies = store.studies()
    trials = store.trials(studies[0].id) if studies else ()
    return len(trials) if trials and trials[-1].state is TrialState.RUNNING else 0


def test_of_two_controllers_that_race_for_a_node_one_wins_and_the_other_is_told(
    store: Store, url: str, tmp_path: Path
) -> None:
    study = write(tmp_path)
    with controller(tmp_path, study, url) as one, controller(tmp_path, study, url) as other:
        both = {line(one): one, line(other): other}
        assert "leased" in both, both
        (told,) = [said for said in both if said != "leased"]
        assert told.startswith("told: node 'local' is leased to '")
        assert f"pid {both['leased'].pid} " in told
        assert both[told].wait(WATCHDOG_S) == Conflict.exit_code


HOLD = "import sys, time; from tuner.fleet.nodes import locked_gpus\nwith locked_gpus(sys.argv[1:]): print('held', flush=True); time.sleep(600)"  # noqa: E501


def test_a_gpu_is_used_by_one_tuner_and_the_kernel_frees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    words = [sys.executable, "-c", HOLD, "GPU-2", "GPU-1"]
    with subprocess.Popen(
        words, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert line(holder) == "held"
        with (
            pytest.raises(Conflict, match=f"GPU GPU-1 is in use by another tuner .* pid {holder.pid} "),
            nodes.locked_gpus(["GPU-1"]),
        ):
            pass
        with nodes.locked_gpus(["GPU-3"]):
            pass
        holder.kill()
        holder.wait()
        with nodes.locked_gpus(["GPU-1", "GPU-2"]):
            pass


RUN_ON_GPUS = """
import sys
from dataclasses import replace
from tuner.commands.common import open_store
from tuner.commands.plan import prepared_study
from tuner.commands.tune import on_its_node
from tuner.errors import Conflict
from tuner.fleet.nodes import locked_gpus
from tuner.tuning.run import RunLimits
from pathlib import Path

gpus = tuple(sys.argv[2:])

def look(event):
    try:
        with locked_gpus(gpus[1:]):
            print("free", flush=True)
    except Conflict as error:
        print(error, flush=True)

store = open_store(create=True)
prepared = prepared_study(Path(sys.argv[1]))
prepared = replace(prepared, node=replace(prepared.node, gpus=gpus))
run = on_its_node(prepared, store, RunLimits(trials=1, early=False), quiet=True, listen=look)
look(None)
print(run.state)
"""


@pytest.mark.slow
def test_a_run_on_a_node_with_gpus_does_not_lock_itself_out(tmp_path: Path) -> None:
    """It holds each GPU once, from its first word to its last."""
    gpus = sorted(f"GPU-{uuid.uuid4()}" for _ in range(2))
    try:
        done = subprocess.run(
            [sys.executable, "-c", RUN_ON_GPUS, str(write(tmp_path)), *gpus],
            env=environment(tmp_path), cwd=Path(__file__).parents[2], capture_output=True, text=True,
            timeout=WATCHDOG_S, check=False,
        )  # fmt: skip
        *told, free, state = done.stdout.splitlines() or ["", ""]
        assert (free, state) == ("free", "FINISHED"), done.stderr
        assert told
        assert all(said.startswith(f"GPU {gpus[1]} is in use by another tuner") for said in told)
    finally:
        for gpu in gpus:
            nodes.lock_path(gpu).unlink(missing_ok=True)
