"""One database: how it is opened, how a transaction is run and run again, what its errors mean, and a number
that changes with every commit.
"""

import hashlib
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    SQLAlchemyError,
    StatementError,
)
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection, StaticPool

from tuner import masking
from tuner.errors import BadInput, Conflict, NotFound, TunerError, Unavailable
from tuner.history.tables import REVISIONS, VERSION_TABLE

# A change is seen on a server within this time. Where the database cannot be asked, every interval counts as
# a change.
STEP_S = 0.2


def _clock() -> int:
    """A new number every step, as if something had been written."""
    return -1 - int(time.monotonic() / STEP_S)


class ClockToken:
    """For a database in memory, which cannot be asked."""

    def __call__(self) -> int:
        return _clock()

    def close(self) -> None:
        """Nothing to end."""


class SqliteToken:
    """For an SQLite file: its count of commits by others, read on a connection that never writes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._watch: PoolProxiedConnection | None = None

    def __call__(self) -> int:
        with self._lock:
            if self._watch is None:
                self._watch = self._engine.raw_connection()
            cursor = self._watch.cursor()
            cursor.execute("PRAGMA data_version")
            found = cursor.fetchone()
            cursor.close()
        return int(found[0]) if found else 0

    def close(self) -> None:
        """Ends the connection."""
        with self._lock:
            if self._watch is not None:
                self._watch.close()
                self._watch = None


class PostgresToken:
    """For PostgreSQL: a hash of its snapshot of running transactions; a thread asks, so no caller waits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen = (0.0, 0)

    def __call__(self) -> int:
        if self._thread is None:
            self._start()
        at, found = self._seen
        return found if time.monotonic() - at < STEP_S else _clock()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._watch, name="change-token", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while not self._ended.is_set():
            try:
                with self._engine.connect() as connection:
                    # Without an open transaction, each query sees what was committed before it.
                    self._look(connection.execution_options(isolation_level="AUTOCOMMIT"))
            except SQLAlchemyError:
                self._ended.wait(STEP_S)

    def _look(self, connection: Connection) -> None:
        asked = text("SELECT pg_current_snapshot()::text")
        while not self._ended.wait(STEP_S / 4):
            at = time.monotonic()
            snapshot = str(connection.execute(asked).scalar())
            self._seen = at, int.from_bytes(hashlib.blake2b(snapshot.encode(), digest_size=6).digest())

    def close(self) -> None:
        """Ends the thread."""
        with self._lock:
            self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=STEP_S)


T = TypeVar("T")
WRITE = "tuner_write"
STILL_S = 5.0
MOST_KEPT = 64  # results of `read_once`
SERIALISATION = ("40001", "40P01", "55P03")
_SQLITE_WORDS = {
    "locked": "is locked by another process; try again when that has finished",
    "full": "could not be written: the disk is full",
    "disk i/o": "could not be read or written: disk I/O error",
    "readonly": "is read-only for this user",
    "unable to open": "could not be opened: its folder does not exist or may not be written",
    "not a database": "is not an SQLite database",
    "malformed": "is damaged: restore a backup",
}


def _url(raw: str) -> URL:
    try:
        url = make_url(raw)
    except ArgumentError as error:
        raise BadInput(
            f"'{raw.split('@')[-1]}' is not a database URL: write sqlite:///path/to/tuner.db or"
            " postgresql://user@host/name"
        ) from error
    if url.drivername in ("postgres", "postgresql"):
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise BadInput(f"database '{url.get_backend_name()}' is not supported: use sqlite or postgresql")
    return url


