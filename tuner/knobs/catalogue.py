"""The knobs as data (catalogue.yaml): versions, values, defaults, and the effect of each knob."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import yaml

from tuner.errors import BadInput, nearest
from tuner.knobs.versions import FlagTable, Interval, matches, table
from tuner.records import EngineFacts, ReadBack, Value, canonical_json
from tuner.settings import shipped

Kind = Literal["int", "float", "bool", "choice", "text", "json", "ints", "preemption"]
PREEMPTION = re.compile(r"recompute|(swap|offload):(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A value and the conditions under which it applies; a missing condition is always true."""

    value: Value = None
    values: tuple[Value, ...] = ()
    versions: str = ""
    platform: str | None = None
    min_memory_gib: float = 0.0
    gpu_not: str | None = None

    def holds(self, facts: EngineFacts) -> bool:
        """Whether the rule applies to this engine on this device."""
        return (
            matches(facts.version, self.versions)
            and self.platform in (None, facts.platform)
            and (facts.gpu_memory_gib or 0.0) >= self.min_memory_gib
            and not (self.gpu_not and self.gpu_not.lower() in (facts.gpu_name or "").lower())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One engine argument that may be changed. `flags` are in order of preference. Empty `platforms` means
    all.

    `usable` is the range of versions in which the knob has an effect; `never` is the reason why no shipped
    space has it. `effective` is how its value is read back from a running engine; `unproved` is the reason
    why it cannot be read back.
    """

    name: str
    kind: Kind
    flags: tuple[str, ...]
    trades: str
    source: str
    env: str | None = None
    choices: tuple[Rule, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    platforms: tuple[str, ...] = ()
    usable: str = ""
    unit: str = ""
    default: tuple[Rule, ...] = ()
    recompiles: bool = False
    changes_output: bool = False
    needs_raw: bool = False
    never: str | None = None
    effective: ReadBack | None = None
    unproved: str | None = None
    substitute: str | None = None

    def spans(self, flags: FlagTable | None = None) -> tuple[Interval, ...]:
        """The releases whose parser has the knob, under any of its spellings."""
        data = flags or table()
        return tuple(span for flag in self.flags for span in data.flags.get(flag, ()))

    def flag_in(self, facts: EngineFacts) -> str | None:
        """The spelling that this engine has, or None."""
        return next((flag for flag in self.flags if flag in facts.flags), None)

    def acts_on(self, platform: str) -> bool:
        """Whether the knob has an effect on a platform."""
        return not self.platforms or platform in self.platforms

    def choices_for(self, version: str) -> tuple[Value, ...]:
        """The allowed values in a version; empty where there is no closed list."""
        return next((rule.values for rule in self.choices if matches(version, rule.versions)), ())

    def default_for(self, facts: EngineFacts) -> Value:
        """The default of the engine. None: the engine decides at its start, or the rule needs the memory of a
        GPU that is not known.
        """
        unknown = facts.platform == "cuda" and facts.gpu_memory_gib is None
        if unknown and any(rule.min_memory_gib for rule in self.default):
            return None
        return next((rule.value for rule in self.default if rule.holds(facts)), None)

    def complaint(self, value: Value, version: str | None = None) -> str | None:
        """Why a knob does not take a value (in a version, if given), or None."""
        if (wrong := _type_complaint(self.kind, value)) is not None:
            return f"{self.name}: {wrong}"
        if isinstance(value, int | float) and not isinstance(value, bool):
            if self.minimum is not None and value < self.minimum:
                return f"{self.name}: {value} is below {self.minimum:g}"
            if self.maximum is not None and value > self.maximum:
                return f"{self.name}: {value} is above {self.maximum:g}"
        allowed = self.choices_for(version) if version else self._ever()
        if allowed and value not in allowed:
            listed = ", ".join(str(choice) for choice in allowed)
            where = f" in vLLM {version}" if version else ""
            return f"{self.name}: {value} is not offered{where}; it takes {listed}"
        return None

    def _ever(self) -> tuple[Value, ...]:
        if self.kind != "choice":
            return ()
        return tuple(dict.fromkeys(value for rule in self.choices for value in rule.values))


def _type_complaint(kind: Kind, value: Value) -> str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": number,
        "bool": isinstance(value, bool),
        "choice": isinstance(value, str),
        "text": isinstance(value, str),
        "json": isinstance(value, str) and _decoded(value, dict),
        "ints": isinstance(value, str) and _decoded(value, list),
        "preemption": isinstance(value, str) and PREEMPTION.fullmatch(value) is not None,
    }
    wanted = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "choice": "a word",
        "text": "a word",
        "json": "an object",
        "ints": "a list of whole numbers from 1",
        "preemption": "'recompute', 'swap:<GiB>' or 'offload:<GiB>'",
    }
    return None if fits[kind] else f"{value!r} is not {wanted[kind]}"


def _decoded(text: str, kind: type) -> bool:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if kind is list and isinstance(found, list):
        return bool(found) and all(type(item) is int and item > 0 for item in found)
    return isinstance(found, kind)


def parse(text: str, where: str = "catalogue.yaml") -> dict[str, Knob]:
    """The knobs of a catalogue's YAML text. BadInput names the knob and the key."""
    raw = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {name: _knob(name, entry, where) for name, entry in raw.items()}


def _knob(name: str, entry: Mapping[str, Any], where: str) -> Knob:
    keys = {field.name for field in fields(Knob)} - {"name", "kind", "usable"} | {"type", "versions"}
    for key in entry:
        if key not in keys:
            raise BadInput(f"{where}: {name}: unknown key '{key}'{nearest(key, keys)}")
    rest: dict[str, Any] = {key: value for key, value in entry.items() if key not in ("type", "versions")}
    rest["flags"] = tuple(entry.get("flags", ["--" + name.replace("_", "-")]))
    rest["platforms"] = tuple(entry.get("platforms", ()))
    rest["choices"] = _rules(entry.get("choices"), closed=True)
    rest["default"] = _rules(entry.get("default"), closed=False)
    if "effective" in entry:
        rest["effective"] = _read_back(name, entry["effective"], where)
    return Knob(name=name, kind=entry["type"], usable=entry.get("versions", ""), **rest)


def _read_back(name: str, raw: Any, where: str) -> ReadBack:
    """How a knob is read back: a path, or a mapping of ways. BadInput names an unknown one."""
    given: dict[str, Any] = raw if isinstance(raw, dict) else {"path": raw}
    keys = {field.name for field in fields(ReadBack)}
    for key in given:
        if key not in keys:
            raise BadInput(f"{where}: {name}: effective: unknown key '{key}'{nearest(str(key), keys)}")
    return ReadBack(**given)


def _rules(raw: Any, *, closed: bool) -> tuple[Rule, ...]:
    """A list of rules as written, or one rule from a plain value (`closed`: from a plain list of choices)."""
    if raw is None:
        return ()
    if isinstance(raw, list) and isinstance(raw[0], dict):
        rules: list[dict[str, Any]] = raw
        return tuple(Rule(**{**rule, "values": tuple(rule.get("values", ()))}) for rule in rules)
    return (Rule(values=tuple(raw)),) if closed else (Rule(value=raw),)


def written(value: object) -> Value:
    """A value as a candidate has it: lists and objects become canonical JSON text."""
    if isinstance(value, list | dict):
        return canonical_json(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


CATALOGUE: Mapping[str, Knob] = parse(shipped("knobs", "catalogue.yaml").read_text())


def read_back() -> dict[str, ReadBack]:
    """How the value of each knob is read back from a running engine, for those that any way shows."""
    return {name: each.effective for name, each in CATALOGUE.items() if each.effective is not None}


def knob(name: str) -> Knob:
    """A knob by name (dashes allowed). BadInput names the nearest knob when there is none."""
    known = CATALOGUE.get(name.replace("-", "_").lstrip("_"))
    if known is None:
        raise BadInput(f"no knob is named '{name}'{nearest(name, CATALOGUE)}")
    return known
