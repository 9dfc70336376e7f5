"""What dead controllers left open: whose it is, what closes it, and what stops its engines."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.history.records import NOW, a_study, start
from tests.tuning.studies import STUDY, write
from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.records import JSON, Candidate, Launch, Study, Trial, TrialState
from tuner.tuning.execution import locked, reconcile
from tuner.tuning.study import Prepared, load

HERE = socket.gethostname()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    yield made
    made.close()


def stopped_by(study: Study, *words: str) -> Study:
    """The study, as one whose engines sit behind a container's door."""
    stop: list[JSON] = [*words]
    return replace(study, spec={**study.spec, "engine": {"stop_command": stop}})


def left(store: Store, study: Study, *, host: str = HERE, trial: bool = True) -> str:
    """A run that died: its launch is open, and its trial RUNNING unless it died while it confirmed."""
    store.add_study(study)
    run = store.open_run(study.id, trials_limit=4, deadline=None, now=NOW, pid=1, host=host)
    if trial:
        start(store, run)
    launch = Launch(id=f"of-{study.id[:8]}", study_id=study.id, argv=(), started_at=NOW)
    return store.add_launch(launch).id


def open_now(store: Store) -> set[str]:
    """The studies of which anything is open."""
    return {t.study_id for t in store.orphans()} | {each.study_id for each in store.open_launches()}


def cleared(store: Store, home: Path, *, node: str = "n1", said: list[str] | None = None) -> list[Trial]:
    told = list[str]() if said is None else said
    return [*reconcile(store, home, node=node, clock=lambda: NOW, say=told.append)]


def test_whoever_has_a_node_closes_what_any_host_left_there(store: Store, tmp_path: Path) -> None:
    """A pod of a nightly job has a host name of its own each night, and a study may have changed."""
    pod, changed, confirming = a_study("pod"), a_study("changed"), a_study("confirming")
    left(store, pod, host="pod-of-last-night")
    left(store, changed)
    left(store, confirming, host="pod-of-last-night", trial=False)
    ended = cleared(store, tmp_path)
    assert open_now(store) == set()
    assert {t.study_id for t in ended} == {pod.id, changed.id}
    assert {(t.state, t.cause) for t in ended} == {(TrialState.ABORTED, "controller")}
    assert [each.verdict for each in store.launches(confirming.id)] == ["controller: its controller died"]


def test_of_other_nodes_only_what_this_host_left_and_nobody_has_is_closed(
    store: Store, tmp_path: Path
) -> None:
    here, searching = a_study("here", node="n2"), a_study("searching", node="n2")
    elsewhere, leased, tuned = (a_study(name, node=f"n-{name}") for name in ("elsewhere", "leased", "tuned"))
    left(store, here, trial=False)
    left(store, searching)
    left(store, elsewhere, host="another")
    left(store, leased)
    left(store, tuned)
    store.acquire_lease("n-leased", "somebody", now=NOW, ttl_s=60)
    with locked(tmp_path, tuned.id):
        assert cleared(store, tmp_path) == []
    assert open_now(store) == {elsewhere.id, leased.id, tuned.id}
    cleared(store, tmp_path)
    assert open_now(store) == {elsewhere.id, leased.id}


def test_every_study_s_own_stop_command_is_run_once(store: Store, tmp_path: Path) -> None:
    """What sits behind a container's door is reached by that command alone."""
    asked = tmp_path / "asked"
    words = ("sh", "-c", f"echo {{tag}} >> {asked}")
    mine, other = stopped_by(a_study("mine"), *words), stopped_by(a_study("other", node="n2"), *words)
    tags = [left(store, mine), left(store, other, trial=False)]
    for _ in range(2):
        cleared(store, tmp_path)
    assert asked.read_text().split() == tags


def test_what_cannot_be_stopped_stays_open_and_is_said(store: Store, tmp_path: Path) -> None:
    broken, well = stopped_by(a_study("broken"), "/no/such/stop"), a_study("well")
    left(store, broken)
    left(store, well)
    said: list[str] = []
    assert [t.study_id for t in cleared(store, tmp_path, said=said)] == [well.id]
    assert open_now(store) == {broken.id}
    assert "/no/such/stop" in said[0]


def of_a_file(store: Store, folder: Path, stop_command: str) -> Prepared:
    prepared = load(write(folder, STUDY), store=store, now=NOW)
    engine = prepared.file.engine.model_copy(update={"stop_command": (stop_command, "{tag}")})
    return replace(prepared, file=prepared.file.model_copy(update={"engine": engine}))


def test_the_study_s_file_says_what_stops_its_engines_now(store: Store, tmp_path: Path) -> None:
    prepared = of_a_file(store, tmp_path, "/no/such/stop")
    study = stopped_by(prepared.study, "false")
    left(store, study)
    with pytest.raises(BadInput, match="/no/such/stop"):
        reconcile(store, tmp_path, node=study.node, clock=lambda: NOW, own=prepared)
    assert open_now(store) == {study.id}
    mended = of_a_file(store, tmp_path, "true")
    (ended,) = reconcile(store, tmp_path, node=study.node, clock=lambda: NOW, own=mended)
    assert ended.state is TrialState.ABORTED


def test_what_ran_on_another_host_is_not_looked_for_here(store: Store, tmp_path: Path) -> None:
    study = stopped_by(a_study(), "sh", "-c", f"touch {tmp_path / 'asked'}")
    left(store, study)
    reconcile(store, tmp_path, node="n1", clock=lambda: NOW, here=False)
    assert open_now(store) == set()
    assert not (tmp_path / "asked").exists()


def test_a_killed_trial_took_what_its_launch_did(store: Store, tmp_path: Path) -> None:
    """Until the engine's last line, even if somebody looks only hours later."""
    study = a_study()
    store.add_study(study)
    run = store.open_run(study.id, trials_limit=4, deadline=None, now=NOW, pid=1, host=HERE)
    folder = tmp_path / "0000-0"
    folder.mkdir()
    store.start_trial(
        study_id=study.id, run_id=run.id, candidate=Candidate({"max_num_seqs": 64}), number=0, attempt=0,
        seed=0, origin="search", now=NOW, directory=str(folder),
    )  # fmt: skip
    (folder / "engine.log").write_text("loading")
    os.utime(folder / "engine.log", (NOW.timestamp() + 18, NOW.timestamp() + 18))
    store.add_launch(Launch(id="killed", study_id=study.id, argv=(), started_at=NOW, directory=str(folder)))
    (ended,) = reconcile(store, tmp_path, node="n1", clock=lambda: NOW + timedelta(hours=9))
    (launch,) = store.launches(study.id)
    assert (launch.whole_s, launch.measuring_s) == (18, None)
    assert (ended.gpu_seconds, ended.ended_at) == (18, launch.ended_at)
