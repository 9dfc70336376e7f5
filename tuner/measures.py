"""The names that measurements go by, everywhere, and which way each is better."""

from typing import Literal

Direction = Literal["minimize", "maximize"]

MAXIMIZED = frozenset(
    {"goodput_rps", "slo_attainment", "request_rps", "output_tokens_per_s", "input_tokens_per_s"}
    | {"requests", "prefix_hit_rate", "max_speed", "token_agreement"}
)
"""Measurement names where more is better; every other name is minimised."""

LATENCIES = ("ttft", "tpot", "itl", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
NAMES = frozenset(
    {f"{kind}_{stat}_ms" for kind in LATENCIES for stat in STATISTICS}
    | {"goodput_rps", "slo_attainment", "request_rps", "output_tokens_per_s", "input_tokens_per_s"}
    | {"requests", "failed", "unfinished", "preemptions", "kv_usage_mean", "kv_usage_max", "prefix_hit_rate"}
    | {"queue_depth_mean", "queue_depth_max", "batch_tokens_mean", "gpu_memory_gib"}
    | {"gpu_utilization", "energy_j_per_token", "cost_per_million_tokens", "ready_s"}
    | {"gpu_seconds", "max_speed", "token_agreement", "logprob_distance"}
)


def direction_of(name: str) -> Direction:
    """Whether a measurement is to be minimised or maximised. KeyError for an unknown name."""
    if name not in NAMES:
        raise KeyError(name)
    return "maximize" if name in MAXIMIZED else "minimize"
