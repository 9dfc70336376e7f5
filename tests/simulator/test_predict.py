"""Predictions and calibration against a known truth: an engine whose coefficients the test has set."""

import csv
import lzma
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import h100_predict
from benchmarks import simulator as benchmark
from tuner.errors import BadInput
from tuner.knobs.model import ModelFacts, read
from tuner.records import Candidate, Slice, Slo
from tuner.replay.plan import PLANS
from tuner.simulator.calibrate import BOUNDS, Observation, fit
from tuner.simulator.cost import (
    CARDS,
    Budget,
    Coefficients,
    StepCost,
    capture_sizes,
    card_of,
    preset,
    profile,
)
from tuner.simulator.predict import Predictor, Scene
from tuner.simulator.state import Step
from tuner.traffic.trace import Trace, build

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FACTS = read("Qwen/Qwen2.5-7B-Instruct", env={})
H100 = CARDS["h100-80"]


def traffic(count: int = 200, rate: float = 14.0, seed: int = 3, block_size: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6.5, 0.8, count), 20, 5000).astype(int)
    blocks = None
    if block_size:
        ids = [
            [0, 1, *range(100 * row + 100, 100 * row + 100 + n // block_size)]
            for row, n in enumerate(lengths)
        ]
        kept = [found[: max(1, -(-n // block_size))] for found, n in zip(ids, lengths, strict=True)]
        blocks = (np.cumsum([0, *map(len, kept)]), np.concatenate(kept))
    return build(
        {
            "arrival_s": np.cumsum(rng.exponential(1 / rate, count)),
            "input_len": lengths,
            "output_len": np.clip(rng.lognormal(4.8, 0.8, count), 2, 900).astype(int),
        },
        blocks=blocks,
        block_size=block_size,
    )


def scene(trace: Trace | None = None, **changes: object) -> Scene:
    trace = trace or traffic()
    whole = Slice(name="all", start_s=0.0, duration_s=trace.duration_s + 1e-3)
    made = Scene(
        trace=trace,
        slices=(whole,),
        facts=FACTS,
        card=H100,
        plan=benchmark.BARE,
        args={"max-model-len": 8192},
        slo=Slo(ttft_ms=500, tpot_ms=50),
        cut=False,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_kv_memory_of_a_measured_h100() -> None:
    """vLLM 0.25.1 on one H100 with this shape and its defaults: 1,071,136 tokens."""
    budget = Budget(max_num_seqs=1024, max_num_batched_tokens=8192)
    assert profile(FACTS, H100, budget).tokens(16) == pytest.approx(1_071_136, rel=0.02)


def test_more_utilization_more_blocks_until_warm_up_fails() -> None:
    found = [
        profile(FACTS, CARDS["a4500"], Budget(utilization=u, max_num_seqs=1024)) for u in (0.9, 0.95, 0.999)
    ]
    assert found[0].blocks < found[1].blocks < found[2].blocks
    assert found[0].missing_gib < 0 < found[2].missing_gib


def test_a_step_costs_more_the_more_it_does() -> None:
    cost = StepCost(FACTS, H100, Coefficients())
    least = cost(Step(decodes=1, context=100))
    assert least > cost.weights_s
    assert cost(Step(decodes=1, context=100_000)) > least
    long = cost(Step(prefill_tokens=4096, prefills=1, pairs=4096 * 30_000, prefill_context=32_000))
    assert long > cost(Step(prefill_tokens=4096, prefills=1, pairs=4096 * 2048, prefill_context=4096))
    # Batches are padded to the next captured size.
    assert cost(Step(prefill_tokens=290, prefills=1)) == cost(Step(prefill_tokens=300, prefills=1))
    assert cost(Step(prefill_tokens=300, prefills=1)) < cost(Step(prefill_tokens=305, prefills=1))
    small = read("Qwen/Qwen2.5-0.5B-Instruct", env={})
    eager = StepCost(small, CARDS["h200"], Coefficients(), capture_most=0)
    assert eager(Step(decodes=1)) > StepCost(small, CARDS["h200"], Coefficients())(Step(decodes=1))
    assert cost(Step(decodes=1, swapped_blocks=1000)) > least


def test_a_step_without_a_graph_takes_the_host_at_least_its_time_per_layer() -> None:
    """Seen on an H100 and an H200: about 20 ms for 28 layers, the same for 520 and 640 tokens."""
    bare, captured = (StepCost(FACTS, H100, Coefficients(), capture_most=most) for most in (512, 2048))
    steps = [Step(prefill_tokens=tokens, prefills=2, decodes=80, context=80_000) for tokens in (440, 560)]
    floor = Coefficients().step_s + 82 * Coefficients().seq_s + FACTS.layers * Coefficients().layer_s
    assert [bare(step) for step in steps] == pytest.approx([floor, floor])
    assert captured(steps[0]) < captured(steps[1]) < floor
    small = Step(prefill_tokens=400, prefills=2, decodes=80, context=80_000)
    assert bare(small) == captured(small)
    large = Step(prefill_tokens=3000, prefills=4)
    assert bare(large) == captured(large) > floor


def test_decode_steps_without_a_graph_take_the_hosts_time_too() -> None:
    bare = StepCost(FACTS, H100, Coefficients(), capture_most=64)
    assert bare.decode_line(65, 1000) == (bare(Step(decodes=65, context=1000)), 0.0)
    base, slope = bare.decode_line(64, 1000)
    assert base + 1000 * slope == pytest.approx(bare(Step(decodes=64, context=1000)))


def test_without_async_scheduling_the_host_works_between_steps() -> None:
    """Seen on an H200: p50 TPOT 17.4 → 32.2 ms under vLLM's defaults, p50 TTFT 101 → 96 ms."""
    found = Predictor(scene(), preset(H100), spreads=False)
    on, off = found([Candidate(), Candidate({"async_scheduling": False})])
    assert off.values["tpot_p50_ms"] > 1.1 * on.values["tpot_p50_ms"]
    assert off.values["e2e_p95_ms"] > on.values["e2e_p95_ms"]


def test_two_cards_halve_the_work_and_pay_for_the_sums() -> None:
    one, two = (StepCost(FACTS, H100.group(ranks), Coefficients()) for ranks in (1, 2))
    slow = StepCost(FACTS, replace(H100, link=25e9).group(2), Coefficients())
    decode, prompt = Step(decodes=32, context=32_000), Step(prefill_tokens=8192, prefills=4)
    assert one(decode) > two(decode) > one(decode) / 2
    assert one(prompt) > two(prompt) > one(prompt) / 2
    assert slow(prompt) > one(prompt) - 0.5 * (one(prompt) - two(prompt))
    budget = Budget(max_num_seqs=1024, max_num_batched_tokens=8192)
    assert profile(FACTS, H100.group(2), budget).kv_gib > 2.2 * profile(FACTS, H100, budget).kv_gib


def test_a_tensor_parallel_candidate_needs_its_cards() -> None:
    asked = Candidate({"tensor_parallel_size": 2})
    alone, pair = (Predictor(scene(gpus=gpus), preset(H100), spreads=False) for gpus in (1, 2))
    assert not alone([asked])[0].feasible
    (split,), (whole,) = pair([asked]), pair([Candidate()])
    assert split.feasible
    assert split.values["tpot_p95_ms"] < whole.values["tpot_p95_ms"]


def test_data_parallel_engines_share_the_requests_and_need_their_cards() -> None:
    asked = Candidate({"data_parallel_size": 2})
    alone, pair = (Predictor(scene(gpus=gpus), preset(H100), spreads=False) for gpus in (1, 2))
    assert not alone([asked])[0].feasible
    (split,), (whole,) = pair([asked]), pair([Candidate()])
    assert split.values["requests"] == whole.values["requests"]
    assert split.values["tpot_p95_ms"] < whole.values["tpot_p95_ms"]
    assert split.values["batch_tokens_mean"] < 0.8 * whole.values["batch_tokens_mean"]
    both = Candidate({"data_parallel_size": 2, "tensor_parallel_size": 2})
    assert not pair([both])[0].feasible


SHAPE_32B = read(str(Path(benchmark.__file__).parent / "h100" / "qwen2.5-32b-shape"), env={})
BOOTS = [  # model, knobs of the budget, compiled, KV GiB, graphs GiB; vLLM 0.25.1 on one H100
    (SHAPE_32B, {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}, False, 10.05, 1.13),
    (SHAPE_32B, {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}, True, 9.97, 1.13),
    (SHAPE_32B, {"max_num_batched_tokens": 256, "capture_most": 256}, False, 11.33, 0.72),
    (SHAPE_32B, {"max_num_batched_tokens": 256, "capture_most": 256}, True, 10.13, 0.72),
    (SHAPE_32B, {"max_num_batched_tokens": 1024}, True, 10.11, 0.92),
    (FACTS, {"max_num_batched_tokens": 640}, True, 57.31, 0.54),
    (FACTS, {"max_num_batched_tokens": 640, "capture_most": 640}, True, 57.31, 0.61),
    (FACTS, {"max_num_batched_tokens": 1024, "capture_most": 1024}, True, 57.30, 0.77),
]


@pytest.mark.parametrize(("facts", "knobs", "compiles", "kv", "graphs"), BOOTS)
def test_the_kv_memory_of_measured_boots_with_and_without_compiling(
    facts: ModelFacts, knobs: dict[str, int], compiles: bool, kv: float, graphs: float
) -> None:
    found = profile(facts, H100, Budget(**knobs), compiles=compiles)
    assert found.kv_gib == pytest.approx(kv, rel=0.01)
    assert found.graphs_gib == pytest.approx(graphs, abs=0.12)


HERE = Path(benchmark.__file__).parent
MEASURED = [
    (
        ("--card", "h100-80"),
        [HERE / "h100" / "live_limits.jsonl", HERE / "h100" / "graphs.jsonl"],
        "1024 8192 0",
    ),
    (("--card", "h200"), [HERE / "table" / "h200-7b"], "{}"),
    (("--card", "h200"), [HERE / "table" / "h200-32b"], "r gpu_memory_utilization=0.56"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "files", "base"), MEASURED)
def test_what_real_cards_measured_is_predicted_from_the_default_alone(
    words: tuple[str, ...], files: list[Path], base: str
) -> None:
    """With and without captured graphs, between 256 and 8,192 tokens a step; each row within 15 %, those of
    the 32B shape within 10 % (9.3 % at worst).
    """
    given = benchmark.arguments([*map(str, files), *words, "--on", base])
    given.traffic = HERE / "table" / "conversation.csv"
    table = benchmark.run(given)
    assert table is not None
    assert len(table.lines) >= 15
    for name in ("tpot_p95_ms", "e2e_p95_ms"):
        assert np.median(table.errors(name)) <= 0.05
        assert max(table.errors(name)) <= (0.10 if "32b" in files[0].name else 0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "files", "base"), [MEASURED[0], MEASURED[2]])
def test_the_presets_alone_predict_what_real_cards_measured(
    words: tuple[str, ...], files: list[Path], base: str
) -> None:
    """What `tuner lint` says of itself where nothing was calibrated; the targets of docs/simulator.md."""
    given = benchmark.arguments([*map(str, files), *words, "--on", base, "--uncalibrated"])
    given.traffic = HERE / "table" / "conversation.csv"
    table = benchmark.run(given)
    assert table is not None
    assert np.median(table.errors("e2e_p95_ms")) <= 0.05
    assert max(table.errors("e2e_p95_ms")) <= 0.11


def test_a_prediction_between_two_rows_of_one_configuration_is_right() -> None:
    rows = [
        benchmark.Row(
            knobs=k, speed=4, count=1, candidate=Candidate({"max_num_seqs": 8}), values={"e2e_p95_ms": v}
        )
        for k, v in (("r", 100.0), ("s", 150.0))
    ]
    table = benchmark.Table([(row, {"e2e_p95_ms": 120.0}, {}, 0.0) for row in rows])
    assert table.errors("e2e_p95_ms") == [0.0, 0.0]
    table = benchmark.Table([(row, {"e2e_p95_ms": 165.0}, {}, 0.0) for row in rows])
    assert table.errors("e2e_p95_ms") == pytest.approx([0.1, 0.1])


@pytest.mark.slow
def test_issue_24_a_32b_shape_is_predicted_from_its_baseline_within_10_percent(tmp_path: Path) -> None:
    """Study D on one H200: 512 to 8,192 tokens a step, blocks of 16 and 64, with and without preemptions."""
    trace = tmp_path / "trace.csv"
    packed = Path(__file__).parents[1] / "data" / "public" / "AzureLLMInferenceTrace_conv.csv.xz"
    trace.write_bytes(lzma.decompress(packed.read_bytes()))
    made = h100_predict.scene_of(HERE / "h100" / "study-d.yaml", trace, "h200")
    raw = HERE.parent / "docs" / "results" / "h200"
    base, *others = [h100_predict.observation_of(raw / f"d-trial-{n}.json") for n in range(12)]
    predict = Predictor(made, fit(made, [base], rounds=10).coefficients, spreads=False)
    for seen, found in zip(others, predict([seen.candidate for seen in others]), strict=True):
        for name in ("tpot_p95_ms", "e2e_p95_ms"):
            assert found.values[name] == pytest.approx(seen.values[name], rel=0.10), seen.candidate


@pytest.mark.slow
def test_two_card_engines_are_predicted_from_one_card_within_15_percent() -> None:
    """Measured pairs on two H200, vLLM's defaults: nothing of the data parallel row was fitted."""
    folders = [str(HERE / "table" / name) for name in ("h200-7b", "h200-7b-two-cards")]
    given = benchmark.arguments([*folders, "--card", "h200", "--on", "{}"])
    given.traffic = HERE / "table" / "conversation.csv"
    rows = [row for folder in given.rows for row in benchmark.rows_of(folder)]
    base = next(row for row in rows if row.knobs == "{}")
    seen = [Observation(candidate=base.candidate, values=base.values)]
    calibration = fit(benchmark.scene_of(given, base), seen)
    for knobs in ("r tensor_parallel_size=2", "r data_parallel_size=2"):
        pair = [row for row in rows if row.knobs == knobs]
        assert len(pair) == 1
        table = benchmark.predict_rows(given, pair, calibration)
        assert max(error for name in benchmark.SHOWN for error in table.errors(name)) <= 0.15


def test_captured_sizes_are_vllms() -> None:
    assert capture_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert capture_sizes(512)[-3:] == (480, 496, 512)


def test_names_and_rates_are_a_measurements() -> None:
    (found,) = Predictor(scene(), preset(H100))([Candidate()])
    values = found.values
    assert found.feasible
    assert values["requests"] == 200
    assert values["failed"] == 0
    assert values["ttft_p50_ms"] <= values["ttft_p95_ms"] <= values["e2e_p95_ms"]
    assert 0 < values["goodput_rps"] <= values["request_rps"]
    assert set(found.spread) <= set(values)
    assert found.violation.kv is not None
    assert found.violation.kv < 0


def test_the_batch_is_counted_in_the_window_alone() -> None:
    one = build({"arrival_s": np.zeros(1), "input_len": np.array([400]), "output_len": np.array([900])})
    window = Slice(name="first second", start_s=0.0, duration_s=1.0)
    made = scene(one, slices=(window,))
    values = Predictor(made, preset(H100), spreads=False)([Candidate()])[0].values
    steps = 1 + (1000 - values["ttft_mean_ms"]) / values["tpot_mean_ms"]
    assert 50 < steps < 600, "the answer outlasts the window"
    assert values["batch_tokens_mean"] == pytest.approx((400 + steps - 1) / steps, rel=0.01)


def test_gaps_are_those_of_the_measured_requests() -> None:
    """Of answers of one length the mean gap is the mean time per token, though many come after the window."""
    rows = traffic(400, rate=40.0)
    equal = build({"arrival_s": rows.arrival_s, "input_len": rows.input_len, "output_len": np.full(400, 200)})
    made = scene(equal, slices=(Slice(name="rush", start_s=1.0, duration_s=2.0),))
    values = Predictor(made, preset(H100), spreads=False)([Candidate({"max_num_seqs": 32})])[0].values
    assert values["e2e_mean_ms"] > 3000, "the window lasts 2 s"
    assert values["itl_mean_ms"] == pytest.approx(values["tpot_mean_ms"], rel=1e-6)


def test_a_smaller_step_budget_trades_first_tokens_for_steady_ones() -> None:
    loaded = scene(traffic(rate=19.0))
    wide, narrow = Predictor(loaded, preset(H100))(
        [Candidate(), Candidate({"max_num_batched_tokens": 512, "max_num_seqs": 256})]
    )
    assert narrow.values["tpot_p95_ms"] < wide.values["tpot_p95_ms"]
    assert narrow.values["ttft_p95_ms"] > wide.values["ttft_p95_ms"]


def test_what_would_not_start_is_infeasible_and_graded() -> None:
    small = scene(card=card_of("a4500"))
    found = Predictor(small, preset(small.card))(
        [
            Candidate({"gpu_memory_utilization": 0.76}),
            Candidate({"max_num_seqs": 64, "max_num_batched_tokens": 32}),
            Candidate({"block_size": 24}),
            Candidate({"gpu_memory_utilization": 0.999, "max_num_seqs": 1024}),
        ]
    )
    assert [prediction.feasible for prediction in found] == [False] * 4
    assert found[0].violation.kv is not None
    assert found[0].violation.kv > 0
    assert found[3].violation.oom is not None
    assert found[3].violation.oom > 0


def test_shared_prefixes_are_hits_only_with_the_cache_on() -> None:
    for size in (16, 64, 48):  # whole multiples of an engine block, and not
        shared = scene(traffic(block_size=size))
        on, off = Predictor(shared, preset(H100))(
            [Candidate({"block_size": 16}), Candidate({"enable_prefix_caching": False})]
        )
        assert on.values["prefix_hit_rate"] > 0.01
        assert "prefix_hit_rate" not in off.values
        assert on.values["ttft_mean_ms"] < off.values["ttft_mean_ms"]


def test_an_overload_fails_at_the_deadline() -> None:
    (found,) = Predictor(scene(traffic(rate=500.0), deadline_s=1.0), preset(H100))([Candidate()])
    assert found.values["failed"] > 0
    assert math.isinf(found.values["e2e_p99_ms"])
    assert not found.feasible
    assert found.violation.err is not None
    assert found.violation.err > 0


def test_a_tail_that_ends_cuts_what_still_runs() -> None:
    plan = replace(PLANS["quick"], load_warmup_s=0.0, tail_limit_s=0.5)
    slow = preset(H100).scaled({"step_s": 20.0})
    values = [
        Predictor(scene(plan=plan, cut=cut), slow, spreads=False)([Candidate({})])[0].values
        for cut in (False, True)
    ]
    assert values[0]["failed"] == 0 < values[1]["failed"]
    assert values[1]["requests"] == values[0]["requests"]
    assert values[1]["e2e_p99_ms"] == math.inf


OTHERS = [
    Candidate({"max_num_batched_tokens": 512, "max_num_seqs": 256}),
    Candidate({"max_num_seqs": 48}),
    Candidate({"max_num_batched_tokens": 2048, "long_prefill_token_threshold": 256}),
]


@pytest.mark.parametrize(
    "truth",
    [
        Coefficients(compute=0.45, memory=0.7, step_s=0.005, seq_s=2e-5, request_s=0.01),
        Coefficients(compute=0.75, memory=0.95, step_s=0.001),
    ],
)
def test_one_trial_calibrates_for_the_others(truth: Coefficients) -> None:
    made = scene()
    real = Predictor(made, truth, spreads=False)
    seen = Observation(candidate=Candidate(), values=real([Candidate()])[0].values)
    found = fit(made, [seen])
    assert max(found.residuals.values()) < 0.05
    fitted = Predictor(made, found.coefficients, spreads=False)
    for name, limit in (("tpot_p95_ms", 0.10), ("e2e_p95_ms", 0.10), ("ttft_p95_ms", 0.25)):
        for got, want in zip(fitted(OTHERS), real(OTHERS), strict=True):
            assert abs(math.log(got.values[name] / want.values[name])) < limit
    for name, (low, high) in BOUNDS.items():
        assert low <= getattr(found.coefficients, name) <= high


def test_nothing_measured_calibrates_nothing() -> None:
    with pytest.raises(BadInput, match="no observation"):
        fit(scene(traffic(20)), [Observation(candidate=Candidate(), values={"goodput_rps": 3.0})])
    bad = Candidate({"max_num_seqs": 64, "max_num_batched_tokens": 32})
    with pytest.raises(BadInput, match="refuses a candidate"):
        fit(scene(traffic(20)), [Observation(candidate=bad, values={"e2e_p95_ms": 3.0})])


def test_a_measured_h100_is_predicted_from_its_default() -> None:
    """docs/simulator.md's table: one measured row, fourteen predicted."""
    rows, slice_file = BENCHMARKS / "h100" / "live_limits.jsonl", BENCHMARKS / "table" / "conversation.csv"
    with slice_file.open() as file:
        assert next(csv.reader(file)) == ["arrival_s", "prompt_tokens", "output_tokens"]
    found = benchmark.run(benchmark.arguments([str(rows), "--traffic", str(slice_file)]))
    assert found is not None
    assert [words for words, held in found.verdicts() if not held] == []
