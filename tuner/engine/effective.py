"""What the engine really runs with, in its own words, held against what was asked of it."""

import json
from collections.abc import Mapping
from types import MappingProxyType

from tuner.engine.metrics import EngineMetrics, number
from tuner.records import JSON, Candidate, Value

_SECTIONS = (
    "cache_config",
    "scheduler_config",
    "model_config",
    "parallel_config",
    "attention_config",
    "offload_config",
    "compilation_config",
)
_RENAMED = MappingProxyType(
    {
        "policy": "scheduling_policy",
        "cache_dtype": "kv_cache_dtype",
        "chunked_prefill_enabled": "enable_chunked_prefill",
        "backend": "attention_backend",
        "level": "compilation_level",
    }
)
IDENTITY = (
    *("block_size", "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
    *("enable_prefix_caching", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("max_num_active_seqs", "max_num_scheduled_tokens", "max_num_queued_reqs", "max_num_queued_tokens"),
    *("long_prefill_token_threshold", "enable_chunked_prefill", "scheduling_policy", "watermark"),
    *("scheduler_reserve_full_isl", "async_scheduling", "stream_interval", "kv_offloading_size"),
    *("attention_backend", "enforce_eager", "quantization", "dtype", "performance_mode"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "swap_space"),
    *("optimization_level", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
)
"""Names that decide how the engine behaves; two launches that agree in them are one configuration."""


def from_server_info(info: JSON) -> dict[str, Value]:
    """Flat knob → value from `/server_info?config_format=json`; empty when it holds no configuration.

    Versions without JSON give one string, which says nothing reliable.
    """
    config = info.get("vllm_config") if isinstance(info, dict) else None
    if not isinstance(config, dict):
        return {}
    found: dict[str, Value] = {}
    for name in ("optimization_level", "performance_mode"):
        if name in config:
            found[name] = _value(config[name])
    for section in _SECTIONS:
        part = config.get(section)
        if isinstance(part, dict):
            for name, value in part.items():
                found.setdefault(_RENAMED.get(name, name), _value(value))
    return {
        name: found[name] for name in sorted(found) if name in IDENTITY or name.startswith("kv_cache_size")
    }


def from_metrics(metrics: EngineMetrics) -> dict[str, Value]:
    """What cache_config_info says, for engines without `/server_info`."""
    found = {_RENAMED.get(name, name): number(text) for name, text in metrics.config.items()}
    return {name: found[name] for name in sorted(found) if name in IDENTITY}


def differences(asked: Candidate, effective: Mapping[str, Value]) -> dict[str, tuple[Value, Value]]:
    """Knobs that the engine says it runs otherwise than asked: name → (asked, effective)."""
    return {
        name: (wanted, effective[name])
        for name, wanted in asked.items()
        if name in effective
        and not same(wanted, effective[name])
        and not (name == "max_cudagraph_capture_size" and _captures_a_step(wanted, effective))
    }


def _captures_a_step(wanted: Value, effective: Mapping[str, Value]) -> bool:
    """Whether graphs reach the step budget, above which none is captured, to within 16 tokens."""
    found, budget = effective["max_cudagraph_capture_size"], effective.get("max_num_batched_tokens")
    if not isinstance(wanted, int) or not isinstance(found, int) or not isinstance(budget, int):
        return False
    return found > min(wanted, budget) - 16 and 0 < found <= wanted


def identity(effective: Mapping[str, Value]) -> tuple[tuple[str, Value], ...]:
    """What two launches must agree in to count as one configuration; empty when the engine says nothing."""
    return tuple((name, effective[name]) for name in IDENTITY if name in effective)


def same(asked: Value, effective: Value) -> bool:
    """Equality across spellings: 0.9 and "0.9", True and "true", fp8 and "fp8"."""
    if asked == effective or str(asked).lower() == str(effective).lower():
        return True
    try:
        return abs(float(str(asked)) - float(str(effective))) <= 1e-9 * max(1.0, abs(float(str(asked))))
    except ValueError:
        return False


def _value(value: JSON) -> Value:
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    return value
