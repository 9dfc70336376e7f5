"""LiteLLM's SpendLogs, read from LiteLLM's own database: what a trace needs, no column that holds text."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.errors import BadInput, NotFound, Unavailable

if TYPE_CHECKING:
    from sqlalchemy import ColumnClause, Connection

TABLE = "LiteLLM_SpendLogs"
COLUMNS = (
    "request_id", "call_type", "api_key", "prompt_tokens", "completion_tokens", "startTime", "endTime",
    "completionStartTime", "cache_hit", "end_user", "user", "session_id", "status",
)  # fmt: skip
NEEDED = ("startTime", "prompt_tokens", "completion_tokens")


def export(url: str, target: Path) -> int:
    """Write the rows of a LiteLLM database as JSON lines, oldest first; how many there were.

    BadInput: no such kind of database. NotFound: no such table, or another one of that name. Unavailable: the
    database does not answer. Nothing is written to the database.
    """
    import sqlalchemy as sa  # here, since every look for a file's format imports this module

    try:
        engine = sa.create_engine(_driver(url))
    except (sa.exc.ArgumentError, ImportError) as error:
        raise BadInput(f"{_shown(url)}: this database cannot be read: {error}") from error
    try:
        with engine.connect().execution_options(stream_results=True, yield_per=2000) as connection:
            table = _table(connection, url)
            chosen: list[ColumnClause[object]] = [sa.column(name) for name in COLUMNS if name in table]
            query = sa.select(*chosen).select_from(sa.table(TABLE)).order_by(sa.column("startTime"))
            with target.open("w", encoding="utf-8") as file:
                count = 0
                for row in connection.execute(query).mappings():
                    file.write(_line(dict(row)))
                    count += 1
    except (sa.exc.DBAPIError, OSError) as error:
        said = str(error.orig if isinstance(error, sa.exc.DBAPIError) else error).splitlines()[0]
        raise Unavailable(f"{_shown(url)}: {said}") from error
    finally:
        engine.dispose()
    return count


def _driver(url: str) -> str:
    """A PostgreSQL URL as people write it, with the driver that we ship."""
    scheme, colon, rest = url.partition("://")
    return f"postgresql+psycopg{colon}{rest}" if scheme in ("postgres", "postgresql") else url


def _shown(url: str) -> str:
    """The URL without its password."""
    import sqlalchemy as sa

    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except sa.exc.ArgumentError:
        return url.partition("://")[0] + "://..."


def _table(connection: "Connection", url: str) -> frozenset[str]:
    """The names of the table's columns."""
    import sqlalchemy as sa

    try:
        found = frozenset(column["name"] for column in sa.inspect(connection).get_columns(TABLE))
    except sa.exc.NoSuchTableError:
        raise NotFound(f"{_shown(url)}: there is no table {TABLE} in it") from None
    missing = [name for name in NEEDED if name not in found]
    if missing:
        raise NotFound(f"{_shown(url)}: {TABLE} has no column {' nor '.join(missing)}")
    return found


def _line(row: Mapping[str, object]) -> str:
    told = {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in row.items()
        if value is not None
    }
    return json.dumps(told, separators=(",", ":"), default=str) + "\n"
