"""Finalists against the baseline: how sure a verdict is, and who falls out."""

import asyncio
import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from tests.tuning.studies import write
from tuner.errors import Infeasible
from tuner.history.store import Store
from tuner.knobs.catalogue import CATALOGUE
from tuner.records import (
    Candidate,
    Measurement,
    Outcome,
    SliceMeasurement,
    Slo,
    Study,
    Trial,
    TrialState,
    Violation,
)
from tuner.replay import outcomes
from tuner.tuning.attempt import failing, retries_of
from tuner.tuning.confirm import by_repeats, comparisons, confirm, finalists, unproved_of
from tuner.tuning.study import load
from tuner.tuning.trial import Bench, Measured, Note, Order, Serving

OBJECTIVES = ("ttft_p95_ms", "goodput_rps", "max_speed")
STUDY = Study(
    id="s", name="s", model="m", node="n", gpu_class="g", workload="w", engine_version="v", trace_digest="t",
    space_digest="x", slices=(), objectives=OBJECTIVES, slo=Slo(ttft_ms=250, attainment=0.8), seed=0,
    identity={}, spec={}, created_at=datetime(2026, 3, 1, tzinfo=UTC),
)  # fmt: skip


def replayed(level: float, seed: int) -> list[Outcome]:
    """Two hundred requests of one token, slower by `level`."""
    ttft = 0.1 * level * np.exp(0.2 * np.random.default_rng(seed).standard_normal(200))
    return [
        Outcome(
            row=i, scheduled_s=0.3 * i, first_token_s=0.3 * i + t, last_token_s=0.3 * i + t, output_tokens=1,
            chunk_s=np.array([0.3 * i + t]), chunk_tokens=np.ones(1, np.int32),
        )
        for i, t in enumerate(ttft.tolist())
    ]  # fmt: skip


def measured(folder: Path, number: int, levels: list[float], where: str = "confirm") -> list[Measurement]:
    """One measurement per repeat, its outcomes in files as a confirmation leaves them."""
    found = []
    for repeat, level in enumerate(levels, start=1):
        path = folder / f"{number}-{where}-{repeat}.parquet"
        outcomes.write(path, replayed(level, 100 * number + repeat))
        part = SliceMeasurement(name="peak", window_s=60.0, values={}, outcomes_file=str(path))
        found.append(
            Measurement(
                values={"max_speed": 2.0 / level},
                slices=(part,),
                purpose="held_out" if where == "held_out" else "confirm",
                repeat=repeat,
            )
        )
    return found


def test_the_family_is_every_finalist_in_every_objective(tmp_path: Path) -> None:
    base, near = measured(tmp_path, 0, [1.0, 1.03, 0.98]), measured(tmp_path, 1, [0.9, 0.93, 0.91])
    far = measured(tmp_path, 2, [0.5, 0.51, 0.52])
    alone = comparisons(STUDY, 0, {0: base, 1: near})
    both = comparisons(STUDY, 0, {0: base, 1: near, 2: far})
    assert [(n, w, c.metric) for n, w, c in both] == [(n, "confirm", o) for n in (1, 2) for o in OBJECTIVES]
    assert {(n, c.metric): c.verdict for n, _, c in both}[2, "ttft_p95_ms"] == "better"
    single = comparisons(replace(STUDY, objectives=OBJECTIVES[:1]), 0, {0: base, 1: near})
    width = [made[0][2].high - made[0][2].low for made in (single, alone)]
    assert width[0] < width[1]


def test_one_repeat_knows_no_noise_and_a_held_out_slice_is_compared_apart(tmp_path: Path) -> None:
    rows = {n: measured(tmp_path, n, [1.0 / (n + 1)]) for n in (0, 1)}
    held = {n: [*rows[n], *measured(tmp_path, n, [1.0], "held_out")] for n in rows}
    found = comparisons(STUDY, 0, held)
    assert [where for _, where, _ in found] == ["confirm"] * 3 + ["held_out"] * 3
    assert all(math.isinf(c.high) for _, _, c in found if c.metric == "max_speed")


def test_what_was_not_repeated_is_held_to_an_assumed_noise(tmp_path: Path) -> None:
    rows = {0: measured(tmp_path, 0, [1.0]), 1: measured(tmp_path, 1, [0.9])}
    (bare, *_), (assumed, *_) = comparisons(STUDY, 0, rows), comparisons(STUDY, 0, rows, assumed=0.3)
    assert assumed[2].low < bare[2].low
    assert assumed[2].high > bare[2].high


def test_whole_replays_pool_the_noise_of_everybody() -> None:
    base, other, third = [1.0, 1.1, 0.9], [1.2, 1.3, 1.1], [1.0, 1.01, 0.99]
    few = by_repeats("max_speed", base, other, family=6)
    many = by_repeats("max_speed", base, other, everybody=(base, other, third, third), family=6)
    one = by_repeats("max_speed", base, other)
    assert few is not None
    assert many is not None
    assert one is not None
    assert few.high - few.low > one.high - one.low
    assert few.high - few.low > many.high - many.low


