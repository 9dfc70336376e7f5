"""What a study's launches tell of the next one: whether a boot that compiled anew is thrown away."""

from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from tests.tuning.studies import write
from tuner.engine.boots import about_first
from tuner.engine.gpu import Gpus
from tuner.history.store import Store
from tuner.records import Fidelity, Launch, Measurement, Study
from tuner.tuning.context import Cores, HostContext, LaunchBudget, RunContext, launch_estimates
from tuner.tuning.study import load
from tuner.tuning.trial import flagged

NOW = datetime(2026, 11, 28, tzinfo=UTC)


def test_29b4_first_boots_are_judged_by_their_own_compile_group(tmp_path: Path) -> None:
    """On an H100 the baseline's differed by 0.8 %, a candidate's of another step budget by 12 %."""
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    prepared = load(write(tmp_path), store=store, now=NOW)
    study = store.add_study(prepared.study)
    bench = RunContext(
        prepared=prepared, store=store, home=tmp_path, clock=lambda: NOW, tell=lambda event: None
    )
    today, wide = ("--max-num-batched-tokens", "8192"), ("--max-num-batched-tokens", "256")
    number = 0

    def launched(argv: tuple[str, ...], timeline: dict[str, float]) -> None:
        nonlocal number
        number += 1
        row = Launch(id=f"l{number}", study_id=study.id, argv=argv, started_at=NOW, timeline=timeline)
        store.finish_launch(store.add_launch(row))

    try:
        assert bench.settles(today) is None, "as the engine room does: on GPUs"
        launched(today, {"ready_s": 95.0})
        assert bench.settles(today) is None, "it did not compile, so it told nothing"
        launched(today, {"ready_s": 95.0, "first_kv_drift": -0.008})
        assert bench.settles(today) is False, "proved harmless for these arguments"
        assert bench.settles((*today, "--scheduler-cls", "tuner.live")) is False, "the class compiles nothing"
        assert bench.settles(wide) is None, "which says nothing of others"
        launched(wide, {"ready_s": 95.0, "first_kv_drift": -0.12})
        assert bench.settles(wide) is None, "thrown away again"
        assert bench.settles(today) is False
        spent = replace(bench, budget=LaunchBudget(most=3, begun=3))
        assert spent.settles(wide) is False, "no launch is left for a second boot"
        said = about_first([each.timeline for each in bench.launches()])
        assert said == "2 discarded: the KV cache of the next boot differed by up to 12.0%"
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
        assert launch_estimates(store, prepared, home=None).ready_timeout_s == 900.0
        launched(replace(mine, id="before"), 100.0, 110.0, 120.0)
        assert launch_estimates(store, prepared, home=None).ready_timeout_s == 330.0
        launched(mine, 40.0, 40.0, 40.0)
        assert launch_estimates(store, prepared, home=None).ready_timeout_s == 120.0


def test_how_the_gpus_fared_is_kept_with_the_measurement(tmp_path: Path) -> None:
    prepared = load(write(tmp_path), store=None, now=NOW)
    place = HostContext(prepared=prepared, cores=Cores(engine=None, sender=None), gpus=Gpus(nvml=None))
    sampled = {"gpu_memory_gib": 70.0, "gpu_clock_min_mhz": 1200.0, "gpu_throttled": 0.5}
    found = flagged(
        Measurement(values={}, fidelity=Fidelity(values={"lateness": 1.0})), place, sampled
    ).fidelity
    assert found.values == {"lateness": 1.0, "gpu_clock_min_mhz": 1200.0, "gpu_throttled": 0.5}
    assert found.warnings == ("the GPU was throttled for more than 5 % of the time",)
