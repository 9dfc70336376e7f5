"""Run by vLLM's own interpreter: its real scheduler, without an engine, over scenarios from standard input.

In: a JSON list of {"limits": {...}, "requests": [[step, prompt, output, priority, group], ...]}; lengths are
in tokens, a request arrives before the step of that number, requests of one group share 64 tokens.
Out: a JSON list of [[[requests, tokens] per step ...], preemptions].
"""

import json
import sys
from collections import deque
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from vllm.config import (  # type: ignore[import-not-found, unused-ignore]
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found, unused-ignore]
from vllm.utils.hashing import sha256  # type: ignore[import-not-found, unused-ignore]
from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found, unused-ignore]
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import (  # type: ignore[import-not-found, unused-ignore]
    AsyncScheduler,
)
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found, unused-ignore]
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found, unused-ignore]
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # type: ignore[import-not-found, unused-ignore]
from vllm.v1.request import Request  # type: ignore[import-not-found, unused-ignore]
from vllm.v1.structured_output import (  # type: ignore[import-not-found, unused-ignore]
    StructuredOutputManager,
)


def scheduler_of(limits: dict[str, Any], model: str) -> Any:
    ahead = limits["async_scheduling"]
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=limits["max_num_seqs"],
            max_num_batched_tokens=limits["max_num_batched_tokens"],
            max_model_len=limits["max_model_len"],
            long_prefill_token_threshold=limits["long_prefill_token_threshold"],
            enable_chunked_prefill=limits["enable_chunked_prefill"],
            policy=limits["policy"],
            watermark=limits["watermark"],
            scheduler_reserve_full_isl=limits["scheduler_reserve_full_isl"],
            async_scheduling=ahead,
            is_encoder_decoder=False,
        ),
        model_config=ModelConfig(
            model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=limits["max_model_len"]
        ),
        cache_config=CacheConfig(
            block_size=limits["block_size"], enable_prefix_caching=limits["enable_prefix_caching"]
        ),
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(
        block_size=limits["block_size"], num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    kv = KVCacheConfig(
        num_blocks=limits["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    config.cache_config.num_gpu_blocks = limits["num_blocks"]
    kind = AsyncScheduler if ahead else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=kv,
        block_size=limits["block_size"],
        structured_output_manager=StructuredOutputManager(config),
        log_stats=True,
    )


def request_of(number: int, row: list[int], block_size: int) -> Any:
    _, prompt, output, priority, group = row
    tokens = [(number * 7919 + 31 * i) % 1999 + 2 for i in range(prompt)]
    if group >= 0:
        tokens[:64] = [(group * 104729 + 17 * i) % 1999 + 2 for i in range(min(64, prompt))]
    return Request(
        request_id=str(number),
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
        pooling_params=None,
        arrival_time=float(number),
        priority=priority,
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


def output_of(step: Any, scheduler: Any) -> Any:
    ids = list(step.num_scheduled_tokens)
    sampled = [[7] if ends[0] else [] for ends in (step.simulated[i] for i in ids)]
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: index for index, name in enumerate(ids)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def run(scenario: dict[str, Any], model: str) -> list[Any]:
    limits = scenario["limits"]
    scheduler = scheduler_of(limits, model)
    left = deque(
        (row[0], request_of(n, row, limits["block_size"])) for n, row in enumerate(scenario["requests"])
    )
    steps: list[list[int]] = []
    preempted: dict[str, int] = {}
    live: dict[str, Any] = {}
    in_flight: deque[Any] = deque()
    depth = 2 if limits["async_scheduling"] else 1
    number = 0
    for _ in range(20_000):
        while left and left[0][0] <= number:
            live[left[0][1].request_id] = left[0][1]
            scheduler.add_request(left.popleft()[1])
        step = scheduler.schedule() if len(in_flight) < depth else None
        if step is not None and step.total_num_scheduled_tokens:
            number += 1
            steps.append([len(step.num_scheduled_tokens), step.total_num_scheduled_tokens])
            step.simulated = {name: (not live[name].is_prefill_chunk,) for name in step.num_scheduled_tokens}
            in_flight.append(step)
            if len(in_flight) < depth:
                continue
        elif step is not None and not in_flight:
            scheduler.update_from_output(step, ModelRunnerOutput([], {}, [], None, {}, []))
            if not left and not scheduler.has_requests():
                break
            number += 1
            continue
        if in_flight:
            done = in_flight.popleft()
            scheduler.update_from_output(done, output_of(done, scheduler))
        for name, request in live.items():
            preempted[name] = request.num_preemptions
    return [steps, sum(preempted.values())]


def main() -> None:
    init_none_hash(sha256)
    scenarios = json.load(sys.stdin)
    print("STEPS " + json.dumps([run(scenario, sys.argv[1]) for scenario in scenarios]))


if __name__ == "__main__":
    main()
