"""One PostgreSQL server for all tests that are marked so."""

from collections.abc import Iterator

import pytest

from tests.history.postgres import Server, serving


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    with serving() as server:
        yield server
