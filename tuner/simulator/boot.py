"""How a simulated engine starts: from arguments to its configuration, or to vLLM's words on why it does not
start.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tuner.errors import TunerError
from tuner.knobs.model import ModelFacts, read
from tuner.simulator.cost import GIB, Card, Coefficients, Memory, StepCost, card_of, preset, profile
from tuner.simulator.options import VERSION, Options, StartRefused, host_blocks, parser, release_of, resolve

_SOURCES = {"APIServer": "api_server.py:1", "EngineCore": "core.py:1", "Worker": "gpu_worker.py:1"}


def log(who: str, words: str, level: str = "INFO") -> None:
    """One line in vLLM's format, on standard output, per line of `words`."""
    stamp = datetime.now().strftime("%m-%d %H:%M:%S")
    for line in words.split("\n"):
        print(f"({who} pid={os.getpid()}) {level} {stamp} [{_SOURCES[who]}] {line}", flush=True)


def check_memory(options: Options, memory: Memory, facts: ModelFacts, card: Card) -> None:
    """What vLLM finds at start-up: StartRefused for too little KV memory, a bad block size, out of memory."""
    size, length = options.limits.block_size, options.limits.max_model_len
    step, backend = (32, "CPU_ATTN") if card.platform == "cpu" else (16, "FLASH_ATTN")
    if memory.kv_gib <= 0:
        raise StartRefused(
            "ValueError",
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            "initializing the engine. See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ "
            "for more details.",
            where="EngineCore",
        )
    if memory.tokens(size) < length:
        per_token = facts.kv_bytes_per_token * options.budget.kv_scale / GIB
        need, have = length * per_token, memory.tokens(size) * per_token
        raise StartRefused(
            "ValueError",
            f"To serve at least one request with the model's max seq len ({length}), ({need:.2f} GiB KV "
            f"cache is needed, which is larger than the available KV cache memory ({have:.2f} GiB). Based on "
            f"the available memory, the estimated maximum model length is {memory.tokens(size)}. Try "
            "increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or "
            "decreasing `max_model_len` when initializing the engine. See "
            "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
            where="EngineCore",
        )
    if size % step:
        raise StartRefused(
            "ValueError",
            f"No common block size for {size} ({backend}: [MultipleOf({step})]).",
            where="Worker",
        )
    if memory.missing_gib > 0:
        raise StartRefused(
            "RuntimeError",
            f"CUDA out of memory occurred when warming up sampler with {options.limits.max_num_seqs} dummy "
            "requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the "
            "engine.",
            where="Worker",
        )


def refuse(refused: StartRefused) -> int:
    """Print the failure as the process that finds it would, wrapped as vLLM wraps it; the exit code."""
    if refused.where == "APIServer":
        print(f"Traceback (most recent call last):\n{refused.kind}: {refused}", file=sys.stderr, flush=True)
        return 1
    if refused.where == "Worker":
        log("Worker", f"Traceback (most recent call last):\n{refused.kind}: {refused}", "ERROR")
    log("EngineCore", "EngineCore failed to start.", "ERROR")
    log("EngineCore", f"Traceback (most recent call last):\n{refused.kind}: {refused}", "ERROR")
    print(
        "Traceback (most recent call last):\nRuntimeError: Engine core initialization failed. "
        "See root cause above. Failed core proc(s): {}",
        file=sys.stderr,
        flush=True,
    )
    return 1


def announce(options: Options, memory: Memory, version: str = VERSION) -> None:
    """The lines that vLLM logs before it is ready."""
    length = options.limits.max_model_len
    tokens = memory.tokens(options.limits.block_size)
    log("APIServer", f"version {version}")
    log("APIServer", f"non-default args: {dict(options.given)}")
    log("APIServer", f"Using max model len {length}")
    log("EngineCore", f"Initializing a V1 LLM engine (v{version}) with config: model='{options.model}'")
    log("Worker", "Loading weights took 0.00 seconds")
    log("Worker", f"Model loading took {memory.weights_gib:.2f} GiB memory and 0.000000 seconds")
    log("Worker", f"Available KV cache memory: {memory.kv_gib:.2f} GiB")
    log("EngineCore", f"GPU KV cache size: {tokens:,} tokens")
    log("EngineCore", f"Maximum concurrency for {length:,} tokens per request: {tokens / length:.2f}x")


