"""The records as the API shows them. A schema has the fields of its record without those that the API leaves
out.

A measured +inf becomes null. Paths, environments and process ids of this host are left out.
"""

import base64
import binascii
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, fields
from datetime import date
from operator import attrgetter
from typing import Annotated, Any, Generic, Self, TypeVar, cast

from fastapi import Query
from pydantic import BaseModel, Field, JsonValue, create_model

from tuner import masking
from tuner.conclusions import Conclusion, Difference
from tuner.errors import BadInput
from tuner.history.best_per_night import Change, Night
from tuner.history.entities import RunBest, TraceInfo
from tuner.records import (
    JSON,
    AliasEvent,
    Measurement,
    Node,
    Profile,
    Run,
    SliceMeasurement,
    Study,
    Trial,
)
from tuner.report import words

HIDDEN = ("env", "python", "command", "stop_command")
"""What the API leaves out of a study's engines, because it belongs to this host."""
LARGEST = 2**31 - 1
"""The largest number in a cursor: PostgreSQL's integer columns hold no larger one."""
S = TypeVar("S", bound="Schema")
T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K", int, str)
Cursor = Annotated[str | None, Query(max_length=400, description="`next` of the page before.")]
Limit = Annotated[int, Query(ge=1, le=500, description="Most items on a page.")]


class Schema(BaseModel, from_attributes=True):
    """What the API shows of a record."""

    @classmethod
    def of(cls, record: object, **more: object) -> Self:
        """The schema of a record; `more` are the fields that it does not have."""
        own = {name: getattr(record, name) for name in cls.model_fields if hasattr(record, name)}
        return cls.model_validate({**own, **more})


def fields_of(record: type[Any], *only: str, without: Sequence[str] = ()) -> Callable[[type[S]], type[S]]:
    """Adds the fields of a record (all, or `only` some) to a schema that does not declare them."""
    types = {
        each.name: each.type
        for each in fields(record)
        if each.name in (only or (each.name,)) and each.name not in without
    }

    def extended(schema: type[S]) -> type[S]:
        added: Any = {name: (kind, ...) for name, kind in types.items() if name not in schema.model_fields}
        return create_model(
            schema.__name__, __base__=schema, __doc__=schema.__doc__, __module__=__name__, **added
        )

    return extended


class Page(BaseModel, Generic[T]):
    """One page of a list; `next` is null on the last page."""

    items: list[T]
    next: str | None = Field(default=None, examples=["WyJhYmMiXQ"])


def pack(*place: int | str) -> str:
    """Makes a cursor: an opaque text that says where the next page begins."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def unpack(cursor: str | None, *kinds: type) -> tuple[int | str, ...] | None:
    """The values in a cursor. BadInput unless `pack` made it from values of these types."""
    if cursor is None:
        return None
    try:
        raw = cursor.encode("ascii")
        found = json.loads(base64.b64decode(raw + b"=" * (-len(raw) % 4), altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, RecursionError):
        found = None
    right = isinstance(found, list) and len(found) == len(kinds)
    if (
        not right
        or any(type(part) is not kind for part, kind in zip(found, kinds, strict=True))
        or any(isinstance(part, int) and abs(part) > LARGEST for part in found)
    ):
        raise BadInput("cursor: this service did not make it; begin with the first page")
    return tuple(found)


def after(cursor: str | None, kind: type[K]) -> K | None:
    """The value in a cursor of one value; None on the first page."""
    place = unpack(cursor, kind)
    return cast(K, place[0]) if place else None


def page(
    found: Sequence[R], limit: int, shown: Callable[[R], T], place: Callable[[R], tuple[int | str, ...]]
) -> Page[T]:
    """A page of rows. The caller asked for one row more than `limit`, to see whether there is a next page."""
    following = pack(*place(found[limit - 1])) if len(found) > limit else None
    return Page(items=[shown(each) for each in found[:limit]], next=following)


@fields_of(Study, without=("identity",))
class StudySchema(Schema):
    """What makes trials comparable."""


def study(of: Study) -> StudySchema:
    return StudySchema.of(of, spec=_without_host(masking.tree(of.spec)))


def _without_host(found: Any) -> Any:
    """A spec or a run's summary without the parts of its engines that belong to this host (also of arms)."""
    if isinstance(found, list | tuple):
        return [_without_host(each) for each in found]
    if not isinstance(found, dict):
        return found
    shown = {name: _without_host(each) for name, each in found.items()}
    if isinstance(engine := shown.get("engine"), dict):
        shown["engine"] = {name: each for name, each in engine.items() if name not in HIDDEN}
    return shown


