"""What a study's launches tell of the next one: whether a boot that compiled anew is thrown away."""

from datetime import UTC, datetime
from pathlib import Path

from tests.tuning.studies import write
from tuner.history.store import Store
from tuner.records import Launch
from tuner.tuning.study import load
from tuner.tuning.trial import Bench, learned

NOW = datetime(2026, 11, 28, tzinfo=UTC)


def test_first_boots_are_kept_once_one_changed_little(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    prepared = load(write(tmp_path), store=store, now=NOW)
    study = store.add_study(prepared.study)
    bench = Bench(prepared=prepared, store=store, home=tmp_path, clock=lambda: NOW, tell=lambda event: None)

    def launch(number: int, timeline: dict[str, float]) -> bool | None:
        """What the next launch is told after one more with this timeline."""
        launched = Launch(
            id=f"l{number}", study_id=study.id, argv=(), started_at=NOW, ended_at=NOW, timeline=timeline
        )
        store.finish_launch(store.add_launch(launched))
        return learned(bench).settle

    try:
        assert learned(bench).settle is None, "as the engine room does: on GPUs"
        assert launch(0, {"ready_s": 95.0}) is None
        assert launch(1, {"ready_s": 95.0, "first_kv_drift": -0.0011}) is False
        assert launch(2, {"ready_s": 50.0}) is False
        assert launch(3, {"ready_s": 50.0, "first_kv_drift": -0.05}) is None
    finally:
        store.close()
