"""Issue 29 C and 19.7: clocks that jump, spent hours, folders that were left, runs that were cancelled."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.history.records import a_conclusion, a_run, a_study, start
from tests.service.world import World
from tests.tuning.studies import STUDY, write
from tests.tuning.test_reconcile import left
from tuner.commands.progress import log_to
from tuner.conclusions import Judgement
from tuner.history.store import Store
from tuner.leftovers import scratch_prefix, sweep_scratch
from tuner.records import (
    Launch,
    Measurement,
    Node,
    RunState,
    SliceMeasurement,
    TrialState,
)
from tuner.tuning.context import LaunchJob, Measured, Note, RunContext, RunEvent, Serving, hours_left, steady
from tuner.tuning.ending import publish
from tuner.tuning.run import RunLimits, tune
from tuner.tuning.study import load

NOW = datetime(2026, 11, 28, 22, tzinfo=UTC)


class Jumping:
    """A clock that runs a second a look, and jumps two hours back at a look."""

    def __init__(self, at: int) -> None:
        self.looks, self.at = 0, at

    def __call__(self) -> datetime:
        self.looks += 1
        return NOW + timedelta(seconds=self.looks) - timedelta(hours=2 if self.looks > self.at else 0)


async def measures(order: LaunchJob, note: Note) -> Sequence[Measured]:
    """What an engine that served everything would have measured: more sequences are faster."""
    seqs = int(str(order.spec.asked.get("max_num_seqs", 4)))
    note(Serving(effective=dict(order.spec.asked), timeline={"ready_s": 1.0}, kv_tokens=1000))
    values = {
        "requests": 100.0, "failed": 0.0, "unfinished": 0.0, "ttft_p95_ms": 400.0 / seqs, "tpot_p95_ms": 20.0,
        "e2e_p95_ms": 900.0, "goodput_rps": 5.0, "slo_attainment": 1.0, "preemptions": 0.0,
    }  # fmt: skip
    return [
        Measured(
            measurement=Measurement(
                values=values, purpose=each.purpose, repeat=each.repeat,
                slices=tuple(SliceMeasurement(name=s.name, window_s=1.0, values=values) for s in each.slices),
            ),
            curtailed=None,
        )
        for each in order.passes
    ]  # fmt: skip


def tuned(
    tmp_path: Path, clock: object, *, study: str = STUDY + "live_limits: off\n", **limits: object
) -> tuple[Store, list[RunEvent]]:
    store, told = Store(f"sqlite:///{tmp_path / 'tuner.db'}"), list[RunEvent]()
    prepared = load(write(tmp_path, study), store=store, now=NOW)
    asyncio.run(
        tune(
            prepared, store, home=tmp_path, clock=clock, work=measures, tell=told.append,  # type: ignore[arg-type]
            limits=RunLimits(trials=3, early=False, **limits),  # type: ignore[arg-type]
        )
    )  # fmt: skip
    return store, told


@pytest.mark.slow
@pytest.mark.parametrize("at", [12, 25, 40, 60, 1_000_000])
def test_29c_a_clock_that_jumps_two_hours_back_leaves_no_run_running(tmp_path: Path, at: int) -> None:
    store, told = tuned(tmp_path, Jumping(at))
    with closing(store):
        (run,) = store.runs()
        assert run.state is RunState.FINISHED, run.reason
        assert all(t.state is not TrialState.RUNNING for t in store.trials(run.study_id))
        said = store.conclusion(run.id)
        assert said is not None
        assert said.repeats >= 1, said.sentence
        assert {event.run for event in told if event.kind != "note"} == {run.id}


@pytest.mark.slow
def test_29c_a_fault_of_our_own_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is: a run that stays RUNNING blocks its node, and would only break again."""

    def broken(*_: object) -> None:
        raise TypeError("a set of nothing")

    monkeypatch.setattr("tuner.tuning.ending.Ending.conclusion", broken)
    with pytest.raises(TypeError):
        tuned(tmp_path, Jumping(1_000_000))
    with closing(Store(f"sqlite:///{tmp_path / 'tuner.db'}")) as store:
        (run,) = store.runs()
        assert (run.state, run.reason) == (RunState.FAILED, "unexpected: TypeError: a set of nothing")


def test_29c_the_clock_of_a_run_goes_on_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady(Jumping(1))
    first, second, third = clock(), clock(), clock()
    assert first <= second <= third < first + timedelta(minutes=1)


def test_29c_the_hours_of_a_run_do_not_begin_anew_when_it_is_resumed(tmp_path: Path) -> None:
    with closing(Store(f"sqlite:///{tmp_path / 'tuner.db'}")) as store:
        study = store.add_study(a_study())
        assert hours_left(store, study.id, 6.0, NOW) == 6.0
        run = store.save_run(replace(a_run(store, study, now=NOW), pid=None))
        row = store.add_launch(Launch(id="a", study_id=study.id, argv=(), started_at=NOW))
        store.finish_launch(replace(row, ended_at=NOW + timedelta(hours=4)))
        before = Launch(id="b", study_id=study.id, argv=(), started_at=NOW - timedelta(days=1))
        store.add_launch(replace(before, ended_at=NOW))
        later = NOW + timedelta(hours=20)
        assert hours_left(store, study.id, 6.0, later) == pytest.approx(2.0), "4 of 6 were spent"
        assert hours_left(store, study.id, 3.0, later) == pytest.approx(1 / 3600)
        assert hours_left(store, study.id, None, later) is None
        store.save_run(replace(run, state=RunState.FINISHED, ended_at=later))
        assert hours_left(store, study.id, 6.0, later) == 6.0, "a new run has its own"


