import asyncio
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.test_cases import job, outcome
from tests.replay.traces import trace
from tuner.errors import BadInput
from tuner.measures import measure_of
from tuner.metrics import (
    CANCELLED,
    LATENCY_MS,
    columns_of,
    counted,
    fold,
    is_good,
    itl_ms,
    percentile,
    percentiles,
    resampled,
    statistic,
    tpot_ms,
)
from tuner.records import Fidelity, Outcome, Slice, Slo
from tuner.replay import outcomes as files
from tuner.replay.fidelity import PrefixCounts
from tuner.replay.plan import schedule
from tuner.replay.sender import Job, Sent
from tuner.replay.timeline import Partial, Replayed, SliceReplay, measure
from tuner.tuning.trial import LOST, MET, bisect, sure

numbers = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@settings(deadline=None)
@given(numbers, st.floats(0, 1))
def test_a_percentile_interpolates_like_numpy(values: list[float], share: float) -> None:
    assert percentile(np.array(values), share) == pytest.approx(
        float(np.percentile(values, share * 100)), abs=1e-6
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 9)), min_size=1, max_size=20), st.floats(0, 1))
def test_weights_repeat_values(pairs: list[tuple[float, int]], share: float) -> None:
    values, weights = np.array(pairs, float).T
    whole = np.repeat(values, weights.astype(int))
    assert percentile(values, share, weights) == pytest.approx(
        float(np.percentile(whole, share * 100)), abs=1e-6
    )


def test_a_failure_is_infinite_in_percentiles_and_absent_from_means() -> None:
    found = fold([outcome(k) for k in range(19)] + [outcome(19, error="gone")], 10.0, Slo(ttft_ms=60))
    assert found["ttft_p50_ms"] == pytest.approx(50)
    assert math.isinf(found["ttft_p95_ms"])
    assert found["ttft_mean_ms"] == pytest.approx(50)
    assert found["failed"] == 1
    assert found["slo_attainment"] == 0.95
    assert found["goodput_rps"] == 1.9


def test_p99_is_absent_under_a_thousand_requests_unless_asked() -> None:
    few, many = [outcome(k) for k in range(999)], [outcome(k) for k in range(1000)]
    assert "ttft_p99_ms" not in fold(few, 1.0, Slo())
    assert "ttft_p95_ms" in fold(few, 1.0, Slo())
    assert "ttft_p99_ms" in fold(few, 1.0, Slo(), asked=["ttft_p99_ms"])
    assert "e2e_p99_ms" not in fold(few, 1.0, Slo(), asked=["ttft_p99_ms"])
    assert "ttft_p99_ms" in fold(many, 1.0, Slo())


def test_bundles_of_tokens_change_neither_tpot_nor_itl() -> None:
    single = outcome(
        chunk_s=np.arange(25) * 0.02, chunk_tokens=np.ones(25, np.int32), first_token_s=0.0, last_token_s=0.48
    )
    bundled = outcome(
        chunk_s=np.array([0.0, 0.16, 0.32, 0.48]),
        chunk_tokens=np.array([1, 8, 8, 8], np.int32),
        first_token_s=0.0,
        last_token_s=0.48,
    )
    assert tpot_ms(single) == pytest.approx(tpot_ms(bundled)) == pytest.approx(20)
    for one in (single, bundled):
        gaps, weights = itl_ms([one])
        assert weights.sum() == 24
        assert np.average(gaps, weights=weights) == pytest.approx(20)
    assert math.isnan(tpot_ms(outcome(chunk_s=np.array([0.1]), chunk_tokens=np.array([3], np.int32))))