def test_speeds_that_bisection_cannot_tell_apart_are_no_gain() -> None:
    near, far = by_repeats("max_speed", [1.0] * 3, [1.04] * 3), by_repeats("max_speed", [1.0] * 3, [1.2] * 3)
    assert near is not None
    assert far is not None
    assert (near.verdict, far.verdict) == ("no clear winner", "better")


def test_each_run_relaunches_what_it_screened(tmp_path: Path) -> None:
    prepared = load(write(tmp_path), store=None, now=STUDY.created_at)

    def trial(number: int, run: str, ttft: float, origin: str, screened: bool = False) -> Trial:
        values = {"ttft_p95_ms": ttft, "tpot_p95_ms": 9.0, "e2e_p95_ms": ttft, "goodput_rps": 5.0}
        return Trial(
            id=number + 1, study_id="s", run_id=run, number=number, origin=origin, screened=screened,
            candidate=Candidate({"max_num_seqs": (4, 16, 64)[number % 3], "max_num_batched_tokens": 512}),
            state=TrialState.COMPLETE, started_at=STUDY.created_at,
            measurements=(Measurement(values={**values, "slo_attainment": 1.0}),),
        )  # fmt: skip

    first = [trial(0, "one", 100.0, "relaunched"), trial(1, "one", 90.0, "relaunched")]
    history = [*first, trial(2, "two", 50.0, "tpe", screened=True)]
    assert [t.number for t in finalists(prepared, history, "two")] == [2]
    assert [t.number for t in finalists(prepared, history, "one")] == [1]
    both = replace(prepared, plan=replace(prepared.plan, finalists=2))
    assert [t.number for t in finalists(both, history, "two")] == [2, 1]


def test_a_finalist_that_runs_otherwise_than_asked_falls_out(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    prepared = load(write(tmp_path), store=store, now=STUDY.created_at)
    study = store.add_study(prepared.study)
    run = store.open_run(
        study.id, trials_limit=2, deadline=None, now=STUDY.created_at, pid=1, host="here"
    )  # fmt: skip
    values = {"ttft_p95_ms": 9.0, "tpot_p95_ms": 9.0, "e2e_p95_ms": 9.0, "goodput_rps": 5.0}
    numbers = Measurement(values={**values, "slo_attainment": 1.0, "requests": 20.0, "failed": 0.0})
    for number, seqs in enumerate((4, 16)):
        trial = store.start_trial(
            study_id=study.id, run_id=run.id, candidate=Candidate({"max_num_seqs": seqs}), number=number,
            attempt=0, seed=0, origin="search" if number else "baseline", now=STUDY.created_at, directory="d",
        )  # fmt: skip
        store.finish_trial(replace(trial, state=TrialState.COMPLETE, measurements=(numbers,)))

    async def work(order: Order, note: Note) -> list[Measured]:
        """An engine that runs four sequences whatever it is asked for."""
        note(Serving(effective={"max_num_seqs": 4}, timeline={}, kv_tokens=None))
        again = [replace(numbers, purpose=each.purpose, repeat=each.repeat) for each in order.passes]
        return [Measured(measurement=each, curtailed=None) for each in again]

    now = STUDY.created_at
    bench = Bench(
        prepared=prepared, store=store, home=tmp_path, clock=lambda: now, tell=lambda event: None, work=work
    )
    try:
        said = asyncio.run(confirm(bench, run)).summary
    finally:
        store.close()
    assert said["verdict"] == "no verdict"
    assert "the engine runs max_num_seqs = 4, not 16" in str(said["sentence"])


@pytest.mark.parametrize(("failed", "out"), [(0, False), (1, False), (2, True)])
def test_more_than_one_in_a_hundred_failed_requests_fall_out(failed: int, out: bool) -> None:
    assert (failing({"failed": failed, "requests": 100.0}) is not None) == out


def test_requests_that_the_plan_cut_are_told_apart() -> None:
    said = failing({"failed": 24.0, "unfinished": 23.0, "requests": 1000.0})
    assert said == (
        "24 of 1000 requests failed, 23 because they still ran at the end of the tail (plan: tail_limit_s)"
    )


def test_an_unready_engine_is_tried_again_and_a_lack_of_memory_is_not() -> None:
    assert retries_of(Infeasible("late", cause="init_timeout")) == 1
    assert retries_of(Infeasible("full", cause="oom")) == 0
    assert retries_of(Infeasible("full", cause="oom", violation=Violation(oom=1.5))) == 1


def test_M40_a_winner_names_what_nothing_shows_that_its_engine_took() -> None:
    asked = Candidate({"max_num_seqs": 16, "watermark": 0.05, "api_server_count": 2})
    trial = Trial(
        id=1, study_id="s", run_id="r", number=1, candidate=asked, effective={"max_num_seqs": 16},
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip
    assert unproved_of(trial) == {
        "api_server_count": CATALOGUE["api_server_count"].unproved,
        "watermark": "this engine does not report it",
    }
