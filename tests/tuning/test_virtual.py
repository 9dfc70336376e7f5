"""The virtual clock: the same launches, failures and numbers as the simulated engine in real time."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.tuning import studies
from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.records import Slice, Trial, TrialState
from tuner.replay.plan import Load
from tuner.replay.timeline import SliceReplay
from tuner.simulator import virtual
from tuner.simulator.boot import Booted, boot
from tuner.simulator.clock import Clock
from tuner.simulator.virtual import VirtualPace
from tuner.tuning.context import budget_of
from tuner.tuning.study import load, read
from tuner.tuning.virtual import VirtualTime

VIRTUAL = studies.STUDY.replace("kind: simulated", "kind: simulated\n  clock: virtual")


def tuned(
    folder: Path, home: Path, study: str = VIRTUAL, hidden: Sequence[Mapping[str, float]] = ()
) -> list[Trial]:
    path = studies.write(folder, study)
    done = studies.tuner(home, "tune", path, more={"TUNER_SIM_HIDDEN": json.dumps(list(hidden))})
    assert done.returncode == 0, done.stderr
    store = Store(f"sqlite:///{home / 'tuner.db'}")
    (found,) = store.studies()
    return list(store.trials(found.id))


@pytest.mark.slow
def test_a_night_of_virtual_trials_is_the_same_twice(tmp_path: Path) -> None:
    first, second = (tuned(tmp_path, tmp_path / name) for name in ("one", "two"))
    assert [t.state for t in first] == [TrialState.COMPLETE] * 3
    for one, other in zip(first, second, strict=True):
        assert one.candidate == other.candidate
        assert one.measurement
        assert other.measurement
        assert one.measurement.values == other.measurement.values
    renamed = VIRTUAL.replace("name: tiny", "name: other")
    again = studies.tuner(tmp_path / "one", "tune", studies.write(tmp_path, renamed))
    assert "of study tiny (other is the same study)" in again.stderr
    assert (
        "version 3 (baseline) is a new measurement of the configuration of version 1 (tuner profile show 3)"
        in again.stdout
    )


def test_virtual_seconds_are_charged_and_no_process_is_started(tmp_path: Path) -> None:
    trials = tuned(tmp_path, tmp_path / "home")
    for trial in trials:
        assert trial.directory is not None
        assert "Available KV cache memory" in (Path(trial.directory) / "engine.log").read_text()
        assert trial.ended_at is not None
        took = (trial.ended_at - trial.started_at).total_seconds()
        assert trial.gpu_seconds == pytest.approx(took, abs=1e-3)
        assert took >= 2.0  # one second to start, one of traffic


def test_a_launch_that_was_killed_as_it_began_is_not_one_of_the_next_run(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (first, *_) = tuned(tmp_path, home)
    store = Store(f"sqlite:///{home / 'tuner.db'}")
    at = datetime.now(UTC) + timedelta(hours=1)
    last = replace(store.launches(first.study_id)[-1], id="killed", started_at=at, ended_at=at)
    store.add_launch(last)
    done = studies.tuner(home, "tune", tmp_path / "study.yaml")
    assert done.returncode == 0, done.stderr
    run, launches = store.runs(first.study_id)[0], store.launches(first.study_id)
    assert run.started_at > at
    assert "killed" in {each.id for each in launches}
    others = [each for each in launches if each.id != "killed"]
    assert budget_of(run, launches) == budget_of(run, others)


def test_a_run_after_one_that_ends_in_the_future_has_its_whole_window(tmp_path: Path) -> None:
    """Virtual time runs ahead of the host's clock."""
    home = tmp_path / "home"
    (first, *_) = tuned(tmp_path, home)
    store = Store(f"sqlite:///{home / 'tuner.db'}")
    at = datetime.now(UTC) + timedelta(hours=1)
    store.add_launch(replace(store.launches(first.study_id)[-1], id="ahead", started_at=at, ended_at=at))
    done = studies.tuner(home, "tune", tmp_path / "study.yaml", "--hours", "0.5")
    assert done.returncode == 0, done.stderr
    run = store.runs(first.study_id)[0]
    assert run.deadline is not None
    assert run.deadline - run.started_at == pytest.approx(timedelta(hours=0.5), abs=timedelta(seconds=60))
    assert any(trial.run_id == run.id for trial in store.trials(first.study_id))