def test_slices_are_pooled_by_their_outcomes_and_windows() -> None:
    def part(name: str, count: int, window: float, **engine: float) -> SliceReplay:
        return SliceReplay(
            slice=Slice(name=name, start_s=0, duration_s=window), window_s=window,
            outcomes=tuple(outcome(k) for k in range(count)), engine=engine,
        )  # fmt: skip

    replayed = Replayed(
        slices=(
            part(
                "peak",
                30,
                10.0,
                kv_usage_mean=0.9,
                kv_usage_max=1.0,
                preemptions=3,
                prefix_hits=10,
                prefix_queries=40,
            ),
            part(
                "calm",
                10,
                30.0,
                kv_usage_mean=0.1,
                kv_usage_max=0.2,
                preemptions=0,
                prefix_hits=0,
                prefix_queries=60,
            ),
        ),
        fidelity=Fidelity(),
    )
    found = measure(replayed, Slo(ttft_ms=60), price_per_gpu_hour=3.6, gpus=2, extra={"ready_s": 9.0})
    assert found.values["goodput_rps"] == 1.0
    assert found.values["kv_usage_mean"] == pytest.approx(0.3)
    assert found.values["kv_usage_max"] == 1.0
    assert found.values["preemptions"] == 3
    assert found.values["prefix_hit_rate"] == 0.1
    assert found.values["ready_s"] == 9.0
    assert found.values["cost_per_million_tokens"] == pytest.approx(3.6 * 2 / 3600 / 2.0 * 1e6)
    assert [s.name for s in found.slices] == ["peak", "calm"]
    assert found.slices[0].values["goodput_rps"] == 3.0
    assert found.kind == "full"
    assert measure(dataclasses.replace(replayed, stopped="beaten"), Slo()).kind == "partial"


def test_outcomes_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.parquet"
    whole = [outcome(3, cached_tokens=4), outcome(4, error="reset", sent_s=None, first_token_s=None)]
    files.write(path, whole)
    for before, after in zip(whole, files.read(path), strict=True):
        for field in dataclasses.fields(Outcome):
            assert np.array_equal(getattr(before, field.name), getattr(after, field.name)), field.name
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("no parquet")
    with pytest.raises(BadInput, match="not a file of outcomes"):
        files.read(path)


def test_jobs_and_results_survive_the_pipe() -> None:
    one = dataclasses.replace(
        job(7, 1.5),
        parent=3,
        think_s=0.5,
        children=True,
        prompt=(10, 20),
        delta=b"1,2",
        cancel_s=2.0,
        counted=False,
    )
    again = Job.unpack(one.pack())
    assert all(getattr(one, f.name) == getattr(again, f.name) for f in dataclasses.fields(Job))
    assert Job.unpack(job(8).pack()).cancel_s is None
    sent = Sent(key=5, outcome=outcome(2, error="é", first_token_s=None), resent=True, engine={"a": 1.5})
    back = Sent.unpack(sent.pack())
    assert (back.key, back.resent, back.counted, dict(back.engine)) == (5, True, True, {"a": 1.5})
    for field in dataclasses.fields(Outcome):
        assert np.array_equal(getattr(sent.outcome, field.name), getattr(back.outcome, field.name)), (
            field.name
        )


