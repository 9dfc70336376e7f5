"""`tuner predict STUDY --night`: a whole run that is computed, marked as simulated, and leaves nothing."""

import asyncio
import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.commands.test_care import call
from tests.history import records
from tests.tuning import studies
from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.records import TrialState
from tuner.tuning.next_trial import last_calibration
from tuner.tuning.predicted_night import forecast, predict_night
from tuner.tuning.run import RunLimits
from tuner.tuning.study import load
from tuner.tuning.virtual import HIDDEN


def predicted(home: Path, study: Path) -> dict[str, Any]:
    done = call(home, "predict", study, "--night", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_a_predicted_night_is_marked_and_leaves_no_history(tmp_path: Path) -> None:
    home = tmp_path / "home"
    study = studies.write(tmp_path)
    done = call(home, "predict", study, "--night")
    assert done.exit_code == 0, done.output
    said = [line for line in done.stdout.splitlines() if "baseline" in line and "trial" in line]
    assert all(line.startswith("simulated: ") for line in said)
    assert "simulated night of tiny" in done.stdout
    for shown in (done.stdout, call(home, "predict", study).stdout):
        assert "ttft_p95_ms (ms, ↓ better)" in shown
    assert "SIMULATED on NVIDIA H100" in done.stderr
    assert not (home / "tuner.db").exists()


def test_a_predicted_night_is_the_same_twice_and_knows_nothing_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = studies.write(tmp_path)
    first = predicted(tmp_path / "home", study)
    monkeypatch.setenv(HIDDEN, json.dumps([{"slower": 3.0}]))
    second = predicted(tmp_path / "home", study)
    assert first["simulated"] is True
    assert [t["candidate"] for t in first["trials"]] == [t["candidate"] for t in second["trials"]]
    assert [t["values"] for t in first["trials"]] == [t["values"] for t in second["trials"]]
    assert len(first["trials"]) == 3


@pytest.mark.slow
def test_a_predicted_night_begins_with_the_front_and_changes_no_history(tmp_path: Path) -> None:
    home = tmp_path / "home"
    study = studies.write(tmp_path, studies.VIRTUAL)
    assert call(home, "tune", study, "--all-trials").exit_code == 0
    rows = [call(home, *words, "--json").stdout for words in (("run", "list"), ("profile", "list"))]
    files = {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in home.rglob("*.log")}
    found = predicted(home, study)
    assert found["calibration"] is not None
    origins = [t["origin"] for t in found["trials"] if str(t["origin"]).startswith("this study: trial")]
    told = json.loads(call(home, "front", "tiny", "--json").stdout)
    assert origins[0] == f"this study: trial {told['winner']}", "the winner comes first"
    assert [call(home, *words, "--json").stdout for words in (("run", "list"), ("profile", "list"))] == rows
    assert {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in home.rglob("*.log")} == files
    conclusion = found["conclusion"]
    assert isinstance(conclusion, dict)
    assert conclusion["profiles"] == {}


@pytest.mark.slow
def test_predict_begins_with_the_calibration_of_the_last_study_as_the_search_does(tmp_path: Path) -> None:
    """`predict`, `--night` and the search give one number for one configuration."""
    home = tmp_path / "home"
    earlier = studies.write(tmp_path, studies.VIRTUAL)
    slower = {"TUNER_SIM_HIDDEN": json.dumps([{"slower": 1.2}])}
    assert studies.tuner(home, "tune", earlier, "--all-trials", more=slower).returncode == 0
    (tmp_path / "other").mkdir()
    text = studies.VIRTUAL.replace("name: tiny", "name: other").replace("start_s: 20", "start_s: 30")
    study = studies.write(tmp_path / "other", text)
    store = Store(f"sqlite:///{home / 'tuner.db'}", create=False)
    prepared = load(study, store=store, now=datetime.now(UTC))
    start = last_calibration(store, prepared, None)
    store.close()
    assert start is not None
    told = studies.answer(home, "predict", study, "--candidates", 2, "--json")
    expected = forecast(prepared, (), count=2, start=start)
    value = expected.baseline.prediction.values["ttft_p95_ms"]
    assert told["baseline"]["prediction"]["values"]["ttft_p95_ms"] == pytest.approx(value)  # type: ignore[index]
    alone = forecast(prepared, (), count=2).baseline.prediction.values["ttft_p95_ms"]
    assert value > 1.1 * alone, "the card is slower than its datasheet"
    night = predicted(home, study)
    for basis in (told["basis"], night["basis"]):
        assert "these numbers use the calibration of the last study" in str(basis)
    first = next(t for t in night["trials"] if t["origin"] == "baseline")
    assert first["values"]["ttft_p95_ms"] == pytest.approx(value, rel=0.02)


def test_predict_says_which_numbers_are_measured_only_when_the_metrics_are_read(tmp_path: Path) -> None:
    path = studies.write(tmp_path, f"{studies.STUDY}objectives: [ttft_p95_ms, queue_depth_mean]\n")
    store = Store(f"sqlite:///{tmp_path / 'home/tuner.db'}")
    run = records.a_run(store, load(path, store=None, now=records.NOW).study)
    base = records.a_measurement(values={"ttft_p95_ms": 90.0, "queue_depth_mean": 2.0})
    records.finished(store, records.start(store, run, 0, origin="baseline"), base)
    store.close()
    said = call(tmp_path / "home", "predict", path, "--candidates", 2).output
    note = "(queue_depth_mean: at every step → whenever the metrics were read)"
    assert f"predicted → measured {note}" in " ".join(said.split())


def test_a_night_over_several_cards_is_refused(tmp_path: Path) -> None:
    study = studies.write(tmp_path, studies.STUDY.replace("max_num_seqs: 4}", "tensor_parallel_size: 2}"))
    done = call(tmp_path / "home", "predict", study, "--night")
    assert isinstance(done.exception, BadInput)
    assert "needs 2 GPUs, but there are 1" in str(done.exception)


def test_a_night_of_a_node_with_two_cards_is_refused_where_today_uses_both(tmp_path: Path) -> None:
    path = studies.write(tmp_path, studies.STUDY)
    now = datetime(2026, 5, 1, 1, tzinfo=UTC)
    prepared = load(path, store=None, now=now)
    both = prepared.file.model_copy(update={"baseline": {"tensor_parallel_size": 2}})
    night = predict_night(replace(prepared, file=both), None, base=tmp_path, now=now, limits=RunLimits())
    with pytest.raises(BadInput, match="a predicted night has only one card"):
        asyncio.run(night)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h100-80", "cpu"])
@pytest.mark.parametrize("tried", ["nothing", "a baseline that was stopped", "a baseline that did not serve"])
def test_A7_predict_says_what_its_numbers_rest_on(tmp_path: Path, kind: str, tried: str) -> None:
    """A baseline that did not serve calibrates nothing, whatever else was measured; a CPU has no card."""
    home = tmp_path / "home"
    text = studies.STUDY.replace("  kind: simulated\n", f"  kind: simulated\n  card: {kind}\n")
    assert text != studies.STUDY
    path = studies.write(tmp_path, text)
    store = Store(f"sqlite:///{home / 'tuner.db'}")
    prepared = load(path, store=store, now=records.NOW)
    if tried != "nothing":
        run = records.a_run(store, prepared.study)
        served = "not serve" in tried
        state = TrialState.INFEASIBLE if served else TrialState.ABORTED
        records.finished(store, records.start(store, run, 0, origin="baseline"), state=state)
        if served:
            records.finished(store, records.start(store, run, 1), records.a_measurement(90.0))
    store.close()
    why = {
        "nothing": "nothing was measured yet",
        "a baseline that was stopped": "the baseline was not measured yet",
        "a baseline that did not serve": "the baseline did not serve, so there is no measurement",
    }[tried]
    source = "assumed speeds of a CPU" if kind == "cpu" else "the card's datasheet"
    for words in ([], ["--night"]):
        done = call(home, "predict", path, *words)
        assert done.exit_code == 0, done.output
        said = " ".join(done.stderr.split())
        assert f"not calibrated: {why}" in said
        assert f"these numbers use {source}" in said
        assert ("datasheet" in said) == (kind != "cpu")
    told = json.loads(call(home, "predict", path, "--json").stdout)
    assert f"not calibrated: {why}" in told["basis"]
