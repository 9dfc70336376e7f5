"""What a running engine reports. Its /metrics get the same names for all engines and versions (a number
that an engine does not export is None, never 0). Its configuration is compared with the one that was asked
for.

Each knob's `ReadBack` (`effective:` in the catalogue) says where the engine reports it.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tuner.adapters import adapter_of
from tuner.records import JSON, Candidate, LaunchSpec, ReadBack, Value

Fold = Callable[[Iterable[float]], float]

# By which share more tokens may be looked up than came in: the ends of a window cut requests.
EDGE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """How several series of one number become one. Counters and queues add up over engine ranks, usage takes
    the largest. Several API servers export the same gauge once per pid: the largest counts. Of a `counter`
    only differences mean much.
    """

    fold: Fold = sum
    counter: bool = False


_SUM, _MOST, _COUNTER = Series(), Series(fold=max), Series(counter=True)
_TIMES = ("ttft", "itl", "tpot", "e2e", "queue", "prefill", "decode")

# Our names. An engine's own names for them are in its adapter; docs/engine.md has vLLM's as a table.
SERIES: Mapping[str, Series] = MappingProxyType(
    dict.fromkeys(("running", "waiting", "swapped"), _SUM)
    | dict.fromkeys(("kv_usage", "prefix_hit_rate_gauge"), _MOST)
    | dict.fromkeys(
        ("preemptions", "prompt_tokens", "generation_tokens", "iterations", "iteration_tokens",
         "prefix_queries", "prefix_hits", "external_prefix_queries", "external_prefix_hits",
         "prompt_tokens_cached", "finished", "rejected", "spec_drafted", "spec_accepted",
         "offload_load_bytes", "offload_store_bytes", "offload_bytes",
         *(f"{time}_seconds_{end}" for time in _TIMES for end in ("sum", "count"))),
        _COUNTER,
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """One scrape. `values` has every canonical name; `used` maps it to the sample name that it came from.
    `config` has the labels of the adapter's `config_metric`, as the engine wrote them. `step_tokens` is the
    histogram of tokens per step: upper bound → steps of no more tokens.
    """

    values: Mapping[str, float | None]
    used: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    step_tokens: Mapping[float, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float | None:
        return self.values[name]

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        return bool((self.values["running"] or 0) + (self.values["waiting"] or 0))


def parse(text: str, kind: str = "vllm") -> EngineMetrics:
    """Read an exposition text of any version of an engine of that kind. ValueError when no line of it is a
    sample.

    A line that cannot be read, or is not finite, makes its number None: without it the sum would be wrong. A
    last line without its line feed was cut off. Of two lines for one series the last counts.
    """
    found, adapter = _Samples(), adapter_of(kind)
    for sample in _samples(text):
        if isinstance(sample, str):
            found.broken.add(sample)
        elif sample.name == adapter.config_metric:
            found.config.update(sample.labels)
        else:
            found.add(sample)
    values: dict[str, float | None] = {}
    used: dict[str, str] = {}
    for canonical, series in SERIES.items():
        names = adapter.metrics.get(canonical, ())
        name = next((name for name in names if name in found.values or name in found.broken), None)
        values[canonical] = None if name is None else found.fold(name, series)
        if name is not None:
            used[canonical] = name
    bucket = used.get("iteration_tokens", "").removesuffix("_sum") + "_bucket"
    return EngineMetrics(values=values, used=used, config=found.config, step_tokens=found.buckets(bucket))


_Labels = tuple[tuple[str, str], ...]


class _Samples:
    """(sample name → labels without `pid` → pid → value, names whose values cannot be trusted) of a text."""

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

    def buckets(self, name: str) -> dict[float, float]:
        """A histogram's cumulative counts by upper bound, of all engines; empty if it is not complete."""
        found: dict[float, float] = {}
        for labels, per_pid in ({} if name in self.broken else self.values.get(name, {})).items():
            try:
                bound = float(dict(labels).get("le", "NaN"))
            except ValueError:
                bound = math.nan
            if math.isnan(bound):
                return {}  # one line of it cannot be read
            found[bound] = found.get(bound, 0.0) + sum(per_pid.values())
        return found

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

    A preempted request looks its tokens up again and finds its own blocks; vLLM before 0.11.1 counts these as
    hits. If more tokens were looked up than came in, hits and queries are those of the prompts alone (None if
    the engine has no such counter), and `prefix_recomputed` is the share of the other lookups.
    """
    delta: dict[str, float | None] = {}
    for name, series in SERIES.items():
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
    delta |= _step_percentiles(before.step_tokens, after.step_tokens)
    delta["spec_acceptance"] = _ratio(delta["spec_accepted"], delta["spec_drafted"])
    return delta


def _step_percentiles(before: Mapping[float, float], after: Mapping[float, float]) -> dict[str, float | None]:
    """Tokens in a step, by linear interpolation in the histogram's buckets; None if no step was counted.
    A step has at least one token; values above the highest bound count as that bound.
    """
    bounds = sorted(after)
    counts = [after[bound] - before.get(bound, 0.0) for bound in bounds]
    names = {"batch_tokens_p50": 0.5, "batch_tokens_p95": 0.95}
    if len(bounds) < 2 or counts[-1] <= 0 or min(counts) < 0:
        return dict.fromkeys(names)
    edges, steps = [min(1.0, bounds[0]), *bounds[:-1], bounds[-2]], [0.0, *counts]
    return {name: float(np.interp(share * counts[-1], steps, edges)) for name, share in names.items()}


def _recomputed(delta: Mapping[str, float | None]) -> float | None:
    """The share of looked-up tokens that came from no prompt; None without preemptions or without
    counters.
    """
    asked, came = delta["prefix_queries"], delta["prompt_tokens"]
    if not delta["preemptions"] or not asked or came is None:
        return None
    share = max(0.0, 1 - came / asked)
    return share if share > EDGE else 0.0


def kv_tokens(metrics: EngineMetrics) -> int | None:
    """Size of the KV cache in tokens from cache_config_info, None if it is not there."""
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


# Names of number formats that vLLM takes for the formats that it then reports.
_SPELLED = MappingProxyType({"half": "float16", "float": "float32"})

# Reported beside the knobs: the size of the KV cache, which differs from launch to launch.
_KV_TOKENS = "kv_cache_size_tokens"


def read_effective(spec: LaunchSpec, metrics: EngineMetrics, info: JSON, log: str) -> dict[str, Value]:
    """Knob → value as a ready engine reports it: its configuration, and for knobs that this leaves open, its
    log. A value that the log says is lost is None.
    """
    said = {**from_metrics(metrics, spec.read_back), **from_server_info(info, spec.read_back, spec.kind)}
    said |= {name: None for name, rule in spec.read_back.items() if rule.lost and re.search(rule.lost, log)}
    chosen = from_log(log, spec.read_back)
    return {**said, **{name: value for name, value in chosen.items() if said.get(name) is None}}


def from_server_info(info: JSON, knobs: Mapping[str, ReadBack], engine: str = "vllm") -> dict[str, Value]:
    """Knob → value from the configuration that the engine answers (`/server_info?config_format=json`); empty
    when the answer has none.

    A knob whose path is not there is left out. Versions without JSON answer one string, which is not
    reliable.
    """
    adapter = adapter_of(engine)
    config = info.get(adapter.config_key) if isinstance(info, dict) else None
    if not isinstance(config, dict):
        return {}
    found: dict[str, Value] = {}
    for name, rule in sorted({_KV_TOKENS: ReadBack(path=adapter.kv_tokens_path), **knobs}.items()):
        part: JSON = config
        *sections, last = (rule.path or "").split(".")
        for section in sections:
            part = part.get(section) if isinstance(part, dict) else None
        if isinstance(part, dict) and last in part:
            found[name] = _value(rule, part[last])
    return found


def from_metrics(metrics: EngineMetrics, knobs: Mapping[str, ReadBack]) -> dict[str, Value]:
    """Knob → value from the labels of the metric that holds the configuration, for engines without
    `/server_info`.
    """
    found: dict[str, Value] = {}
    for name, rule in sorted(knobs.items()):
        section, _, last = (rule.path or "").partition(".")
        label = rule.metric or (last if section == "cache_config" else None)
        if label is not None and label in metrics.config:
            found[name] = _value(rule, number(metrics.config[label]))
    return found


def from_log(text: str, knobs: Mapping[str, ReadBack]) -> dict[str, Value]:
    """Knob → value, as text, from the engine's log."""
    found = {name: re.search(rule.log, text) for name, rule in knobs.items() if rule.log}
    return {name: match.group(1) for name, match in found.items() if match}


