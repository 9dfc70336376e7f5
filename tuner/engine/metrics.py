"""One set of names over the /metrics of every vLLM version; what an engine does not say is None, never 0."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families

from tuner.records import Value

Fold = Callable[[Iterable[float]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One canonical number: sample names by priority, and how several series of it become one.

    Counters and queues add up over engine ranks, usage takes the largest. Several API servers export the same
    gauge once per pid: the largest counts. `counter`: only differences mean much.
    """

    names: tuple[str, ...]
    fold: Fold = sum
    counter: bool = False


def _counter(*names: str) -> Series:
    return Series(names=tuple(f"vllm:{name}" for name in names), counter=True)


def _gauge(*names: str, fold: Fold = sum) -> Series:
    return Series(names=tuple(f"vllm:{name}" for name in names), fold=fold)


def _histogram(key: str, *names: str) -> dict[str, Series]:
    return {
        f"{key}_seconds_sum": _counter(*(f"{name}_seconds_sum" for name in names)),
        f"{key}_seconds_count": _counter(*(f"{name}_seconds_count" for name in names)),
    }


ALIASES: Mapping[str, Series] = MappingProxyType(
    {
        "running": _gauge("num_requests_running"),
        "waiting": _gauge("num_requests_waiting"),
        "swapped": _gauge("num_requests_swapped"),
        "kv_usage": _gauge("kv_cache_usage_perc", "gpu_cache_usage_perc", fold=max),
        "preemptions": _counter("num_preemptions_total"),
        "prompt_tokens": _counter("prompt_tokens_total"),
        "generation_tokens": _counter("generation_tokens_total"),
        "iterations": _counter("iteration_tokens_total_count"),
        "iteration_tokens": _counter("iteration_tokens_total_sum"),
        "prefix_queries": _counter(
            "prefix_cache_queries_total", "gpu_prefix_cache_queries_total", "gpu_prefix_cache_queries"
        ),
        "prefix_hits": _counter(
            "prefix_cache_hits_total", "gpu_prefix_cache_hits_total", "gpu_prefix_cache_hits"
        ),
        "prefix_hit_rate_gauge": _gauge("gpu_prefix_cache_hit_rate", fold=max),
        "external_prefix_queries": _counter("external_prefix_cache_queries_total"),
        "external_prefix_hits": _counter("external_prefix_cache_hits_total"),
        "prompt_tokens_cached": _counter("prompt_tokens_cached_total"),
        "finished": _counter("request_success_total"),
        "rejected": _counter("admission_rejections_total"),
        "spec_drafted": _counter("spec_decode_num_draft_tokens_total"),
        "spec_accepted": _counter("spec_decode_num_accepted_tokens_total"),
        **_histogram("ttft", "time_to_first_token"),
        **_histogram("itl", "inter_token_latency", "time_per_output_token"),
        **_histogram("tpot", "request_time_per_output_token"),
        **_histogram("e2e", "e2e_request_latency"),
        **_histogram("queue", "request_queue_time"),
        **_histogram("prefill", "request_prefill_time"),
        **_histogram("decode", "request_decode_time"),
    }
)
"""Canonical name → the names it has borne (0.6 … 0.33), newest first; docs/engine.md has the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """One scrape. `values` has every canonical name; `used` says which name each came from.

    `config` holds the labels of cache_config_info: strings as the engine wrote them.
    """

    values: Mapping[str, float | None]
    used: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float | None:
        return self.values[name]

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        return bool((self.values["running"] or 0) + (self.values["waiting"] or 0))


def parse(text: str) -> EngineMetrics:
    """Read an exposition text of any version. ValueError when it is none."""
    samples: dict[str, dict[tuple[tuple[str, str], ...], list[float]]] = {}
    config: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                config.update(sample.labels)
            elif not math.isnan(sample.value):
                labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "pid"))
                samples.setdefault(sample.name, {}).setdefault(labels, []).append(float(sample.value))
    values: dict[str, float | None] = {}
    used: dict[str, str] = {}
    for canonical, series in ALIASES.items():
        name = next((name for name in series.names if name in samples), None)
        per_pid: Fold = sum if series.counter else max
        values[canonical] = None if name is None else series.fold(map(per_pid, samples[name].values()))
        if name is not None:
            used[canonical] = name
    return EngineMetrics(values=values, used=used, config=config)


def between(before: EngineMetrics, after: EngineMetrics) -> dict[str, float | None]:
    """What happened between two scrapes: differences of counters (from zero after a restart), gauges as at
    the end, and `prefix_hit_rate`, `batch_tokens_mean`, `spec_acceptance` in between. Missing stays None."""
    delta: dict[str, float | None] = {}
    for name, series in ALIASES.items():
        new, old = after.values[name], before.values[name]
        if series.counter and new is not None:
            old = old or 0.0
            delta[name] = new - old if new >= old else new
        else:
            delta[name] = new
    rate = _ratio(delta["prefix_hits"], delta["prefix_queries"])
    delta["prefix_hit_rate"] = rate if rate is not None else delta["prefix_hit_rate_gauge"]
    delta["batch_tokens_mean"] = _ratio(delta["iteration_tokens"], delta["iterations"])
    delta["spec_acceptance"] = _ratio(delta["spec_accepted"], delta["spec_drafted"])
    return delta


def kv_tokens(metrics: EngineMetrics) -> int | None:
    """Size of the KV cache in tokens as cache_config_info tells it, None where it does not."""
    tokens = number(metrics.config.get("kv_cache_size_tokens"))
    blocks = number(metrics.config.get("num_gpu_blocks"))
    size = number(metrics.config.get("block_size"))
    if isinstance(tokens, int) and not isinstance(tokens, bool):
        return tokens
    if isinstance(blocks, int) and isinstance(size, int):
        return blocks * size
    return None


def number(text: str | None) -> Value:
    """A label's text as the value it was: "None" → None, "True" → True, "16" → 16, else the text."""
    words: dict[str, Value] = {"None": None, "True": True, "False": False}
    if text is None or text in words:
        return words.get(text or "None")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
