"""What the commands that show things print."""

from pathlib import Path

from tests.commands.test_care import call
from tests.history.records import NOW, a_measurement, a_run, a_study, finished, start
from tuner.commands.common import text
from tuner.history.store import Store
from tuner.profiles import registry
from tuner.records import JSON


def test_a_profile_s_evidence_is_shown_line_by_line(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    study = a_study()
    trial = finished(store, start(store, a_run(store, study), 1), a_measurement(float("inf")))
    evidence: dict[str, JSON] = {"confirmed": False, "front": [1.5, None], "run": {"id": "r1", "gains": {}}}
    made = registry.publish(
        store, study=study, trial=trial, argv=(), env={}, evidence=evidence, now=NOW, alias=None
    )
    store.close()
    shown = call(tmp_path, "profile", "show", made.id)
    assert shown.exit_code == 0, shown.output
    lines = [line.strip() for line in shown.stdout.splitlines() if line.strip()]
    rows = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1:] for line in lines}
    assert rows["driver"] == rows["run.gains"] == ["–"]
    assert rows["values.goodput_rps"] == ["3.5"]
    assert rows["values.ttft_p95_ms"] == ["∞"]
    assert rows["slices"] == ["peak, held"]
    assert rows["front"] == ["1.5, –"]
    assert rows["run.id"] == ["r1"]
    assert not set("{}[]'") & set(shown.stdout.partition("evidence")[2])


def test_a_cell_never_shows_how_python_writes_a_value() -> None:
    assert text({"a": {"b": None}, "c": [1.25, "x"], "d": ()}) == "a b –  c 1.25, x  d –"
