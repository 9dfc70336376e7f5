"""What `deploy/` ships is what runs: every command of the units, every metric of dashboard and alerts."""

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from tests.fleet.production import Production
from tests.tuning.studies import WATCHDOG_S, command, environment, tuner, write
from tuner.engine.http import fresh_port
from tuner.history.entities import Schedule
from tuner.history.store import Store

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
TIMERS = sorted((DEPLOY / "systemd").glob("*.timer"))
PROGRAM = "/opt/tuner/bin/tuner"


def settings_of(path: Path) -> Iterator[tuple[str, str, str]]:
    """(section, key, value) of a unit file."""
    section = ""
    for line in path.read_text().splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = match.group(1)
        elif line and not line.startswith("#"):
            key, sign, value = line.partition("=")
            assert sign, f"{path.name}: {line}"
            yield section, key, value


def commands() -> list[tuple[str, str]]:
    """Every command line of every unit."""
    return [
        (path.name, value) for path in UNITS for _, key, value in settings_of(path) if key.startswith("Exec")
    ]


def words_of(line: str, schedule: str = "nightly") -> list[str]:
    program, *words = line.replace("%i", schedule).split()
    assert program == PROGRAM
    return words


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_is_shut_off_from_its_host(path: Path) -> None:
    """`systemd-analyze security` rates it at most 3 of 10; where there is none, the settings are there."""
    found = {(section, key): value for section, key, value in settings_of(path)}
    assert found["Service", "UMask"] == "0077"
    assert found["Service", "StateDirectoryMode"] == "0700"
    assert found["Service", "NoNewPrivileges"] == "yes"
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("no systemd-analyze on this host")
    words = [analyze, "security", "--offline=true", "--threshold=30", "--no-pager", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a schedule that is due now, for a node whose production is a file."""
    home = tmp_path_factory.mktemp("home")
    study = write(home)
    study.write_text(study.read_text().replace("trace:", "node: gpu-1\ntrace:"))
    done = tuner(home, "node", "add", "gpu-1", "--card", "h100-80")
    assert done.returncode == 0, done.stderr
    Production(home / "production").register(home, "gpu-1")
    begin = datetime.now(UTC) - timedelta(minutes=1)
    store = Store(f"sqlite:///{home / 'tuner.db'}")
    store.put_schedule(
        Schedule(
            name="nightly", node="gpu-1", cron=f"{begin.minute} {begin.hour} * * *", timezone="UTC",
            spec={"study": str(study), "hours": 2.0, "trials": 1}, created_at=begin - timedelta(hours=1),
        )
    )  # fmt: skip
    store.close()
    return home


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "line"), [c for c in commands() if " serve" not in c[1]])
def test_a_command_of_a_unit_runs(unit: str, line: str, home: Path) -> None:
    done = tuner(home, *words_of(line))
    assert done.returncode == 0, f"{unit}: {line}: {done.stderr}"


def test_the_night_of_the_timer_was_a_run_and_production_is_back(home: Path) -> None:
    store = Store(f"sqlite:///{home / 'tuner.db'}")
    row = store.schedule("nightly")
    if row.last_due is None:
        assert tuner(home, "schedule", "run", "nightly").returncode == 0
        row = store.schedule("nightly")
    (run,) = store.runs()
    assert row.last_run_id == run.id
    assert run.deadline is not None
    assert row.last_due is not None
    assert run.deadline < row.last_due + timedelta(hours=2)
    production = home / "production"
    assert [w for w in (production / "log").read_text().split() if w != "ready"] == ["drain", "restore"]
    assert (production / "state").read_text() == "up"
    assert [entry.action for entry in store.audit()] == ["schedule.ended"]
    store.close()
    again = tuner(home, "schedule", "run", "nightly")
    assert again.returncode == 0
    assert "nothing is due" in again.stderr


def test_the_service_of_the_unit_answers(home: Path) -> None:
    (line,) = [value for _, value in commands() if " serve" in value]
    words = words_of(line)
    port = fresh_port()
    words[words.index("--port") + 1] = str(port)
    with (home / "serve.log").open("wb") as log:
        process = subprocess.Popen(command(*words), env=environment(home), stdout=log, stderr=log)
    try:
        end = time.monotonic() + WATCHDOG_S
        while True:
            assert process.poll() is None, (home / "serve.log").read_text()
            assert time.monotonic() < end, "it never answered"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as reply:
                    assert reply.status == 200
                    return
            except OSError:
                time.sleep(0.1)
    finally:
        process.terminate()
        process.wait(WATCHDOG_S)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_reads_the_units(tmp_path: Path) -> None:
    """Copies whose program exists; anything systemd says of them is a fault."""
    for path in (*UNITS, *TIMERS):
        text = path.read_text().replace(PROGRAM, "/bin/true")
        (tmp_path / path.name.replace("@.", "@nightly.")).write_text(text)
    units = [str(path) for path in sorted(tmp_path.iterdir())]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )
    said = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "tuner" in line]
    assert said == [], done.stderr


def test_each_timer_has_its_service() -> None:
    assert {path.stem for path in TIMERS} <= {path.stem for path in UNITS}
    for path in TIMERS:
        assert any(key == "OnCalendar" for _, key, _ in settings_of(path)), path.name


def exported(home: Path) -> set[str]:
    """The names that the service exports on /metrics, with their labels left out."""
    from tuner.service.metrics import Watcher
    from tuner.service.runner import Controllers
    from tuner.settings import Settings

    store = Store(f"sqlite:///{home / 'tuner.db'}")
    ours = Settings(home=home)

    def clock() -> datetime:
        return datetime.now(UTC)

    watcher = Watcher(store, clock, Controllers(store, ours, clock))
    names = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in watcher.collect()
    }
    store.close()
    return names


def named(text: str) -> set[str]:
    return set(re.findall(r"\btuner_[a-z_]+", text))


def expressions() -> list[str]:
    """What dashboard and alerts ask Prometheus."""
    board = json.loads((DEPLOY / "monitoring" / "grafana-dashboard.json").read_text())
    rules = yaml.safe_load((DEPLOY / "monitoring" / "alerts.yaml").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [item["query"] for item in board["templating"]["list"]]
    return asked + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_dashboard_and_alerts_ask_for_what_is_exported(home: Path) -> None:
    names = exported(home)
    assert names
    asked = named(" ".join(expressions()))
    assert asked <= names, f"not exported: {asked - names}"
    assert names <= asked, f"shown nowhere: {names - asked}"


def test_panels_have_ids_of_their_own_and_a_place() -> None:
    board = json.loads((DEPLOY / "monitoring" / "grafana-dashboard.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert all(x + w <= 24 for x, _, w, _ in places)


def test_every_alert_says_what_to_look_at() -> None:
    rules = yaml.safe_load((DEPLOY / "monitoring" / "alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]
            assert rule["annotations"]["description"]
