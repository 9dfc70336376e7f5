"""The knobs as data (catalogue.yaml): versions, values, defaults, and the effect of each knob. Also the
long flags of each vLLM release (data/vllm_flags.json), and numbers as vLLM's parser reads them. Nothing
here asks an engine.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from tuner.errors import BadInput, nearest
from tuner.records import PARALLEL, EngineFacts, ReadBack, Value, canonical_json
from tuner.settings import shipped


def _flags(names: str) -> frozenset[str]:
    return frozenset(f"--{name}" for name in names.split())


_INTEGERS = _flags(
    """
    port grpc-port data-parallel-supervisor-port dp-supervisor-probe-failure-threshold max-log-len
    sse-keep-alive-interval ssl-cert-reqs h11-max-incomplete-event-size h11-max-header-count seed max-logprobs
    renderer-num-workers safetensors-prefetch-num-threads safetensors-prefetch-block-size nnodes node-rank
    mamba-cache-philox-rounds master-port distributed-timeout-seconds cpu-distributed-timeout-seconds
    numa-bind-nodes dcp-kv-cache-interleave-size cp-kv-cache-interleave-size prefill-context-parallel-size
    data-parallel-rank data-parallel-start-rank data-parallel-size-local data-parallel-rpc-port ubatch-size
    elastic-ep-max-dp-size dbo-decode-token-threshold dbo-prefill-token-threshold dp-sync-interval
    max-parallel-loading-workers prefix-cache-retention-interval mamba-block-size prefix-match-unit
    replayssm-buffer-len offload-group-size offload-num-in-group offload-prefetch-step max-loras max-lora-rank
    max-cpu-loras max-lora-cls-labels mm-shm-cache-max-object-size-mb spec-tokens shutdown-timeout
    """
)
"""Flags of whole numbers that are no knobs, by the parser of 0.32."""
_FLOATS = _flags(
    """
    dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s device-memory-utilization kv-offloading-size
    mm-processor-cache-gb mm-encoder-fp8-scale-save-margin video-pruning-rate mm-ipc-gpu-memory-gb
    kv-cache-metrics-sample
    """
)
"""Flags of numbers that are no knobs, by the same parser."""
_WITH_UNIT = _flags(
    """
    max-model-len max-num-batched-tokens max-num-scheduled-tokens max-num-queued-tokens kv-cache-memory-bytes
    safetensors-prefetch-block-size
    """
)
"""Flags of whole numbers that take 1k, 1.5k (thousands) and 1K (1,024) too; all others refuse a unit."""
_OPTIONAL = _flags(
    """
    distributed-timeout-seconds cpu-distributed-timeout-seconds kv-cache-memory-bytes kv-offloading-size
    mamba-block-size max-cpu-loras max-lora-cls-labels max-num-active-seqs max-num-queued-reqs
    max-num-queued-tokens max-num-scheduled-tokens max-parallel-loading-workers num-gpu-blocks-override
    numa-bind-nodes prefix-cache-retention-interval prefix-match-unit video-pruning-rate
    """
)
"""Flags for which an empty word and None mean: not given. All others refuse them."""
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_readable_int(text: str) -> int:
    """`8k` is 8000, `1.5k` 1500, `8K` 8192. ValueError otherwise, also for `1.5K`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text.strip())
    if found is None:
        return int(text)
    number, unit = found.groups()
    return int(float(number) * _UNITS[unit]) if unit.islower() else int(number) * _UNITS[unit]


def wanted_number(flag: str, kind: str) -> str | None:
    """What a flag takes: a whole number, a number, or None for anything else. `kind` is that of its knob
    (empty: it is no knob).
    """
    if kind in ("int", "ints") or flag in _INTEGERS:
        return "a whole number"
    return "a number" if kind == "float" or flag in _FLOATS else None


def read_number(flag: str, kind: str, text: str) -> int | float | None:
    """The number that a flag gets; None if vLLM takes the word for not given, or chooses (`auto`).
    ValueError if vLLM's parser or its check of the value refuses it, such as `1e3` for a whole number.
    """
    if flag in _OPTIONAL and text in ("", "None"):
        return None
    if flag == "--max-model-len" and text.strip().lower() in ("auto", "-1"):
        return None
    try:
        if wanted_number(flag, kind) == "a whole number":
            return human_readable_int(text) if flag in _WITH_UNIT else int(text)
        value = float(text)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


# Short flags as vLLM's parser has them.
SHORT = {
    **PARALLEL,
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-asc": "--api-server-count",
    "-ac": "--attention-config",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-O": "--optimization-level",
}

# Older engines are refused; the data knows them only to explain what they lack.
OLDEST = Version("0.10")

# Characters of a version range; ranges are kept in memory, and a service takes them from requests.
LONGEST_RANGE = 200

# The first and the last release with a flag; None: the newest release in the data has it.
Interval = tuple[str, str | None]


