"""The Store over SQLite."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.history.conformance import StoreConformance
from tests.history.conformance_service import ServiceConformance
from tuner.history.store import Store


class TestSqlite(StoreConformance, ServiceConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = Store(f"sqlite:///{tmp_path}/tuner.db")
        yield store
        store.close()


class TestMemory(StoreConformance, ServiceConformance):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = Store("sqlite://")
        yield store
        store.close()
