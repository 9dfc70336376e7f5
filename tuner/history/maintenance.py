"""Upgrades a history to this release, backs it up, and copies it into another database."""

import os
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Integer, Table, func, insert, select, text

from tuner.errors import BadInput, Conflict, NotFound, Unavailable
from tuner.history.database import Database
from tuner.history.tables import REVISIONS, leases, metadata
from tuner.measures import many
from tuner.settings import shipped

if TYPE_CHECKING:
    from alembic.config import Config

# Key of the PostgreSQL advisory lock that one upgrade at a time holds: the ASCII codes of "tuner".
LOCK = 0x7475_6E65_72

# Rows that a copy holds in memory: trials with their measurements are a few kB each.
BATCH = 1000


def upgrade(database: Database, to: str = "head") -> tuple[str | None, str]:
    """Runs `migrations/` in one transaction; returns the revision before and after. Safe to run
    twice at once.

    An SQLite file that holds a history is first copied beside itself. Conflict, and nothing is changed, while
    a controller of an earlier release holds a node: it would go on writing in the old form.
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
    return before, str(database.revision())


def _config(connection: Connection) -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(shipped("migrations")))
    config.attributes["connection"] = connection
    return config


def _refuse_at_work(connection: Connection, now: datetime) -> None:
    held = select(leases).where(leases.c.released.is_(False), leases.c.expires_at > now)
    for row in connection.execute(held.order_by(leases.c.node)).mappings():
        raise Conflict(
            f"node '{row['node']}' is leased to '{row['holder']}', a run of the earlier release. Cancel this"
            " run, or wait until it has ended. If it was lost, its lease ends at"
            f" {row['expires_at']:%H:%M:%S} UTC. Then upgrade"
        )


@contextmanager
def _whole(target: Path, ending: str, now: datetime) -> Iterator[tuple[Path, Path]]:
    """(the target, a file beside it to write to). The target appears when all is written, or not at all.

    A target that is a folder gets `tuner-<time>` with this ending in it. BadInput for a file that is there.
    """
    if target.is_dir():
        target = target / f"tuner-{now:%Y%m%dT%H%M%SZ}{ending}"
    if target.exists():
        raise BadInput(f"{target} exists: a backup never overwrites a file")
    part = target.with_name(f".{target.name}.part")
    try:
        part.unlink(missing_ok=True)
        yield target, part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(target)
    except (OSError, sqlite3.Error, tarfile.TarError) as error:
        part.unlink(missing_ok=True)
        raise Unavailable(f"the backup {target} could not be written: {error}") from error


def backup(database: Database, target: Path, *, now: datetime) -> Path:
    """Writes a consistent copy of an SQLite history to a file, or to `tuner-<time>.db` in a folder.

    Others may read and write meanwhile. The file appears complete or not at all. BadInput for PostgreSQL,
    which has its own tool, and for a file that exists.
    """
    if database.path is None:
        raise BadInput("only an SQLite file is backed up here: for PostgreSQL use pg_dump")
    with (
        _whole(target, ".db", now) as (whole, part),
        closing(sqlite3.connect(database.path)) as here,
        closing(sqlite3.connect(part)) as there,
    ):
        here.backup(there)
        there.execute("PRAGMA journal_mode = DELETE")
    return whole


def copy(source: Database, target: Database) -> dict[str, int]:
    """Copies every row, ids included, in one transaction of each side; returns rows per table.

    Both must be at this release's revision and the target empty: Conflict otherwise, and nothing is written.
    """
    source.check()
    target.check()

    def work(there: Connection) -> dict[str, int]:
        _refuse_full(there)
        return source.read(lambda here: _copy_all(here, there))

    return target.write(work)


def _refuse_full(connection: Connection) -> None:
    for table in metadata.sorted_tables:
        if rows := connection.execute(select(func.count()).select_from(table)).scalar():
            raise Conflict(
                f"the target is not empty ({many(rows, 'row')} in '{table.name}'): copy into a new database"
            )


def _copy_all(here: Connection, there: Connection) -> dict[str, int]:
    copied: dict[str, int] = {}
    for table in metadata.sorted_tables:
        copied[table.name] = 0
        found = here.execution_options(yield_per=BATCH).execute(select(table))
        for rows in found.mappings().partitions(BATCH):
            there.execute(insert(table), [dict(row) for row in rows])
            copied[table.name] += len(rows)
        _advance(there, table)
    return copied


def _advance(connection: Connection, table: Table) -> None:
    """Makes PostgreSQL's next id come after the copied ones; SQLite does so by itself."""
    if connection.dialect.name != "postgresql" or table.autoincrement_column is None:
        return
    if isinstance(table.c.id.type, Integer):
        connection.execute(
            text(
                f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'),"
                f" (SELECT max(id) FROM {table.name}))"
            )
        )


def pack(database: Database, files: Mapping[str, Path], target: Path, *, now: datetime) -> Path:
    """Writes an archive of a history, PostgreSQL or SQLite, as `tuner.db`, and of files by their names in it;
    only its owner can read it. To a new file, or to `tuner-<time>.tar.gz` in a folder; it appears complete or
    not at all. BadInput for a file that exists.
    """
    with _whole(target, ".tar.gz", now) as (whole, part), tempfile.TemporaryDirectory() as scratch:
        inside = Path(scratch) / "tuner.db"
        if database.path is not None:
            backup(database, inside, now=now)
        else:
            copy(database, there := _made(f"sqlite:///{inside}"))
            there.close()
        with (
            os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as raw,
            tarfile.open(fileobj=raw, mode="w:gz") as archive,
        ):
            for name, path in {"tuner.db": inside, **files}.items():
                archive.add(path, arcname=name, recursive=False)
    return whole


def _made(url: str) -> Database:
    """A database at this release's revision, made where there was none."""
    found = Database(url)
    found.make_folder()
    if found.revision() is None:
        upgrade(found)
    return found


def unpack(archive: Path, home: Path, url: str) -> int:
    """Puts what `pack` wrote into another home and its database; returns how many files there are beside it.

    Nothing is written over: Conflict if the database has rows or the home has one of the files. BadInput
    for a file that is no such archive.
    """
    try:
        with tempfile.TemporaryDirectory() as scratch:
            inside = Path(scratch)
            with tarfile.open(archive, "r:gz") as found:
                found.extractall(inside, filter="data")
            if not (inside / "tuner.db").is_file():
                raise BadInput(f"{archive}: not a backup of `tuner db backup --full`: it has no tuner.db")
            files = [path for path in sorted(inside.rglob("*")) if path.is_file()]
            files.remove(inside / "tuner.db")
            for path in files:
                if (there := home / path.relative_to(inside)).exists():
                    raise Conflict(f"{there} is there already: set TUNER_HOME to an empty folder")
            upgrade(source := Database(f"sqlite:///{inside / 'tuner.db'}"))
            copy(source, _made(url))
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
