"""One study on the nodes of a real Ray cluster: its own winner on each, a node lost, a race, a cancel."""

import json
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from tests.fleet.raycluster import (
    ROOT,
    Cluster,
    another,
    page_lines,
    running,
    serving,
    study_of,
    trials_of,
    wait_for,
)
from tests.history.records import newest_conclusion
from tuner import processes
from tuner.conclusions import UNMEASURED
from tuner.errors import INTERRUPTED, Conflict, NotFound
from tuner.records import Profile, ProfileKey, RunState, Trial, TrialState, gpus_held

pytestmark = pytest.mark.cluster

LINES = page_lines()
STARTS = [line for line in LINES if line.startswith("ray start")]
(TUNE,) = [line for line in LINES if line.startswith("tuner tune") and "--dry-run" not in line]
NODES = {"small-1": "sim-a4500x2", "small-2": "sim-a4500x2", "large": "sim-a100-80x2"}
VICTIM = "small-2"
PROBES = 2
"""Completions that a launch is asked for before anything is replayed, at most."""
NIGHTS = 3
"""Nights at most until the host was as fast in the confirmation as in the search, on every node."""
REPLAY_S = 1.6
"""Every replay takes longer: the window alone is so long."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running(STARTS) as found:
        yield found


class Watcher:
    """Watches from outside when each engine is sent requests: by the growth of its log."""

    def __init__(self, home: Path) -> None:
        self.seen: list[tuple[float, str]] = []
        self._home, self._over = home, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        counts, read = Counter[str](), Counter[str]()
        while not self._over.wait(0.1):
            for log in self._home.glob("work/*/engine.log"):
                launch = log.parent.name
                try:
                    with log.open("rb") as file:
                        file.seek(read[launch])
                        lines = file.read().rpartition(b"\n")[0]
                except OSError:
                    continue
                read[launch] += len(lines)
                new = lines.count(b"POST /v1/completions")
                counts[launch] += new
                if new and counts[launch] > PROBES:
                    self.seen.append((time.monotonic(), launch))


@dataclass(frozen=True)
class Told:
    """What the one command left: its output, and when which launch was sent requests."""

    out: str
    seen: list[tuple[float, str]]


def _was_lost(trials: Sequence[Trial]) -> bool:
    return any(trial.cause == "node_lost" for trial in trials)


@pytest.fixture(scope="module")
def told(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The page's command on all nodes; one is killed in the middle of its trial 1, and comes back."""
    log = tmp_path_factory.mktemp("fleet") / "tune.log"
    (again,) = [line for line in STARTS if VICTIM in line]
    with Watcher(cluster.home) as watcher, cluster.started(TUNE, log) as command:
        try:
            launch = wait_for(lambda: serving(cluster, VICTIM, 1), alive=command)
            cluster.kill_node(VICTIM)
            wait_for(lambda: processes.tagged(launch) == [])
            wait_for(lambda: _was_lost(trials_of(cluster, VICTIM)), alive=command)
            cluster.join(again, VICTIM)
            code = command.wait(600)
        except AssertionError as error:
            raise AssertionError(log.read_text()[-3000:]) from error
    assert code == 0, log.read_text()[-3000:]
    out = log.read_text()
    for _ in range(NIGHTS - 1):
        if _drifted(cluster):
            out += cluster.type(f"{TUNE} 2>&1")
    return Told(out=out, seen=watcher.seen)


def _drifted(cluster: Cluster) -> list[str]:
    """The nodes whose newest run is not to be trusted: what else this host did changed what it measured. Nor
    is a run without a winner, if processes waited for a core in more than half of a replay.
    """
    store, found = cluster.store(), []
    for node in NODES:
        study = study_of(cluster, node)
        said, run = newest_conclusion(store, study.id), store.runs(study.id)[0]
        measured = [m for t in store.trials(study.id, run_id=run.id) for m in t.measurements]
        starved = any((m.fidelity.values.get("cpu_pressure") or 0.0) > 0.5 for m in measured)
        if said is None or said.outcome in UNMEASURED or (said.winner is None and starved):
            found.append(node)
    return found


def profile_of(cluster: Cluster, node: str) -> Profile:
    """The version that a node's challenger is."""
    study = study_of(cluster, node)
    key = ProfileKey(model=study.model, target=node, workload=study.workload)
    alias = cluster.store().alias(key, "challenger")
    assert alias is not None, cluster.store().runs(study.id)[0].summary.get("sentence")
    (found,) = [p for p in cluster.store().profiles(key) if p.version == alias.to_version]
    return found


