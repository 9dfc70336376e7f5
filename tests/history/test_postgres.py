"""The Store over a real PostgreSQL."""

from collections.abc import Iterator

import pytest

from tests.history.conformance import StoreConformance
from tests.history.conformance_service import ServiceConformance
from tests.history.postgres import Server
from tuner.history.store import Store

pytestmark = pytest.mark.postgres


class TestPostgres(StoreConformance, ServiceConformance):
    @pytest.fixture
    def store(self, postgres: Server) -> Iterator[Store]:
        store = Store(postgres.url())
        yield store
        store.close()