def bursty(seed: int) -> list[Outcome]:
    """Requests whose latency depends on the ten seconds that they fall into."""
    rng = np.random.default_rng(seed)
    level = rng.lognormal(sigma=0.5, size=60)
    found = []
    for k, at in enumerate(np.sort(rng.uniform(0, 600, 3000))):
        ttft = 0.1 * level[int(at // 10)] * rng.lognormal(sigma=0.1)
        found.append(
            outcome(k, scheduled_s=float(at), first_token_s=float(at + ttft), last_token_s=float(at + 1))
        )
    return found


def test_intervals_of_blocks_cover_the_truth_where_single_requests_would_not() -> None:
    truth = 100 * math.exp(0.5**2 / 2) * math.exp(0.1**2 / 2)
    covered = {10.0: 0, 0.2: 0}
    for seed in range(12):
        outcomes = bursty(seed)
        ttft = columns_of(outcomes, Slo()).ttft
        for length in covered:
            blocks = np.array([int(o.scheduled_s / length) for o in outcomes])
            weights = resampled(blocks, 100, np.random.default_rng(0))
            means = weights @ ttft / weights.sum(axis=1)
            low, high = np.quantile(means, (0.025, 0.975))
            covered[length] += low <= truth <= high
    assert covered[10.0] >= 9
    assert covered[0.2] < covered[10.0]


def mixed(row: int) -> Outcome:
    """An answered, a failed or a cancelled request with random times."""
    rng = np.random.default_rng(row)
    stamps = 0.1 * row + np.cumsum(rng.random(1 + row % 7) * 0.2)
    tokens = rng.integers(1, 4, len(stamps)).astype(np.int32)
    return Outcome(
        row=row,
        scheduled_s=0.1 * row,
        first_token_s=float(stamps[0]),
        last_token_s=float(stamps[-1]),
        output_tokens=int(tokens.sum()),
        chunk_s=stamps,
        chunk_tokens=tokens,
        error={5: "reset", 6: CANCELLED}.get(row % 31),
    )


def test_columns_mean_the_same_as_single_requests() -> None:
    everything, slo = [mixed(row) for row in range(200)], Slo(ttft_ms=300, tpot_ms=60, e2e_ms=1000)
    kept = counted(everything)
    assert len(kept) < len(everything)
    good = columns_of(kept, slo).good
    assert 0 < good.sum() < len(good)
    assert good.tolist() == [is_good(one, slo) for one in kept]
    folded = fold(everything, 20.0, slo)
    for name in ("ttft_p50_ms", "tpot_p90_ms", "e2e_mean_ms", "e2e_p95_ms"):
        kind, share = measure_of(name).latency or ("", None)
        values = np.array([LATENCY_MS[kind](one) for one in kept])
        assert statistic(values, share) == pytest.approx(folded[name])


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.floats(0, 1e6), st.just(math.inf)), min_size=1, max_size=20),
    st.floats(0, 1),
    st.integers(0, 100),
)
def test_percentiles_of_many_weightings_equal_one_at_a_time(
    values: list[float], share: float, seed: int
) -> None:
    sample = np.array(values)
    weights = np.random.default_rng(seed).integers(0, 4, (5, len(values))).astype(float)
    weights = weights[weights.sum(axis=1) > 0]
    for found, row in zip(percentiles(sample, share, weights), weights, strict=True):
        repeated = np.sort(np.repeat(sample, row.astype(int)))
        place = share * (len(repeated) - 1)
        low, high = repeated[math.floor(place)], repeated[math.ceil(place)]
        expected = low if low == high else low + (high - low) * (place - math.floor(place))
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-6)


async def check_speed(truth: float) -> None:
    async def measure_at(speed: float) -> bool:
        return speed <= truth

    found = await bisect(measure_at)
    if truth < 0.1:
        assert (found.speed, found.above) == (0.0, 0.1)
    elif truth > 16:
        assert (found.speed, found.above) == (16.0, None)
    else:
        assert found.above is not None
        assert found.speed <= truth < found.above
        assert found.above / found.speed <= 1.05
    assert len(found.tried) <= 12


@pytest.mark.parametrize("truth", [0.05, 0.3, 1.0, 2.7, 11.0, 100.0])
def test_bisection_brackets_the_highest_speed(truth: float) -> None:
    asyncio.run(check_speed(truth))


def test_a_replay_ends_as_soon_as_its_answer_is_sure() -> None:
    judge = sure(Slo(ttft_ms=60, e2e_ms=1000, attainment=0.9))

    def seen(good: int, bad: int, waiting: int = 0) -> str | None:
        outcomes = [outcome(k) for k in range(good)] + [outcome(k, error="x") for k in range(bad)]
        return judge(
            Partial(
                slice=Slice(name="s", start_s=0, duration_s=10), now_s=5.0, window_s=10.0, planned=100,
                outcomes=outcomes, waiting_s=[0.0] * waiting,
            )
        )  # fmt: skip

    assert seen(50, 10) is None
    assert seen(50, 11) == LOST
    assert seen(50, 5, waiting=6) == LOST
    assert seen(89, 5) is None
    assert seen(90, 5) == MET


def test_cached_prompt_tokens_stand_beside_what_a_cache_would_have_had() -> None:
    shared = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [9, 8, 7]]
    traffic = trace([0.0, 1.0, 2.0, 3.0], inputs=48, blocks=shared, block_size=16)
    part = Slice(name="end", start_s=1.0, duration_s=10.0)
    timetable = schedule(traffic, part, speed=1.0, warmup_s=0.0, tail_s=0.0)
    outcomes = [
        outcome(row=row, input_tokens=48, expected_input=48, cached_tokens=cached)
        for row, cached in ((1, 32), (2, 16), (3, None))
    ]
    prefix = PrefixCounts()
    prefix.add(traffic, (np.array([0]), timetable), outcomes, (16, None))
    assert prefix.values() == {
        "prefix_cached_share": pytest.approx(48 / 96),
        "prefix_predicted_share": pytest.approx(64 / 96),
    }
    assert PrefixCounts().values() == {}