@pytest.mark.parametrize("node", NODES)
def test_each_node_beats_its_default_by_a_confirmed_verdict(told: Told, cluster: Cluster, node: str) -> None:
    study = study_of(cluster, node)
    assert study.gpu_class == NODES[node]
    run = cluster.store().runs(study.id)[0]
    assert run.state is RunState.FINISHED
    evidence = profile_of(cluster, node).evidence
    assert evidence["confirmed"] is True, run.summary["sentence"]
    assert evidence["demonstration"] is False
    assert str(run.summary["verdict"]) in ("clear winner", "trade-off")


def test_each_class_has_a_winner_of_its_own(told: Told, cluster: Cluster) -> None:
    """The slower card wins with fewer tokens a step. If two levels are nearly equal, noise may decide on one
    of the two equal nodes.
    """
    default = 2048
    knobs = [profile_of(cluster, node).candidate for node in NODES]
    small, twin, large = (int(str(each.get("max_num_batched_tokens", default))) for each in knobs)
    assert max(small, twin) < default
    assert max(small, twin) <= large <= default
    assert min(small, twin) < large


@pytest.mark.parametrize("node", NODES)
def test_M8_both_cards_of_a_node_are_in_use_and_ten_knobs_are_turned(
    told: Told, cluster: Cluster, node: str
) -> None:
    study, store = study_of(cluster, node), cluster.store()
    launches = store.launches(study.id)
    assert all("--tensor-parallel-size 2" in " ".join(each.argv) for each in launches)
    assert any("ready_s" in each.timeline for each in launches)
    assert {gpus_held(each.argv) for each in launches} == {2}
    run = store.runs(study.id)[0]
    assert run.summary["idle_gpus"] is None
    space = yaml.safe_load((ROOT / "docs" / "examples" / "fleet-space.yaml").read_text())["knobs"]
    levels = {name: each["values"] if isinstance(each, dict) else each for name, each in space.items()}
    turned = [name for name, each in space.items() if "default" in str(each) or len(levels[name]) > 1]
    assert len(turned) == 10


def test_a_node_killed_in_the_middle_loses_its_running_trial_alone(told: Told, cluster: Cluster) -> None:
    lost = {
        node: [t for t in trials_of(cluster, node) if t.cause in ("node_lost", "controller", "stopped")]
        for node in NODES
    }
    assert {node: len(trials) for node, trials in lost.items()} == {"small-1": 0, "small-2": 1, "large": 0}
    (trial,) = lost[VICTIM]
    assert (trial.number, trial.state, trial.cause) == (1, TrialState.ABORTED, "node_lost")
    after = [t for t in trials_of(cluster, VICTIM) if t.number == 1 and t.attempt > trial.attempt]
    assert [t.state for t in after][-1:] in ([TrialState.COMPLETE], [TrialState.PRUNED])
    assert after[-1].candidate == trial.candidate
    assert f"{VICTIM} trial 1 ABORTED: node {VICTIM} was lost" in told.out


def test_replays_of_nodes_that_share_a_host_take_turns(told: Told) -> None:
    """No engine is sent requests between two requests of another that are less than a replay apart."""
    assert len({launch for _, launch in told.seen}) >= 9
    mixed = [
        (launch, between)
        for i, (at, launch) in enumerate(told.seen)
        for j in range(i + 1, len(told.seen))
        if told.seen[j][1] == launch and told.seen[j][0] - at < REPLAY_S
        for _, between in told.seen[i + 1 : j]
        if between != launch
    ]
    assert mixed == []


def test_the_whole_fleet_is_told_in_one_view(told: Told) -> None:
    for node, gpu_class in NODES.items():
        assert re.search(rf"^{node} +run \w+ of study fleet$", told.out, re.MULTILINE)
        assert f"node {node} ({gpu_class})" in told.out
    assert len(re.findall(r"pull the winner: ", told.out)) >= len(NODES)
    assert "For controllers on several machines, set TUNER_DATABASE_URL to a PostgreSQL" in told.out


def test_what_came_out_is_pulled_node_by_node(told: Told, cluster: Cluster) -> None:
    found = re.findall(r"pull the winner: (?:TUNER_\w+=\S+ )*(?:\S*tuner) (profile export (\d+).*)", told.out)
    profiles = [cluster.store().profile(int(number)) for _, number in found]
    assert {profile.key.target for profile in profiles} == set(NODES)
    for (line, _), profile in zip(found, profiles, strict=True):
        pulled = yaml.safe_load(cluster.type(f"tuner {line}"))
        knobs = profile.candidate
        assert knobs.items() <= {name.replace("-", "_"): value for name, value in pulled.items()}.items()


def test_nothing_of_the_work_stays_on_the_nodes(told: Told, cluster: Cluster) -> None:
    assert not list((cluster.home / "work").iterdir())
    ids = {each.id for s in cluster.store().studies() for each in cluster.store().launches(s.id)}
    assert [p for p in processes.tagged() if p.environ().get(processes.TAG) in ids] == []
    assert cluster.store().leases(now=cluster.store().runs()[0].started_at) == ()


