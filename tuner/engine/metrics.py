"""One set of names over the /metrics of every vLLM version; what an engine does not say is None, never 0."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tuner.records import Value

Fold = Callable[[Iterable[float]], float]
EDGE = 0.02
"""Share by which tokens looked up may exceed those that came in: requests that a window's ends cut."""


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
    """Read an exposition text of any version. ValueError when no line of it is a sample.

    A line that cannot be read makes its number None: the sum of the other series would be another number. So
    does one that is not finite. A last line without its line feed was cut off. Of two lines for one series
    the last counts.
    """
    found = _Samples()
    for sample in _samples(text):
        if isinstance(sample, str):
            found.broken.add(sample)
        elif sample.name == "vllm:cache_config_info":
            found.config.update(sample.labels)
        else:
            found.add(sample)
    values: dict[str, float | None] = {}
    used: dict[str, str] = {}
    for canonical, series in ALIASES.items():
        name = next((name for name in series.names if name in found.values or name in found.broken), None)
        values[canonical] = None if name is None else found.fold(name, series)
        if name is not None:
            used[canonical] = name
    return EngineMetrics(values=values, used=used, config=found.config)


_Labels = tuple[tuple[str, str], ...]


class _Samples:
    """What a text says: sample name → labels without `pid` → pid → value, and the names that are not to be
    trusted."""

    def __init__(self) -> None:
        self.values: dict[str, dict[_Labels, dict[str, float]]] = {}
        self.broken: set[str] = set()
        self.config: dict[str, str] = {}

    def add(self, sample: Sample) -> None:
        if not math.isfinite(sample.value):
            self.broken.add(sample.name)
            return
        labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "pid"))
        per_pid = self.values.setdefault(sample.name, {}).setdefault(labels, {})
        per_pid[sample.labels.get("pid", "")] = float(sample.value)

    def fold(self, name: str, series: Series) -> float | None:
        if name in self.broken:
            return None
        per_pid: Fold = sum if series.counter else max
        return series.fold(per_pid(each.values()) for each in self.values[name].values())


def _samples(text: str) -> Iterator[Sample | str]:
    """The samples of a text; the name alone (empty: not even that) of a line that is none."""
    whole, _, rest = text.rpartition("\n")
    if not rest:
        try:
            yield from [one for family in text_string_to_metric_families(text) for one in family.samples]
            return
        except ValueError:
            pass
    lines = [line for line in whole.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    read = [_sample(line) for line in lines]
    if (lines or rest) and not any(isinstance(one, Sample) for one in read):
        raise ValueError("no line of it is a sample of a metric")
    yield from read
    if rest:
        yield _name(rest)


def _sample(line: str) -> Sample | str:
    try:
        return next(one for family in text_string_to_metric_families(line) for one in family.samples)
    except (ValueError, StopIteration):
        return _name(line)


def _name(line: str) -> str:
    found = re.match(r"\s*([A-Za-z_:][A-Za-z0-9_:]*)", line)
    return found[1] if found else ""


def between(before: EngineMetrics, after: EngineMetrics) -> dict[str, float | None]:
    """What happened between two scrapes: differences of counters (from zero after a restart), gauges as at
    the end, and `prefix_hit_rate`, `batch_tokens_mean`, `spec_acceptance` in between. Missing stays None.

    Requests that were preempted look their tokens up again, and find their own blocks: engines before 0.11.1
    count that. Where more was looked up than came in, hits and queries are those of the prompts, None where
    the engine does not tell these apart; `prefix_recomputed` is the share that was not traffic's.
    """
    delta: dict[str, float | None] = {}
    for name, series in ALIASES.items():
        new, old = after.values[name], before.values[name]
        if series.counter and old is None and name in before.used:
            delta[name] = None
        elif series.counter and new is not None:
            old = old or 0.0
            delta[name] = new - old if new >= old else new
        else:
            delta[name] = new
    delta["prefix_recomputed"] = _recomputed(delta)
    if delta["prefix_recomputed"]:
        told = delta["prompt_tokens_cached"] is not None
        delta["prefix_hits"] = delta["prompt_tokens_cached"]
        delta["prefix_queries"] = delta["prompt_tokens"] if told else None
        delta["prefix_hit_rate_gauge"] = None
    rate = _ratio(delta["prefix_hits"], delta["prefix_queries"])
    delta["prefix_hit_rate"] = rate if rate is not None else delta["prefix_hit_rate_gauge"]
    delta["batch_tokens_mean"] = _ratio(delta["iteration_tokens"], delta["iterations"])
    delta["spec_acceptance"] = _ratio(delta["spec_accepted"], delta["spec_drafted"])
    return delta


def _recomputed(delta: Mapping[str, float | None]) -> float | None:
    """The share of looked-up tokens that no prompt brought; None while nothing was preempted or said."""
    asked, came = delta["prefix_queries"], delta["prompt_tokens"]
    if not delta["preemptions"] or not asked or came is None:
        return None
    share = max(0.0, 1 - came / asked)
    return share if share > EDGE else 0.0


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
