"""The data and the compiler against the real vLLM (CPU build): its parser and its effective configuration."""

import asyncio
import json
import os
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.knobs import release
from tests.knobs.conftest import engine
from tuner.engine.server import serve
from tuner.knobs.arguments import compile_candidate
from tuner.knobs.catalogue import CATALOGUE, read_back, table
from tuner.knobs.discover import discover
from tuner.knobs.model import shapes
from tuner.records import Candidate, EngineFacts, LaunchSpec, Value

PYTHON = os.environ.get("TUNER_TEST_VLLM", "")
VERSION = "0.32.0"
VALUES: Mapping[str, tuple[Value, Value]] = {
    "max_num_seqs": (8, 16),
    "max_num_active_seqs": (4, 6),
    "max_num_batched_tokens": (1024, 2048),
    "max_num_scheduled_tokens": (512, 1024),
    "block_size": (32, 64),
    "gpu_memory_utilization": (0.1, 0.15),
    "kv_cache_memory_bytes": (134217728, 268435456),
    "num_gpu_blocks_override": (64, 128),
    "watermark": (0.05, 0.1),
    "scheduling_policy": ("fcfs", "priority"),
    "scheduler_reserve_full_isl": (True, False),
    "enable_chunked_prefill": (True, False),
    "long_prefill_token_threshold": (128, 256),
    "long_prefill_token_threshold_adaptive": (True, False),
    "prefill_schedule_interval": (1, 2),
    "enable_prefix_caching": (True, False),
    "prefix_caching_hash_algo": ("sha256", "sha256_cbor"),
    "kv_cache_dtype": ("auto", "bfloat16"),
    "dtype": ("float32", "bfloat16"),
    "quantization": ("fp8", "awq"),
    "attention_backend": ("CPU_ATTN", "FLASHINFER"),
    "enforce_eager": (True, False),
    "optimization_level": (0, 2),
    "performance_mode": ("interactivity", "throughput"),
    "cudagraph_capture_sizes": ("[1,2,4]", "[8]"),
    "max_cudagraph_capture_size": (64, 128),
    "async_scheduling": (True, False),
    "tensor_parallel_size": (1, 2),
    "pipeline_parallel_size": (1, 2),
    "data_parallel_size": (1, 2),
    "enable_expert_parallel": (True, False),
    "decode_context_parallel_size": (1, 2),
    "enable_dbo": (True, False),
    "speculative_config": (
        '{"method":"ngram","num_speculative_tokens":2}',
        '{"method":"ngram","num_speculative_tokens":3}',
    ),
    "api_server_count": (1, 2),
    "cpu_offload_gb": (1.0, 2.5),
    "disable_cascade_attn": (True, False),
    "moe_backend": ("triton", "auto"),
    "enable_sleep_mode": (True, False),
    "disable_hybrid_kv_cache_manager": (True, False),
    "stream_interval": (1, 2),
    "max_num_queued_reqs": (100, 200),
    "max_num_queued_tokens": (10000, 20000),
    "max_model_len": (512, 1024),
}
"""Two values of every knob that 0.32 has."""
PARSE = Path(__file__).parents[1] / "profiles" / "vllm_parse.py"


def python() -> str:
    if not PYTHON or not Path(PYTHON).exists():
        pytest.fail("TUNER_TEST_VLLM names no interpreter that has vLLM: run make test-vllm")
    return PYTHON


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> EngineFacts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNER_HOME", str(tmp_path_factory.mktemp("home")))
        return discover((python(), "-m", "vllm.entrypoints.openai.api_server"))


