"""Sixty mistakes, one planted into each command line, and the finding that must name it."""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest

from tuner.lint import run, subject
from tuner.lint.load import busiest, steady
from tuner.lint.run import LintedEngine
from tuner.records import Slo
from tuner.traffic.trace import build

MODEL = "Qwen/Qwen2.5-7B-Instruct"
LARGE = "meta-llama/Llama-3.3-70B-Instruct"
GOOD = f"vllm serve {MODEL} --max-model-len 16384"


class Planted(NamedTuple):
    """A command line, the id that must be found, and what it is linted against."""

    id: str
    line: str
    against: Mapping[str, object] = MappingProxyType({})


def repeating() -> run.LintOptions:
    """Forty conversations that share 4,000 tokens of prompt."""
    count = 400
    blocks = [[*range(250), 1000 + row] for row in range(count)]
    offsets = [0]
    for each in blocks:
        offsets.append(offsets[-1] + len(each))
    flat = [block for each in blocks for block in each]
    arrival, ones = np.arange(count) * 0.2, np.ones(count)
    columns = {"arrival_s": arrival, "input_len": 4016 * ones, "output_len": 100 * ones}
    made = busiest(build(columns, blocks=(offsets, flat), block_size=16))
    return run.LintOptions(card="h100-80", version="0.32.0", trace=made.trace, about=made.about)