def test_29c_folders_that_a_killed_controller_left_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import tempfile, os; from tuner.leftovers import scratch_prefix;"
        " print(tempfile.mkdtemp(prefix=scratch_prefix())); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    left_behind = Path(done.stdout.strip())
    assert left_behind.is_dir()
    mine = Path(tempfile.mkdtemp(prefix=scratch_prefix()))
    other_host = tmp_path / f"tuner-{2**22 + 1}-aaaaaa-x"
    foreign = tmp_path / "tuner-notes"
    new = tmp_path / f"tuner-{'a' * 32}"
    old = tmp_path / f"tuner-{'b' * 32}"
    for path in (other_host, foreign, new, old):
        path.mkdir()
    os.utime(old, (1, 1))
    assert sweep_scratch() == sorted([left_behind, old])
    assert all(path.is_dir() for path in (mine, other_host, foreign, new))


def test_29c_an_event_carries_the_run_that_told_it(tmp_path: Path) -> None:
    """Also where it is about a trial of an earlier run, which a confirmation measures again."""
    with closing(Store(f"sqlite:///{tmp_path / 'tuner.db'}")) as store:
        trial = start(store, a_run(store, store.add_study(a_study())), 0)
    with log_to(tmp_path) as write_event:
        write_event(RunEvent(kind="confirm", text="again", trial=trial, run="this-run"))
        write_event(RunEvent(kind="note", text="interrupted", trial=trial))
    lines = [json.loads(line) for line in (tmp_path / "logs" / "tuner.jsonl").read_text().splitlines()]
    assert [line["run"] for line in lines] == ["this-run", trial.run_id]


def test_29c_a_node_that_somebody_has_a_lease_of_is_not_free(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store.add_node(Node(name="n1", gpu_class="g"))
    world.store.add_node(Node(name="n2", gpu_class="g", state="fault"))
    for name in ("n1", "n2"):
        world.store.acquire_lease(name, "somebody", now=world.clock(), ttl_s=60)
    client = world.client("read")
    assert [(n["name"], n["state"], n["lease"]) for n in client.get("/v1/nodes").json()] == [
        ("n1", "leased", "somebody"), ("n2", "fault", "somebody"),
    ]  # fmt: skip
    assert client.get("/v1/nodes/n1").json()["state"] == "leased"
    world.clock.forward(minutes=2)
    assert client.get("/v1/nodes/n1").json()["state"] == "free"


def test_29c_a_run_that_was_cancelled_before_its_process_came_is_not_begun(tmp_path: Path) -> None:
    """Its row stood, its controller was just being started: that one starts no run of its own instead."""
    with closing(Store(f"sqlite:///{tmp_path / 'tuner.db'}")) as store:
        prepared = load(write(tmp_path, STUDY + "live_limits: off\n"), store=store, now=NOW)
        study = store.add_study(prepared.study)
        run = a_run(store, study, now=NOW)
        store.cancel_run(run.id)
    store, _ = tuned(tmp_path, Jumping(1_000_000), run=run.id)
    with closing(store):
        assert [(r.id, r.state) for r in store.runs()] == [(run.id, RunState.CANCELLED)]
        assert store.trials(study.id) == ()
    again, _ = tuned(tmp_path, Jumping(1_000_000), run=run.id)
    with closing(again):
        assert len(again.runs()) == 1, "nor where it was ended by whoever cancelled it"


def test_29c_a_cancelled_run_of_another_host_leaves_no_trial_running(tmp_path: Path) -> None:
    world = World(tmp_path)
    study = a_study()
    left(world.store, study, host="another")
    (run,) = world.store.runs(study.id)
    assert world.client("run").post(f"/v1/runs/{run.id}/cancel").status_code == 202
    (trial,) = world.store.trials(study.id)
    assert (trial.state, trial.cause) == (TrialState.ABORTED, "controller")
    assert world.store.run(run.id).state is RunState.CANCELLED


@pytest.mark.parametrize(
    ("state", "published"), [(TrialState.COMPLETE, True), (TrialState.INFEASIBLE, False)]
)
def test_19_7_a_baseline_that_did_not_serve_is_published_under_no_alias(
    tmp_path: Path, state: TrialState, published: bool
) -> None:
    with closing(Store(f"sqlite:///{tmp_path / 'tuner.db'}")) as store:
        prepared = load(write(tmp_path), store=store, now=NOW)
        bench = RunContext(
            prepared=prepared, store=store, home=tmp_path, clock=lambda: NOW, tell=lambda event: None
        )
        run = a_run(store, store.add_study(prepared.study), now=NOW)
        trial = start(store, run, 0, origin="baseline", max_num_seqs=4)
        values = {"requests": 94.0, "failed": 58.0, "ttft_p95_ms": 200.0, "goodput_rps": 1.0}
        store.finish_trial(
            replace(trial, state=state, measurements=(Measurement(values=values),), ended_at=NOW,
                    reason="58 of 94 requests failed")
        )  # fmt: skip
        said = a_conclusion(
            run, outcome=Judgement.NOTHING_SERVED, winner=None, baseline=None, finalists=(), profiles={}
        )
        assert set(publish(bench, run, said, label="x")) == ({"baseline"} if published else set())
        assert bool(store.aliases()) == published


@pytest.mark.slow
def test_29_36_a_run_keeps_what_its_study_file_says_differently(tmp_path: Path) -> None:
    """The policy is no part of a study, so a later run of the same study may have another."""
    tuned(tmp_path, Jumping(1_000_000))[0].close()
    other = STUDY + "live_limits: off\nnot_worse: {tpot_p95_ms: 50%}\n"
    store, _ = tuned(tmp_path, Jumping(1_000_000), study=other)
    with closing(store):
        changed = [run.summary["study_file"] for run in store.runs()]
        assert [{"not_worse": {"tpot_p95_ms": 0.5}}, {}] in (changed, changed[::-1])
