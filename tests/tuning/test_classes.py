"""Classes of requests: numbers, limits and objectives of interactive and bulk, adapters and tenants (M19)."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from tests.replay.traces import trace as small
from tests.tuning import studies
from tuner.conclusions import Judgement
from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.metrics import fold
from tuner.records import Candidate, Outcome, Slo, TrialState
from tuner.replay import outcomes
from tuner.simulator.cost import preset
from tuner.simulator.predict import Predictor
from tuner.traffic import trace as traces
from tuner.tuning.next_trial import card_for, scene_of
from tuner.tuning.run import RunLimits, tune
from tuner.tuning.significance import compare, spread_of
from tuner.tuning.study import Prepared, load

SPACE = """\
about: Who goes first.
vllm: ">=0.10"
knobs:
  scheduling_policy: [fcfs, priority]
  max_num_batched_tokens: [2048, 8192]
"""
STUDY = """\
name: classes
model: Qwen/Qwen2.5-7B-Instruct
workload: mixed
trace: mixed.parquet
space: space.yaml
engine: {kind: simulated, clock: virtual, args: {max-model-len: 4096}}
baseline: {max_num_seqs: 8}
slices: [{start_s: 5, duration_s: 20}]
plan: {base: brief, repeats: 3, most_repeats: 3, finalists: 1, tail_limit_s: 120}
slo: {attainment: 0.9, classes: {interactive: {ttft_ms: 2500}, bulk: {e2e_ms: 120000}}}
objectives: [interactive.ttft_p95_ms, output_tokens_per_s]
budget: {trials: 4}
"""


def mixed() -> traces.Trace:
    """Two short urgent requests and three long patient ones a second, of two adapters and two clients."""
    at = np.arange(0, 30, 0.2)
    urgent = np.arange(len(at)) % 5 < 2
    return traces.build(
        {
            "arrival_s": at,
            "input_len": np.where(urgent, 200, 1500),
            "output_len": np.where(urgent, 40, 400),
            "priority": np.where(urgent, 0, 5),
            "lora": np.where(urgent, 0, 3),
            "client": np.arange(len(at)) % 2 + 7,
        }
    )


def prepared_in(folder: Path, store: Store | None = None, study: str = STUDY) -> Prepared:
    path = studies.write(folder, study, SPACE)
    traces.write(mixed(), folder / "mixed.parquet")
    return load(path, store=store, now=datetime.now(UTC))


def answered(row: int, first_s: float, *classes: str) -> Outcome:
    chunks = np.array([row + first_s, row + first_s + 1.0])
    return Outcome(
        row=row, scheduled_s=float(row), sent_s=float(row), first_token_s=chunks[0], last_token_s=chunks[1],
        end_s=chunks[1], output_tokens=2, expected_output=2, chunk_s=chunks,
        chunk_tokens=np.array([1, 1], np.int32), classes=classes,
    )  # fmt: skip


def test_M19_a_trace_tells_its_classes_adapters_and_tenants_apart() -> None:
    found = mixed().classes
    assert list(found) == ["interactive", "bulk", "adapter0", "adapter3", "tenant7", "tenant8"]
    assert int(found["interactive"].sum()) == 60
    assert mixed().classes_of(2) == ("bulk", "adapter3", "tenant7")
    assert small([0.0, 1.0], priority=4, client=1).classes == {}, "nothing tells these requests apart"
    crowd = small(np.arange(40.0), client=np.repeat(np.arange(20), 2)).classes
    assert len(crowd) == traces.MOST_CLASSES


def test_M19_each_class_has_numbers_of_its_own_and_is_held_to_its_own_limits() -> None:
    sent = [answered(row, 0.1, "interactive", "tenant1") for row in range(8)]
    sent += [answered(8, 3.0, "interactive", "tenant1"), answered(9, 3.0, "bulk", "tenant2")]
    slo = Slo(ttft_ms=1000, classes={"bulk": Slo(e2e_ms=60_000)})
    values = fold(sent, 10.0, slo, asked=["interactive.ttft_p99_ms"])
    assert values["slo_attainment"] == pytest.approx(0.9), "the bulk request may wait for its first token"
    assert fold(sent, 10.0, Slo(ttft_ms=1000))["slo_attainment"] == pytest.approx(0.8)
    assert (values["interactive.requests"], values["bulk.requests"], values["tenant2.requests"]) == (9, 1, 1)
    assert values["interactive.slo_attainment"] == pytest.approx(8 / 9)
    assert values["bulk.ttft_p95_ms"] == pytest.approx(3000)
    assert values["interactive.ttft_p50_ms"] == pytest.approx(100)
    assert values["interactive.goodput_rps"] == pytest.approx(0.8)
    assert "interactive.ttft_p99_ms" in values
    assert "bulk.ttft_p99_ms" not in values


def test_M19_the_classes_of_an_outcome_are_kept_and_older_files_have_none(tmp_path: Path) -> None:
    outcomes.write(tmp_path / "a.parquet", [answered(0, 0.1, "bulk", "tenant2"), answered(1, 0.1)])
    assert [one.classes for one in outcomes.read(tmp_path / "a.parquet")] == [("bulk", "tenant2"), ()]
    import pyarrow.parquet as pq

    older = pq.read_table(tmp_path / "a.parquet").drop_columns(["classes"])
    pq.write_table(older, tmp_path / "b.parquet")
    assert [one.classes for one in outcomes.read(tmp_path / "b.parquet")] == [(), ()]


def test_M19_a_class_is_compared_on_its_own_requests() -> None:
    def side(bulk_s: float) -> list[Outcome]:
        return [answered(row, bulk_s if row % 2 else 0.2, "bulk" if row % 2 else "interactive")
                for row in range(200)]  # fmt: skip

    before, after = ([{"s": side(wait)}] * 3 for wait in (4.0, 1.0))
    quiet = spread_of([[1.0, 1.001, 0.999]] * 4)
    for name, word in (("bulk.ttft_p95_ms", "better"), ("interactive.ttft_p95_ms", "open")):
        found = compare(before, after, name, spread=quiet)
        assert (found.word, found.rows) == (word, 300)


def test_M19_a_class_that_the_trace_lacks_is_refused_and_the_nearest_is_named(tmp_path: Path) -> None:
    for wrong, said in (
        (STUDY.replace("interactive.ttft", "adapter4.ttft"), "the trace has no class 'adapter4'"),
        (STUDY.replace("bulk: {", "tenant9: {"), "slo.classes: the trace has no class 'tenant9'"),
        (STUDY.replace("interactive.ttft_p95_ms", "interactive.kv_usage_max"), "is not a measurement"),
        (STUDY.replace("interactive: {", "urgent: {"), "slo.classes"),
    ):
        with pytest.raises(BadInput, match=said):
            prepared_in(tmp_path, study=wrong)


def test_M19_a_study_without_classes_is_the_study_that_it_was(tmp_path: Path) -> None:
    plain = STUDY.replace(
        "slo: {attainment: 0.9, classes: {interactive: {ttft_ms: 2500}, bulk: {e2e_ms: 120000}}}",
        "slo: {ttft_ms: 500}",
    )
    assert "classes" not in dict(prepared_in(tmp_path, study=plain).study.identity["slo"])  # type: ignore[arg-type]
    own = prepared_in(tmp_path).study
    store = Store(f"sqlite:///{tmp_path / 'a.db'}")
    store.upgrade()
    assert store.add_study(own).slo == own.slo
    assert store.study(own.id).slo.of(("bulk",)).e2e_ms == 120_000


def test_M19_the_simulator_predicts_the_classes_that_are_asked_for(tmp_path: Path) -> None:
    prepared = prepared_in(tmp_path)
    card = card_for(prepared)
    assert not isinstance(card, str)
    predictor = Predictor(scene_of(prepared, card), preset(card), spreads=False)
    first, urgent = predictor(
        [Candidate({"max_num_seqs": 8, "scheduling_policy": policy}) for policy in ("fcfs", "priority")]
    )
    assert urgent.values["interactive.ttft_p95_ms"] < 0.5 * first.values["interactive.ttft_p95_ms"]
    assert urgent.values["slo_attainment"] > first.values["slo_attainment"]
    assert "bulk.ttft_p95_ms" not in first.values, "no objective asks for it"


def test_M19_priority_scheduling_wins_a_night_of_mixed_classes(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    store.upgrade()
    prepared = prepared_in(tmp_path, store)
    run = asyncio.run(
        tune(prepared, store, home=tmp_path, limits=RunLimits(trials=4), clock=lambda: datetime.now(UTC))
    )
    said = store.conclusion(run.id)
    assert said is not None
    assert said.outcome in (Judgement.CLEAR_WINNER, Judgement.TRADE_OFF), said.sentence
    arm = said.arm(said.winner)
    assert arm is not None
    assert arm.candidate["scheduling_policy"] == "priority"
    change = arm.change("interactive.ttft_p95_ms")
    assert change is not None
    assert (change.word, (change.change or 0) < -0.5) == ("better", True)
    trials = [t for t in store.trials(run.study_id) if t.state is TrialState.COMPLETE and t.measurement]
    for trial in trials:
        assert trial.measurement is not None
        assert {"bulk.e2e_p95_ms", "adapter3.goodput_rps", "tenant8.slo_attainment"} <= set(
            trial.measurement.values
        )
    (night,) = store.bests(model=prepared.study.model, metric="interactive.ttft_p95_ms")
    assert night.number == said.winner
    assert replace(night).value == pytest.approx(change.after)
