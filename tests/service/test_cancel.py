"""A run that is cancelled: asked while somebody is at work on it, ended at once when nobody is."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.commands.test_care import call
from tests.history.records import a_study
from tests.service.world import World
from tests.tuning.test_reconcile import HERE, left
from tuner.conclusions import RunCost
from tuner.fleet.handover import handed_over
from tuner.records import Launch, Node, RunState, TrialState
from tuner.tuning.execution import locked

Cancel = Callable[[World, str], None]


def by_http(world: World, run_id: str) -> None:
    assert world.client("run").post(f"/v1/runs/{run_id}/cancel").status_code == 202


def by_hand(world: World, run_id: str) -> None:
    done = call(world.home, "run", "cancel", run_id)
    assert done.exit_code == 0, done.output
    ended = world.store.run(run_id).state is RunState.CANCELLED
    assert ("is CANCELLED: cancelled; its controller was gone" in done.output) == ended


@pytest.mark.parametrize("cancel", [by_http, by_hand])
def test_a_run_without_a_controller_ends_when_it_is_cancelled(tmp_path: Path, cancel: Cancel) -> None:
    world = World(tmp_path)
    node = Node(name="n1", gpu_class="h100-80x1", gpus=(), gpu_memory_gib=80.0)
    with handed_over(world.store, node, home=tmp_path, clock=world.clock):
        pass
    study = a_study()
    left(world.store, study)
    (run,) = world.store.runs(study.id)
    begun = world.clock()
    spans = {"0001-0": 103.2, f"0001-confirm-{run.id[:8]}-1-0": 20.0, "0000-confirm-5e1f-1-0": 5.0}
    for name, took in spans.items():
        made = Launch(id=name, study_id=study.id, argv=(), started_at=begun, directory=f"trials/{name}")
        world.store.add_launch(made)
        world.store.finish_launch(replace(made, ended_at=begun + timedelta(seconds=took)))
    cancel(world, run.id)
    found = world.store.run(run.id)
    assert (found.state, found.cancel_requested) == (RunState.CANCELLED, True)
    assert found.ended_at is not None
    (trial,) = world.store.trials(study.id)
    assert (trial.state, trial.cause) == (TrialState.ABORTED, "controller")
    said = world.store.conclusion(run.id)
    assert said is not None
    (lost,) = [each for each in world.store.launches(study.id) if each.directory is None]
    assert lost.whole_s is not None
    assert said.cost == RunCost(search_s=math.fsum((103.2, lost.whole_s)), confirm_s=25.0, gpus=1)
    assert world.store.open_launches() == ()
    assert world.store.leases(now=world.clock()) == ()


@pytest.mark.parametrize("cancel", [by_http, by_hand])
@pytest.mark.parametrize(
    ("host", "lease", "lock", "state"),
    [
        (HERE, False, True, RunState.RUNNING),
        (HERE, True, False, RunState.CANCELLED),
        ("another", True, False, RunState.RUNNING),
        ("another", False, False, RunState.CANCELLED),
    ],
)
def test_a_run_that_somebody_is_at_work_on_is_only_asked(
    tmp_path: Path, cancel: Cancel, host: str, lease: bool, lock: bool, state: RunState
) -> None:
    """A lock of this host tells; of another host's run only the lease of its node does."""
    world = World(tmp_path)
    study = a_study()
    left(world.store, study, host=host)
    (run,) = world.store.runs(study.id)
    if lease:
        world.store.acquire_lease("n1", "another pid 1 since 1", now=world.clock(), ttl_s=1e9)
    work: AbstractContextManager[None] = locked(tmp_path, study.id) if lock else nullcontext()
    with work:
        cancel(world, run.id)
    found = world.store.run(run.id)
    assert (found.state, found.cancel_requested) == (state, True)
    (trial,) = world.store.trials(study.id)
    ended = state is RunState.CANCELLED
    assert trial.state is (TrialState.ABORTED if ended else TrialState.RUNNING)
