"""Production gives a node up and gets it back: when all is well, when hooks fail, and after a kill −9."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.fleet.production import Production
from tests.history.records import a_run, a_study
from tests.tuning.studies import STUDY, VIRTUAL, WATCHDOG_S, command, environment, tuner, write
from tuner.cli import app
from tuner.errors import BadInput, Conflict, Unavailable
from tuner.fleet import hooks
from tuner.fleet.handover import handed_over, recover
from tuner.history.store import Store
from tuner.records import JSON, Launch, Node

NODE = Node(name="gpu-1", gpu_class="sim-h100-80")


def clock() -> datetime:
    return datetime.now(UTC)


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + WATCHDOG_S
    while not what():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.02)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    made = Store(f"sqlite:///{home / 'tuner.db'}")
    made.add_node(NODE)
    yield made
    made.close()


@pytest.fixture
def production(tmp_path: Path, home: Path) -> Production:
    made = Production(tmp_path / "production")
    made.register(home, "gpu-1")
    return made


@pytest.fixture(autouse=True)
def _no_watchers(home: Path) -> Iterator[None]:
    """The processes that watch over production end when there is nothing left to restore."""
    yield
    if (home / "tuner.db").exists():
        ending = Store(f"sqlite:///{home / 'tuner.db'}")
        for node in ending.nodes():
            ending.set_handover(node.name, None)
        ending.close()


def test_production_is_down_in_between_and_up_afterwards(
    store: Store, home: Path, production: Production
) -> None:
    with handed_over(store, NODE, home=home, clock=clock) as held:
        assert not production.up
        assert store.node("gpu-1").state == "leased"
        journal = json.dumps(store.handover("gpu-1"))
        assert "restore" in journal
        held.set_node_state("gpu-1", "leased")
        with pytest.raises(Conflict, match="leased to"):
            handed_over(store, NODE, home=home, clock=clock).__enter__()
    assert production.up
    assert production.log == ["drain", "restore"]
    assert store.handover("gpu-1") is None
    assert store.node("gpu-1").state == "free"
    assert store.leases(now=clock()) == ()


def test_a_node_without_hooks_is_leased_only(store: Store, home: Path) -> None:
    other = Node(name="gpu-2", gpu_class="sim-h100-80")
    with handed_over(store, other, home=home, clock=clock):
        assert store.handover("gpu-2") is None
        assert [lease.node for lease in store.leases(now=clock())] == ["gpu-2"]
    assert store.node("gpu-2").state == "free"


def test_an_error_in_the_run_brings_production_back(store: Store, home: Path, production: Production) -> None:
    with pytest.raises(BadInput, match="the run"), handed_over(store, NODE, home=home, clock=clock):
        raise BadInput("the run")
    assert production.up


def test_the_journal_is_there_before_the_first_drain(
    store: Store, home: Path, production: Production
) -> None:
    production.trouble("drain", 9)
    seen = []
    with (
        pytest.raises(Unavailable, match=r"was not drained: .*the unit is masked"),
        handed_over(
            store, NODE, home=home, clock=clock, say=lambda text: seen.append((text, store.handover("gpu-1")))
        ),
    ):
        pytest.fail("the body must not run")
    assert seen[0][0].startswith("draining")
    assert seen[0][1] is not None
    assert production.log == ["drain", "restore"]
    assert store.handover("gpu-1") is None


def test_what_was_drained_before_a_hook_failed_is_restored_the_last_first(
    store: Store, home: Path, tmp_path: Path
) -> None:
    first, second = Production(tmp_path / "first"), Production(tmp_path / "second")
    second.trouble("drain", 9)
    entries = [
        {"command": {"drain": each.words("drain"), "restore": each.words("restore")}}
        for each in (first, second)
    ]
    hooks.write(home, "gpu-1", {"handover": entries})  # type: ignore[dict-item]
    said: list[str] = []
    with (
        pytest.raises(Unavailable),
        handed_over(store, NODE, home=home, clock=clock, say=said.append),
    ):
        pytest.fail("the body must not run")
    assert first.log == second.log == ["drain", "restore"]
    assert [line.split()[0] for line in said] == ["draining", "draining", "restoring", "restoring"]


def test_a_restore_that_fails_is_tried_again(store: Store, home: Path, production: Production) -> None:
    production.trouble("restore", 2)
    with handed_over(store, NODE, home=home, clock=clock):
        pass
    assert production.up
    assert production.log == ["drain", "restore", "restore", "restore"]


def test_a_restore_that_keeps_failing_is_loud_and_stays_in_the_journal(
    store: Store, home: Path, production: Production
) -> None:
    production.trouble("restore", 3)
    with (
        pytest.raises(Unavailable, match=r"is NOT restored: .*tuner node restore gpu-1"),
        handed_over(store, NODE, home=home, clock=clock),
    ):
        pass
    assert store.node("gpu-1").state == "dirty"
    assert store.handover("gpu-1") is not None
    assert recover(store, "gpu-1", home=home, clock=clock)
    assert production.up
    assert store.node("gpu-1").state == "free"


def test_a_hook_that_hangs_is_killed_at_its_time(store: Store, home: Path, production: Production) -> None:
    production.register(home, "gpu-1", timeout_s=1.0)
    production.trouble("drain", "hang")
    with (
        pytest.raises(Unavailable, match="did not end within 1 s"),
        handed_over(store, NODE, home=home, clock=clock),
    ):
        pytest.fail("the body must not run")


def test_a_node_in_state_fault_is_neither_taken_nor_restored(
    store: Store, home: Path, production: Production
) -> None:
    with pytest.raises(Conflict, match="NOT restored"), handed_over(store, NODE, home=home, clock=clock):
        store.set_node_state("gpu-1", "fault")
    assert production.log == ["drain"]
    with pytest.raises(Conflict, match="NOT restored"):
        recover(store, "gpu-1", home=home, clock=clock)
    with (
        pytest.raises(Conflict, match="state fault"),
        handed_over(store, NODE, home=home, clock=clock),
    ):
        pytest.fail("the body must not run")
    assert production.log == ["drain"]
    done = tuner(home, "node", "restore", "gpu-1", "--mended")
    assert done.returncode == 0, done.stderr
    assert production.up


def test_a_journal_of_another_host_is_left_to_it(store: Store, home: Path, production: Production) -> None:
    store.set_handover("gpu-1", {"host": "elsewhere", "holder": "elsewhere pid 1 since 1", "hooks": []})
    with pytest.raises(Conflict, match="from host elsewhere"):
        recover(store, "gpu-1", home=home, clock=clock)


def left_by_a_pod(store: Store, home: Path, production: Production) -> str:
    """Production is down, and a pod that is gone has the journal of it. Returns the pod."""
    with handed_over(store, NODE, home=home, clock=clock):
        journal = store.handover("gpu-1")
    assert isinstance(journal, dict)
    store.set_handover("gpu-1", {**journal, "host": "tuner-29471-x7k2p", "holder": "tuner-29471-x7k2p pid 1"})
    (production.place / "state").write_text("down")
    (production.place / "log").write_text("")
    return "tuner-29471-x7k2p"


def test_20_what_a_dead_pod_drained_is_restored_by_the_next_one_when_told_so(
    store: Store, home: Path, production: Production
) -> None:
    pod = left_by_a_pod(store, home, production)
    refused = tuner(home, "node", "restore", "gpu-1")
    assert refused.returncode == 5
    assert f"'tuner node restore gpu-1 --from {pod}'" in refused.stderr
    refused = tuner(home, "node", "restore", "gpu-1", "--from", "another")
    assert (refused.returncode, f"--from {pod}" in refused.stderr) == (5, True)
    assert not production.up
    production.trouble("restore", 9)
    failed = tuner(home, "node", "restore", "gpu-1", "--from", pod)
    assert (failed.returncode, "is NOT restored" in failed.stderr) == (6, True)
    assert "host tuner-29471-x7k2p" in json.dumps(store.handover("gpu-1")).replace('": "', " "), (
        "kept for a try"
    )
    (production.place / "no-restore").unlink()
    done = tuner(home, "node", "restore", "gpu-1", "--from", pod)
    assert done.returncode == 0, done.stderr
    assert f"drained from host {pod} at 20" in done.stderr
    assert f"production.py restore {production.place}" in done.stderr, "it says what it will run"
    assert done.stderr.endswith("node gpu-1: production is back\n")
    assert production.up
    assert (store.handover("gpu-1"), store.node("gpu-1").state) == (None, "free")
    row = store.audit(limit=1)[0]
    assert (row.action, row.target, pod in row.reason) == ("node.restore", "gpu-1", True)
    again = tuner(home, "node", "restore", "gpu-1", "--from", pod)
    assert (again.returncode, "nothing to restore" in again.stderr) == (0, True)


def test_20_a_journal_is_forgotten_when_production_was_brought_back_by_hand(
    store: Store, home: Path, production: Production
) -> None:
    pod = left_by_a_pod(store, home, production)
    lease = store.acquire_lease("gpu-1", f"{pod} pid 1", now=clock(), ttl_s=3600.0)
    held = tuner(home, "node", "restore", "gpu-1", "--forget")
    assert "a run still uses it" in held.stderr
    assert store.handover("gpu-1") is not None
    store.release_lease(lease)
    done = tuner(home, "node", "restore", "gpu-1", "--forget")
    assert done.returncode == 0, done.stderr
    assert f"drained from host {pod}" in done.stderr
    assert done.stderr.endswith("node gpu-1: the journal is cleared, and nothing was run\n")
    assert production.log == []
    assert (store.handover("gpu-1"), store.node("gpu-1").state) == (None, "free")
    assert store.audit(limit=1)[0].action == "node.forget"
    for wrong in (("--all", "--forget"), ("--all", "--from", pod), ("gpu-1", "--forget", "--from", pod)):
        assert tuner(home, "node", "restore", *wrong).returncode == 2


def test_a_lease_that_ran_out_while_nobody_came_does_not_keep_production_down(
    store: Store, home: Path, production: Production
) -> None:
    now = [clock()]
    with handed_over(store, NODE, home=home, clock=lambda: now[0], ttl_s=3600.0):
        now[0] = now[0].replace(year=now[0].year + 1)  # suspended for a year
    assert production.up


def _taken_over(store: Store, now: list[datetime]) -> None:
    now[0] = now[0].replace(year=now[0].year + 1)
    store.acquire_lease("gpu-1", "somebody", now=now[0], ttl_s=3600.0)


def test_production_is_left_to_whoever_took_the_node(
    store: Store, home: Path, production: Production
) -> None:
    now = [clock()]
    with (
        pytest.raises(Conflict, match="leased to 'somebody'"),
        handed_over(store, NODE, home=home, clock=lambda: now[0], ttl_s=3600.0),
    ):
        _taken_over(store, now)
    assert production.log == ["drain"]


def test_a_signal_in_the_middle_of_a_drain_waits_until_production_is_back(
    store: Store, home: Path, production: Production
) -> None:
    def at_drain(text: str) -> None:
        if text.startswith("draining"):
            os.kill(os.getpid(), signal.SIGTERM)

    with (
        pytest.raises(KeyboardInterrupt),
        handed_over(store, NODE, home=home, clock=clock, say=at_drain),
    ):
        pytest.fail("the body must not run")
    assert production.log == ["drain", "restore"]


def test_a_thread_can_take_a_node_too(store: Store, home: Path, production: Production) -> None:
    def work() -> None:
        with handed_over(store, NODE, home=home, clock=clock):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert production.log == ["drain", "restore"]


def drained_by_a_run_that_was_killed(home: Path, folder: Path) -> "subprocess.Popen[bytes]":
    """A real `tuner tune`, killed by −9 while its engine starts or serves."""
    study = write(folder, STUDY.replace("trace:", "node: gpu-1\ntrace:"))
    controller = subprocess.Popen(
        command("tune", study), env=environment(home), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    wait_for(lambda: bool(list(home.glob("trials/*/0000-0/engine.log"))) or controller.poll() is not None)
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    return controller


@pytest.mark.slow
def test_after_a_kill_production_is_restored_without_anybody_s_help(
    store: Store, home: Path, production: Production, tmp_path: Path
) -> None:
    drained_by_a_run_that_was_killed(home, tmp_path)
    assert production.log[0] == "drain"
    wait_for(lambda: store.handover("gpu-1") is None and store.node("gpu-1").state == "free")
    assert production.up
    assert store.orphans() == ()


def test_after_a_loss_of_power_the_next_start_restores_before_it_drains(
    store: Store, home: Path, production: Production, tmp_path: Path
) -> None:
    """Nothing of the dead run is left, not even what watches over it: only the journal in the database."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with handed_over(store, NODE, home=home, clock=clock):
        journal = store.handover("gpu-1")
    assert isinstance(journal, dict)
    journal["holder"] = f"{socket.gethostname()} pid {gone.pid} since 1"
    store.set_handover("gpu-1", journal)
    (production.place / "state").write_text("down")
    (production.place / "log").write_text("")
    study = write(tmp_path, VIRTUAL.replace("trace:", "node: gpu-1\ntrace:"))
    done = tuner(home, "tune", study, "--trials", "1")
    assert done.returncode == 0, done.stderr
    assert production.log == ["restore", "drain", "restore"]
    assert production.up