@fields_of(Run, without=("pid", "host"))
class RunSchema(Schema):
    """One execution of a study."""

    id: str = Field(examples=["4f0c1d2e3a5b6c7d"])
    state: str = Field(
        examples=["RUNNING", "stopped", "FINISHED"],
        description="`stopped`: it has not ended, but its process is gone; the same command continues it.",
    )
    stopped: bool = Field(description="Whether `state` is `stopped`.")
    trials: dict[str, int] | None = Field(
        default=None,
        description="How many trials, by state of the last attempt; null in lists for a run that has ended.",
    )
    conclusion: dict[str, JsonValue] | None = Field(
        default=None,
        description="What the run found, written once; null in lists and before the run has ended.",
    )
    left_s: float | None = Field(
        default=None,
        description="About how many seconds the run still takes. Null if unknown, or if its process is gone.",
    )


def run(
    of: Run,
    stopped: Collection[str],
    trials: dict[str, int] | None = None,
    said: Conclusion | None = None,
    left_s: float | None = None,
) -> RunSchema:
    concluded = conclusion(said)
    return RunSchema.of(
        of, state=words.run_state(of, stopped), stopped=of.id in stopped, trials=trials,
        conclusion=concluded, left_s=left_s, summary=_without_host(dict(of.summary)),
    )  # fmt: skip


def conclusion(of: Conclusion | None) -> dict[str, Any] | None:
    return None if of is None else of.to_json()


@fields_of(SliceMeasurement, without=("outcomes_file",))
class SliceSchema(Schema):
    """Numbers of one slice."""


@fields_of(Measurement, without=("fidelity",))
class MeasurementSchema(Schema):
    """Numbers of one pass over the study's slices."""

    slices: list[SliceSchema]
    fidelity_failed: list[str]


@fields_of(Trial, without=("seed", "violation", "directory"))
class TrialSchema(Schema):
    """One candidate, launched and measured."""

    state: str = Field(
        examples=["COMPLETE", "interrupted"],
        description="`interrupted`: the run was stopped in the middle of it.",
    )
    measurements: list[MeasurementSchema]


def trial(of: Trial, stopped: Collection[str] = ()) -> TrialSchema:
    measured = [MeasurementSchema.of(m, fidelity_failed=m.fidelity.failed) for m in of.measurements]
    return TrialSchema.of(of, state=words.trial_state(of, stopped), measurements=measured)


class BesideSchema(Schema):
    """A row of the front's table.

    Values by objective: `first` from its first measurement, `confirmed` from the repeats of the confirmation
    (empty if it was not measured again). `changes` compare it with the baseline.
    """

    trial: int
    role: str = Field(
        examples=["baseline", "winner", "front"],
        description="`finalist`: it was screened, and confirmed without a relaunch.",
    )
    first: dict[str, float | None]
    confirmed: dict[str, float | None]
    changes: list[Difference]


class FrontSchema(BaseModel):
    """The front of first measurements, the baseline, and the conclusions of the newest run and of the newest
    confirmation.
    """

    study: dict[str, JsonValue]
    objectives: list[str]
    baseline: TrialSchema | None
    front: list[TrialSchema]
    rows: list[BesideSchema]
    verdict: dict[str, JsonValue] = Field(
        description="The newest run's outcome and its sentence; empty before a run has ended.",
    )
    winner: int | None
    conclusion: dict[str, JsonValue] | None
    confirmation: dict[str, JsonValue] | None


