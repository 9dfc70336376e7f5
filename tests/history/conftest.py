"""Here the migrations themselves are tested."""

import pytest


@pytest.fixture(autouse=True)
def migrated_once() -> None:
    """Every new history is migrated."""
