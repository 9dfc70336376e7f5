"""What rooms share: a PostgreSQL server and the real engine. Its tests run last, its killers at the end."""

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest
from hypothesis import HealthCheck, settings
from sqlalchemy import Connection
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from tests.engine.helpers import leftovers
from tests.history.postgres import Server, serving
from tests.vllm import Shared
from tuner.engine.http import is_free
from tuner.history import database, store
from tuner.history.database import Database
from tuner.history.maintenance import upgrade

settings.register_profile(
    "loaded",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("loaded")

LAST = ("real_server", "dying_server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No other engine is launched beside the shared one, and none needs it after it was killed."""

    def place(item: pytest.Item) -> int:
        used = getattr(item, "fixturenames", ())
        return max((rank for rank, name in enumerate(LAST, 1) if name in used), default=0)

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """No SQLite file of this process waits for the disk: a power failure is no test."""
    pragmas = database._pragmas

    def without_waiting(busy_timeout_s: float) -> Callable[[DBAPIConnection, ConnectionPoolEntry], None]:
        def on_connect(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
            pragmas(busy_timeout_s)(connection, entry)
            cursor = connection.cursor()
            cursor.execute("PRAGMA synchronous = OFF")
            cursor.close()

        return on_connect

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "_pragmas", without_waiting)
        yield


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    """The statements that make what the migrations make of an empty SQLite file."""
    path = tmp_path_factory.mktemp("migrated") / "tuner.db"
    first = Database(f"sqlite:///{path}")
    upgrade(first)
    first.close()
    with closing(sqlite3.connect(path)) as made:
        return [each for each in made.iterdump() if each not in ("BEGIN TRANSACTION;", "COMMIT;")]


@pytest.fixture(autouse=True)
def migrated_once(migrated: Sequence[str]) -> Iterator[None]:
    """The migrations run once: a new SQLite file gets what they made, in a tenth of the time."""

    def upgraded(new: Database) -> tuple[str | None, str]:
        if new.path is None or (before := new.revision()) is not None:
            return upgrade(new)

        def work(connection: Connection) -> None:
            if not connection.exec_driver_sql("SELECT 1 FROM sqlite_master").first():
                for statement in migrated:
                    connection.exec_driver_sql(statement)

        new.migrate(work)
        return before, str(new.revision())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "upgrade", upgraded)
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """One PostgreSQL server for all tests that are marked so."""
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    shared = Shared(tmp_path_factory.mktemp("real"))
    yield shared
    shared.close()
    assert leftovers(shared.spec) == []
    assert is_free(shared.server.port)


@pytest.fixture
def dying_server(real_server: Shared) -> Shared:
    """The shared engine for the test that ends it."""
    return real_server