def differences(
    asked: Candidate, effective: Mapping[str, Value], knobs: Mapping[str, ReadBack] = MappingProxyType({})
) -> dict[str, tuple[Value, Value]]:
    """Knobs that the engine runs with another value than asked: name → (asked, effective)."""
    return {
        name: (wanted, effective[name])
        for name, wanted in asked.items()
        if name in effective
        and not same_value(wanted, effective[name])
        and not (name in knobs and _was_cut(knobs[name], wanted, effective[name], effective))
    }


def _was_cut(rule: ReadBack, wanted: Value, found: Value, effective: Mapping[str, Value]) -> bool:
    """Whether the engine took as much of the value as the knob that bounds it allows."""
    bound = effective.get(rule.cut_to or "")
    if not isinstance(wanted, int) or not isinstance(found, int) or not isinstance(bound, int):
        return False
    return found >= min(wanted, bound) - rule.cut_by and 0 < found <= wanted


def unproved_knobs(asked: Candidate, effective: Mapping[str, Value]) -> tuple[str, ...]:
    """Knobs that were asked for and that the engine did not report."""
    return tuple(name for name, value in asked.items() if value is not None and name not in effective)


def identity_of(effective: Mapping[str, Value]) -> tuple[tuple[str, Value], ...]:
    """Equal for two launches of one configuration; empty when the engine reports nothing."""
    return tuple((name, effective[name]) for name in sorted(effective) if name != _KV_TOKENS)


def same_value(asked: Value, effective: Value) -> bool:
    """Equality across spellings: 0.9 and "0.9", True and "true", float and float32; of a JSON object what was
    asked for must be in the engine's. "auto" is whatever the engine chose.
    """
    if asked == effective or str(asked).lower() in ("auto", str(effective).lower()):
        return True
    if str(asked) in _SPELLED:
        return _SPELLED[str(asked)] == effective
    try:
        return abs(float(str(asked)) - float(str(effective))) <= 1e-9 * max(1.0, abs(float(str(asked))))
    except ValueError:
        return _within(asked, effective)


def _within(asked: Value, effective: Value) -> bool:
    """Whether all that a JSON object asks for is in the one that the engine reports."""
    try:
        wanted, found = json.loads(str(asked)), json.loads(str(effective))
    except ValueError:
        return False
    if not isinstance(wanted, dict) or not isinstance(found, dict):
        return False
    return all(name in found and found[name] == value for name, value in wanted.items())


def _value(rule: ReadBack, value: JSON) -> Value:
    """A knob's value as a candidate would hold it."""
    if value is None:
        return rule.null
    if rule.number is not None and isinstance(value, int | float):
        return rule.number.format(value)
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    return value.removeprefix("torch.") if isinstance(value, str) else value