def _pragmas(busy_timeout_s: float) -> Callable[[DBAPIConnection, ConnectionPoolEntry], None]:
    def on_connect(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        # The driver's own implicit BEGIN would be a deferred one; ours is in `_begin`.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(busy_timeout_s * 1000)}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    return on_connect


def _bound(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    """Who is paused in the middle of a transaction loses it, and with it the locks that others wait for."""
    cursor = connection.cursor()
    cursor.execute(f"SET idle_in_transaction_session_timeout = '{STILL_S:g}s'")
    cursor.close()
    connection.commit()


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get(WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


class Database:
    """Runs work in transactions that are serial in effect, on SQLite (WAL) or PostgreSQL.

    `patience_s` bounds how long a write is retried after lost connections and serialisation failures, and
    how long SQLite waits for a lock. Raises Unavailable beyond it: nothing was decided.
    """

    def __init__(self, url: str, *, patience_s: float = 15.0, pause: Callable[[float], None] = time.sleep):
        self.url = _url(url)
        self.name = masking.text(self.url.render_as_string(hide_password=True))
        self.sqlite = self.url.get_backend_name() == "sqlite"
        self._patience_s = patience_s
        self._pause = pause
        self.engine = self._engine()
        self._token: SqliteToken | PostgresToken | ClockToken = ClockToken()
        self._kept: tuple[int, dict[Hashable, Any]] = (0, {})
        if self.path is not None:
            self._token = SqliteToken(self.engine)
        elif not self.sqlite:
            self._token = PostgresToken(self.engine)

    @property
    def path(self) -> Path | None:
        """The SQLite file; None for a memory database or a server."""
        name = self.url.database
        return Path(name) if self.sqlite and name and name != ":memory:" else None

    def _engine(self) -> Engine:
        if not self.sqlite:
            try:
                server = create_engine(self.url, pool_size=10, max_overflow=30, pool_timeout=self._patience_s)
            except ModuleNotFoundError as error:
                raise BadInput(
                    "PostgreSQL needs the driver psycopg: pip install 'vllm-config-tuner[postgres]'"
                ) from error
            event.listen(server, "connect", _bound)
            return server
        engine = create_engine(self.url) if self.path else create_engine(self.url, poolclass=StaticPool)
        event.listen(engine, "connect", _pragmas(self._patience_s))
        event.listen(engine, "begin", _begin)
        return engine

    def close(self) -> None:
        self._token.close()
        self.engine.dispose()

    def change_token(self) -> int:
        """A number that changes once another connection has committed (on a server within 0.2 s); costs
        microseconds.
        """
        return self._token()

    def make_folder(self) -> None:
        """Makes the folder of an SQLite file."""
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise Unavailable(f"the folder of database {self.path} cannot be made: {error}") from error

    def read(self, work: Callable[[Connection], T]) -> T:
        """Runs `work` in one read transaction, again when the connection was lost."""
        return self._run(work, write=False)

    def read_once(self, key: Hashable, work: Callable[[Connection], T]) -> T:
        """As `read`; what was read under this key is given again until something is committed. Nobody may
        change it. Only an SQLite file tells of a commit at once.
        """
        if self.path is None:
            return self.read(work)
        try:
            token = self.change_token()
        except (sqlite3.Error, SQLAlchemyError):
            return self.read(work)
        at, kept = self._kept
        if at != token or len(kept) >= MOST_KEPT:
            kept = {}
            self._kept = (token, kept)
        if key not in kept:
            kept[key] = self.read(work)
        found: T = kept[key]
        return found

    def write(self, work: Callable[[Connection], T]) -> T:
        """Runs `work` in one transaction and commits it exactly once; `work` may be called again from new."""
        return self._run(work, write=True)

    def _run(self, work: Callable[[Connection], T], *, write: bool) -> T:
        waited, pause = 0.0, 0.005
        while True:
            attempt = _Attempt(self, work, write=write)
            try:
                return attempt.run()
            except DBAPIError as error:
                if waited >= self._patience_s or not self._again(error):
                    raise self.translate(error) from error
                if attempt.committed():
                    return attempt.result()
            except OverflowError as error:
                raise BadInput(f"a number is too large: {error}") from error
            except StatementError as error:
                raise BadInput(f"the record is not valid: {error.orig}") from error
            except SQLAlchemyError as error:
                raise Unavailable(f"database {self.name}: {error}") from error
            step = pause * random.uniform(0.5, 1.5)
            self._pause(step)
            waited, pause = waited + step, min(pause * 2, 1.0)

    def _again(self, error: DBAPIError) -> bool:
        if self.sqlite:
            return False
        state = getattr(error.orig, "sqlstate", None)
        refused = state is None and type(error.orig).__name__ == "OperationalError"
        return (
            error.connection_invalidated
            or refused
            or state in SERIALISATION
            or str(state or "").startswith(("08", "57P"))
        )

    def translate(self, error: DBAPIError) -> TunerError:
        """The tuner's error for a driver's, in one sentence."""
        words = " ".join(str(error.orig).split())
        if isinstance(error, IntegrityError):
            return Conflict(f"database {self.name} refused the change: {words}")
        if isinstance(error, DataError):
            return BadInput(f"the database cannot store this record: {words}")
        if self.sqlite:
            for sign, sentence in _SQLITE_WORDS.items():
                if sign in words.lower():
                    kind = BadInput if sign == "not a database" else Unavailable
                    return kind(f"database {self.path or self.name} {sentence}")
        return Unavailable(f"database {self.name} failed: {words}")

    def migrate(self, work: Callable[[Connection], None]) -> None:
        """Runs a migration once, in one transaction that sees what others committed while it waited."""
        try:
            with self.engine.connect() as connection:
                connection = connection.execution_options(**{WRITE: True})
                with connection.begin():
                    work(connection)
        except DBAPIError as error:
            raise self.translate(error) from error

    def revision(self) -> str | None:
        """The revision that the database is at; None for an empty one."""

        def work(connection: Connection) -> str | None:
            if not inspect(connection).has_table(VERSION_TABLE):
                return None
            found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
            return None if found is None else str(found)

        return self.read(work)

    def check(self) -> None:
        """Raises NotFound (empty), or Conflict (older or newer than this release), naming what to do."""
        found = self.revision()
        if found is None:
            raise NotFound(f"database {self.name} is empty: run 'tuner db upgrade'")
        if found not in REVISIONS:
            raise Conflict(
                f"database {self.name} was written by a newer release (revision {found}, this one knows up to"
                f" {REVISIONS[-1]}): install that release, or restore a backup"
            )
        if found != REVISIONS[-1]:
            raise Conflict(
                f"database {self.name} is at revision {found}, this release needs {REVISIONS[-1]}:"
                " make a backup ('tuner db backup') and run 'tuner db upgrade'"
            )


class _Attempt(Generic[T]):
    """One try of one transaction. After a lost connection it can find out whether the commit had arrived."""

    def __init__(self, database: Database, work: Callable[[Connection], T], *, write: bool):
        self._database = database
        self._work = work
        self._write = write
        self._transaction: str | None = None
        self._results: list[T] = []

    def run(self) -> T:
        with self._database.engine.connect() as connection:
            serial = self._write and not self._database.sqlite
            options = {"isolation_level": "SERIALIZABLE"} if serial else {}
            connection = connection.execution_options(**{WRITE: self._write}, **options)
            with connection.begin():
                found = self._work(connection)
                if serial:
                    # The id outlives the connection, so a commit that got no answer can be looked up.
                    asked = connection.exec_driver_sql("SELECT pg_current_xact_id_if_assigned()::text")
                    self._transaction = asked.scalar()
                self._results.append(found)
        return found

    def committed(self) -> bool:
        """Whether the transaction that lost its connection was committed all the same."""
        if not self._results or self._transaction is None:
            return False
        asked = text("SELECT pg_xact_status(CAST(CAST(:id AS text) AS xid8))")

        def status(connection: Connection) -> str | None:
            found = connection.execute(asked, {"id": self._transaction}).scalar()
            return None if found is None else str(found)

        while (state := self._database.read(status)) == "in progress":
            self._database._pause(0.02)
        return state == "committed"

    def result(self) -> T:
        return self._results[0]
