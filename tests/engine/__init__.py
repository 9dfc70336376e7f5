"""The engine room: one process tree, whatever it does."""

import pytest

pytest.register_assert_rewrite("tests.engine.conformance")