class KeySchema(Schema):
    """The profile key."""

    model: str
    target: str
    workload: str


@fields_of(Profile, without=("key",))
class ProfileSchema(KeySchema):
    """An immutable version of a published configuration with its evidence."""


def profile(of: Profile) -> ProfileSchema:
    return ProfileSchema.of(of, **asdict(of.key))


@fields_of(AliasEvent, without=("key",))
class AliasSchema(KeySchema):
    """The version of an alias after its last move. `generation` counts the moves; it is the ETag."""


def alias(of: AliasEvent) -> AliasSchema:
    return AliasSchema.of(of, **asdict(of.key))


_OF_BEST = ("node", "workload", "run_id", "study_id", "trial_id", "number", "attempt", "metric", "value",
            "low", "high", "baseline", "engine_version", "trials")  # fmt: skip
_OF_NIGHT = ("compared", "regression", "sure", "runs")
_of_best, _of_night = attrgetter(*_OF_BEST), attrgetter(*_OF_NIGHT)


@fields_of(RunBest, *_OF_BEST, "candidate")
class NightSchema(Schema):
    """What a run found in its night, what has changed since the night before, and how sure this is."""

    date: date
    outcome: str = Field(
        examples=["clear winner"],
        description="The outcome of the run. While it has no conclusion: running or stopped.",
    )
    from_baseline: Difference | None = Field(
        description="The change from the baseline, (after − before) / before, by the run's repeats, with its"
        " 95 % interval; `high` null: unbounded."
    )
    from_last_night: float | None = Field(description="Change of the value, (after − before) / before.")
    compared: str = Field(
        examples=["better"],
        description="The change from the night before, in a word; `open`: the noise can explain the change.",
    )
    regression: bool
    trials: int = Field(
        description="Trials that were measured in full. Failed, stopped and screened trials do not count."
    )
    sure: str = Field(examples=["confirmed, 3 repeats, 3.41 to 3.52"])
    changes: list[Change]
    runs: int


def night(of: Night, stopped: Collection[str]) -> dict[str, JSON]:
    """A NightSchema as plain JSON. An answer has hundreds of nights, and Pydantic models of them would be
    slow.
    """
    return {
        "date": of.date.isoformat(),
        **dict(zip(_OF_BEST, _of_best(of.best), strict=True)),
        **dict(zip(_OF_NIGHT, _of_night(of), strict=True)),
        "outcome": words.outcome_of(of.best, stopped),
        "from_baseline": asdict(of.best.change) if of.best.change else None,
        "from_last_night": of.step,
        "candidate": dict(of.best.candidate),
        "changes": [
            {"kind": each.kind, "name": each.name, "before": each.before, "after": each.after}
            for each in of.changes
        ],
    }


class PlaceSchema(BaseModel):
    """One node and workload over the nights; `change_per_night` is the median change of the value. `nights`
    has the newest run of each night, `other_runs` the other runs of these nights.
    """

    node: str
    workload: str
    change_per_night: float | None
    nights: list[NightSchema]
    other_runs: list[NightSchema]


class HistorySchema(BaseModel):
    """What each night found for a model, in one metric. `without_value` counts the ended runs of these nodes
    whose results do not have the metric. `next` is null on the last page.
    """

    model: str
    metric: str
    places: list[PlaceSchema]
    without_value: int
    next: str | None = Field(examples=["WyJncHUtNyJd"])


@fields_of(TraceInfo, without=("path",))
class TraceSchema(Schema):
    """Captured traffic, known by the digest of its content."""


@fields_of(Node)
class NodeSchema(Schema):
    """A machine with GPUs."""

    lease: str | None = Field(default=None, description="The process that holds the node now.")


def node(of: Node, holder: str | None = None) -> NodeSchema:
    return NodeSchema.of(of, state=words.node_state(of, holder), lease=holder)
