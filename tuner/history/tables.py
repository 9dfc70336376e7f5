"""The tables. What they mean is in docs/history.md; how they came to be, in `migrations/`."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime

from pydantic_core import from_json
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.types import TypeDecorator

from tuner.records import JSON, canonical_json

# Every revision of `migrations/`, oldest first; the last one is what this release reads and writes.
REVISIONS = ("0001", "0002")
VERSION_TABLE = "tuner_alembic_version"


class Moment(TypeDecorator[datetime]):
    """An aware datetime, stored in UTC. SQLite has no zone and stores the UTC wall clock."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a time of day without a zone")
        utc = value.astimezone(UTC)
        return utc if dialect.name == "postgresql" else utc.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


class Document(TypeDecorator[JSON]):
    """A JSON value as its canonical text: the same bytes, digest and number types on every database."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: JSON, dialect: Dialect) -> str | None:
        return None if value is None else canonical_json(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> JSON:
        if value is None:
            return None
        try:
            found: JSON = from_json(value)
        except ValueError:
            found = json.loads(value)  # half of a surrogate pair, which only Python's own reader takes
        return found


class Words(TypeDecorator[str]):
    """Free text such as a log line: characters that a database refuses are replaced."""

    impl: type[String] = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return value.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


class Label(Words):
    """A short text of the tuner's own making: an id, a digest, a state."""

    impl = String
    cache_ok = True


class Whole(TypeDecorator[int]):
    """An integer of any size (seeds), as decimal text."""

    impl = String(80)
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> int | None:
        return None if value is None else int(value)


NAMES: Mapping[str, str] = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
metadata = MetaData(naming_convention=dict(NAMES))
Key = BigInteger().with_variant(Integer, "sqlite")


def _key() -> tuple[Column[str], Column[str], Column[str]]:
    """The three parts of a profile key."""
    return (
        Column("model", Words, nullable=False),
        Column("target", Words, nullable=False),
        Column("workload", Words, nullable=False),
    )


studies = Table(
    "studies",
    metadata,
    Column("id", Label(64), primary_key=True),
    Column("name", Words, nullable=False),
    Column("model", Words, nullable=False),
    Column("node", Words, nullable=False),
    Column("gpu_class", Words, nullable=False),
    Column("workload", Words, nullable=False),
    Column("engine_version", Words, nullable=False),
    Column("trace_digest", Label(64), nullable=False),
    Column("space_digest", Label(64), nullable=False),
    Column("slices", Document, nullable=False),
    Column("objectives", Document, nullable=False),
    Column("slo", Document, nullable=False),
    Column("seed", Whole, nullable=False),
    Column("identity", Document, nullable=False),
    Column("spec", Document, nullable=False),
    Column("created_at", Moment, nullable=False),
    Index(None, "name", "created_at"),
    Index(None, "model", "node", "workload"),
)

runs = Table(
    "runs",
    metadata,
    Column("id", Label(32), primary_key=True),
    Column("study_id", ForeignKey(studies.c.id), nullable=False),
    Column("state", Label(16), nullable=False),
    Column("started_at", Moment, nullable=False),
    Column("trials_limit", Integer),
    Column("deadline", Moment),
    Column("ended_at", Moment),
    Column("cancel_requested", Boolean, nullable=False),
    Column("reason", Words),
    Column("summary", Document, nullable=False),
    Column("pid", Integer),
    Column("host", Words, nullable=False),
    Index(None, "study_id", "started_at"),
    Index("ix_runs_started_at", "started_at"),
)
Index(
    "uq_runs_running",
    runs.c.study_id,
    unique=True,
    sqlite_where=text("state = 'RUNNING'"),
    postgresql_where=text("state = 'RUNNING'"),
)

launches = Table(
    "launches",
    metadata,
    Column("id", Label(64), primary_key=True),
    Column("study_id", ForeignKey(studies.c.id), nullable=False),
    Column("argv", Document, nullable=False),
    Column("started_at", Moment, nullable=False),
    Column("ended_at", Moment),
    Column("effective", Document, nullable=False),
    Column("timeline", Document, nullable=False),
    Column("kv_tokens", BigInteger),
    Column("verdict", Words),
    Column("directory", Words),
    Index(None, "study_id", "started_at"),
)

