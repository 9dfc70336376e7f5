"""The change token of a database: a number that changes with every commit; reading it takes microseconds."""

import hashlib
import threading
import time

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import PoolProxiedConnection

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
