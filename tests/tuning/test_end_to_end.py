"""The whole path on the simulated engine as a real process: tuned, killed, resumed, pulled."""

import os
import signal
import subprocess
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.tuning.studies import (
    SPACE,
    STUDY,
    WATCHDOG_S,
    answer,
    command,
    environment,
    tuner,
    wait_for,
    write,
)
from tuner import processes
from tuner.history.store import Store
from tuner.records import Run, RunState, Trial, TrialState
from tuner.replay import outcomes
from tuner.tuning.context import PICKED, RELAUNCHED
from tuner.tuning.next_trial import propose
from tuner.tuning.study import load

pytestmark = pytest.mark.slow


def store_of(home: Path) -> Store:
    return Store(f"sqlite:///{home / 'tuner.db'}", create=False)


def ours(home: Path) -> list[int]:
    """Living engine processes whose launch belongs to the studies of this home."""
    try:
        store = store_of(home)
    except Exception:
        return []
    ids = {launch.id for study in store.studies() for launch in store.launches(study.id)}
    store.close()
    return [p.pid for launch in ids for p in processes.tagged(launch)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose controller was killed in the middle of trial 1, and then ran to its end. A launch takes
    longer than a replay, so candidates are screened.
    """
    home = tmp_path_factory.mktemp("home")
    space = SPACE.replace("[4, 16, 64]", "[4, 8, 64]").replace("[512, 2048, 8192]", "[256, 1024, 8192]")
    study = write(home, STUDY.replace("  args:", '  env: {TUNER_SIM_STARTUP_S: "8"}\n  args:'), space)
    words = command("tune", study, "--trials", 6, "--all-trials")
    with (home / "first.log").open("w") as log:
        controller = subprocess.Popen(words, env=environment(home), stderr=log, stdout=log)
        try:
            wait_for(lambda: _is_serving(home, 1) or controller.poll() is not None)
            assert controller.poll() is None, (home / "first.log").read_text()
        finally:
            controller.send_signal(signal.SIGKILL)
            controller.wait()
    wait_for(lambda: not ours(home))
    (home / "killed").write_text("")
    done = tuner(home, "tune", study, "--trials", 6, "--all-trials", "--json")
    assert done.returncode == 0, done.stderr
    return home


def test_a_run_killed_in_its_confirmation_and_cancelled_is_confirmed_by_the_next(tmp_path: Path) -> None:
    study = write(tmp_path)
    words = command("tune", study, "--trials", 4, "--all-trials")
    with (tmp_path / "first.log").open("w") as log:
        controller = subprocess.Popen(words, env=environment(tmp_path), stderr=log, stdout=log)
        try:
            wait_for(lambda: len(_confirming(tmp_path)) > 1 or controller.poll() is not None)
            assert controller.poll() is None, (tmp_path / "first.log").read_text()
        finally:
            controller.send_signal(signal.SIGKILL)
            controller.wait()
    first = run_of(tmp_path)
    kept = {folder for folder in _confirming(tmp_path) if list(folder.glob("*.parquet"))}
    assert tuner(tmp_path, "run", "cancel", first.id).returncode == 0
    shown = tuner(tmp_path, "run", "status", first.id).stdout
    assert "The next run first finishes the confirmation." in " ".join(shown.split())
    done = tuner(tmp_path, "tune", study, "--trials", 1, "--all-trials")
    assert done.returncode == 0, done.stderr
    second = run_of(tmp_path)
    said = store_of(tmp_path).conclusion(second.id)
    assert said is not None
    assert said.repeats >= 2
    launches = store_of(tmp_path).launches(second.study_id)
    again = [each for each in launches if each.started_at >= second.started_at]
    confirming = [f"-confirm-{first.id[:8]}-" in (each.directory or "") for each in again]
    assert confirming == sorted(confirming, reverse=True), "the confirmation comes first"
    assert any(confirming)
    assert not kept & {Path(each.directory or "") for each in again}


def _confirming(home: Path) -> set[Path]:
    return {log.parent for log in home.glob("trials/*/*-confirm-*/engine.log")}


def _is_serving(home: Path, number: int) -> bool:
    if not (home / "tuner.db").exists():
        return False
    logs = list(home.glob(f"trials/*/{number:04d}-*/engine.log"))
    return bool(logs) and "/v1/completions" in logs[0].read_text()


def trials_of(home: Path) -> tuple[Trial, ...]:
    store = store_of(home)
    return store.trials(store.study("tiny").id)


def run_of(home: Path) -> Run:
    return store_of(home).runs()[0]


def test_no_engine_outlives_its_controller(killed: Path) -> None:
    assert ours(killed) == []


def test_the_killed_attempt_is_aborted_and_repeated_as_it_was(killed: Path) -> None:
    first, second = (t for t in trials_of(killed) if t.number == 1)
    assert (first.state, first.cause, first.attempt) == (TrialState.ABORTED, "controller", 0)
    assert second.attempt == 1
    assert (second.candidate, second.seed, second.origin) == (first.candidate, first.seed, first.origin)


def test_the_interrupted_run_is_the_one_that_finished(killed: Path) -> None:
    runs = store_of(killed).runs()
    assert [r.state for r in runs] == [RunState.FINISHED]
    assert {t.run_id for t in trials_of(killed)} == {runs[0].id}


def test_history_alone_gives_every_candidate_again(killed: Path) -> None:
    store = store_of(killed)
    prepared = load(killed / "study.yaml", store=store, now=datetime.now(UTC))
    trials = trials_of(killed)
    assert prepared.study.id == trials[0].study_id
    for trial in (t for t in trials if t.origin != RELAUNCHED):
        found = propose(prepared, [t for t in trials if t.number < trial.number])
        assert found is not None
        assert (found.candidate, found.seed, found.origin) == (trial.candidate, trial.seed, trial.origin)


def test_every_complete_trial_has_numbers_and_outcomes(killed: Path) -> None:
    measured = [t for t in trials_of(killed) if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert len({t.number for t in measured}) == 6, "the finalist that was relaunched is one of them"
    complete = [t for t in measured if t.state is TrialState.COMPLETE]
    assert complete
    for trial in complete:
        assert trial.measurement is not None
        part = trial.measurement.slices[0]
        assert part.outcomes_file is not None
        assert len(outcomes.read(part.outcomes_file)) == trial.measurement.values["requests"]
        assert trial.measurement.values["ttft_p95_ms"] > 0


def test_the_pick_of_the_simulator_had_an_engine_of_its_own(killed: Path) -> None:
    picks = [t for t in trials_of(killed) if t.origin == PICKED]
    assert picks
    assert not any(t.screened for t in picks)


def test_one_engine_screened_several_candidates(killed: Path) -> None:
    trials = trials_of(killed)
    screened = [t for t in trials if t.screened]
    launches = {t.measurement.launch_id for t in screened if t.measurement}
    assert len(screened) >= 2
    assert len(launches) < len(screened)
    for trial in screened:
        for name in trial.candidate:
            assert trial.effective[name] == trial.candidate[name]
    assert run_of(killed).summary["live_limits"] == "used"


def test_the_front_and_the_finalists_were_relaunched(killed: Path) -> None:
    trials = {t.number: t for t in trials_of(killed)}
    front = answer(killed, "front", "tiny", "--json")["front"]
    assert isinstance(front, list)
    numbers = [*(row["number"] for row in front), *run_of(killed).summary["finalists"]]  # type: ignore[misc]
    assert numbers
    assert not any(trials[number].screened for number in numbers)


def test_the_log_of_a_screened_trial_is_its_engine_s(killed: Path) -> None:
    screened = next(t for t in trials_of(killed) if t.screened)
    done = tuner(killed, "trial", "log", "tiny", screened.number, "--lines", 0)
    assert done.returncode == 0, done.stderr
    assert "scheduler_cls" in done.stdout


def test_the_forecast_rests_on_the_trials_and_launches_nothing(killed: Path) -> None:
    before = len(store_of(killed).launches(trials_of(killed)[0].study_id))
    said = answer(killed, "predict", killed / "study.yaml", "--candidates", 4, "--json")
    assert said["calibration"]["trials"] >= 1  # type: ignore[index]
    assert said["asked"] == 4
    assert len(said["measured"]) >= 2  # type: ignore[arg-type]
    assert len(store_of(killed).launches(trials_of(killed)[0].study_id)) == before


def test_every_launch_is_closed(killed: Path) -> None:
    store = store_of(killed)
    launches = store.launches(store.study("tiny").id)
    assert all(launch.ended_at is not None for launch in launches)
    assert sum(1 for launch in launches if (launch.verdict or "").startswith("controller")) == 1


def test_one_engine_runs_at_a_time(killed: Path) -> None:
    """Two would share the GPU: what was screened is relaunched after the engine that screened has gone."""
    store = store_of(killed)
    launches = sorted(store.launches(store.study("tiny").id), key=lambda each: each.started_at)
    assert any(t.screened for t in trials_of(killed))
    assert any(t.origin == RELAUNCHED for t in trials_of(killed))
    for before, after in pairwise(launches):
        assert before.ended_at is not None
        assert before.ended_at <= after.started_at


def test_finalists_and_baseline_were_measured_again(killed: Path) -> None:
    again = {t.number for t in trials_of(killed) if any(m.purpose == "confirm" for m in t.measurements)}
    summary = run_of(killed).summary
    assert 0 in again
    assert set(summary["finalists"]) <= again  # type: ignore[arg-type]
    files = [
        part.outcomes_file
        for trial in trials_of(killed)
        for m in trial.measurements
        if m.purpose == "confirm"
        for part in m.slices
    ]
    assert files
    assert all(run_of(killed).id[:8] in (file or "") for file in files)
    assert summary["demonstration"] is True


def test_the_baseline_is_there_to_be_pulled(killed: Path) -> None:
    done = tuner(killed, "profile", "resolve", "--model", "Qwen/Qwen2.5-7B-Instruct", "--alias", "baseline")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout) == {"max-model-len": 16384, "max-num-seqs": 4}


def test_the_winner_is_pulled_and_nothing_changes_the_second_time(killed: Path) -> None:
    summary = run_of(killed).summary
    assert summary["winner"] is not None, summary["sentence"]
    words = ["profile", "resolve", "--model", "Qwen/Qwen2.5-7B-Instruct", "--alias", "challenger"]
    words += ["-o", str(killed / "vllm.yaml"), "--exit-code"]
    assert [tuner(killed, *words).returncode for _ in range(2)] == [0, 3]
    pulled = yaml.safe_load((killed / "vllm.yaml").read_text())
    winner = next(t for t in trials_of(killed) if t.number == summary["winner"])
    assert {
        name.replace("_", "-"): value for name, value in winner.candidate.items()
    }.items() <= pulled.items()


def test_a_demonstration_cannot_become_champion(killed: Path) -> None:
    done = tuner(killed, "profile", "promote", "--model", "Qwen/Qwen2.5-7B-Instruct", "--node", "local")
    assert done.returncode == 5
    assert "not confirmed" in done.stderr


def test_the_front_is_told_beside_the_baseline(killed: Path) -> None:
    told = answer(killed, "front", "tiny", "--timings", "--json")
    assert told["baseline"]["number"] == 0  # type: ignore[index]
    assert len(told["timings"]) == len(store_of(killed).launches(trials_of(killed)[0].study_id))  # type: ignore[arg-type]
    assert told["front"]


def test_a_study_that_is_being_tuned_is_not_tuned_twice(killed: Path) -> None:
    from tuner.tuning.execution import locked

    with locked(killed, trials_of(killed)[0].study_id):
        done = tuner(killed, "tune", killed / "study.yaml")
    assert done.returncode == 5
    assert f"process {os.getpid()}" in done.stderr


def test_a_signal_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    study = write(tmp_path)
    controller = subprocess.Popen(
        command("tune", study), env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: _is_serving(tmp_path, 0) or controller.poll() is not None)
    controller.send_signal(signal.SIGTERM)
    _, told = controller.communicate(timeout=WATCHDOG_S)
    assert controller.returncode == 8, told
    assert "the same command continues this run" in told
    assert ours(tmp_path) == []
    (trial,) = trials_of(tmp_path)
    assert (trial.state, trial.cause) == (TrialState.ABORTED, "stopped")
    assert trial.ended_at is not None
    assert 0 < trial.gpu_seconds <= (trial.ended_at - trial.started_at).total_seconds() + 1
    assert run_of(tmp_path).state is RunState.RUNNING
    assert "stopped" in tuner(tmp_path, "run", "status").stdout


def test_a_run_is_cancelled_on_request(tmp_path: Path) -> None:
    study = write(tmp_path)
    controller = subprocess.Popen(
        command("tune", study),
        env=environment(tmp_path),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    wait_for(lambda: _is_serving(tmp_path, 0) or controller.poll() is not None)
    assert tuner(tmp_path, "run", "cancel", run_of(tmp_path).id).returncode == 0
    assert controller.wait(WATCHDOG_S) == 0
    assert run_of(tmp_path).state is RunState.CANCELLED
    assert ours(tmp_path) == []


NARROW = """\
about: The largest step budget leaves no memory on the card.
vllm: ">=0.10"
knobs:
  max_num_seqs: [4, 8]
  max_num_batched_tokens: [512, 1024, 32768]
"""


def test_what_a_wide_engine_cannot_hold_is_launched_by_itself_and_said(tmp_path: Path) -> None:
    text = STUDY.replace("kind: simulated", "kind: simulated\n  card: a4500")
    text = text.replace(
        "baseline: {max_num_seqs: 4}", "baseline: {max_num_seqs: 4, max_num_batched_tokens: 512}"
    )
    study = write(tmp_path, text, NARROW)
    done = tuner(tmp_path, "tune", study, "--trials", 6, "--all-trials")
    assert done.returncode == 0, done.stderr
    trials = [t for t in trials_of(tmp_path) if t.origin != RELAUNCHED]
    assert not trials[1].screened
    assert any(t.screened for t in trials[2:])
    said = run_of(tmp_path).summary["live_limits"]
    assert isinstance(said, list)
    assert [str(one).partition(":")[0] for one in said] == ["no_kv_memory"]