def test_the_placement_is_told_before_anything_starts(cluster: Cluster, tmp_path: Path) -> None:
    line = f"tuner tune {another(tmp_path, 'placed')} --on auto --nodes gpu=a4500 --dry-run --json"
    rows = json.loads(cluster.type(line))
    assert [(row["node"], row["gpus"]) for row in rows] == [("small-1", 2), ("small-2", 2)]
    assert trials_of(cluster, "small-1", "placed") == ()
    for row in rows:
        assert "--port" in row["commands"]["baseline"]
        assert row["seconds"]["replay"] > 0
    said = cluster.type(line.removesuffix(" --json"))
    assert said.count("A trial with its own launch takes about") == 2


def screening(cluster: Cluster, node: str, name: str) -> str | None:
    """The launch that a running trial is screened in: its engine has served another trial before."""
    trials = trials_of(cluster, node, name)
    if len(trials) < 2 or trials[-1].state is not TrialState.RUNNING:
        return None
    for launch in cluster.store().launches(trials[-1].study_id):
        if launch.ended_at is None and "--scheduler-cls" in launch.argv and processes.tagged(launch.id):
            return launch.id
    return None


def test_M8_live_limits_screen_in_an_engine_that_stays_on_a_node(cluster: Cluster, tmp_path: Path) -> None:
    study = another(tmp_path, "screened", startup_s=7)
    cluster.type(f"tuner tune {study} --on auto --nodes name=large --trials 8 --all-trials")
    trials, store = trials_of(cluster, "large", "screened"), cluster.store()
    screened = [t for t in trials if t.screened]
    assert len(screened) >= 2
    served = Counter(t.measurement.launch_id for t in trials if t.measurement)
    assert max(served[t.measurement.launch_id] for t in screened if t.measurement) >= 2
    argv = {launch.id: launch.argv for launch in store.launches(trials[0].study_id)}
    assert all("--scheduler-cls" in argv[t.measurement.launch_id or ""] for t in screened if t.measurement)
    for trial in screened:
        for name, value in trial.candidate.items():
            assert trial.effective[name] == value
    (run,) = store.runs(trials[0].study_id)
    assert run.summary["live_limits"] == "used"
    for launch in store.launches(trials[0].study_id):
        assert launch.ended_at is not None
        assert processes.tagged(launch.id) == []
        assert (Path(launch.directory or "") / "engine.log").exists()
    assert leased(cluster) == set()


@pytest.mark.parametrize("how", ["cancel", "kill", "node"])
def test_M8_an_engine_that_stays_ends_with_its_run_its_controller_or_its_node(
    cluster: Cluster, tmp_path: Path, how: str
) -> None:
    name = f"stays-{how}"
    study = another(tmp_path, name, startup_s=7)
    line = f"tuner tune {study} --on auto --nodes name=large --trials 6 --all-trials"
    log = tmp_path / "stays.log"
    with cluster.started(line, log) as command:
        launch = wait_for(lambda: screening(cluster, "large", name), alive=command)
        (run,) = cluster.store().runs(study_of(cluster, "large", name).id)
        if how == "cancel":
            cluster.type(f"tuner run cancel {run.id}")
            assert command.wait(600) == 0, log.read_text()
        elif how == "kill":
            command.kill()
            command.wait(60)
        else:
            cluster.kill_node("large")
            wait_for(lambda: _was_lost(trials_of(cluster, "large", name)), alive=command)
            cluster.join(next(line for line in STARTS if "node=large" in line), "large")
            wait_for(lambda: "the run continues on node large" in log.read_text(), alive=command)
            cluster.type(f"tuner run cancel {run.id}")
            assert command.wait(600) == 0, log.read_text()
        wait_for(lambda: processes.tagged(launch) == [])
    if how != "kill":
        assert leased(cluster) == set()
        assert TrialState.RUNNING not in [t.state for t in trials_of(cluster, "large", name)]


def test_of_two_controllers_that_race_for_a_node_one_is_told(cluster: Cluster, tmp_path: Path) -> None:
    """And SIGTERM ends the one that won, with no engine left and a run to be resumed."""
    line = f"tuner tune {another(tmp_path, 'raced')} --on auto --nodes name=large"
    with (
        cluster.started(line, tmp_path / "one.log") as one,
        cluster.started(line, tmp_path / "other.log") as other,
    ):
        logs = {one: tmp_path / "one.log", other: tmp_path / "other.log"}
        wait_for(lambda: one.poll() is not None or other.poll() is not None)
        (loser,) = [each for each in (one, other) if each.poll() is not None]
        (winner,) = [each for each in (one, other) if each is not loser]
        assert loser.returncode == Conflict.exit_code, logs[loser].read_text()
        assert re.search(rf"node 'large' is leased to '.* pid {winner.pid} ", logs[loser].read_text())
        launch = wait_for(lambda: serving(cluster, "large", 0, "raced"), alive=winner)
        winner.send_signal(signal.SIGTERM)
        assert winner.wait(600) == 8, logs[winner].read_text()
        assert processes.tagged(launch) == []
    (trial,) = trials_of(cluster, "large", "raced")
    assert (trial.state, trial.cause) == (TrialState.ABORTED, "stopped")
    (run,) = cluster.store().runs(trial.study_id)
    assert (run.state, run.pid) == (RunState.RUNNING, None)


