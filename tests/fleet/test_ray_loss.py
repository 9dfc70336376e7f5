"""A cluster by Ray's client with its history in PostgreSQL; its controller, and then its head, are lost."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.raycluster import (
    Cluster,
    another,
    readme_lines,
    running,
    serving,
    study_of,
    trials_of,
    wait_for,
)
from tests.history.postgres import Server
from tuner import processes
from tuner.records import RunState, TrialState

pytestmark = pytest.mark.cluster

STARTS = [line for line in readme_lines() if line.startswith("ray start") and "small-2" not in line]
CLIENT = "ray://127.0.0.1:10001"


@pytest.fixture(scope="module")
def cluster(postgres: Server) -> Iterator[Cluster]:
    with running(STARTS, postgres.url()) as found:
        yield found


def test_a_study_by_ray_s_client_is_written_to_postgresql(cluster: Cluster, tmp_path: Path) -> None:
    line = f"tuner tune {another(tmp_path, 'far')} --on {CLIENT} --nodes name=large --trials 2"
    log = tmp_path / "far.log"
    with cluster.started(line, log) as command:
        assert command.wait(600) == 0, log.read_text()
    assert "SQLite" not in log.read_text()
    assert "pull the winner: " in log.read_text()
    assert not (cluster.home / "tuner.db").exists()
    study = study_of(cluster, "large", "far")
    (run,) = cluster.store().runs(study.id)
    assert (run.state, study.gpu_class) == (RunState.FINISHED, "sim-a100-80")
    measured = [t for t in trials_of(cluster, "large", "far") if t.state is TrialState.COMPLETE]
    assert measured
    assert all(t.measurement and Path(t.measurement.slices[0].outcomes_file or "").exists() for t in measured)
    assert cluster.store().leases(now=run.started_at) == ()


@pytest.mark.parametrize("address", ["auto", CLIENT])
def test_a_controller_that_is_killed_leaves_no_engine_and_its_run_goes_on(
    cluster: Cluster, tmp_path: Path, address: str
) -> None:
    name = "killed" + address[:3]
    line = f"tuner tune {another(tmp_path, name)} --on {address} --nodes name=small-1"
    with cluster.started(line, tmp_path / "first.log") as command:
        wait_for(lambda: serving(cluster, "small-1", 0, name) is not None, alive=command)
        launch = serving(cluster, "small-1", 0, name) or ""
        command.kill()
    wait_for(lambda: processes.tagged(launch) == [])
    with cluster.started(line, tmp_path / "again.log") as command:
        wait_for(lambda: len(trials_of(cluster, "small-1", name)) > 1, alive=command)
        command.send_signal(signal.SIGTERM)
        assert command.wait(600) == 8, (tmp_path / "again.log").read_text()
    first, second = trials_of(cluster, "small-1", name)[:2]
    assert (first.number, first.state, first.cause) == (0, TrialState.ABORTED, "controller")
    assert (second.number, second.attempt, second.candidate) == (0, 1, first.candidate)
    (run,) = cluster.store().runs(study_of(cluster, "small-1", name).id)
    assert {first.run_id, second.run_id} == {run.id}


def test_when_the_head_is_lost_no_engine_stays_and_the_run_goes_on_once_it_is_back(
    cluster: Cluster, tmp_path: Path
) -> None:
    line = f"tuner tune {another(tmp_path, 'headless')} --on auto --nodes name=large"
    with cluster.started(line, tmp_path / "first.log") as command:
        wait_for(lambda: serving(cluster, "large", 0, "headless") is not None, alive=command)
        launch = serving(cluster, "large", 0, "headless") or ""
        cluster.kill_head()
        assert command.wait(600) != 0, (tmp_path / "first.log").read_text()
    wait_for(lambda: processes.tagged(launch) == [])
    cluster.end()
    for start in STARTS:
        cluster.type(start)
    with cluster.started(line, tmp_path / "again.log") as command:
        wait_for(lambda: len(trials_of(cluster, "large", "headless")) > 1, alive=command)
        command.send_signal(signal.SIGTERM)
        assert command.wait(600) == 8, (tmp_path / "again.log").read_text()
    first, second = trials_of(cluster, "large", "headless")[:2]
    assert (first.number, first.state) == (0, TrialState.ABORTED)
    assert (second.number, second.attempt, second.run_id) == (0, 1, first.run_id)
