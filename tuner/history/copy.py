"""Copies a whole history into another, empty database, and backs one up."""

import os
import sqlite3
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from sqlalchemy import Connection, Integer, Table, func, insert, select, text

from tuner.errors import BadInput, Conflict, Unavailable
from tuner.history.store import Store
from tuner.history.tables import metadata

BATCH = 1000


def copy(
    source: Store, target: Store, *, progress: Callable[[str, int], None] | None = None
) -> dict[str, int]:
    """Copies every row, ids included, in one transaction of each side; returns rows per table.

    Both must be at this release's revision and the target empty: Conflict otherwise, and nothing is written.
    `progress` is told a table and its rows so far.
    """
    source.database.check()
    target.database.check()

    def work(there: Connection) -> dict[str, int]:
        _refuse_full(there)
        return source.database.read(lambda here: _copy_all(here, there, progress))

    return target.database.write(work)


def _refuse_full(connection: Connection) -> None:
    for table in metadata.sorted_tables:
        if rows := connection.execute(select(func.count()).select_from(table)).scalar():
            raise Conflict(
                f"the target is not empty ({rows} rows in '{table.name}'): copy into a new database"
            )


def _copy_all(
    here: Connection, there: Connection, progress: Callable[[str, int], None] | None
) -> dict[str, int]:
    copied: dict[str, int] = {}
    for table in metadata.sorted_tables:
        copied[table.name] = 0
        found = here.execution_options(yield_per=BATCH).execute(select(table))
        for rows in found.mappings().partitions(BATCH):
            there.execute(insert(table), [dict(row) for row in rows])
            copied[table.name] += len(rows)
            if progress is not None:
                progress(table.name, copied[table.name])
        _advance(there, table)
    return copied


def _advance(connection: Connection, table: Table) -> None:
    """Lets PostgreSQL count on from the copied ids; SQLite does by itself."""
    if connection.dialect.name != "postgresql" or table.autoincrement_column is None:
        return
    if not isinstance(table.c.id.type, Integer):
        return
    advance = text(
        f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), (SELECT max(id) FROM {table.name}))"
    )
    connection.execute(advance)


def backup(store: Store, target: Path, *, now: datetime) -> Path:
    """Writes a consistent copy of an SQLite history to a file, or to `tuner-<time>.db` in a folder.

    Readers and writers go on meanwhile. The file appears whole or not at all. BadInput for PostgreSQL,
    which brings its own tool, and for a file that is there already.
    """
    path = store.database.path
    if path is None:
        raise BadInput("only an SQLite file is backed up here: for PostgreSQL use pg_dump")
    if target.is_dir():
        target = target / f"tuner-{now:%Y%m%dT%H%M%SZ}.db"
    if target.exists():
        raise BadInput(f"{target} exists: a backup does not write over anything")
    part = target.with_name(f".{target.name}.part")
    try:
        part.unlink(missing_ok=True)
        here, there = sqlite3.connect(path), sqlite3.connect(part)
        try:
            here.backup(there)
            there.execute("PRAGMA journal_mode = DELETE")
        finally:
            there.close()
            here.close()
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(target)
    except (OSError, sqlite3.Error) as error:
        part.unlink(missing_ok=True)
        raise Unavailable(f"the backup {target} could not be written: {error}") from error
    return target
