"""Runs `migrations/` on an open database."""

from typing import TYPE_CHECKING

from sqlalchemy import Connection, text

from tuner.history.database import Database
from tuner.history.tables import REVISIONS
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
    """Upgrades to a revision in one transaction; returns the revision before and after. Safe to race."""
    from alembic import command

    before = database.revision()
    if before is not None and before not in REVISIONS:
        database.check()

    def work(connection: Connection) -> None:
        if not database.sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK})
        command.upgrade(_config(connection), to)

    database.migrate(work)
    after = database.revision()
    return before, str(after)
