"""`latest:NAME` never changes from an import to a capture without a word; what has moved is named."""

import json
from pathlib import Path

import pytest

from tests.history.records import NOW
from tests.tuning.studies import TRACE, VIRTUAL, tuner, write
from tuner.commands import plan
from tuner.history.store import Store
from tuner.records import ProfileKey
from tuner.tuning import execution
from tuner.tuning.study import load


def a_capture(place: Path, length: int) -> None:
    """40 requests a second for a minute, closed."""
    lines: list[dict[str, object]] = [
        {"capture": 1, "block_size": 16, "started_at": "2026-06-01T10:00:00+00:00"}
    ]
    for n in range(2400):
        lines.append({"r": n, "t": n * 25_000_000, "i": length, "m": 64, "c": 0, "s": 0})
        lines.append({"r": n, "f": 1_500_000, "e": 250_000_000, "o": 9, "k": 0})
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_name_that_turns_from_an_import_to_a_capture_and_back_is_said(tmp_path: Path) -> None:
    study = write(tmp_path, VIRTUAL.replace(str(TRACE), "latest:chat"))
    assert tuner(tmp_path, "trace", "import", TRACE, "--name", "chat").returncode == 0
    first = tuner(tmp_path, "tune", study, "--trials", 1)
    assert first.returncode == 0, first.stderr
    assert "latest:chat is" not in first.stderr
    assert "champion's trace" not in first.stderr
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    (made,) = store.studies()
    key = ProfileKey(model=made.model, target=made.node, workload=made.workload)
    trial = store.trials(made.id)[0]
    store.add_profile(
        key=key, candidate=trial.candidate, engine_version="0.32.0", gpu_class=made.gpu_class,
        study_id=made.id, trial_id=None, argv=(), env={}, evidence={}, now=NOW,
    )  # fmt: skip
    store.move_alias(key, "champion", 1, expected=0, actor="me", reason="first", now=NOW)
    store.close()
    capture = tmp_path / "captures" / "chat-20260601T100000Z.jsonl"
    a_capture(capture, 333)
    second = tuner(tmp_path, "tune", study, "--trials", 1)
    assert second.returncode == 0, second.stderr
    assert (
        f"trace latest:chat is the capture {capture.name}. An imported trace has the same name"
        in second.stderr
    )
    assert "write `trace: chat` to use it" in second.stderr
    assert f"is the capture {capture.name}. The run before this one used the import chat" in second.stderr
    assert "since the champion's trace, this has changed: prompt length p50:" in second.stderr
    assert "→ 333 tokens" in second.stderr
    capture.unlink()
    third = tuner(tmp_path, "tune", study, "--trials", 1)
    assert third.returncode == 0, third.stderr
    assert "latest:chat is the import" in third.stderr
    assert f"The run before this one used the capture {capture.stem}" in third.stderr
    assert "champion's trace" not in third.stderr


def test_slices_with_very_few_requests_are_said_by_tune_and_by_the_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_HOME", str(tmp_path))
    few = write(tmp_path, VIRTUAL)
    for words in (("--trials", 1), ("--dry-run",), ("--dry-run", "--json")):
        done = tuner(tmp_path, "tune", few, *words)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("WARNING: the searched slices hold 8 requests in all (1 s of replay)") == 1
        assert "`plan: brief` or `plan: standard` or `plan: thorough`" in done.stderr
    prepared = load(few, store=None, now=NOW)
    for then_runs in (True, False):
        plan.print_plan(prepared, 1, then_runs=then_runs)
        assert capsys.readouterr().err.count("WARNING") == (not then_runs), (
            "tuner demo --trace: the run warns"
        )
    for set_already, advised in (("brief", "auto`: `plan: standard`"), ("thorough", "Take longer slices or")):
        write(tmp_path, VIRTUAL.replace("plan: quick", f"plan: {set_already}"))
        said = execution.few_requests(load(few, store=None, now=NOW))
        assert said is not None
        assert advised in said
        assert f"`plan: {set_already}`" not in said
    held = "{start_s: 40, duration_s: 60, held_out: true}"
    write(tmp_path, VIRTUAL.replace("duration_s: 1.0}", "duration_s: 1.0}, " + held))
    assert "hold 8 requests" in tuner(tmp_path, "tune", few, "--dry-run").stderr
    write(tmp_path, VIRTUAL.replace("duration_s: 1.0}", "duration_s: 6.0}"))
    assert "WARNING" not in tuner(tmp_path, "tune", few, "--dry-run").stderr