trials = Table(
    "trials",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("study_id", ForeignKey(studies.c.id), nullable=False),
    Column("run_id", ForeignKey(runs.c.id), nullable=False),
    Column("number", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("candidate", Document, nullable=False),
    Column("state", Label(16), nullable=False),
    Column("origin", Words, nullable=False),
    Column("seed", Whole, nullable=False),
    Column("screened", Boolean, nullable=False),
    Column("violation", Document, nullable=False),
    Column("reason", Words),
    Column("cause", Words),
    Column("effective", Document, nullable=False),
    Column("started_at", Moment, nullable=False),
    Column("ended_at", Moment),
    Column("gpu_seconds", Double, nullable=False),
    Column("directory", Words),
    UniqueConstraint("study_id", "number", "attempt"),
    Index(None, "run_id"),
)
Index(
    "ix_trials_running",
    trials.c.id,
    sqlite_where=text("state = 'RUNNING'"),
    postgresql_where=text("state = 'RUNNING'"),
)

measurements = Table(
    "measurements",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("trial_id", ForeignKey(trials.c.id), nullable=False),
    Column("launch_id", ForeignKey(launches.c.id)),
    Column("kind", Label(16), nullable=False),
    Column("purpose", Label(16), nullable=False),
    Column("repeat", Integer, nullable=False),
    Column("values", Document, nullable=False),
    Column("slices", Document, nullable=False),
    Column("fidelity", Document, nullable=False),
    Index(None, "trial_id"),
)

run_bests = Table(
    "run_bests",
    metadata,
    Column("run_id", ForeignKey(runs.c.id), primary_key=True),
    Column("metric", Label(40), primary_key=True),
    Column("trial_id", ForeignKey(trials.c.id), nullable=False),
    Column("value", Double, nullable=False),
    Column("low", Double, nullable=False),
    Column("high", Double, nullable=False),
    Column("repeats", Integer, nullable=False),
    Column("confirmed", Boolean, nullable=False),
    Column("trials", Integer, nullable=False),
    Column("baseline", Double),
)

conclusions = Table(
    "conclusions",
    metadata,
    Column("run_id", ForeignKey(runs.c.id), primary_key=True),
    Column("study_id", ForeignKey(studies.c.id), nullable=False),
    Column("at", Moment, nullable=False),
    Column("outcome", Label(40), nullable=False),
    Column("document", Document, nullable=False),
    Index(None, "study_id", "at"),
)

attributions = Table(
    "attributions",
    metadata,
    Column("run_id", ForeignKey(runs.c.id), primary_key=True),
    Column("study_id", ForeignKey(studies.c.id), nullable=False),
    Column("at", Moment, nullable=False),
    Column("document", Document, nullable=False),
    Index(None, "study_id", "at"),
)

traces = Table(
    "traces",
    metadata,
    Column("digest", Label(64), primary_key=True),
    Column("name", Words, nullable=False),
    Column("path", Words, nullable=False),
    Column("meta", Document, nullable=False),
    Column("created_at", Moment, nullable=False),
    Index(None, "name", "created_at"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("name", Words, primary_key=True),
    Column("gpu_class", Words, nullable=False),
    Column("gpus", Document, nullable=False),
    Column("gpu_memory_gib", Double),
    Column("driver", Words),
    Column("host", Words, nullable=False),
    Column("labels", Document, nullable=False),
    Column("state", Label(16), nullable=False),
    Column("handover", Document),
)

leases = Table(
    "leases",
    metadata,
    Column("node", Words, primary_key=True),
    Column("holder", Words, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("acquired_at", Moment, nullable=False),
    Column("expires_at", Moment, nullable=False),
    Column("released", Boolean, nullable=False),
)

profiles = Table(
    "profiles",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    *_key(),
    Column("version", Integer, nullable=False),
    Column("candidate", Document, nullable=False),
    Column("engine_version", Words, nullable=False),
    Column("gpu_class", Words, nullable=False),
    Column("study_id", ForeignKey(studies.c.id), nullable=False),
    Column("trial_id", ForeignKey(trials.c.id)),
    Column("argv", Document, nullable=False),
    Column("env", Document, nullable=False),
    Column("evidence", Document, nullable=False),
    Column("digest", Label(64), nullable=False),
    Column("created_at", Moment, nullable=False),
    UniqueConstraint("model", "target", "workload", "version"),
)

aliases = Table(
    "aliases",
    metadata,
    *_key(),
    Column("alias", Words, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("version", Integer),
    Column("frozen", Boolean, nullable=False),
    UniqueConstraint("model", "target", "workload", "alias"),
    ForeignKeyConstraint(
        ["model", "target", "workload", "version"],
        [profiles.c.model, profiles.c.target, profiles.c.workload, profiles.c.version],
    ),
)

alias_events = Table(
    "alias_events",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    *_key(),
    Column("alias", Words, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("from_version", Integer),
    Column("to_version", Integer),
    Column("actor", Words, nullable=False),
    Column("reason", Words, nullable=False),
    Column("at", Moment, nullable=False),
    UniqueConstraint("model", "target", "workload", "alias", "generation"),
)

schedules = Table(
    "schedules",
    metadata,
    Column("name", Words, primary_key=True),
    Column("node", Words, nullable=False),
    Column("cron", Words, nullable=False),
    Column("timezone", Words, nullable=False),
    Column("spec", Document, nullable=False),
    Column("enabled", Boolean, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("last_due", Moment),
    Column("last_run_id", Label(32)),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", Label(32), primary_key=True),
    Column("name", Words, nullable=False),
    Column("scopes", Document, nullable=False),
    Column("secret_hash", Label(64), nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("expires_at", Moment),
    Column("revoked_at", Moment),
    Column("last_used_at", Moment),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("at", Moment, nullable=False),
    Column("actor", Words, nullable=False),
    Column("action", Words, nullable=False),
    Column("target", Words, nullable=False),
    Column("reason", Words, nullable=False),
    Column("detail", Document, nullable=False),
    Index(None, "at"),
)

answers = Table(
    "answers",
    metadata,
    Column("key", Words, primary_key=True),
    Column("request_digest", Label(64), nullable=False),
    Column("answer", Document, nullable=False),
    Column("at", Moment, nullable=False),
    Index(None, "at"),
)
