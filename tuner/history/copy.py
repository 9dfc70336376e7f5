"""Copies a whole history into another, empty database; packs one up with the files of its home."""

import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from sqlalchemy import Connection, Integer, Table, func, insert, select, text

from tuner.errors import BadInput, Conflict, NotFound, Unavailable
from tuner.history.backup import backup
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


def pack(store: Store, files: Mapping[str, Path], target: Path, *, now: datetime) -> Path:
    """Writes an archive of a history, PostgreSQL or SQLite, as `tuner.db`, and of files by their names in it;
    for its owner alone. To a new file, or to `tuner-<time>.tar.gz` in a folder; it appears whole or not at
    all. BadInput for a file that is there.
    """
    if target.is_dir():
        target = target / f"tuner-{now:%Y%m%dT%H%M%SZ}.tar.gz"
    if target.exists():
        raise BadInput(f"{target} exists: a backup does not write over anything")
    part = target.with_name(f".{target.name}.part")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            database = Path(scratch) / "tuner.db"
            _as_file(store, database, now)
            part.unlink(missing_ok=True)
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as raw:
                with tarfile.open(fileobj=raw, mode="w:gz") as archive:
                    for name, path in {"tuner.db": database, **files}.items():
                        archive.add(path, arcname=name, recursive=False)
                raw.flush()
                os.fsync(raw.fileno())
        part.replace(target)
    except (OSError, tarfile.TarError) as error:
        part.unlink(missing_ok=True)
        raise Unavailable(f"the backup {target} could not be written: {error}") from error
    return target


def _as_file(store: Store, path: Path, now: datetime) -> None:
    """A history as an SQLite file."""
    if store.database.path is not None:
        backup(store.database, path, now=now)
        return
    there = Store(f"sqlite:///{path}", create=True)
    copy(store, there)
    there.close()


def unpack(archive: Path, home: Path, url: str) -> int:
    """Puts what `pack` wrote into another home and its database; returns how many files there are beside it.

    Nothing is written over: Conflict where the database has rows or the home has one of the files. BadInput
    for what is no such archive.
    """
    try:
        with tempfile.TemporaryDirectory() as scratch:
            inside = Path(scratch)
            with tarfile.open(archive, "r:gz") as found:
                found.extractall(inside, filter="data")
            if not (inside / "tuner.db").is_file():
                raise BadInput(f"{archive}: no backup of `tuner db backup --full`: it holds no tuner.db")
            files = [path for path in sorted(inside.rglob("*")) if path.is_file()]
            files.remove(inside / "tuner.db")
            for path in files:
                if (home / path.relative_to(inside)).exists():
                    raise Conflict(f"{home / path.relative_to(inside)} is there already: give an empty home")
            source = Store(f"sqlite:///{inside / 'tuner.db'}", check=False)
            source.upgrade()
            copy(source, Store(url, create=True))
            source.close()
            for path in files:
                place = home / path.relative_to(inside)
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                shutil.copyfile(path, place)
                place.chmod(0o600)
    except FileNotFoundError as error:
        raise NotFound(f"there is no {error.filename}") from error
    except (OSError, EOFError, tarfile.TarError) as error:
        raise BadInput(f"{archive}: cannot be restored: {error}") from error
    return len(files)
