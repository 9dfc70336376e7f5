"""Runs `migrations/` on an open database."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sqlalchemy import Connection, select, text

from tuner.errors import Conflict
from tuner.history.backup import backup
from tuner.history.database import Database
from tuner.history.tables import REVISIONS, leases
from tuner.settings import shipped

if TYPE_CHECKING:
    from alembic.config import Config

LOCK = 0x7475_6E65_72
"""Key of the PostgreSQL advisory lock that one upgrade at a time holds."""


def _config(connection: Connection) -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(shipped("migrations")))
    config.attributes["connection"] = connection
    return config


def upgrade(database: Database, to: str = "head") -> tuple[str | None, str]:
    """Upgrades to a revision in one transaction; returns the revision before and after. Safe to race.

    An SQLite file that holds a history is first copied beside itself. Conflict, and nothing is changed, while
    a controller of an earlier release holds a node: it would go on writing as it knows.
    """
    from alembic import command

    before = database.revision()
    if before is not None and before not in REVISIONS:
        database.check()
    now, changes = datetime.now(UTC), before not in (None, REVISIONS[-1])
    if changes and database.path is not None:
        name = f"{database.path.stem}-{before}-{now:%Y%m%dT%H%M%S%fZ}.db"
        backup(database, database.path.with_name(name), now=now)

    def work(connection: Connection) -> None:
        if not database.sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK})
        if changes:
            _refuse_at_work(connection, now)
        command.upgrade(_config(connection), to)

    database.migrate(work)
    after = database.revision()
    return before, str(after)


def _refuse_at_work(connection: Connection, now: datetime) -> None:
    held = select(leases).where(leases.c.released.is_(False), leases.c.expires_at > now)
    for row in connection.execute(held.order_by(leases.c.node)).mappings():
        raise Conflict(
            f"node '{row['node']}' is leased to '{row['holder']}', a run of the release before: end it, or"
            f" wait until it has ended (where it was lost: {row['expires_at']:%H:%M:%S} UTC), then upgrade"
        )
