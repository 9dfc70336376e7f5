"""Backs an SQLite history up: when somebody asks for it, and before a migration changes it."""

import os
import sqlite3
from datetime import datetime
from pathlib import Path

from tuner.errors import BadInput, Unavailable
from tuner.history.database import Database


def backup(database: Database, target: Path, *, now: datetime) -> Path:
    """Writes a consistent copy of an SQLite history to a file, or to `tuner-<time>.db` in a folder.

    Readers and writers go on meanwhile. The file appears whole or not at all. BadInput for PostgreSQL,
    which brings its own tool, and for a file that is there already.
    """
    path = database.path
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