RATE = {"rate": (8, 1500, 250)}
FAST = {"rate": (30, 1500, 250)}
TABLE = [
    # flags: unknown
    Planted("flag-unknown", f"{GOOD} --gpu-memory-utilisation 0.9"),
    Planted("flag-unknown", f"{GOOD} --max-batch-size 64"),
    Planted("flag-unknown", f"{GOOD} --max-sequences 64"),
    Planted("flag-unknown", f"{GOOD} --mem-fraction-static 0.9"),
    Planted("flag-unknown", f"{GOOD} --enable-prefix-cache-sharing"),
    Planted("flag-unknown", f"{GOOD} -zz 4"),
    Planted("flag-unknown", f"{GOOD} --no-max-num-seqs"),
    # gone, not there yet, renamed
    Planted("flag-removed", f"{GOOD} --swap-space 4"),
    Planted("flag-removed", f"{GOOD} --disable-log-requests"),
    Planted("flag-removed", f"{GOOD} --num-scheduler-steps 8"),
    Planted("flag-removed", f"{GOOD} --use-v2-block-manager"),
    Planted("flag-removed", f"{GOOD} --preemption-mode swap"),
    Planted("flag-removed", f"{GOOD} --max-num-partial-prefills 4"),
    Planted("flag-removed", f"{GOOD} --speculative-model x --num-speculative-tokens 3"),
    Planted("flag-too-new", f"{GOOD} --watermark 0.05", {"version": "0.20.2"}),
    Planted("flag-too-new", f"{GOOD} --performance-mode throughput", {"version": "0.11.0"}),
    Planted("flag-too-new", "docker run vllm/vllm-openai:v0.12.0 --model m --max-num-queued-reqs 9"),
    Planted("flag-renamed", f"{GOOD} --cuda-graph-sizes 1024"),
    Planted("flag-renamed", f"{GOOD} --cudagraph-capture-sizes 1 2 4", {"version": "0.10.2"}),
    Planted("flag-renamed", f"{GOOD} --max-cudagraph-capture-size 1024", {"version": "0.11.0"}),
    # written badly
    Planted("flag-abbreviated", f"{GOOD} --max-num-seq 64"),
    Planted("flag-abbreviated", f"{GOOD} --tensor-parallel 1"),
    Planted("flag-repeated", f"{GOOD} --max-num-seqs 64 --max-num-seqs 128"),
    Planted("flag-repeated", f"{GOOD} -tp 1 --tensor-parallel-size 1"),
    Planted("flag-repeated", f"{GOOD} --enable-prefix-caching --no-enable-prefix-caching"),
    Planted("flag-value", f"{GOOD} --gpu-memory-utilization 92"),
    Planted("flag-value", f"{GOOD} --kv-cache-dtype fp9"),
    Planted("flag-value", f"{GOOD} --max-num-seqs many"),
    Planted("flag-value", f"{GOOD} --speculative-config ngram"),
    Planted("flag-value", f"{GOOD} --scheduling-policy lifo"),
    Planted("flag-value", f"{GOOD} --max-num-seqs 0"),
    Planted("flag-value", f"{GOOD} --enable-chunked-prefill=False"),
    Planted("flag-value", f"{GOOD} --enforce-eager true"),
    Planted("flag-value", f"{GOOD} --port http"),
    Planted("flag-value", f"{GOOD} --max-num-partial-prefills 4", {"version": "0.20.2"}),
    # do nothing
    Planted("flag-no-effect", f"{GOOD} --swap-space 4", {"version": "0.12.0"}),
    Planted("flag-no-effect", f"{GOOD} --disable-cascade-attn"),
    Planted("flag-no-effect", f"{GOOD} --async-scheduling", {"card": "cpu"}),
    Planted("flag-no-effect", f"{GOOD} --cpu-offload-gb 4", {"card": "cpu"}),
    Planted("flag-ignored", f"{GOOD} --enforce-eager --cudagraph-capture-sizes 1 2 4"),
    Planted("flag-ignored", f"{GOOD} --no-enable-prefix-caching --prefix-caching-hash-algo sha256_cbor"),
    Planted("flag-ignored", f"{GOOD} --max-loras 8"),
    Planted("flag-ignored", f"{GOOD} --kv-offloading-backend native"),
    Planted("flag-ignored", f"{GOOD} --long-prefill-token-threshold-adaptive"),
    Planted("flag-overridden", f"{GOOD} --kv-cache-memory-bytes 8G --gpu-memory-utilization 0.9"),
    Planted("flag-misread", f"{GOOD} '--dtype auto'"),
    Planted("flag-overridden", f"{GOOD} --num-gpu-blocks-override 4096 --gpu-memory-utilization 0.9"),
    Planted("flag-default", f"{GOOD} --enable-chunked-prefill"),
    # exclude each other
    Planted("flag-contradiction", f"{GOOD} --max-num-seqs 256 --max-num-batched-tokens 128"),
    Planted("flag-contradiction", f"{GOOD} --no-enable-chunked-prefill --max-num-batched-tokens 4096"),
    Planted("flag-contradiction", f"{GOOD} --enable-auto-tool-choice"),
    Planted("flag-contradiction", f"{GOOD} --block-size 24"),
    # defaults
    Planted("default-moved", f"docker run vllm/vllm-openai:v0.8.5 --model {MODEL}"),
    # fit
    Planted("weights-do-not-fit", f"vllm serve {LARGE}"),
    Planted("no-kv-memory", "vllm serve meta-llama/Llama-3.1-8B-Instruct", {"card": "a4500"}),
    Planted("out-of-memory", f"vllm serve {MODEL} --gpu-memory-utilization 0.995"),
    Planted("length-over-model", f"vllm serve {MODEL} --max-model-len 65536"),
    Planted("requests-too-long", f"vllm serve {MODEL} --max-model-len 1600", RATE),
    # parallelism
    Planted("cards-idle", GOOD, {"gpus": 4}),
    Planted("cards-missing", f"{GOOD} -tp 2 -pp 2", {"gpus": 2}),
    Planted("heads-not-divided", f"{GOOD} -tp 3", {"gpus": 4}),
    # traffic
    Planted("overloaded", f"{GOOD} --max-num-seqs 1", RATE),
    Planted("limit-sequences", f"{GOOD} --max-num-seqs 8", RATE),
    Planted("limit-step-tokens", f"{GOOD} --max-num-batched-tokens 256 --max-num-seqs 128", FAST),
    Planted("limit-kv-memory", f"{GOOD} --num-gpu-blocks-override 1100", RATE),
    Planted("preemption-risk", f"{GOOD} --num-gpu-blocks-override 1100", RATE),
    Planted("limit-host", f"{GOOD} --enforce-eager", RATE),
    Planted("graphs-uncovered", f"{GOOD} --enforce-eager", RATE),
    Planted("prefix-cache-off", f"{GOOD} --no-enable-prefix-caching", {"repeats": True}),
    Planted("slo-missed", f"{GOOD} --max-num-seqs 8", RATE),
    Planted("study-gain", f"{GOOD} --max-num-seqs 8", RATE),
]


