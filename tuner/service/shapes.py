"""Records as the API shows them. A measured +inf is null; this host's paths and environments are left out."""

from dataclasses import asdict
from datetime import date, datetime
from operator import attrgetter
from typing import Annotated, Any

from pydantic import BaseModel, Field, JsonValue

from tuner import masking
from tuner.conclusions import Conclusion
from tuner.history.best_per_night import Night
from tuner.history.entities import AuditEntry, Schedule, TraceInfo
from tuner.profiles.export import as_json
from tuner.records import JSON, AliasEvent, Measurement, Node, Profile, Run, Study, Trial, pack_values
from tuner.report import words

Values = dict[str, float | None]
Scalar = bool | int | float | str | None
Moment = Annotated[datetime, Field(examples=["2026-03-01T22:00:00Z"])]
HIDDEN = ("env", "python", "command")


class StudyShape(BaseModel):
    """What makes trials comparable."""

    id: str
    name: str
    model: str
    node: str
    gpu_class: str
    workload: str
    engine_version: str
    trace_digest: str
    space_digest: str
    slices: list[dict[str, JsonValue]]
    objectives: list[str]
    slo: dict[str, float | None]
    seed: int
    spec: dict[str, JsonValue]
    created_at: Moment


def study(of: Study) -> StudyShape:
    spec: dict[str, Any] = masking.tree(of.spec)
    if isinstance(engine := spec.get("engine"), dict):
        spec["engine"] = {key: value for key, value in engine.items() if key not in HIDDEN}
    special = ("slices", "slo", "spec")
    return StudyShape(
        **{name: getattr(of, name) for name in StudyShape.model_fields if name not in special},
        slices=[{name: getattr(each, name) for name in ("name", "start_s", "duration_s", "held_out")}
                for each in of.slices],
        slo={name: getattr(of.slo, name) for name in ("ttft_ms", "tpot_ms", "e2e_ms", "attainment")},
        spec=spec,
    )  # fmt: skip


class RunShape(BaseModel):
    """One execution of a study."""

    id: str = Field(examples=["4f0c1d2e3a5b6c7d"])
    study_id: str
    state: str = Field(examples=["RUNNING"])
    started_at: Moment
    ended_at: datetime | None
    trials_limit: int | None
    deadline: datetime | None
    cancel_requested: bool
    reason: str | None
    summary: dict[str, JsonValue]
    trials: dict[str, int] | None = Field(default=None, description="How many trials, by state.")
    conclusion: dict[str, JsonValue] | None = Field(
        default=None, description="What it found, written once; null in lists and while it goes on."
    )


def run(of: Run, trials: dict[str, int] | None = None, said: Conclusion | None = None) -> RunShape:
    names = [
        name for name in RunShape.model_fields if name not in ("trials", "state", "summary", "conclusion")
    ]
    plain = {name: getattr(of, name) for name in names}
    return RunShape(
        **plain, state=of.state.value, summary=dict(of.summary), trials=trials, conclusion=conclusion(said)
    )


def conclusion(of: Conclusion | None) -> dict[str, Any] | None:
    return None if of is None else of.to_json()


class MeasurementShape(BaseModel):
    """Numbers of one pass over the study's slices."""

    values: Values = Field(examples=[{"ttft_p95_ms": 412.5, "goodput_rps": 3.4}])
    kind: str
    purpose: str
    repeat: int
    launch_id: str | None
    slices: list[dict[str, JsonValue]]
    fidelity_failed: list[str]


def measurement(of: Measurement) -> MeasurementShape:
    slices: list[dict[str, Any]] = [
        {"name": each.name, "window_s": each.window_s, "values": pack_values(each.values)}
        for each in of.slices
    ]
    packed: Any = pack_values(of.values)
    return MeasurementShape(
        values=packed, kind=of.kind, purpose=of.purpose, repeat=of.repeat, launch_id=of.launch_id,
        slices=slices, fidelity_failed=list(of.fidelity.failed),
    )  # fmt: skip


class TrialShape(BaseModel):
    """One candidate, launched and measured."""

    id: int
    study_id: str
    run_id: str
    number: int
    attempt: int
    candidate: dict[str, Scalar] = Field(examples=[{"max_num_seqs": 128}])
    state: str = Field(examples=["COMPLETE"])
    origin: str
    screened: bool
    reason: str | None
    cause: str | None
    effective: dict[str, Scalar]
    started_at: Moment
    ended_at: datetime | None
    gpu_seconds: float
    measurements: list[MeasurementShape]


def trial(of: Trial) -> TrialShape:
    special = ("candidate", "state", "effective", "measurements")
    return TrialShape(
        **{name: getattr(of, name) for name in TrialShape.model_fields if name not in special},
        candidate=dict(of.candidate),
        state=of.state.value,
        effective=dict(of.effective),
        measurements=[measurement(each) for each in of.measurements],
    )


class FrontShape(BaseModel):
    """The trials that no other beats in every objective by their first measurements, beside the baseline, and
    what the newest run and the newest confirmation found.
    """

    objectives: list[str]
    baseline: TrialShape | None
    front: list[TrialShape]
    winner: int | None
    conclusion: dict[str, JsonValue] | None
    confirmation: dict[str, JsonValue] | None


class ProfileShape(BaseModel):
    """An immutable version of a winning configuration with its evidence."""

    id: int
    model: str
    target: str
    workload: str
    version: int
    engine_version: str
    gpu_class: str
    candidate: dict[str, Scalar]
    argv: list[str] = Field(examples=[["--max-num-seqs", "128"]])
    env: dict[str, str]
    study_id: str
    trial_id: int | None
    evidence: dict[str, JsonValue]
    digest: str
    created_at: Moment