def test_a_run_whose_node_is_lost_goes_on_on_a_free_node_of_its_class(
    cluster: Cluster, tmp_path: Path
) -> None:
    """And a request to cancel ends it wherever it is."""
    line = f"tuner tune {another(tmp_path, 'moved')} --on auto --nodes name={VICTIM}"
    log = tmp_path / "moved.log"
    with cluster.started(line, log) as command:
        wait_for(lambda: serving(cluster, VICTIM, 0, "moved"), alive=command)
        cluster.kill_node(VICTIM)
        wait_for(lambda: "the run continues on node small-1" in log.read_text(), alive=command)
        wait_for(lambda: len(trials_of(cluster, VICTIM, "moved")) > 1, alive=command)
        (run,) = cluster.store().runs(study_of(cluster, VICTIM, "moved").id)
        cluster.type(f"tuner run cancel {run.id}")
        assert command.wait(600) == 0, log.read_text()
    states = [(t.number, t.state, t.cause) for t in trials_of(cluster, VICTIM, "moved")]
    assert states[0] == (0, TrialState.ABORTED, "node_lost")
    assert cluster.store().run(run.id).state is RunState.CANCELLED


def runs_of(cluster: Cluster, name: str) -> dict[str, str]:
    """The run of each node that has begun one of a study."""
    try:
        store = cluster.store()
    except NotFound:
        return {}
    return {s.node: run.id for s in store.studies() if s.name == name for run in store.runs(s.id)}


def test_a_node_whose_part_has_ended_takes_over_a_lost_one_while_others_go_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Of three nodes small-1 is done, small-2's raylet is killed, and large is still at work."""
    if not any(VICTIM in " ".join(process.cmdline()) for process in cluster.processes()):
        cluster.join(next(line for line in STARTS if VICTIM in line), VICTIM)  # the test before killed it
    study = another(tmp_path, "taken")
    wait_for(lambda: VICTIM in cluster.type(f"tuner tune {study} --on auto --dry-run"))  # it has joined
    log = tmp_path / "taken.log"
    with cluster.started(f"tuner tune {study} --on auto", log) as command:
        wait_for(lambda: set(runs_of(cluster, "taken")) == set(NODES), alive=command)
        runs = runs_of(cluster, "taken")
        cluster.type(f"tuner run cancel {runs['small-1']}")
        wait_for(lambda: cluster.store().run(runs["small-1"]).state is RunState.CANCELLED, alive=command)
        wait_for(lambda: "small-1" not in leased(cluster), alive=command)
        assert "large" in leased(cluster)
        wait_for(lambda: serving(cluster, VICTIM, 0, "taken"), alive=command)
        cluster.kill_node(VICTIM)
        wait_for(lambda: "the run continues on node small-1" in log.read_text(), alive=command)
        assert leased(cluster) == set(NODES)
        command.send_signal(signal.SIGTERM)
        command.send_signal(signal.SIGINT)
        assert command.wait(600) == INTERRUPTED, log.read_text()
    assert_ended_by_signal(cluster, "taken", log)


def leased(cluster: Cluster) -> set[str]:
    return {lease.node for lease in cluster.store().leases(now=datetime.now(UTC))}


def assert_ended_by_signal(cluster: Cluster, name: str, log: Path) -> None:
    """No trial and no lease is left, nothing but sentences was printed."""
    assert "Traceback" not in log.read_text()
    states = [t.state for node in NODES for t in trials_of(cluster, node, name)]
    assert TrialState.RUNNING not in states
    assert leased(cluster) == set()


@pytest.mark.parametrize("after_s", [0.1, 1.0, 4.0, 8.0])
def test_a_signal_ends_a_run_on_many_nodes_with_8_at_any_moment(
    cluster: Cluster, tmp_path: Path, after_s: float
) -> None:
    name = f"stopped-{after_s:g}"
    log = tmp_path / "stopped.log"
    with cluster.started(
        f"tuner tune {another(tmp_path, name)} --on auto --nodes name=large", log
    ) as command:
        time.sleep(after_s)
        command.send_signal(signal.SIGTERM)
        assert command.wait(600) == INTERRUPTED, log.read_text()
    assert_ended_by_signal(cluster, name, log)
