"""What the simulated engine counts, and its /metrics page under the names of vLLM 0.32."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

# vLLM's own buckets, so that a dashboard or a parser made for vLLM reads them.
FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
)
TOKEN_S = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
)
REQUEST_S = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
STEP_TOKENS = (1.0, *(float(2**n) for n in range(3, 15)))
COUNTS = (*(step * 10.0**n for n in range(5) for step in (1.0, 2.0, 5.0)), 1e5)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", COUNTS),
    "request_generation_tokens": ("Number of generation tokens processed.", COUNTS),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", STEP_TOKENS),
    "request_params_max_tokens": ("Histogram of the max_tokens request parameter.", COUNTS),
    "time_to_first_token_seconds": (
        "Histogram of time to first token in seconds.",
        (*FIRST_TOKEN_S, 40.0, 80.0, 160.0, 640.0, 2560.0),
    ),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", (*TOKEN_S, 80.0)),
    "request_time_per_output_token_seconds": (
        "Histogram of time_per_output_token_seconds per request.",
        (*TOKEN_S, 80.0),
    ),
    "e2e_request_latency_seconds": (
        "Histogram of e2e request latency in seconds.",
        (*REQUEST_S, 960.0, 1920.0, 7680.0),
    ),
    "request_queue_time_seconds": (
        "Histogram of time spent in WAITING phase for request.",
        (*REQUEST_S, 960.0, 1920.0, 7680.0),
    ),
    "request_inference_time_seconds": (
        "Histogram of time spent in RUNNING phase for request.",
        (*REQUEST_S, 960.0, 1920.0, 7680.0),
    ),
    "request_prefill_time_seconds": (
        "Histogram of time spent in PREFILL phase for request.",
        (*REQUEST_S, 960.0, 1920.0, 7680.0),
    ),
    "request_decode_time_seconds": (
        "Histogram of time spent in DECODE phase for request.",
        (*REQUEST_S, 960.0, 1920.0, 7680.0),
    ),
    "request_num_preemptions": ("Histogram of the number of preemptions per request.", PREEMPTIONS),
}
_COUNTERS: Mapping[str, str] = {
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "generation_tokens": "Number of generation tokens processed.",
}
_GAUGES: Mapping[str, str] = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
}
_FINISHED = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Counts per bucket, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        running = 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            running += count
            edge = "+Inf" if bound is None else repr(float(bound))
            yield f'{name}_bucket{{{labels},le="{edge}"}} {float(running)}'
        yield f"{name}_count{{{labels}}} {float(running)}"
        yield f"{name}_sum{{{labels}}} {self.total}"


class Counters:
    """Everything on the page that only grows."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.values = dict.fromkeys(_COUNTERS, 0.0)
        self.finished = dict.fromkeys(_FINISHED, 0)

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)

    def page(self, model: str, gauges: Mapping[str, float], config: Mapping[str, object]) -> str:
        """The text of /metrics. `gauges` has a value for each of vLLM's three load gauges."""
        labels = f'engine="0",model_name="{model}"'
        lines = []
        for name, words in _GAUGES.items():
            lines += _head(f"vllm:{name}", words, "gauge")
            lines.append(f"vllm:{name}{{{labels}}} {float(gauges[name])}")
        for name, words in _COUNTERS.items():
            lines += _head(f"vllm:{name}_total", words, "counter")
            lines.append(f"vllm:{name}_total{{{labels}}} {float(self.values[name])}")
        lines += _head("vllm:request_success_total", "Count of successfully processed requests.", "counter")
        for reason, count in self.finished.items():
            lines.append(
                f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="{model}"}}'
                f" {float(count)}"
            )
        for name, (words, _) in _HISTOGRAMS.items():
            lines += _head(f"vllm:{name}", words, "histogram")
            lines += self.histograms[name].lines(f"vllm:{name}", labels)
        lines += _head("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", "gauge")
        shown = ",".join(f'{key}="{value}"' for key, value in sorted(config.items()))
        lines.append(f"vllm:cache_config_info{{{shown}}} 1.0")
        return "\n".join(lines) + "\n"


def _head(name: str, words: str, kind: str) -> list[str]:
    return [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
