"""What a study's launches tell of the next one: whether a boot that compiled anew is thrown away."""

from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from tests.tuning.studies import write
from tuner.engine.gpu import Gpus
from tuner.history.store import Store
from tuner.records import Fidelity, Launch, Measurement, Study
from tuner.tuning.launch_estimates import learned
from tuner.tuning.study import load
from tuner.tuning.trial import Bench, Cores, Place, flagged

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
        return bench.learned().settle

    try:
        assert bench.learned().settle is None, "as the engine room does: on GPUs"
        assert launch(0, {"ready_s": 95.0}) is None
        assert launch(1, {"ready_s": 95.0, "first_kv_drift": -0.0011}) is False
        assert launch(2, {"ready_s": 50.0}) is False
        assert launch(3, {"ready_s": 50.0, "first_kv_drift": -0.05}) is None
    finally:
        store.close()


def test_a_new_study_knows_how_long_engines_of_its_model_take_on_its_node(tmp_path: Path) -> None:
    """Its own launches alone once there are enough; never those of another model, engine or node."""
    with closing(Store(f"sqlite:///{tmp_path / 'tuner.db'}")) as store:
        prepared = load(write(tmp_path), store=store, now=NOW)
        mine = store.add_study(prepared.study)

        def launched(study: Study, *seconds: float) -> None:
            store.add_study(study)
            for number, ready in enumerate(seconds):
                launch = Launch(id=f"{study.id}-{number}", study_id=study.id, argv=(), started_at=NOW)
                store.add_launch(replace(launch, timeline={"ready_s": ready}))

        launched(replace(mine, id="model", model="another"), 500.0, 500.0, 500.0)
        launched(replace(mine, id="engine", engine_version="0.1"), 500.0, 500.0, 500.0)
        launched(replace(mine, id="node", node="elsewhere"), 500.0, 500.0, 500.0)
        assert learned(store, prepared, home=None).ready_timeout_s == 900.0
        launched(replace(mine, id="before"), 100.0, 110.0, 120.0)
        assert learned(store, prepared, home=None).ready_timeout_s == 330.0
        launched(mine, 40.0, 40.0, 40.0)
        assert learned(store, prepared, home=None).ready_timeout_s == 120.0


def test_how_the_gpus_fared_is_kept_with_the_measurement(tmp_path: Path) -> None:
    prepared = load(write(tmp_path), store=None, now=NOW)
    place = Place(prepared=prepared, cores=Cores(engine=None, sender=None), gpus=Gpus(nvml=None))
    sampled = {"gpu_memory_gib": 70.0, "gpu_clock_min_mhz": 1200.0, "gpu_throttled": 0.5}
    found = flagged(
        Measurement(values={}, fidelity=Fidelity(values={"lateness": 1.0})), place, sampled
    ).fidelity
    assert found.values == {"lateness": 1.0, "gpu_clock_min_mhz": 1200.0, "gpu_throttled": 0.5}
    assert found.warnings == ("the GPU held its clocks down in more than 5 % of the time",)
