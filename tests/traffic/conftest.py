"""Published traces, and small traces with a known structure."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.public import public
from tuner.traffic.trace import Trace, build


@pytest.fixture
def real() -> Callable[[str], Path]:
    """The path of a published trace, by its name."""
    return public


def make(
    inputs: Sequence[int],
    *,
    gap_s: float = 1.0,
    output: int = 10,
    ids: Sequence[Sequence[int]] = (),
    block_size: int = 16,
    columns: Mapping[str, Sequence[float]] | None = None,
) -> Trace:
    """A trace of given prompt lengths and block ids, one request each `gap_s`."""
    lengths = [len(one) for one in ids] or [0] * len(inputs)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    flat = [block for one in ids for block in one]
    given: dict[str, Sequence[float]] = {
        "arrival_s": [gap_s * row for row in range(len(inputs))],
        "input_len": inputs,
        "output_len": [output] * len(inputs),
    }
    return build(given | dict(columns or {}), blocks=(offsets, flat), block_size=block_size if ids else 0)
