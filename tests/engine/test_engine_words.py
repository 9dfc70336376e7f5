"""What is read from an engine's own words: its log, its metrics, its configuration."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.engine.helpers import spec
from tests.public import public
from tuner.engine import failures, log, metrics
from tuner.engine.boots import compiled_anew, ready_deadline
from tuner.engine.metrics import (
    differences,
    from_log,
    from_metrics,
    from_server_info,
    identity_of,
    read_effective,
    same_value,
    unproved_knobs,
)
from tuner.engine.server import Liveness, serve, watch
from tuner.knobs import catalogue
from tuner.records import JSON, Candidate, Value
from tuner.replay.prepare import fold_scrapes, recomputed

CASES = Path(__file__).parents[1] / "data" / "cases"


@pytest.mark.parametrize(
    ("name", "code", "kind"),
    [
        ("e_badblock", 1, "block_size"), ("e_badchoice", 2, "bad_flag"), ("e_badflag", 2, "bad_flag"),
        ("e_batched_lt_seqs", 1, "config_invalid"), ("e_gpuutil", 1, "config_invalid"),
        ("e_hub", 1, "model_missing"), ("e_kvsmall", 1, "max_len_gt_kv"), ("e_maxlen", 1, "max_len_gt_model"),
        ("e_missing", 1, "model_missing"), ("b", 1, "port_in_use"),
    ],
)  # fmt: skip
def test_recorded_logs_get_their_verdict(name: str, code: int, kind: str) -> None:
    text = log.read(public(f"vllm-logs/{name}.log"))
    found = failures.classify(text, code, "startup", asked=["block_size"])
    assert found.kind == kind
    assert found.evidence in text or kind == "config_invalid"


def test_ranks_without_a_numa_node_each_are_refused_in_the_engines_words() -> None:
    """Seen with --tensor-parallel-size 2 on a machine of one node."""
    words = "AssertionError: Not enough allowed NUMA nodes to bind threads of 2 local CPUWorkers."
    text = f"(EngineCore pid=7) ERROR [core.py:1510] EngineCore failed to start.\n{words}\n"
    found = failures.classify(text, 1, "startup", asked=["tensor_parallel_size"])
    assert (found.kind, found.outcome, found.retries) == ("config_invalid", "infeasible", 0)
    assert "NUMA" in found.reason


def test_recorded_logs_tell_the_time_line_and_the_kv_cache() -> None:
    text = log.read(public("vllm-logs/a.log"))
    found = log.timeline(text)
    assert found["init_s"] == 30.34
    assert found["imports_s"] < found["serving_s"]
    assert log.kv_tokens(text) == 524_288


def test_a_recorded_exposition_is_read() -> None:
    found = metrics.parse(public("metrics_0.32.txt").read_text())
    assert found["generation_tokens"] == 24
    assert found["iterations"] == 24
    assert found["ttft_seconds_count"] == 3
    assert metrics.kv_tokens(found) == 524_288


def test_a_recorded_configuration_is_read() -> None:
    found = from_server_info(json.loads(public("server_info_0.32.json").read_text()), catalogue.read_back())
    assert found["max_num_seqs"] == 16
    assert found["block_size"] == 128
    assert found["scheduling_policy"] == "fcfs"
    assert found["watermark"] == 0.0
    assert found["preemption"] == "recompute"
    assert found["dtype"] == "bfloat16"
    assert {name for name, rule in catalogue.read_back().items() if rule.path} - set(found) == {
        "max_num_partial_prefills",
        "max_long_partial_prefills",
    }  # gone since 0.27


def test_M40_every_knob_can_be_read_back_or_says_why_not() -> None:
    for name, knob in catalogue.CATALOGUE.items():
        assert bool(knob.effective) != bool(knob.unproved), name


def test_M40_an_offload_that_the_engine_did_not_take_is_a_difference() -> None:
    """Also where nothing but the labels of /metrics tell of it."""
    asked = Candidate({"preemption": "offload:8"})
    for size, said in ((None, "recompute"), (8.0, "offload:8"), (2.5, "offload:2.5")):
        info: JSON = {"vllm_config": {"cache_config": {"kv_offloading_size": size}}}
        found = from_server_info(info, catalogue.read_back())
        assert found["preemption"] == said
        assert differences(asked, found) == ({} if size == 8.0 else {"preemption": ("offload:8", said)})
        labels = f'vllm:cache_config_info{{block_size="16",kv_offloading_size="{size}"}} 1.0\n'
        assert from_metrics(metrics.parse(labels), catalogue.read_back())["preemption"] == said


def test_M40_what_the_engine_says_nothing_of_is_not_proved() -> None:
    asked = Candidate({"max_num_seqs": 16, "watermark": 0.05, "block_size": None})
    assert unproved_knobs(asked, {"max_num_seqs": 16}) == ("watermark",)
    assert differences(asked, {"max_num_seqs": 16}) == {}


@pytest.mark.parametrize(
    ("line", "backend"),
    [
        (
            "INFO [cuda.py:486] Using FLASHINFER attention backend out of potential backends: ['X'].",
            "FLASHINFER",
        ),
        ("INFO [cuda.py:300] Using AttentionBackendEnum.TRITON_ATTN backend.", "TRITON_ATTN"),
        ("INFO [nccl.py:1] Using network IB", None),
    ],
)
def test_M18_the_attention_backend_that_the_engine_chose_is_read_from_its_log(
    line: str, backend: str | None
) -> None:
    assert from_log(line, catalogue.read_back()).get("attention_backend") == backend


def test_M40_a_backend_that_the_log_says_is_not_used_is_a_difference(tmp_path: Path) -> None:
    """The CPU build keeps `--attention-backend FLASHINFER` in its configuration and computes with its own."""
    asked = Candidate({"attention_backend": "FLASHINFER"})
    launch = spec(tmp_path, asked=dict(asked), read_back=catalogue.read_back())
    info: JSON = {"vllm_config": {"attention_config": {"backend": "FLASHINFER"}}}
    line = "INFO [cpu.py:178] Cannot use AttentionBackendEnum.FLASHINFER backend on CPU.\n"
    silent = metrics.parse("")
    assert differences(asked, read_effective(launch, silent, info, "INFO ready\n")) == {}
    lost = read_effective(launch, silent, info, line)
    assert differences(asked, lost) == {"attention_backend": ("FLASHINFER", None)}


def test_the_effective_configuration_is_held_against_what_was_asked() -> None:
    baseline = {"block_size": 128, "max_num_seqs": 16, "watermark": 0.0, "enable_prefix_caching": True}
    asked = Candidate({"block_size": 16, "max_num_seqs": 64, "watermark": 0.05, "unheard_of": 1})
    said = {"block_size": 128, "max_num_seqs": 64, "watermark": 0.0, "enable_prefix_caching": True}
    assert differences(asked, said) == {"block_size": (16, 128), "watermark": (0.05, 0.0)}
    assert identity_of(said) != identity_of(baseline)
    assert identity_of({**baseline, "watermark": 0.0}) == identity_of(baseline)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("0.9", 0.9, True),
        (True, "true", True),
        (16, 32, False),
        ("auto", "bfloat16", True),
        ("half", "float16", True),
        ('{"method":"ngram"}', '{"method":"ngram","num_speculative_tokens":2}', True),
        ('{"method":"ngram"}', '{"method":"mtp"}', False),
        ('{"method":"ngram"}', None, False),
        (64, None, False),
    ],
)
def test_spellings_of_one_value_are_one(a: Value, b: Value, same: bool) -> None:
    assert same_value(a, b) is same


@pytest.mark.parametrize(
    ("line", "gone", "kept"),
    [
        (b"Authorization: Bearer abc.def.ghi", b"abc.def", b"Authorization"),
        (b"non-default args: {'api_key': ['sk-12'], 'model': 'm'}", b"sk-12", b"'model': 'm'"),
        (b"token hf_abcdefghijklmnopqrstuv end", b"hf_abc", b"end"),
        (b"Received request 1: prompt: 'my diary', params: X", b"diary", b"params: X"),
        (b"Received request 1: prompt: 'a diary cut off in the mid", b"diary", b"Received request"),
        (b"prompt_token_ids: [1, 2, 3], lora", b"[1, 2, 3]", b"lora"),
        (b"password=hunter22 x", b"hunter22", b" x"),
        (b"the value is s3cr3t-value here", b"s3cr3t", b"here"),
    ],
)
def test_secrets_and_prompts_are_taken_out(line: bytes, gone: bytes, kept: bytes) -> None:
    redact = log.redactor({"MY_TOKEN": "s3cr3t-value", "HOME": "/home/x"})
    assert gone not in redact(line)
    assert kept in redact(line)


def test_an_ordinary_line_stays_as_it_is() -> None:
    line = b"INFO 11-27 22:16:55 Avg prompt throughput: 18.0 tokens/s, api_key=None, prompt_tokens: 3"
    assert log.redactor({})(line) == line


def test_the_engines_log_on_disk_holds_no_secret(tmp_path: Path) -> None:
    launch = spec(tmp_path, "secret", env={"MY_API_KEY": "very-secret-value"})

    async def serve_it() -> None:
        async with serve(launch):
            pass

    asyncio.run(serve_it())
    text = (tmp_path / "engine.log").read_text()
    assert "Received request" in text
    assert "very-secret-value" not in text
    assert "secret plan" not in text


def test_counters_that_restarted_count_from_zero() -> None:
    def counted(value: float) -> metrics.EngineMetrics:
        return metrics.parse(f"# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total {value}\n")

    assert metrics.between(counted(7), counted(9))["preemptions"] == 2
    assert metrics.between(counted(7), counted(3))["preemptions"] == 3
    assert metrics.between(counted(7), metrics.parse(""))["preemptions"] is None


@pytest.mark.parametrize(
    ("ready", "deadline"),
    [([], 900), ([40, 50], 900), ([40, 50, 60], 150), ([1, 2, 3], 60), ([2e3] * 5, 3600)],
)
def test_the_deadline_is_learned_from_launches(ready: list[float], deadline: float) -> None:
    assert ready_deadline(ready) == deadline


def test_a_boot_that_loads_compiled_code_did_not_compile() -> None:
    assert compiled_anew("x\nCompiling a graph for compile range (1, 2) takes 9.00 s\n")
    assert not compiled_anew("Directly load AOT compilation from path p\n torch.compile took 0.1 s in total")
    assert not compiled_anew("Enforce eager set")


def test_silence_counts_from_the_last_token() -> None:
    """No answer to any scrape; tokens come until second 50."""
    now = [0.0]

    async def silent() -> str:
        now[0] += 10.0
        raise TimeoutError

    found = asyncio.run(
        watch(
            silent,
            Liveness(grace_s=25.0),
            interval_s=0.0,
            clock=lambda: now[0],
            heard=lambda: min(now[0], 50.0),
        )
    )
    assert (found.kind, now[0]) == ("frozen", 80.0)


def state(running: int, steps: int | None, tokens: int | None, preemptions: int = 0) -> metrics.EngineMetrics:
    series = {
        "num_requests_running": running,
        "iteration_tokens_total_count": steps,
        "generation_tokens_total": tokens,
        "num_preemptions_total": preemptions,
    }
    return metrics.parse(
        "".join(f"vllm:{name} {value}\n" for name, value in series.items() if value is not None)
    )


@pytest.mark.parametrize(
    ("looks", "kind"),
    [
        ([(4, 10, 10, 0), (4, 10, 10, 0), (4, 10, 10, 0), (4, 10, 10, 0)], "frozen"),
        ([(4, 10, 10, 0), (4, 11, 11, 0), (4, 12, 12, 0), (4, 13, 13, 0)], None),
        ([(0, 10, 10, 0), (0, 10, 10, 0), (0, 10, 10, 0), (0, 10, 10, 0)], None),
        ([(4, 10, 10, 0), (4, 20, 10, 5), (4, 30, 10, 9), (4, 40, 10, 12)], "thrash"),
        ([(4, None, None, 0)] * 4, None),
        ([(4, None, 10, 0)] * 4, "frozen"),
    ],
)
def test_liveness_goes_by_steps_and_tokens(
    looks: list[tuple[int, int | None, int | None, int]], kind: str | None
) -> None:
    liveness = Liveness(grace_s=25.0)
    found = [liveness.observe(state(*look), 10.0 * number) for number, look in enumerate(looks)]
    assert found[:3] == [None, None, None]
    assert (found[3].kind if found[3] else None) == kind


def test_graphs_up_to_the_step_budget_are_what_was_asked() -> None:
    """vLLM truncates what is asked to the budget, and may stop 15 tokens below it."""
    asked = Candidate({"max_cudagraph_capture_size": 2048})
    for budget, found in ((1024, 1024), (1000, 992), (8192, 2048), (8192, 2040)):
        said = {"max_num_batched_tokens": budget, "max_cudagraph_capture_size": found}
        assert differences(asked, said, catalogue.read_back()) == {}
    for budget, found in ((8192, 512), (1024, 512), (1024, 0)):
        said = {"max_num_batched_tokens": budget, "max_cudagraph_capture_size": found}
        assert differences(asked, said, catalogue.read_back()) == {
            "max_cudagraph_capture_size": (2048, found)
        }


LINES = (CASES / "metrics-line.txt").read_text()
WAITING = 'waiting{engine="0",model_name="m"}'
RANKS = 'vllm:num_requests_waiting{engine="0"} 4.0\nvllm:num_requests_waiting{engine="1"} 5.0\n'


@pytest.mark.parametrize(
    ("text", "waiting"),
    [
        (LINES, None),
        (LINES.replace(WAITING, f"{WAITING} NaN"), None),
        (LINES.replace(WAITING, f"{WAITING} +Inf"), None),
        (LINES.replace(WAITING, f"{WAITING} many"), None),
        (LINES.replace(WAITING, 'waiting{engine="0"'), None),
        (LINES.replace(WAITING, f"{WAITING} 2.0.1"), None),
        (LINES.replace(f"vllm:num_requests_{WAITING}\n", ""), None),
        ("# TYPE vllm:num_requests_waiting thermometer\n" + LINES.replace(WAITING, f"{WAITING} 2"), 2),
        ("an engine says hello\n\n" + LINES.replace(WAITING, f"{WAITING} 2"), 2),
        (LINES + RANKS, None),
    ],
)
def test_a_line_that_cannot_be_read_is_left_out(text: str, waiting: float | None) -> None:
    found = metrics.parse(text)
    assert (found["running"], found["waiting"], found["kv_usage"]) == (3.0, waiting, 0.25)
    assert found["preemptions"] is None


@pytest.mark.parametrize("labels", ["", '{le="abc"}', '{le="NaN"}', '{le=""}', '{engine="0"}'])
def test_a_bucket_without_a_bound_loses_its_histogram_only(labels: str) -> None:
    bucket = "vllm:iteration_tokens_total_bucket"
    whole = f'{bucket}{{le="8"}} 1\n{bucket}{{le="+Inf"}} 2\nvllm:iteration_tokens_total_sum 3\n'
    assert metrics.parse(whole + LINES).step_tokens
    found = metrics.parse(f"{whole}{bucket}{labels} 4\n" + LINES)
    assert (found.step_tokens, found["iteration_tokens"], found["running"]) == ({}, 3.0, 3.0)


def test_a_text_cut_off_loses_its_last_line_only() -> None:
    whole = RANKS + "vllm:num_preemptions_total 12345.0\n"
    for end in range(len(RANKS) + len("vllm:num_preemptions_total 1"), len(whole)):
        found = metrics.parse(whole[:end])
        assert (found["waiting"], found["preemptions"]) == (9.0, None)
    assert metrics.parse(whole)["preemptions"] == 12345.0


def test_a_line_that_stands_twice_counts_once() -> None:
    line = 'vllm:prompt_tokens_total{engine="0",pid="1"} %d\n'
    assert metrics.parse(line % 7 + line % 7)["prompt_tokens"] == 7
    assert metrics.parse(line % 7 + (line % 5).replace('"1"', '"2"'))["prompt_tokens"] == 12


def test_what_is_no_exposition_is_refused() -> None:
    for text in ("<html><body>502 Bad Gateway</body></html>\n", '{"detail": "Not Found"}', "vllm:x{"):
        with pytest.raises(ValueError, match="no line of it is a sample"):
            metrics.parse(text)


def test_a_counter_that_could_not_be_read_at_first_tells_no_difference() -> None:
    broken, after = (
        metrics.parse("vllm:num_preemptions_total\nx 1\n"),
        metrics.parse("vllm:num_preemptions_total 9\n"),
    )
    assert metrics.between(broken, after)["preemptions"] is None
    assert metrics.between(metrics.parse(""), after)["preemptions"] == 9


def test_an_engine_with_a_bad_metrics_line_is_not_taken_for_dead() -> None:
    now, asked = [0.0], [0]

    async def scrape() -> str:
        now[0] += 10
        asked[0] += 1
        if asked[0] > 20:
            raise ConnectionError
        return "vllm:num_requests_running\n" if asked[0] < 10 else LINES

    watched = watch(scrape, Liveness(grace_s=25), interval_s=0.0, clock=lambda: now[0])
    assert (asyncio.run(watched).kind, asked[0]) == ("frozen", 23)


@pytest.mark.parametrize(
    ("preemptions", "queries", "cached", "rate", "again"),
    [
        (400, 200_000, None, None, 0.5),
        (400, 200_000, 10_000, 0.1, 0.5),
        (400, 100_500, None, 100_000 / 100_500, 0.0),
        (0, 200_000, None, 0.5, None),
    ],
)
def test_recomputed_tokens_are_no_prefix_hits(
    preemptions: int, queries: int, cached: int | None, rate: float | None, again: float | None
) -> None:
    """400 preemptions and a hit rate of 0.5: half of what was looked up is recomputation."""
    text = (
        f"vllm:num_preemptions_total {preemptions}\nvllm:prefix_cache_queries_total {queries}\n"
        "vllm:prefix_cache_hits_total 100000\nvllm:prompt_tokens_total 100000\n"
    )
    if cached is not None:
        text += f"vllm:prompt_tokens_cached_total {cached}\n"
    found = metrics.between(metrics.parse(""), metrics.parse(text))
    assert found["prefix_hit_rate"] == rate
    assert found["prefix_recomputed"] == again
    assert (found["prefix_hits"] is None) == (rate is None)
    assert (recomputed(found) is None) == (not again)


def test_M15_the_distribution_of_step_tokens_and_the_offload_transfer_are_read() -> None:
    def page(low: int, high: int, moved: int) -> metrics.EngineMetrics:
        bucket = "vllm:iteration_tokens_total_bucket"
        return metrics.parse(
            f'{bucket}{{engine="0",le="8.0"}} {low}\n{bucket}{{engine="0",le="16.0"}} {high}\n'
            f'{bucket}{{engine="0",le="+Inf"}} {high}\nvllm:iteration_tokens_total_sum{{engine="0"}} 1\n'
            f"vllm:kv_offload_load_bytes_total {moved}\nvllm:kv_offload_store_bytes_total {moved}\n"
        )

    before, after = page(10, 10, 0), page(10, 110, 2**30)
    found = metrics.between(before, after)
    assert found["batch_tokens_p50"] == pytest.approx(12.0)
    assert found["batch_tokens_p95"] == pytest.approx(15.6)
    assert metrics.between(metrics.parse(""), metrics.parse("a 1\n"))["batch_tokens_p50"] is None
    assert fold_scrapes([(0.0, before), (4.0, after)])["offload_gib_per_s"] == pytest.approx(0.5)
    assert "offload_gib_per_s" not in fold_scrapes([(0.0, metrics.parse("a 1\n"))] * 2)


@pytest.mark.parametrize(("ones", "eights"), [(100, 100), (96, 100), (60, 100), (10, 100), (0, 100)])
def test_a_step_has_at_least_one_token(ones: int, eights: int) -> None:
    """A lone decode is one token a step: vLLM's first bucket, up to 1, holds no fraction of a token."""

    def page(one: int, eight: int) -> metrics.EngineMetrics:
        bucket = 'vllm:iteration_tokens_total_bucket{engine="0",le='
        return metrics.parse(
            f'{bucket}"1.0"}} {one}\n{bucket}"8.0"}} {eight}\n{bucket}"+Inf"}} {eight}\n'
            'vllm:iteration_tokens_total_sum{engine="0"} 1\n'
        )

    found = metrics.between(page(0, 0), page(ones, eights))
    low, high = found["batch_tokens_p50"], found["batch_tokens_p95"]
    assert low is not None
    assert high is not None
    assert 1.0 <= low <= high <= 8.0
    assert (low == 1.0) == (ones >= 50)
    assert (high == 1.0) == (ones >= 95)