A4500: Mapping[str, object] = {"card": "a4500"}
REASONING = "vllm serve m --enable-reasoning --reasoning-parser deepseek_r1"
EIGHT_B = "vllm serve meta-llama/Llama-3.1-8B-Instruct"
PUBLIC = {
    "vllm 8273": Planted("flag-misread", "vllm serve m '--host 127.0.0.1' '--port 6379'"),
    "vllm 10537": Planted("flag-removed", "vllm serve m --use-v2-block-manager"),
    "vllm 10537, rope": Planted("flag-removed", 'vllm serve m --rope-scaling \'{"type": "dynamic"}\''),
    "vllm 6689": Planted("flag-value", "vllm serve m -q awq --enable-chunked-prefill=false"),
    "vllm 6689, capture": Planted("flag-removed", "vllm serve m --max-seq-len-to-capture 32000"),
    "vllm 6689, log": Planted("flag-removed", "vllm serve m --disable-log-requests --disable-log-stats"),
    "vllm 13669": Planted("flag-unknown", "vllm serve m --enable-lora --lora-path /adapters/a"),
    "vllm 18538": Planted("flag-removed", REASONING),
    "vllm 18538, 0.10": Planted(
        "flag-removed",
        "vllm serve m --enable-reasoning --reasoning-parser deepseek_r1",
        {"version": "0.10.2"},
    ),
    "vllm 22072": Planted(
        "flag-misread",
        "services: {vllm: {image: 'vllm/vllm-openai:v0.10.0',\n command: [serve, m, --dtype auto]}}",
    ),
    "vllm 23430": Planted("flag-unknown", "vllm serve m --no-reasoning-parser"),
    "vllm 38507": Planted("flag-value", "vllm serve m --max-num-batched-tokens auto"),
    "vllm 46325": Planted("flag-unknown", "vllm serve m -language-model-only"),
    "vllm-omni 1081": Planted("flag-unknown", "vllm serve m --port 8091 --stage-configs-path a.yaml"),
    "vllm-omni 1364": Planted("flag-unknown", "vllm serve m --omni --port 8092 --max-num-seqs 10"),
    "ramalama 758": Planted("flag-unknown", "vllm serve m --temp 0.8"),
    "tpu-recipes 217": Planted("flag-removed", "vllm serve m --disable-log-requests"),
    "vllm 4232": Planted("heads-not-divided", "vllm serve Qwen/Qwen2.5-32B-Instruct -tp 6", {"gpus": 6}),
    "vllm 7716": Planted("heads-not-divided", f"{EIGHT_B} -tp 3", {"gpus": 4}),
    "AdaptThink 1": Planted("heads-not-divided", f"vllm serve {MODEL} -tp 8", {"gpus": 8}),
    "vllm 596": Planted("cards-idle", f"vllm serve {MODEL} -tp 2", {"gpus": 3}),
    "vllm 2418": Planted("no-kv-memory", EIGHT_B, A4500),
    "Qwen3 295": Planted("no-kv-memory", f"vllm serve {MODEL} --gpu-memory-utilization 0.8", A4500),
    "vllm 10517": Planted("no-kv-memory", f"vllm serve {LARGE} -tp 2", {"gpus": 2}),
    "vllm 14102": Planted("length-over-model", f"vllm serve {MODEL} --max-model-len 131072"),
}
"""Mistakes that people made and reported: the repository and number of the thread, the flags that mattered,
and where the model of the thread is not known here one with the same trouble.
"""


def test_of_mistakes_that_people_reported_nine_in_ten_are_found() -> None:
    missed = [
        (thread, planted.line, sorted(found))
        for thread, planted in PUBLIC.items()
        if planted.id not in (found := {each.id for each in linted(planted).findings})
    ]
    print(f"{len(PUBLIC) - len(missed)} of {len(PUBLIC)} reported mistakes found; missed: {missed}")
    assert len(PUBLIC) >= 25
    assert len(missed) <= len(PUBLIC) // 10, missed


def linted(planted: Planted) -> LintedEngine:
    """What lint says of it on vLLM 0.32.0 and an H100, unless the row says otherwise."""
    given = dict(planted.against)
    if given.pop("repeats", False):
        against = repeating()
    else:
        rate = given.pop("rate", None)
        made = steady(*rate[:3]) if isinstance(rate, tuple) else None
        if ":v0." not in planted.line:
            given.setdefault("version", "0.32.0")
        given.setdefault("card", "h100-80")
        against = run.LintOptions(
            **given,  # type: ignore[arg-type]
            trace=made.trace if made else None,
            about=made.about if made else "",
            slo=Slo(ttft_ms=500, tpot_ms=50),
        )
    (engine,) = subject.engines(planted.line)
    return run.lint(engine, against, os.environ)


@pytest.mark.slow
def test_of_sixty_planted_mistakes_nine_in_ten_are_found() -> None:
    found = [{each.id for each in linted(planted).findings} for planted in TABLE]
    missed = [(p.id, p.line, ids) for p, ids in zip(TABLE, found, strict=True) if p.id not in ids]
    share = 1 - len(missed) / len(TABLE)
    print(f"{len(TABLE) - len(missed)} of {len(TABLE)} planted mistakes found ({share:.0%})")
    assert len(TABLE) >= 60
    assert share >= 0.9, missed
    assert missed == []


def test_a_good_command_line_has_no_error_and_no_warning() -> None:
    assert {each.severity for each in linted(Planted("", GOOD, {"gpus": 1, **RATE})).findings} <= {"note"}


def test_a_mistake_of_one_row_is_not_found_in_the_good_line() -> None:
    clean = {each.id for each in linted(Planted("", GOOD, {"gpus": 1})).findings}
    assert clean <= {"kv-memory", "default-moved"}
