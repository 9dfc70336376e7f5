"""A profile, exported and rendered as its chart renders it, starts the engine that was measured; and back."""

# ruff: noqa: E501

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.profiles import rendering
from tests.profiles.test_export import a_profile
from tuner.knobs.manifests import read
from tuner.profiles.export import render, split_flags

OURS = ("host", "port", "served-model-name", "disable-access-log-for-endpoints", "shutdown-timeout")
CHARTS: dict[str, Callable[[dict[str, object]], tuple[list[str], dict[str, str]]]] = {
    "helm-production-stack": rendering.production_stack,
    "helm-llm-d": rendering.llm_d,
    "kserve": rendering.kserve,
}
ENGINES = {
    "defaults": (),
    "cache on": ("--enable-prefix-caching", "--max-num-seqs", "64"),
    "cache off": ("--no-enable-prefix-caching", "--max-num-seqs", "64"),
    "cache not said": ("--max-num-seqs", "64", "--gpu-memory-utilization", "0.9"),
    "switches off": ("--no-enable-chunked-prefill", "--no-async-scheduling"),
    "a million tokens": ("--max-model-len", "1048576", "--max-num-batched-tokens", "1048576"),
    "tensor parallel": ("--tensor-parallel-size", "4", "--max-num-seqs", "64"),
    "data parallel": ("--data-parallel-size", "4", "--tensor-parallel-size", "2"),
    "objects": ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
    "a dollar": ("--chat-template", "$(HOME)/it's.jinja", "--max-num-seqs", "8"),
    "lists": ("--cudagraph-capture-sizes", "1", "2", "4", "--long-prefill-token-threshold", "2048"),
}


def engine(words: list[str]) -> dict[str, tuple[str, ...]]:
    """Flags as vLLM takes them: of two for one switch the last counts; the prefix cache is on by default."""
    kept: dict[str, tuple[str, ...]] = {"enable-prefix-caching": ("on",)}
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("_", "-")
            on, name = not name.startswith("no-"), name.removeprefix("no-")
            kept[name] = ("on" if on else "off",) if "=" not in word else (word.partition("=")[2],)
            last = name
        elif kept[last] in (("on",), ("off",)):
            kept[last] = (word,)
        else:
            kept[last] = (*kept[last], word)
    return {name: values for name, values in kept.items() if name not in OURS}


@pytest.mark.parametrize("argv", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("chart", CHARTS)
def test_the_chart_starts_the_engine_that_was_measured(
    chart: str, argv: tuple[str, ...], tmp_path: Path
) -> None:
    text = render(a_profile(argv), chart)
    words, env = CHARTS[chart](yaml.safe_load(text))
    assert words[:2] == ["vllm", "serve"]
    measured = engine(list(argv))
    rendered = engine(words[3:])
    if rendered.pop("data-parallel-size-local", None):
        assert env["GPUS"] == "8"
    assert rendered == measured
    assert env["VLLM_ATTENTION_BACKEND"] == "FLASH_ATTN"
    path = tmp_path / "values.yaml"
    path.write_text(text)
    made = read(str(path))
    assert made.model == "Qwen/Qwen2.5-7B-Instruct"
    assert made.env == {"VLLM_ATTENTION_BACKEND": "FLASH_ATTN"}
    told = {flag.name.removeprefix("no-") for flag in split_flags(argv)} - {"cudagraph-capture-sizes"}
    again = {name.replace("_", "-") for name in made.candidate} | set(made.args)
    assert told <= again
    assert made.candidate.get("enable_prefix_caching", True) is (
        measured["enable-prefix-caching"] != ("off",)
    )


def test_an_engine_of_v0_keeps_its_cache_off() -> None:
    profile = a_profile(("--max-num-seqs", "64"), {"VLLM_USE_V1": "0"})
    words, env = rendering.production_stack(yaml.safe_load(render(profile, "helm-production-stack")))
    assert env["VLLM_USE_V1"] == "0"
    assert engine(words[3:])["enable-prefix-caching"] == ("off",)


STACK = """
servingEngineSpec:
  env: [{{name: A, value: "1"}}]
  modelSpec:
  - name: m
    modelURL: org/model
    {}
"""
VALUES = {
    "nothing": "vllmConfig: {}",
    "the chart's own example": 'vllmConfig: {v0: "1", enablePrefixCaching: false, enableChunkedPrefill: false, maxModelLen: 16384, dtype: bfloat16, tensorParallelSize: 2, maxNumSeqs: 32, gpuMemoryUtilization: 0.95}',
    "no word of the cache": "vllmConfig: {maxNumSeqs: 32}",
    "the cache on": "vllmConfig: {enablePrefixCaching: true, maxNumSeqs: 32}",
    "an argument that wins": "vllmConfig: {maxNumSeqs: 32, extraArgs: [--enable-prefix-caching]}",
    "keys that the chart ignores": 'vllmConfig: {v1: "1", pipelineParallelSize: 2, maxNumSeqs: 32}',
    "chunked prefill off": "vllmConfig: {enableChunkedPrefill: false, enablePrefixCaching: true}",
}  # fmt: skip


@pytest.mark.parametrize("config", VALUES.values(), ids=VALUES)
def test_an_imported_chart_is_the_engine_that_it_starts(config: str, tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(STACK.format(config))
    words, env = rendering.production_stack(yaml.safe_load(path.read_text()))
    rendered = engine(words[3:])
    made = read(str(path))
    assert made.candidate.get("enable_prefix_caching", True) is (rendered["enable-prefix-caching"] == ("on",))
    for name, value in made.candidate.items():
        shown = {True: ("on",), False: ("off",)}.get(value) if isinstance(value, bool) else (str(value),)
        assert rendered[name.replace("_", "-")] == shown
    assert len({*made.candidate, "enable_prefix_caching"}) + len(made.args) == len(rendered)
    assert made.env.get("VLLM_USE_V1") == env.get("VLLM_USE_V1")
    assert made.env["A"] == "1"


def test_the_sizes_of_llm_d_are_the_charts(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    head = "modelArtifacts: {name: m, uri: 'hf://org/model'}\ndecode:\n  containers: [{modelCommand: vllmServe, args: [--seed, '1']}]\n"
    for sizes, told in (
        ("{tensor: 2}", {"tensor_parallel_size": 2}),
        ("{tensor: 1, data: 1}", {}),
        ("{dataLocal: 2, workers: 2}", {"data_parallel_size": 4}),
        ("{data: 4}", {"data_parallel_size": 4}),
    ):
        path.write_text(f"{head}  parallelism: {sizes}\n")
        assert dict(read(str(path)).candidate) == told
    path.write_text(head + "tracing: {enabled: true}\n")
    assert read(str(path)).args == {
        "otlp-traces-endpoint": "http://otel-collector:4317",
        "collect-detailed-traces": "all",
        "seed": 1,
    }
