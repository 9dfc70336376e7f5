"""The configuration that an engine reports, compared with the one that was asked for.

Each knob's `ReadBack` (`effective:` in the catalogue) says where the engine reports it.
"""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType

from tuner.adapters import adapter_of
from tuner.engine.metrics import EngineMetrics, number
from tuner.records import JSON, Candidate, LaunchSpec, ReadBack, Value

# Names of number formats that vLLM takes for the formats that it then reports.
_SPELLED = MappingProxyType({"half": "float16", "float": "float32"})

# Reported beside the knobs: the size of the KV cache, which differs from launch to launch.
_KV_TOKENS = "kv_cache_size_tokens"


def read(spec: LaunchSpec, metrics: EngineMetrics, info: JSON, log: str) -> dict[str, Value]:
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
        and not same(wanted, effective[name])
        and not (name in knobs and _was_cut(knobs[name], wanted, effective[name], effective))
    }


def _was_cut(rule: ReadBack, wanted: Value, found: Value, effective: Mapping[str, Value]) -> bool:
    """Whether the engine took as much of the value as the knob that bounds it allows."""
    bound = effective.get(rule.cut_to or "")
    if not isinstance(wanted, int) or not isinstance(found, int) or not isinstance(bound, int):
        return False
    return found >= min(wanted, bound) - rule.cut_by and 0 < found <= wanted


def unproved(asked: Candidate, effective: Mapping[str, Value]) -> tuple[str, ...]:
    """Knobs that were asked for and that the engine did not report."""
    return tuple(name for name, value in asked.items() if value is not None and name not in effective)


def identity(effective: Mapping[str, Value]) -> tuple[tuple[str, Value], ...]:
    """Equal for two launches of one configuration; empty when the engine reports nothing."""
    return tuple((name, effective[name]) for name in sorted(effective) if name != _KV_TOKENS)


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


def _value(rule: ReadBack, value: JSON) -> Value:
    """A knob's value as a candidate would hold it."""
    if value is None:
        return rule.null
    if rule.number is not None and isinstance(value, int | float):
        return rule.number.format(value)
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    return value.removeprefix("torch.") if isinstance(value, str) else value
