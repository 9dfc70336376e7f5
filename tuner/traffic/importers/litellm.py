"""LiteLLM's SpendLogs, as CSV or JSONL or from LiteLLM's own database: times, token counts and callers.
Columns with text are not read.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import BadInput, NotFound, Unavailable
from tuner.traffic.importers import Importer, register
from tuner.traffic.importers.reading import Record, records
from tuner.traffic.importers.trace_builder import ERROR, OK, ImportOptions, Row, TraceBuilder
from tuner.traffic.trace import Trace

if TYPE_CHECKING:
    from sqlalchemy import ColumnClause, Connection

# Every export of SpendLogs has these.
MARKS = ("startTime", "prompt_tokens", "completion_tokens")

NAMES = {"session": ("session_id",), "client": ("end_user", "user", "api_key"), "key": ("request_id",)}

# Call types that reach a generating model; embeddings, images and the like are counted and left out.
CALLS = frozenset(
    {"completion", "acompletion", "text_completion", "atext_completion", "responses", "aresponses"}
    | {"anthropic_messages", "pass_through_endpoint", ""}
)


def read(path: Path, options: ImportOptions) -> Trace:
    """The rows of calls that generate text.

    If a call streamed, completionStartTime is the time of its first token. Answers from LiteLLM's own cache
    are counted and left out, because they did not reach an engine.
    """
    builder = TraceBuilder(path, options)
    for record in records(path, builder.quality):
        call = str(record.data.get("call_type") or "").lower()
        if call not in CALLS:
            builder.drop("dropped_other_call")
        elif str(record.data.get("cache_hit") or "").lower() == "true":
            builder.drop("dropped_cache_hit")
        else:
            builder.add(_row(record))
    return builder.trace("litellm")


def _row(record: Record) -> Row:
    start = record.moment("startTime")
    values: dict[str, Any] = {}
    if record.has("endTime"):
        values["obs_e2e_s"] = max(0, record.moment("endTime") - start) / 1e9
    if record.has("completionStartTime"):
        first = record.moment("completionStartTime") - start
        if 0 < first / 1e9 < values.get("obs_e2e_s", float("inf")):
            values["obs_ttft_s"] = first / 1e9
    values |= record.given(record.text, NAMES)
    failed = str(record.data.get("status") or "success").lower() not in ("success", "ok")
    return Row(
        arrival=start,
        input_len=record.whole("prompt_tokens"),
        output_len=record.whole("completion_tokens"),
        status=ERROR if failed else OK,
        **values,
    )


register(Importer(format="litellm", read=read, csv_columns=MARKS, json_keys=(MARKS,)))


TABLE = "LiteLLM_SpendLogs"
COLUMNS = (
    "request_id", "call_type", "api_key", "prompt_tokens", "completion_tokens", "startTime", "endTime",
    "completionStartTime", "cache_hit", "end_user", "user", "session_id", "status",
)  # fmt: skip


def export(url: str, target: Path) -> int:
    """Writes the rows of a LiteLLM database as JSON lines, oldest first, and returns their number. Nothing is
    written to the database.

    BadInput if this kind of database is not supported. NotFound if there is no such table, or another table
    of this name. Unavailable if the database does not answer.
    """
    import sqlalchemy as sa  # here, since every look for a file's format imports this module

    scheme, colon, rest = url.partition("://")
    if scheme in ("postgres", "postgresql"):  # as people write it, without the driver
        scheme = "postgresql+psycopg"
    try:
        engine = sa.create_engine(f"{scheme}{colon}{rest}")
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
    missing = [name for name in MARKS if name not in found]
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