def test_engines_behind_a_door_are_stopped_before_production_comes_back(
    store: Store, home: Path, production: Production, tmp_path: Path
) -> None:
    """By the stop command of the study that left them, which is not tuned now."""
    events = production.place / "log"
    stop: list[JSON] = ["sh", "-c", f"echo stopped-{{tag}} >> {events}"]
    study = replace(a_study(node="gpu-1"), spec={"engine": {"stop_command": stop}})
    a_run(store, study)
    with handed_over(store, NODE, home=home, clock=clock):
        journal = store.handover("gpu-1")
    store.set_handover("gpu-1", journal)
    store.add_launch(Launch(id="left", study_id=study.id, argv=(), started_at=clock()))
    events.write_text("")
    assert recover(store, "gpu-1", home=home, clock=clock)
    assert production.log == ["stopped-left", "restore"]
    assert store.open_launches() == ()


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"comand": {}}, "give exactly one of the keys command, systemd, kubectl"),
        ({"systemd": "a b"}, "a unit's name"),
        ({"systemd": "--now"}, "a unit's name"),
        ({"kubectl": "vllm"}, "NAMESPACE/deployment/NAME"),
        ({"systemd": "vllm.service", "timout_s": 3}, "unknown key 'timout_s' (did you mean 'timeout_s'?)"),
        ({"systemd": "vllm.service", "timeout_s": 0}, "a number of seconds above 0"),
        ({"command": {"drain": ["true"]}}, "give the keys drain and restore"),
        ({"command": {"drain": "true", "restore": ["true"]}}, "a list of words"),
        ({"command": {"drain": ["x", "--api-key=abc"], "restore": ["true"]}}, "looks like a secret"),
    ],
)
def test_a_wrong_hook_names_what_is_wrong(entry: dict[str, object], sentence: str, home: Path) -> None:
    path = hooks.path_of(home, "gpu-1")
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump({"handover": [entry]}))
    with pytest.raises(BadInput) as refused:
        hooks.hooks(home, "gpu-1")
    assert sentence in str(refused.value)
    assert "gpu-1.yaml: handover[0]" in str(refused.value)