def profile(of: Profile) -> ProfileShape:
    plain: Any = as_json(of)
    return ProfileShape(**plain, created_at=of.created_at)


class ChangeShape(BaseModel):
    """One thing that differs."""

    kind: str = Field(examples=["knob"])
    name: str = Field(examples=["max_num_seqs"])
    before: str | None
    after: str | None


class AliasShape(BaseModel):
    """Where an alias stands, by its last move. `generation` counts the moves; it is the ETag."""

    model: str
    target: str
    workload: str
    alias: str = Field(examples=["champion"])
    generation: int
    from_version: int | None
    to_version: int | None
    actor: str
    reason: str
    at: Moment


def alias(of: AliasEvent) -> AliasShape:
    key = ("model", "target", "workload")
    return AliasShape(
        **{name: getattr(of.key, name) for name in key},
        **{name: getattr(of, name) for name in AliasShape.model_fields if name not in key},
    )


class DifferenceShape(BaseModel):
    """A change from the baseline, (after − before) / before, by a run's interleaved repeats, with its 95 %
    interval; `high` null: unbounded.
    """

    metric: str
    where: str = Field(examples=["confirm"])
    before: float | None
    after: float | None
    change: float | None = Field(examples=[-0.48])
    low: float | None
    high: float | None
    word: str = Field(examples=["better"], description="better, worse or open (no measurable difference).")
    repeats: int


class NightShape(BaseModel):
    """What one night found, what had changed since the night before, and how sure that is."""

    date: date
    node: str
    workload: str
    run_id: str
    study_id: str
    trial_id: int
    number: int
    metric: str
    value: float
    low: float
    high: float
    baseline: float | None
    outcome: str = Field(examples=["clear winner"], description="What the run concluded.")
    from_baseline: DifferenceShape | None
    from_last_night: float | None = Field(description="Change of the value, (after − before) / before.")
    compared: str = Field(examples=["better"], description="With the night before, beyond noise.")
    regression: bool
    sure: str = Field(examples=["confirmed, 3 repeats, 3.41 to 3.52"])
    candidate: dict[str, Scalar]
    engine_version: str
    changes: list[ChangeShape]
    trials: int
    runs: int


_OF_BEST = ("node", "workload", "run_id", "study_id", "trial_id", "number", "metric", "value", "low", "high",
            "baseline", "engine_version", "trials")  # fmt: skip
_OF_NIGHT = ("compared", "regression", "sure", "runs")
_of_best, _of_night = attrgetter(*_OF_BEST), attrgetter(*_OF_NIGHT)


def night(of: Night) -> dict[str, JSON]:
    """A NightShape as plain JSON: an answer holds hundreds, and making models of them takes its time."""
    return {
        "date": of.date.isoformat(),
        **dict(zip(_OF_BEST, _of_best(of.best), strict=True)),
        **dict(zip(_OF_NIGHT, _of_night(of), strict=True)),
        "outcome": words.outcome_of(of.best),
        "from_baseline": asdict(of.best.change) if of.best.change else None,
        "from_last_night": of.step,
        "candidate": dict(of.best.candidate),
        "changes": [
            {"kind": each.kind, "name": each.name, "before": each.before, "after": each.after}
            for each in of.changes
        ],
    }


class PlaceShape(BaseModel):
    """One node and workload over the nights; `change_per_night` is the median change of the value."""

    node: str
    workload: str
    change_per_night: float | None
    nights: list[NightShape]


class HistoryShape(BaseModel):
    """What each night found of a model, for one metric; `next` is null once every node was told."""

    model: str
    metric: str
    places: list[PlaceShape]
    next: str | None = Field(examples=["WyJncHUtNyJd"])


class TraceShape(BaseModel):
    """Captured traffic, known by the digest of its content."""

    digest: str
    name: str
    meta: dict[str, JsonValue]
    created_at: Moment


def trace(of: TraceInfo) -> TraceShape:
    return TraceShape(digest=of.digest, name=of.name, meta=dict(of.meta), created_at=of.created_at)


class NodeShape(BaseModel):
    """A machine with GPUs."""

    name: str
    gpu_class: str
    gpus: list[str]
    gpu_memory_gib: float | None
    driver: str | None
    host: str
    labels: dict[str, str]
    state: str = Field(examples=["free"])
    lease: str | None = Field(default=None, description="Who holds it now.")


def node(of: Node, holder: str | None = None) -> NodeShape:
    names = ("name", "gpu_class", "gpu_memory_gib", "driver", "host", "state")
    plain = {name: getattr(of, name) for name in names}
    if holder is not None and of.state == "free":
        plain["state"] = "leased"
    return NodeShape(**plain, gpus=list(of.gpus), labels=dict(of.labels), lease=holder)


class ScheduleShape(BaseModel):
    """A nightly run."""

    name: str
    node: str
    cron: str
    timezone: str
    spec: dict[str, JsonValue]
    enabled: bool
    created_at: Moment
    last_due: datetime | None
    last_run_id: str | None


def schedule(of: Schedule) -> ScheduleShape:
    plain = {name: getattr(of, name) for name in ScheduleShape.model_fields if name != "spec"}
    return ScheduleShape(**plain, spec=dict(of.spec))


class AuditShape(BaseModel):
    """One change: who did what to which thing, and why."""

    id: int
    at: Moment
    actor: str
    action: str
    target: str
    reason: str
    detail: dict[str, JsonValue]


def audit(of: AuditEntry) -> AuditShape:
    plain = {name: getattr(of, name) for name in AuditShape.model_fields if name != "detail"}
    return AuditShape(**plain, detail=dict(of.detail))
