"""The frozen records that rooms hand to each other; no behaviour beyond construction and reading.

Times of day are aware UTC datetimes, durations are seconds unless the name says otherwise, latencies are
milliseconds. A change makes a new record (`dataclasses.replace`).

One pydantic TypeAdapter for each record reads and writes it, for the database and the API. An annotation says
how where pydantic cannot know it (a measured +inf is null); this module itself does not import pydantic.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

# A knob's value. Lists and objects are written as canonical JSON strings.
Value = bool | int | float | str | None

JSON = dict[str, "JSON"] | list["JSON"] | str | int | float | bool | None


def canonical_json(value: object) -> str:
    """The one JSON text of a value: sorted keys, no spaces, no NaN; what digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(value: object) -> str:
    """SHA-256 hex digest of the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


class Candidate(Mapping[str, Value]):
    """One point of a search space: an immutable, hashable, ordered mapping knob → value.

    A knob that is absent is left to the engine's own default; that is not the same as None.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Value] = MappingProxyType({})) -> None:
        self._values = dict(sorted(values.items()))

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidate) and self.digest == other.digest

    def __repr__(self) -> str:
        return f"Candidate({self._values})"

    @property
    def digest(self) -> str:
        """Identity of the candidate: True and 1 differ, order does not matter."""
        return digest_of(self._values)

    def with_values(self, **values: Value) -> "Candidate":
        """The same candidate with some knobs set."""
        return Candidate({**self._values, **values})


def _number(value: float, name: str = "a value") -> float:
    if math.isnan(value) or value == -math.inf:
        raise ValueError(
            f"'{name}' is {value}: a measured value is a number or +inf; leave out what is missing"
        )
    return float(value)


def pack_values(values: Mapping[str, float]) -> dict[str, JSON]:
    """Measurement values for JSON: +inf becomes null. ValueError for NaN and −inf."""
    packed = {name: _number(value, name) for name, value in values.items()}
    return {name: None if math.isinf(value) else value for name, value in packed.items()}


def unpack_values(values: Mapping[str, float | None]) -> dict[str, float]:
    """What `pack_values` was given: null is +inf."""
    return {name: math.inf if value is None else float(value) for name, value in values.items()}


def _pack_optional(value: float | None) -> float | str | None:
    return "inf" if value == math.inf else None if value is None else _number(value)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a TypeAdapter reads and writes a field of which pydantic does not know it."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> "CoreSchema":
        from pydantic_core import core_schema

        shown = None if self.write is _pack_optional else core_schema.dict_schema(core_schema.str_schema())
        write = core_schema.plain_serializer_function_ser_schema(self.write, return_schema=shown)
        return core_schema.no_info_plain_validator_function(self.read, serialization=write)


Knobs = Annotated[Candidate, _Form(Candidate, dict)]

# A JSON object whose values are taken as they are.
JsonObject = Annotated[Mapping[str, JSON], _Form(dict, dict)]

# A name with +inf (null in JSON) was measured; a name that is absent was not.
MeasuredValues = Annotated[Mapping[str, float], _Form(unpack_values, pack_values)]

# None is a value here, so +inf is written as the string "inf" in JSON.
OptionalNumber = Annotated[
    float | None, _Form(lambda value: value if value is None else float(value), _pack_optional)
]


class TrialState(StrEnum):
    """Where a trial is; only COMPLETE carries measured scores."""

    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    INFEASIBLE = "INFEASIBLE"
    ABORTED = "ABORTED"


