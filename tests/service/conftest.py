"""A service in this process, over an empty history and over one with a row in every table."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.history.fill import fill
from tests.service.world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    found.store.close()


@pytest.fixture
def filled(world: World) -> World:
    fill(world.store)
    return world