def fake(folder: Path, name: str, answers: dict[str, str]) -> Path:
    """A program of that name that answers by its first matching word, and writes down what it was asked."""
    lines = "\n".join(f'    *"{word}"*) echo "{said}";;' for word, said in answers.items())
    program = folder / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\necho "$*" >> "{folder / name}.log"\ncase "$*" in\n{lines}\nesac\n')
    program.chmod(0o755)
    return folder / f"{name}.log"


def test_a_unit_is_stopped_and_started_and_one_that_is_down_stays_down(
    store: Store, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    log = fake(tmp_path / "bin", "systemctl", {"show": "active"})
    hooks.write(home, "gpu-1", {"handover": [{"systemd": "vllm.service"}]})
    with handed_over(store, NODE, home=home, clock=clock):
        pass
    assert [line.split()[0] for line in log.read_text().splitlines()] == [
        "show",
        "stop",
        "start",
        "is-active",
    ]
    log = fake(tmp_path / "bin", "systemctl", {"show": "inactive"})
    log.write_text("")
    with handed_over(store, NODE, home=home, clock=clock):
        assert store.handover("gpu-1") is None
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["show"]


def test_an_answer_that_is_not_understood_drains_nothing(
    store: Store, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    log = fake(tmp_path / "bin", "systemctl", {"show": "Error from server; rm -rf"})
    hooks.write(home, "gpu-1", {"handover": [{"systemd": "vllm.service"}]})
    with (
        pytest.raises(Unavailable, match="is not known"),
        handed_over(store, NODE, home=home, clock=clock),
    ):
        pytest.fail("the body must not run")
    assert len(log.read_text().splitlines()) == 1


def test_nodes_and_hooks_are_registered_on_the_command_line(tmp_path: Path) -> None:
    home = tmp_path / "home"
    words = ["node", "add", "gpu-1", "--card", "h100-80", "--model", "Qwen/Qwen2.5-7B-Instruct"]
    words += ["--drain", "systemctl stop 'my vllm'", "--restore", "systemctl start 'my vllm'"]
    words += ["--ready", "curl -fs http://127.0.0.1:8000/health", "--timeout", "120", "--label", "zone=eu-1"]
    done = tuner(home, *words)
    assert done.returncode == 0, done.stderr
    written = yaml.safe_load((home / "nodes" / "gpu-1.yaml").read_text())
    assert written["models"] == ["Qwen/Qwen2.5-7B-Instruct"]
    assert written["handover"][0]["command"]["drain"] == ["systemctl", "stop", "my vllm"]
    assert (home / "nodes" / "gpu-1.yaml").stat().st_mode & 0o077 == 0
    again = tuner(home, "node", "add", "gpu-1", "--systemd", "vllm.service")
    assert again.returncode == 0, again.stderr
    (row,) = json.loads(tuner(home, "node", "list", "--json").stdout)
    assert row["hooks"] == ["systemd unit vllm.service"]
    assert row["labels"] == {"zone": "eu-1"}
    assert yaml.safe_load((home / "nodes" / "gpu-1.yaml").read_text())["models"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["gpu-1"], "give --python"),
        (["gpu-1", "--card", "h100-80", "--drain", "true"], "together"),
        (["gpu-1", "--card", "h100-80", "--kubectl", "vllm"], "NAMESPACE/deployment/NAME"),
        (["gpu-1", "--card", "h100-80", "--label", "zone"], "KEY=VALUE"),
        (["../evil", "--card", "h100-80"], "a name has letters"),
        (["gpu-1", "--python", "nowhere/python"], "there is no interpreter"),
    ],
)
def test_a_wrong_registration_writes_nothing(words: list[str], sentence: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = CliRunner().invoke(app, ["node", "add", *words], env={"TUNER_HOME": str(home)})
    assert isinstance(done.exception, BadInput)
    assert sentence in str(done.exception)
    assert not list(home.glob("nodes/*"))
