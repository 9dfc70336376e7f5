"""Records of the service's own rows, beside those in `tuner.records`."""

from dataclasses import dataclass, field
from datetime import datetime

from tuner.conclusions import Difference, Judgement
from tuner.records import JsonObject, Knobs, attempt_name

SCOPES = ("read", "run", "promote", "admin")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInfo:
    """A registered trace: the digest of its content is its identity, `path` its file."""

    digest: str
    name: str
    path: str
    meta: JsonObject
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to use a node until `expires_at`. A `fence` is never given twice for one node; it grows."""

    node: str
    holder: str
    fence: int
    acquired_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A nightly run. `spec` holds the study, the window, the missed-run policy and blackout dates."""

    name: str
    node: str
    cron: str
    timezone: str
    spec: JsonObject
    created_at: datetime
    enabled: bool = True
    last_due: datetime | None = None
    last_run_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """An API token as stored: its secret is shown once, at creation, and only its hash is stored."""

    id: str
    name: str
    scopes: tuple[str, ...]
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None

    def valid(self, now: datetime) -> bool:
        """Whether it opens anything: neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > now)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One change: who did what to which thing, and why."""

    id: int
    at: datetime
    actor: str
    action: str
    target: str
    reason: str
    detail: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBest:
    """What one run shows for one metric, with the study's facts beside it. It never changes after the run
    has ended.

    `value` is that of the configuration that the run ended with: its winner, or else the baseline that
    stays. It comes from the run's own repeats, whose span is `low` to `high`. If nothing was measured
    again, it is a first measurement. `baseline` is the baseline's value from the same repeats.
    `outcome` is the conclusion's (None: the run has no end yet). `change` is the difference from the
    baseline, if the metric is an objective. `confirmed`: the gain over the baseline was proved, by a plan
    that is no `demonstration`. A `value` of NaN: the run measured other metrics, and not this one (only if
    `Store.bests` is asked for it).
    """

    run_id: str
    study_id: str
    model: str
    node: str
    gpu_class: str
    workload: str
    engine_version: str
    trace_digest: str
    started_at: datetime
    ended_at: datetime | None
    metric: str
    trial_id: int
    number: int
    attempt: int = 0
    candidate: Knobs
    value: float
    low: float
    high: float
    repeats: int
    confirmed: bool
    trials: int
    baseline: float | None
    demonstration: bool = False
    outcome: Judgement | None = None
    change: Difference | None = None

    @property
    def at(self) -> datetime:
        """When the run ended; its start before that."""
        return self.ended_at or self.started_at

    @property
    def order(self) -> tuple[bool, datetime, str]:
        """Sorts rows: the oldest end first, runs without an end last."""
        return self.ended_at is None, self.at, self.run_id

    @property
    def label(self) -> str:
        """What its trial is called."""
        return attempt_name(self.number, self.attempt)