@dataclass(frozen=True, kw_only=True)
class FlagTable:
    """`versions` in order; `paired` flags have a `--no-` form (since 0.9), `bare` ones take no value."""

    versions: tuple[str, ...]
    flags: Mapping[str, tuple[Interval, ...]]
    paired: frozenset[str]
    bare: frozenset[str]

    def floor(self, version: str) -> str:
        """The newest release in the data that is not newer than the version (the oldest if none is)."""
        known = [name for name, parsed in self._parsed if parsed <= parse_version(version)]
        return known[-1] if known else self.versions[0]

    def has(self, flag: str, version: str) -> bool:
        """Whether the release at or before the version has a flag that is no `--no-` form."""
        return flag in self._by_version[self.floor(version)]

    def flags_of(self, version: str) -> frozenset[str]:
        """Every long flag of the release at or before the version, `--no-` forms included."""
        floor = self.floor(version)
        present = self._by_version[floor]
        if parse_version(floor) < parse_version("0.9"):
            return present
        return present | {negation(flag) for flag in present & self.paired}

    @cached_property
    def _parsed(self) -> list[tuple[str, Version]]:
        return [(name, parse_version(name)) for name in self.versions]

    @cached_property
    def _by_version(self) -> dict[str, frozenset[str]]:
        at = {name: position for position, name in enumerate(self.versions)}
        newest = len(self.versions) - 1
        return {
            name: frozenset(
                flag
                for flag, spans in self.flags.items()
                if any(
                    at[first] <= at[name] <= (newest if last is None else at[last]) for first, last in spans
                )
            )
            for name in self.versions
        }


def negation(flag: str) -> str:
    """`--enforce-eager` → `--no-enforce-eager`."""
    return f"--no-{flag.removeprefix('--')}"


@cache
def parse_version(version: str) -> Version:
    """A version without its local part. A text that is no version (`dev`) counts as newer than all."""
    try:
        return Version(version.split("+", maxsplit=1)[0])
    except InvalidVersion:
        return Version("9999")


@lru_cache(maxsize=4096)
def specifier(text: str, where: str) -> SpecifierSet:
    """A version range such as `>=0.10,<0.33`. BadInput names the place of a wrong one."""
    try:
        if len(text) > LONGEST_RANGE:
            raise InvalidSpecifier
        return SpecifierSet(text)
    except InvalidSpecifier:
        shown = text if len(text) <= LONGEST_RANGE else f"{text[:LONGEST_RANGE]}…"
        raise BadInput(f"{where}: '{shown}' is not a version range; write one like '>=0.10,<0.33'") from None


@lru_cache(maxsize=4096)
def matches(version: str, wanted: str) -> bool:
    """Whether a version, pre-releases included, is in a range; every version is in an empty range."""
    return specifier(wanted, "version range").contains(parse_version(version), prereleases=True)


def read_table(path: Path) -> FlagTable:
    """The table of a file in the shipped format."""
    raw = json.loads(path.read_text())
    return FlagTable(
        versions=tuple(raw["versions"]),
        flags={flag: tuple((first, last) for first, last in spans) for flag, spans in raw["flags"].items()},
        paired=frozenset(raw["paired"]),
        bare=frozenset(raw["bare"]),
    )


@cache
def table() -> FlagTable:
    """The shipped table."""
    return read_table(shipped("data", "vllm_flags.json"))


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

    def spans(self) -> tuple[Interval, ...]:
        """The releases whose parser has the knob, under any of its spellings."""
        return tuple(span for flag in self.flags for span in table().flags.get(flag, ()))

    def flag_in(self, facts: EngineFacts) -> str | None:
        """The spelling that this engine has, or None."""
        return next((flag for flag in self.flags if flag in facts.flags), None)

    def acts_on(self, platform: str) -> bool:
        """Whether the knob has an effect on a platform."""
        return not self.platforms or platform in self.platforms

    def choices_for(self, version: str) -> tuple[Value, ...]:
        """The allowed values in a version; empty if there is no closed list."""
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
        number = isinstance(value, int | float) and not isinstance(value, bool)
        text = isinstance(value, str)
        fits, wanted = {
            "int": (isinstance(value, int) and number, "a whole number"),
            "float": (number, "a number"),
            "bool": (isinstance(value, bool), "true or false"),
            "choice": (text, "a word"),
            "text": (text, "a word"),
            "json": (text and _decoded(str(value), dict), "an object"),
            "ints": (text and _decoded(str(value), list), "a list of whole numbers from 1"),
            "preemption": (
                text and PREEMPTION.fullmatch(str(value)) is not None,
                "'recompute', 'swap:<GiB>' or 'offload:<GiB>'",
            ),
        }[self.kind]
        if not fits:
            return f"{self.name}: {value!r} is not {wanted}"
        if isinstance(value, int | float) and number:
            if self.minimum is not None and value < self.minimum:
                return f"{self.name}: {value} is below {self.minimum:g}"
            if self.maximum is not None and value > self.maximum:
                return f"{self.name}: {value} is above {self.maximum:g}"
        allowed = self.choices_for(version) if version else ()
        if not version and self.kind == "choice":
            allowed = tuple(dict.fromkeys(each for rule in self.choices for each in rule.values))
        if allowed and value not in allowed:
            listed = ", ".join(str(choice) for choice in allowed)
            where = f" in vLLM {version}" if version else ""
            return f"{self.name}: {value} is not offered{where}; it takes {listed}"
        return None


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
