"""A history with a row in every table, and all of it read back."""

from dataclasses import replace
from datetime import timedelta

from tests.history.records import NOW, a_conclusion, a_launch, a_measurement, a_run, a_study, finished, start
from tuner.history.entities import Schedule
from tuner.history.store import Store
from tuner.records import Candidate, Node, ProfileKey, RunState, TrialState

KEY = ProfileKey(model="Qwen/Qwen2.5-7B-Instruct", target="n1", workload="chat")


def fill(store: Store) -> None:
    study = store.add_study(a_study())
    run = a_run(store, study)
    store.add_launch(a_launch(study))
    finished(store, start(store, run, 0, origin="baseline"), a_measurement(200.0, launch_id="L1"))
    finished(store, start(store, run, 1), a_measurement(float("inf")), state=TrialState.INFEASIBLE)
    best = finished(store, start(store, run, 2), a_measurement(90.0), a_measurement(95.0, purpose="confirm"))
    ended = replace(run, state=RunState.FINISHED, ended_at=NOW + timedelta(hours=2))
    store.save_run(ended, a_conclusion(ended))
    start(store, a_run(store, study, now=NOW + timedelta(days=1)), 3)
    store.add_trace("c0" * 32, "azure", "azure.parquet", {"rows": 19366}, NOW)
    store.add_node(Node(name="n1", gpu_class="h100-80x1", gpus=("GPU-1",), gpu_memory_gib=79.6))
    store.set_handover("n1", {"restore": "systemctl start vllm"})
    store.acquire_lease("n1", "me", now=NOW, ttl_s=60)
    for value in (64, 96):
        store.add_profile(
            key=KEY,
            candidate=Candidate({"max_num_seqs": value}),
            engine_version="0.32.0",
            gpu_class="h100-80x1",
            study_id=study.id,
            trial_id=best.id,
            argv=("--max-num-seqs", str(value)),
            env={},
            evidence={"confirmed": True},
            now=NOW,
        )
    store.move_alias(KEY, "champion", 1, expected=0, actor="me", reason="first", now=NOW)
    store.move_alias(KEY, "champion", 2, expected=1, actor="me", reason="better", now=NOW)
    store.put_schedule(
        Schedule(name="nightly", node="n1", cron="0 22 * * *", timezone="UTC", spec={}, created_at=NOW)
    )
    store.create_token("ci", ["read"], now=NOW)
    store.add_audit(actor="me", action="promote", target="champion", reason="better", now=NOW)
    store.keep_answer("k", "d", {"run": run.id}, now=NOW)


def snapshot(store: Store) -> tuple[object, ...]:
    """Everything that the store tells, in an order of its own."""
    studies = store.studies()
    return (
        studies,
        store.runs(),
        store.conclusions(),
        [store.trials(study.id) for study in studies],
        [store.launches(study.id) for study in studies],
        [store.bests(model=study.model, metric="ttft_p95_ms") for study in studies],
        store.traces(),
        store.nodes(),
        [store.handover(node.name) for node in store.nodes()],
        store.leases(now=NOW),
        store.profiles(),
        store.aliases(),
        store.alias_events(),
        store.schedules(),
        store.tokens(),
        store.audit(),
        store.answer("k", "d"),
    )