def test_the_time_to_ready_is_what_the_engine_was_told_to_take(tmp_path: Path) -> None:
    study = VIRTUAL.replace("kind: simulated", "kind: simulated\n  env: {TUNER_SIM_STARTUP_S: '7.5'}")
    first = tuned(tmp_path, tmp_path / "home", study)[0]
    assert first.measurement is not None
    assert first.measurement.values["ready_s"] == 7.5
    store = Store(f"sqlite:///{tmp_path / 'home' / 'tuner.db'}")
    assert {each.timeline["ready_s"] for each in store.launches(first.study_id)} == {7.5}


@pytest.mark.slow
def test_a_virtual_launch_fails_in_the_words_of_a_real_one(tmp_path: Path) -> None:
    ends = {}
    for clock in ("real", "virtual"):
        study = studies.STUDY.replace("kind: simulated", f"kind: simulated\n  clock: {clock}")
        study = study.replace("baseline: {max_num_seqs: 4}", "baseline: {}")
        space = studies.SPACE.replace("max_num_seqs: [4, 16, 64]", "gpu_memory_utilization: [0.1]")
        folder = tmp_path / clock
        folder.mkdir()
        studies.write(folder, study, space)
        done = studies.tuner(folder / "home", "tune", folder / "study.yaml", "--trials", "2", "--all-trials")
        assert done.returncode == 0, done.stderr
        store = Store(f"sqlite:///{folder / 'home' / 'tuner.db'}")
        (found,) = store.studies()
        ends[clock] = [t for t in store.trials(found.id) if t.state is TrialState.INFEASIBLE]
    (real,), (virtual,) = ends["real"][:1], ends["virtual"][:1]
    assert (virtual.cause, virtual.reason, virtual.violation) == (real.cause, real.reason, real.violation)


@pytest.mark.slow
def test_a_hidden_slowdown_shows_in_what_is_measured(tmp_path: Path) -> None:
    plain, slow = (
        tuned(tmp_path, tmp_path / name, hidden=hidden)[0].measurement
        for name, hidden in (("plain", []), ("slow", [{"slower": 1.2}]))
    )
    assert plain
    assert slow
    assert slow.values["tpot_p50_ms"] == pytest.approx(1.2 * plain.values["tpot_p50_ms"], rel=0.1)


def test_a_real_engine_takes_no_virtual_clock(tmp_path: Path) -> None:
    path = studies.write(
        tmp_path, VIRTUAL.replace("kind: simulated", "kind: vllm\n  python: /usr/bin/python3")
    )
    with pytest.raises(BadInput, match="clock"):
        read(path)


@pytest.mark.parametrize(
    "extra",
    [(), ("--max-num-seqs", "4"), ("--no-async-scheduling",), ("--num-gpu-blocks-override", "1500")],
    ids=["defaults", "queue", "one step at a time", "preemptions"],
)
def test_many_decode_steps_at_once_are_the_same_as_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...]
) -> None:
    """Without noise the replay jumps over stretches of pure decode steps: outcomes and telemetry stay."""
    prepared = load(studies.write(tmp_path, VIRTUAL), store=None, now=datetime.now(UTC))
    booted = boot(["--model", "Qwen/Qwen2.5-7B-Instruct", "--max-model-len", "16384", *extra], {})
    assert isinstance(booted, Booted)
    pace, part = VirtualPace(), (Slice(name="part", start_s=20, duration_s=4.0),)
    load_ = Load(seed=0, number=0, model="m", vocabulary=1000)

    def replayed() -> SliceReplay:
        found, _ = virtual.replay(booted, prepared.trace, part, prepared.plan, load_, pace)
        return found.slices[0]

    jumped = replayed()
    whole = Clock.run
    monkeypatch.setattr(Clock, "run", lambda self, requests, watch, stretches: whole(self, requests, watch))
    single = replayed()
    for one, other in zip(jumped.outcomes, single.outcomes, strict=True):
        assert one.chunk_s == pytest.approx(other.chunk_s, abs=1e-9)
        assert one.error == other.error
    for name, value in single.engine.items():
        assert jumped.engine[name] == pytest.approx(value, rel=0.01, abs=0.01), name


def test_what_would_end_after_the_window_waits_until_the_run_is_cut() -> None:
    begun = datetime(2026, 3, 2, tzinfo=UTC)
    clock = VirtualTime(begun, begun + timedelta(seconds=10))

    async def night() -> None:
        await clock.pass_by(4)
        assert clock.seconds() == 4
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(clock.pass_by(7), 0.01)

    asyncio.run(night())
    assert clock.now() == begun + timedelta(seconds=10)
