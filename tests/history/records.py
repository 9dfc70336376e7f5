"""Small records for the tests of history and profiles."""

from datetime import UTC, datetime, timedelta

from tuner.history.store import Store
from tuner.records import (
    JSON,
    Candidate,
    Fidelity,
    Launch,
    Measurement,
    Run,
    Slice,
    SliceMeasurement,
    Slo,
    Study,
    Trial,
    TrialState,
    digest_of,
)

NOW = datetime(2026, 3, 1, 22, 0, tzinfo=UTC)


def a_study(name: str = "chat", *, now: datetime = NOW, node: str = "n1", engine: str = "0.32.0") -> Study:
    identity: dict[str, JSON] = {"name": name, "node": node, "engine": engine}
    return Study(
        id=digest_of(identity),
        name=name,
        model="Qwen/Qwen2.5-7B-Instruct",
        node=node,
        gpu_class="h100-80x1",
        workload="chat",
        engine_version=engine,
        trace_digest="a" * 64,
        space_digest="b" * 64,
        slices=(
            Slice(name="peak", start_s=1200.0, duration_s=60.0),
            Slice(name="held", start_s=0.0, duration_s=60.0, held_out=True),
        ),
        objectives=("ttft_p95_ms", "goodput_rps"),
        slo=Slo(ttft_ms=500.0, tpot_ms=50.0),
        seed=2**70 + 1,
        identity=identity,
        spec={"name": name, "slices": "auto", "price_per_gpu_hour": 2.5},
        created_at=now,
    )


def a_run(store: Store, study: Study, *, now: datetime = NOW) -> Run:
    store.add_study(study)
    return store.open_run(study.id, trials_limit=40, deadline=None, now=now, pid=17, host="here")


def a_measurement(ttft: float = 120.0, goodput: float = 3.5, **changes: object) -> Measurement:
    values = {"ttft_p95_ms": ttft, "goodput_rps": goodput}
    measured = Measurement(
        values=values,
        slices=(SliceMeasurement(name="peak", window_s=60.0, values=values, outcomes_file="peak.parquet"),),
        fidelity=Fidelity(values={"lateness_p99_ms": 1.5, "unknown": None}, warnings=("few rows",)),
    )
    return replace_fields(measured, changes)


def replace_fields(measured: Measurement, changes: dict[str, object]) -> Measurement:
    fields = {name: getattr(measured, name) for name in Measurement.__dataclass_fields__}
    return Measurement(**(fields | changes))


def start(store: Store, run: Run, number: int = 0, *, origin: str = "search", **knobs: int) -> Trial:
    return store.start_trial(
        study_id=run.study_id,
        run_id=run.id,
        candidate=Candidate({"max_num_seqs": 64 + number, **knobs}),
        number=number,
        attempt=0,
        seed=number,
        origin=origin,
        now=run.started_at + timedelta(minutes=number),
        directory=None,
    )


def finished(
    store: Store, trial: Trial, *measured: Measurement, state: TrialState = TrialState.COMPLETE
) -> Trial:
    fields = {name: getattr(trial, name) for name in Trial.__dataclass_fields__}
    ended = trial.started_at + timedelta(seconds=90)
    return store.finish_trial(
        Trial(**(fields | {"state": state, "measurements": measured, "ended_at": ended}))
    )


def a_launch(study: Study, launch_id: str = "L1") -> Launch:
    return Launch(
        id=launch_id,
        study_id=study.id,
        argv=("--max-num-seqs", "64"),
        started_at=NOW,
        effective={"max_num_seqs": 64, "enable_prefix_caching": True, "dtype": "auto"},
        timeline={"ready": 12.5},
        kv_tokens=123456,
    )
