"""What the engine really runs with, in its own words, held against what was asked of it."""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType

from tuner.adapters import adapter_of
from tuner.engine.metrics import EngineMetrics, number
from tuner.records import JSON, Candidate, LaunchSpec, Value

_SPELLED = MappingProxyType({"half": "float16", "float": "float32"})
_BESIDE = MappingProxyType({"kv_cache_size_tokens": "cache_config.kv_cache_size_tokens"})
"""What is kept beside the knobs: name → path."""


def read(spec: LaunchSpec, metrics: EngineMetrics, info: JSON, log: str) -> dict[str, Value]:
    """What a ready engine says of its configuration; where that leaves a knob open, what its log says that it
    chose.
    """
    paths = spec.config_paths
    said = {**from_metrics(metrics, paths), **from_server_info(info, paths, adapter_of(spec.kind).config_key)}
    chosen = from_log(log, spec.log_words)
    return {**said, **{name: value for name, value in chosen.items() if said.get(name) is None}}


def from_server_info(info: JSON, paths: Mapping[str, str], key: str = "vllm_config") -> dict[str, Value]:
    """Flat knob → value from `/server_info?config_format=json`, by where each knob stands in it (`paths`:
    knob → dotted path); empty when it holds no configuration. A knob whose path is not there is left out.

    Versions without JSON give one string, which says nothing reliable.
    """
    config = info.get(key) if isinstance(info, dict) else None
    if not isinstance(config, dict):
        return {}
    found: dict[str, Value] = {}
    for name, path in sorted({**_BESIDE, **paths}.items()):
        part: JSON = config
        *sections, last = path.split(".")
        for section in sections:
            part = part.get(section) if isinstance(part, dict) else None
        if isinstance(part, dict) and last in part:
            found[name] = _value(name, part[last])
    return found


def from_metrics(metrics: EngineMetrics, paths: Mapping[str, str]) -> dict[str, Value]:
    """What cache_config_info says of the knobs, for engines without `/server_info`; `paths` as above."""
    labels = {name: path.removeprefix("cache_config.") for name, path in paths.items()}
    return {
        name: _value(name, number(metrics.config[label]))
        for name, label in sorted(labels.items())
        if label != paths[name] and label in metrics.config
    }


def from_log(text: str, words: Mapping[str, str]) -> dict[str, Value]:
    """What the engine's log says of the knobs; `words`: knob → a pattern whose first group is the value."""
    found = {name: re.search(pattern, text) for name, pattern in words.items()}
    return {name: match.group(1) for name, match in found.items() if match}


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


def unproved(asked: Candidate, effective: Mapping[str, Value]) -> tuple[str, ...]:
    """Knobs that were asked for and of which the engine said nothing."""
    return tuple(name for name, value in asked.items() if value is not None and name not in effective)


def identity(effective: Mapping[str, Value]) -> tuple[tuple[str, Value], ...]:
    """What two launches must agree in to count as one configuration; empty when the engine says nothing."""
    return tuple((name, effective[name]) for name in sorted(effective) if name not in _BESIDE)


def same(asked: Value, effective: Value) -> bool:
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


def _value(name: str, value: JSON) -> Value:
    """A knob's value as a candidate would hold it."""
    if name == "preemption":
        return "recompute" if value is None else f"offload:{value:g}"
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    return value.removeprefix("torch.") if isinstance(value, str) else value