def cache_config(options: Options) -> dict[str, object]:
    """The labels of vLLM's `cache_config_info` metric for a resolved configuration."""
    limits, budget = options.limits, options.budget
    tokens = limits.num_blocks * limits.block_size
    return {
        "block_size": limits.block_size,
        "cache_dtype": options.whole["kv_cache_dtype"],
        "effective_attention_block_size": limits.block_size,
        "enable_prefix_caching": limits.enable_prefix_caching,
        "engine": 0,
        "gpu_memory_utilization": budget.utilization,
        "kv_cache_max_concurrency": round(tokens / limits.max_model_len, 3),
        "kv_cache_memory_bytes": budget.kv_bytes,
        "kv_cache_size_tokens": tokens,
        "kv_offloading_size": options.offload_gib or None,
        "num_cpu_blocks": None,
        "num_gpu_blocks": limits.num_blocks,
        "num_gpu_blocks_override": budget.blocks,
        "prefix_caching_hash_algo": "sha256",
        "user_specified_block_size": options.user_block_size,
    }


def server_info(options: Options) -> dict[str, Any]:
    """The configuration as vLLM's `/server_info?config_format=json` answers it."""
    limits = options.limits
    cache = {key: value for key, value in cache_config(options).items() if key != "engine"}
    scheduler = {
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_active_seqs": limits.max_num_active_seqs,
        "long_prefill_token_threshold": limits.long_prefill_token_threshold,
        "long_prefill_token_threshold_adaptive": limits.long_prefill_token_threshold_adaptive,
        "scheduler_reserve_full_isl": limits.scheduler_reserve_full_isl,
        "enable_chunked_prefill": limits.enable_chunked_prefill,
        "policy": limits.policy,
        "watermark": limits.watermark,
        "async_scheduling": limits.async_scheduling,
    }
    whole = options.whole
    config = {
        "model_config": {
            "model": options.model,
            "max_model_len": limits.max_model_len,
            "enforce_eager": whole["enforce_eager"],
        },
        "cache_config": cache,
        "scheduler_config": scheduler,
        "compilation_config": {"max_cudagraph_capture_size": options.budget.capture_most},
        "performance_mode": whole["performance_mode"],
    }
    return {"vllm_config": config}


@dataclass(frozen=True, slots=True, kw_only=True)
class Booted:
    """What an argv and an environment resolved to."""

    options: Options
    memory: Memory
    cost: StepCost
    facts: ModelFacts


class NotStarted(Exception):
    """The engine would not start: its log has the reason, `code` is its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def boot(argv: Sequence[str], env: Mapping[str, str]) -> Booted:
    """Resolve the argv of vLLM's API server. NotStarted once the reason was printed as vLLM prints it
    (SystemExit 2 if argparse refuses).
    """
    args = parser(release_of(env)).parse_args(list(argv))
    try:
        card = card_of(env.get("TUNER_SIM_CARD", "h100-80"))
    except TunerError as error:
        print(f"TUNER_SIM_CARD: {error}", file=sys.stderr, flush=True)
        raise NotStarted(1) from error
    try:
        facts = read(args.model_tag or args.model, env=env)
    except TunerError as error:
        print(f"huggingface_hub.errors.LocalEntryNotFoundError: {error}", file=sys.stderr, flush=True)
        raise NotStarted(1) from error
    try:
        options = resolve(argv, card, facts, env, int(env.get("TUNER_SIM_CARDS", "1")))
        memory = profile(facts, card.group(options.ranks), options.budget)
        check_memory(options, memory, facts, card)
    except StartRefused as refused:
        raise NotStarted(refuse(refused)) from refused
    options = options.with_blocks(memory.blocks, host_blocks(facts, options))
    given = env.get("TUNER_SIM_COEFFICIENTS")
    coefficients = Coefficients(**json.loads(given)) if given else preset(card)
    cost = options.cost(facts, card, coefficients.slowed(release_of(env).slower))
    return Booted(options=options, memory=memory, cost=cost, facts=facts)
