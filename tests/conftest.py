"""What rooms share: a PostgreSQL server and the real engine. Its tests run last, its killers at the end."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.engine.helpers import leftovers
from tests.history.postgres import Server, serving
from tests.vllm import Shared
from tuner.engine.http import is_free

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