@pytest.fixture(scope="module")
def parsed() -> dict[str, dict[str, str]]:
    """What vLLM's own parser makes of each knob at each of its two values; asked once for all."""
    questions = {
        f"{name} {position}": ["--model", "m", *compile_candidate({name: value}, engine(VERSION)).argv]
        for name, pair in VALUES.items()
        for position, value in enumerate(pair)
    }
    done = subprocess.run(
        [python(), str(PARSE)],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_values_cover_every_knob_of_the_release() -> None:
    has = {name for name, entry in CATALOGUE.items() if entry.flag_in(engine(VERSION))}
    assert set(VALUES) == has


@pytest.mark.vllm
def test_the_installed_engine_says_what_the_data_says(facts: EngineFacts) -> None:
    assert (facts.version, facts.platform) == (VERSION, "cpu")
    assert facts.flags - {"--help"} == table().flags_of(VERSION)
    assert facts.defaults["max_num_seqs"] == 128


@pytest.mark.vllm
def test_its_source_read_without_importing_says_the_same() -> None:
    site = Path(
        subprocess.run(
            [python(), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    )
    found = release.read(site)
    assert found.version == VERSION
    assert found.flags == {flag for flag in table().flags if table().has(flag, VERSION)}
    assert found.bare == {flag for flag in table().bare if table().has(flag, VERSION)}


@pytest.mark.vllm
@pytest.mark.parametrize("name", VALUES)
def test_argv_means_to_vllms_parser_what_was_asked(parsed: dict[str, dict[str, str]], name: str) -> None:
    for position, value in enumerate(VALUES[name]):
        entry = CATALOGUE[name]
        asked = json.loads(str(value)) if entry.kind in ("json", "ints") else value
        told = parsed[f"{name} {position}"][name]
        assert told in (repr(asked), repr(str(asked)))


SCHEDULER = (
    *(
        "max_num_seqs",
        "max_num_active_seqs",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "block_size",
    ),
    *("kv_cache_memory_bytes", "watermark", "scheduling_policy", "scheduler_reserve_full_isl", "dtype"),
    *("enable_chunked_prefill", "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive"),
    *("prefill_schedule_interval", "enable_prefix_caching", "prefix_caching_hash_algo", "kv_cache_dtype"),
    *("enforce_eager", "optimization_level", "performance_mode", "stream_interval", "max_num_queued_reqs"),
    *("max_num_queued_tokens", "max_model_len", "disable_hybrid_kv_cache_manager"),
)
MEMORY = ("gpu_memory_utilization", "num_gpu_blocks_override", "speculative_config")
LAUNCHES = [
    (SCHEDULER, 0),
    (SCHEDULER, 1),
    (MEMORY, 0),
    (MEMORY, 1),
    (("tensor_parallel_size",), 1),
    (("pipeline_parallel_size",), 1),
    (("data_parallel_size",), 1),
]
NOT_HERE = {
    "attention_backend": "the CPU has one backend for a model of this kind",
    "quantization": "needs weights that are quantised",
    "enable_expert_parallel": "needs a mixture of experts",
    "api_server_count": "the api_server module parses and ignores it",
}
"""Knobs that act on CPU and cannot be shown with a tiny dense model, and why."""


def test_every_knob_that_acts_on_cpu_is_launched() -> None:
    launched = {name for knobs, _ in LAUNCHES for name in knobs}
    has = {name for name in VALUES if CATALOGUE[name].acts_on("cpu")}
    assert launched | NOT_HERE.keys() == has


def at(info: object, path: str) -> object:
    """The value under a dotted path of the server's own account."""
    for key in path.split("."):
        info = info[key] if isinstance(info, dict) else None
    return info


def told(name: str, value: object) -> object:
    """The server's value of a knob in the form of a candidate's."""
    if name == "dtype":
        return str(value).removeprefix("torch.")
    if name == "speculative_config" and isinstance(value, dict):
        return {key: value[key] for key in ("method", "num_speculative_tokens")}
    return value


def tiny(directory: Path) -> str:
    """A model of four layers without weights."""
    shape = shapes()["tiny-random-qwen2"]
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_len,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def asked_at(knobs: tuple[str, ...], position: int) -> Candidate:
    return Candidate({name: VALUES[name][position] for name in knobs})


def words_of(asked: Candidate, facts: EngineFacts) -> tuple[str, ...]:
    short = () if "max_model_len" in asked else ("--max-model-len", "512")
    little = () if "kv_cache_memory_bytes" in asked else ("--gpu-memory-utilization", "0.1")
    words = ("--load-format", "dummy", "--skip-tokenizer-init", *short, *little)
    return (*words, *compile_candidate(asked, facts).argv)


def wanted(asked: Candidate) -> dict[str, object]:
    return {name: json.loads(str(v)) if CATALOGUE[name].kind == "json" else v for name, v in asked.items()}


def path_of(name: str) -> str:
    """Where /server_info tells a knob."""
    rule = CATALOGUE[name].effective
    return (rule.path if rule else None) or ""


@pytest.mark.vllm
def test_the_configuration_that_vllm_makes_is_what_was_asked(facts: EngineFacts, tmp_path: Path) -> None:
    model = tiny(tmp_path)
    questions = {
        str(number): ["--model", model, *words_of(asked_at(*launch), facts)]
        for number, launch in enumerate(LAUNCHES)
    }
    paths = sorted({path_of(name) for knobs, _ in LAUNCHES for name in knobs})
    done = subprocess.run(
        [python(), str(Path(__file__).parent / "configure.py"), json.dumps(paths)],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    for number, (knobs, position) in enumerate(LAUNCHES):
        seen = {name: told(name, answers[str(number)][path_of(name)]) for name in knobs}
        assert seen == wanted(asked_at(knobs, position))


@pytest.mark.vllm_full
@pytest.mark.parametrize(("knobs", "position"), LAUNCHES, ids=lambda part: str(part)[:40])
def test_the_engine_runs_with_what_was_asked(
    facts: EngineFacts, tmp_path: Path, knobs: tuple[str, ...], position: int
) -> None:
    asked = asked_at(knobs, position)
    launch = LaunchSpec(
        read_back=read_back(),
        launch_id=uuid.uuid4().hex,
        command=(python(), "-m", "vllm.entrypoints.openai.api_server"),
        model=tiny(tmp_path),
        argv=words_of(asked, facts),
        served_name="study",
        directory=str(tmp_path),
        env={"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},  # bound, a rank wants a NUMA node
        asked=asked,
        ready_timeout_s=600.0,
    )

    async def account() -> object:
        async with serve(launch) as server:
            reply = await server.ask("GET", "/server_info?config_format=json", timeout_s=60.0)
            return reply.json()

    info = at(asyncio.run(account()), "vllm_config")
    seen = {name: told(name, at(info, path_of(name))) for name in knobs}
    assert seen == wanted(asked)
