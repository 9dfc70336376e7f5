"""Small records for the tests of history and profiles."""

from datetime import UTC, datetime, timedelta

from tuner.conclusions import Arm, Conclusion, Difference, Judgement, Noise, PublishedProfile, RunCost
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


def newest_conclusion(store: Store, study_id: str) -> Conclusion | None:
    """The study's newest conclusion, by when it was drawn."""
    return max(store.conclusions(study_id), key=lambda said: said.at, default=None)


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


def start(
    store: Store, run: Run, number: int = 0, *, attempt: int = 0, origin: str = "search", **knobs: int
) -> Trial:
    return store.start_trial(
        study_id=run.study_id,
        run_id=run.id,
        candidate=Candidate({"max_num_seqs": 64 + number, **knobs}),
        number=number,
        attempt=attempt,
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


def a_conclusion(run: Run, **changes: object) -> Conclusion:
    """What a run found: trial 2 beats the baseline in TTFT and is worse in goodput."""
    better = Difference(
        metric="ttft_p95_ms", before=200.0, after=90.0, change=-0.55, low=-0.6, high=-0.5, word="better",
        repeats=3,
    )  # fmt: skip
    worse = Difference(
        metric="goodput_rps", before=3.5, after=3.0, change=-0.143, low=-0.2, high=None, word="worse",
        repeats=3,
    )  # fmt: skip
    today = Arm(trial=0, candidate=Candidate({"max_num_seqs": 64}), attainment=0.9, misses_slo_by=0.05,
                searched={"ttft_p95_ms": 210.0}, confirmed={"ttft_p95_ms": 200.0})  # fmt: skip
    best = Arm(
        trial=2, candidate=Candidate({"max_num_seqs": 66, "async_scheduling": True}), attainment=0.97,
        misses_slo_by=0.0, changed={"max_num_seqs": (64, 66), "async_scheduling": (None, True)},
        searched={"ttft_p95_ms": 88.0, "e2e_p99_ms": None}, confirmed={"ttft_p95_ms": 90.0},
        changes=(better, worse),
    )  # fmt: skip
    fields: dict[str, object] = {
        "run_id": run.id, "study_id": run.study_id, "at": run.started_at + timedelta(hours=2),
        "outcome": Judgement.TRADE_OFF, "sentence": "Trial 2 is a trade-off.", "winner": 2, "baseline": today,
        "finalists": (best,), "attainment": 0.95, "repeats": 3,
        "noise": (Noise(metric="ttft_p95_ms", share=0.03, launches=6, earlier=4, repeats_needed=3),),
        "cost": RunCost(search_s=3600.0, confirm_s=900.0, gpus=1),
        "profiles": {"challenger": PublishedProfile(id=1, version=1)},
    }  # fmt: skip
    return Conclusion(**(fields | changes))  # type: ignore[arg-type]
