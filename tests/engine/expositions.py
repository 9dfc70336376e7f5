"""One state of an engine in the words of five ages of vLLM, written from the table in docs/engine.md.

The state: 3 running, 2 waiting, KV cache 40 % used, 7 preemptions, 1,000 prompt and 200 output tokens, 50
steps of 24 tokens, 600 of 1,000 prefix tokens found, 10 first tokens in 1.5 s together, 190 gaps in 3.8 s.
"""


def _text(*lines: str) -> str:
    return "\n".join((*lines, ""))


_ALWAYS = (
    "# TYPE vllm:num_requests_running gauge",
    'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
    "# TYPE vllm:num_requests_waiting gauge",
    'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0',
    "# TYPE vllm:num_preemptions counter",
    'vllm:num_preemptions_total{engine="0",model_name="m"} 7.0',
    "# TYPE vllm:num_preemptions_created gauge",
    'vllm:num_preemptions_created{engine="0",model_name="m"} 1.79e+09',
    "# TYPE vllm:prompt_tokens counter",
    'vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0',
    "# TYPE vllm:generation_tokens counter",
    'vllm:generation_tokens_total{engine="0",model_name="m"} 200.0',
    "# TYPE vllm:iteration_tokens_total histogram",
    'vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="m"} 50.0',
    'vllm:iteration_tokens_total_count{engine="0",model_name="m"} 50.0',
    'vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 1200.0',
    "# TYPE vllm:time_to_first_token_seconds histogram",
    'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 10.0',
    'vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 10.0',
    'vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.5',
)


def _usage(name: str) -> tuple[str, ...]:
    return (f"# TYPE vllm:{name} gauge", f'vllm:{name}{{engine="0",model_name="m"}} 0.4')


def _gaps(name: str) -> tuple[str, ...]:
    return (
        f"# TYPE vllm:{name}_seconds histogram",
        f'vllm:{name}_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} 190.0',
        f'vllm:{name}_seconds_count{{engine="0",model_name="m"}} 190.0',
        f'vllm:{name}_seconds_sum{{engine="0",model_name="m"}} 3.8',
    )


def _prefix(name: str) -> tuple[str, ...]:
    return tuple(
        line
        for part, value in (("queries", 1000.0), ("hits", 600.0))
        for line in (f"# TYPE vllm:{name}_{part} counter", f"vllm:{name}_{part}_total {value}")
    )


EXPOSITIONS = {
    "0.7": _text(
        *_ALWAYS,
        *_usage("gpu_cache_usage_perc"),
        *_gaps("time_per_output_token"),
        "# TYPE vllm:num_requests_swapped gauge",
        "vllm:num_requests_swapped 0.0",
        "# TYPE vllm:gpu_prefix_cache_hit_rate gauge",
        "vllm:gpu_prefix_cache_hit_rate 0.6",
    ),
    "0.8": _text(
        *_ALWAYS,
        *_usage("gpu_cache_usage_perc"),
        *_gaps("time_per_output_token"),
        *_prefix("gpu_prefix_cache"),
    ),
    "0.10": _text(
        *_ALWAYS,
        *_usage("gpu_cache_usage_perc"),
        *_usage("kv_cache_usage_perc"),
        *_gaps("time_per_output_token"),
        *_gaps("inter_token_latency"),
        *_prefix("gpu_prefix_cache"),
        *_prefix("prefix_cache"),
    ),
    "0.11": _text(
        *_ALWAYS,
        *_usage("kv_cache_usage_perc"),
        *_gaps("time_per_output_token"),
        *_gaps("inter_token_latency"),
        *_prefix("prefix_cache"),
    ),
    "0.16": _text(
        *_ALWAYS,
        *_usage("kv_cache_usage_perc"),
        *_gaps("inter_token_latency"),
        *_prefix("prefix_cache"),
    ),
}