class RunState(StrEnum):
    """RUNNING → FINISHED | CANCELLED | FAILED; a RUNNING run whose controller is gone is resumed."""

    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits per request, in milliseconds (None = no limit); met when `attainment` of requests are good.

    The requests of a class of `classes` are held to its limits instead (`attainment` is everybody's).
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    attainment: float = 0.95
    classes: Mapping[str, "Slo"] = field(default_factory=dict, hash=False)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "Slo":
        """The SLO of what `asdict` made of one, or of a study file's."""
        classes = {name: cls(**limits) for name, limits in found.get("classes", {}).items()}
        return cls(**{**found, "classes": classes})

    def of(self, classes: Iterable[str]) -> "Slo":
        """The limits for a request of these classes: those of the first that has its own."""
        return next((self.classes[name] for name in classes if name in self.classes), self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A window of a trace in trace time, [start_s, start_s + duration_s)."""

    name: str
    start_s: float
    duration_s: float
    held_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What happened to one replayed request. Times are seconds since the replay's zero (its window start).

    `chunk_s` and `chunk_tokens` hold one entry per chunk that carried tokens: arrival stamp and the number
    of completion tokens in it (from continuous usage). `error` is None for a complete answer. `classes` are
    the trace's (`Trace.classes`).
    """

    row: int
    scheduled_s: float
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    end_s: float | None = None
    input_tokens: int = 0
    expected_input: int = 0
    output_tokens: int = 0
    expected_output: int = 0
    cached_tokens: int | None = None
    chunk_s: NDArray[np.float64] = field(default_factory=lambda: np.empty(0, np.float64))
    chunk_tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    error: str | None = None
    classes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Whether a replay is to be believed. `failed` names the gates that failed, empty = believed."""

    values: Mapping[str, OptionalNumber] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMeasurement:
    """The numbers of one slice: the same names as the pooled ones, and the file of its outcomes."""

    name: str
    window_s: float
    values: MeasuredValues
    outcomes_file: str | None = None


MeasurementKind = Literal["full", "partial", "estimate"]
Purpose = Literal["search", "confirm", "held_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Numbers folded from the outcomes of one pass over a study's slices by one launch.

    `values` uses the names in tuner.measures; +inf is a number here and null in JSON and SQL.
    """

    values: MeasuredValues
    slices: tuple[SliceMeasurement, ...] = ()
    kind: MeasurementKind = "full"
    purpose: Purpose = "search"
    repeat: int = 0
    launch_id: str | None = None
    fidelity: Fidelity = field(default_factory=Fidelity)

    @property
    def folder(self) -> str:
        """The folder of its launch, as its outcomes name it; empty if they are not known."""
        return next((str(Path(s.outcomes_file).parent) for s in self.slices if s.outcomes_file), "")


ATTRIBUTED = (".3", ".4")
"""How the labels of an attribution's launches end. The second is that of a comparison with fewer knobs left
out, after the first was lost."""
_AGAIN = re.compile(r"-confirm-([^-/]+)-(\d+)-\d+$")


def label_in(folder: str | None) -> str | None:
    """The label of the confirmation, comparison or attribution that a launch was for, by its folder."""
    return found[1] if (found := _AGAIN.search(folder or "")) else None


def of_attribution(folder: str | None) -> bool:
    """Whether a launch's folder is of an attribution, which gives it a label of its own."""
    return (label_in(folder) or "").endswith(ATTRIBUTED)


def repeat_of(folder: str | None) -> int | None:
    """The repeat of a confirmation or comparison that a launch was for, by its folder; None: for none."""
    found = None if of_attribution(folder) else _AGAIN.search(folder or "")
    return None if found is None else int(found[2])


def attempt_name(number: int, attempt: int | None) -> str:
    """What an attempt to measure a trial is called: `3`, or `3.1` for the second one."""
    return f"{number}.{attempt}" if attempt else str(number)


def last_attempts(trials: Iterable["Trial"]) -> tuple["Trial", ...]:
    """The last attempt of every number, in order of number."""
    return tuple({t.number: t for t in sorted(trials, key=lambda t: (t.number, t.attempt))}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Constraint values of one trial: > 0 violated, ≤ 0 met, None not reached."""

    kv: OptionalNumber = None
    oom: OptionalNumber = None
    err: OptionalNumber = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate launched and measured; a retry is a new `attempt` of the same number.

    `effective` has the engine's own values of the knobs asked for; `reason` is one sentence and `cause` the
    kind of failure, both None unless the trial ended badly. `origin` is what proposed the candidate.
    """

    id: int
    study_id: str
    run_id: str
    number: int
    attempt: int = 0
    candidate: Knobs
    state: TrialState = TrialState.RUNNING
    origin: str = "search"
    seed: int = 0
    screened: bool = False
    measurements: tuple[Measurement, ...] = ()
    violation: Violation = field(default_factory=Violation)
    reason: str | None = None
    cause: str | None = None
    effective: Mapping[str, Value] = field(default_factory=dict)
    started_at: datetime
    ended_at: datetime | None = None
    gpu_seconds: float = 0.0
    directory: str | None = None

    @property
    def label(self) -> str:
        """What it is called."""
        return attempt_name(self.number, self.attempt)

    @property
    def measurement(self) -> Measurement | None:
        """The measurement that the search sees: the last one made for it (extensions come last)."""
        searched = [m for m in self.measurements if m.purpose == "search"]
        return searched[-1] if searched else None

    @property
    def is_baseline(self) -> bool:
        return self.origin == "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator expects of a candidate: measurement names, and whether it would run at all.

    `spread` is the expected relative error (one standard deviation) per name; `fast` and `slow` are the
    values if steps took less or more time by the predictor's error (empty: not computed).
    """

    values: Mapping[str, float]
    feasible: bool = True
    violation: Violation = field(default_factory=Violation)
    spread: Mapping[str, float] = field(default_factory=dict)
    fast: Mapping[str, float] = field(default_factory=dict)
    slow: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the target interpreter answered about its engine: version, platform, exact long flags, defaults,
    and the closed lists of values (knob → choices) of its parser. `kind` names its adapter (tuner.adapters).
    """

    kind: str
    version: str
    platform: Literal["cuda", "cpu", "rocm", "xpu", "tpu"]
    flags: frozenset[str]
    defaults: Mapping[str, Value] = field(default_factory=dict)
    gpu_name: str | None = None
    gpu_memory_gib: float | None = None
    gpu_count: int = 0
    choices: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """Where a running engine tells a knob's value, and how it is written there: a knob's `effective:` in the
    catalogue. The configuration that the engine answers is best, then the metric that tells it, then the log.

    `path` is the dotted place in the configuration, `metric` the label of the metric (absent: the last word
    of a path in `cache_config`), `log` a pattern of a log line whose first group is the value. `null` is the
    value that null stands for, `number` how a number is written (`offload:{:g}`). `cut_to` is a knob that
    bounds the value, which may also be up to `cut_by` less than that bound. `lost` is a pattern of a log line
    which says that the engine does not use the value, whatever its configuration still has.
    """

    path: str | None = None
    metric: str | None = None
    log: str | None = None
    null: Value = None
    number: str | None = None
    cut_to: str | None = None
    cut_by: int = 0
    lost: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """Everything needed to start one engine process tree, and to recognise it later.

    `command` comes before vLLM's own arguments; `argv` are the arguments without model, host, port and served
    names, which the engine room adds. `asked` are the candidate's knobs, to compare with the effective
    configuration, `asked_argv` the part of `argv` that they add; `read_back` says where the engine reports
    each knob. `cores` pins the engine (None = anywhere); `kind` names its adapter.
    """

    launch_id: str
    command: tuple[str, ...]
    model: str
    argv: tuple[str, ...]
    served_name: str
    directory: str
    env: Mapping[str, str] = field(default_factory=dict)
    asked: Candidate = field(default_factory=Candidate)
    asked_argv: tuple[str, ...] = ()
    read_back: Mapping[str, ReadBack] = field(default_factory=dict)
    ready_timeout_s: float = 900.0
    stop_timeout_s: float = 30.0
    stop_command: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] | None = None
    kind: str = "vllm"


PARALLEL = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
}
"""vLLM's short names of the flags that say on how many GPUs an engine runs."""


def gpus_held(argv: Sequence[str]) -> int:
    """The number of GPUs of an engine: tensor × pipeline × data parallel. The last of equal flags counts, as
    for argparse.
    """
    sizes: dict[str, int] = {}
    for position, word in enumerate(argv):
        flag, _, value = word.partition("=")
        flag = PARALLEL.get(flag, flag)
        value = value or (argv[position + 1] if position + 1 < len(argv) else "")
        if flag in PARALLEL.values() and value.isdigit():
            sizes[flag] = int(value)
    return max(1, math.prod(sizes.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One engine process tree as history keeps it; `timeline` maps start-up phases to seconds (and has the
    KV cache's drift after a first boot, a share)."""

    id: str
    study_id: str
    argv: tuple[str, ...]
    started_at: datetime
    ended_at: datetime | None = None
    effective: Mapping[str, Value] = field(default_factory=dict)
    timeline: Mapping[str, float] = field(default_factory=dict)
    kv_tokens: int | None = None
    verdict: str | None = None
    directory: str | None = None

    @property
    def whole_s(self) -> float | None:
        """Seconds from its start to its end; None while it runs."""
        return (self.ended_at - self.started_at).total_seconds() if self.ended_at else None

    @property
    def measuring_s(self) -> float | None:
        """Seconds from ready to its end; None while it runs, or if it never became ready."""
        ready = self.timeline.get("ready_s")
        return None if ready is None or self.whole_s is None else max(0.0, self.whole_s - ready)


def measures_again(folder: str | None) -> bool:
    """Whether a launch's folder is of a confirmation or of an attribution, not of the search."""
    return "-confirm-" in (folder or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine with GPUs. `gpu_class` groups nodes whose profiles may be compared, e.g. `h100-80x1`."""

    name: str
    gpu_class: str
    gpus: tuple[str, ...] = ()
    gpu_memory_gib: float | None = None
    driver: str | None = None
    host: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    state: Literal["free", "leased", "draining", "dirty", "fault"] = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What makes trials comparable. `id` is the digest of `identity`; `spec` is the whole study as read."""

    id: str
    name: str
    model: str
    node: str
    gpu_class: str
    workload: str
    engine_version: str
    trace_digest: str
    space_digest: str
    slices: tuple[Slice, ...]
    objectives: tuple[str, ...]
    slo: Slo
    seed: int
    identity: JsonObject
    spec: JsonObject
    created_at: datetime

    @property
    def compares(self) -> bool:
        """Whether its trials are the arms of `tuner compare` or `tuner upgrade-check`."""
        return "compare" in self.identity

    @property
    def has_gpus(self) -> bool:
        """Whether its engines hold GPUs: GPU-hours are told only of these."""
        return self.gpu_class != "cpu" and not self.gpu_class.startswith("sim-")

    @property
    def searched_slices(self) -> tuple[Slice, ...]:
        """The slices that every trial is measured on."""
        return tuple(each for each in self.slices if not each.held_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution of a study within a budget; with `trials_limit` 0 it only confirms. `summary` is what the
    run concluded, once it ended.
    """

    id: str
    study_id: str
    state: RunState
    started_at: datetime
    trials_limit: int | None = None
    deadline: datetime | None = None
    ended_at: datetime | None = None
    cancel_requested: bool = False
    reason: str | None = None
    summary: JsonObject = field(default_factory=dict)
    pid: int | None = None
    host: str = ""

    @property
    def at(self) -> datetime:
        """When it ended; its start before that."""
        return self.ended_at or self.started_at


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """Which profile: the model, the node or GPU class, and the workload."""

    model: str
    target: str
    workload: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """An immutable version of a published configuration with its evidence; `digest` is of its content."""

    id: int
    key: ProfileKey
    version: int
    candidate: Knobs
    engine_version: str
    gpu_class: str
    study_id: str
    trial_id: int | None
    argv: tuple[str, ...]
    env: Mapping[str, str]
    evidence: JsonObject
    digest: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasEvent:
    """One change of an alias: who moved it, from which version to which, and why."""

    key: ProfileKey
    alias: str
    generation: int
    from_version: int | None
    to_version: int | None
    actor: str
    reason: str
    at: datetime
