"""Small traces for replay tests."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from tuner.traffic import trace as traffic
from tuner.traffic.trace import Trace


def trace(
    arrivals: ArrayLike,
    *,
    inputs: ArrayLike = 12,
    outputs: ArrayLike = 4,
    blocks: Sequence[Sequence[int]] | None = None,
    block_size: int = 0,
    **columns: ArrayLike,
) -> Trace:
    """A trace with the given arrivals; every other column unknown unless given."""
    count = len(np.asarray(arrivals))
    filled = {name: np.full(count, default, dtype=kind) for name, (kind, default) in traffic.COLUMNS.items()}
    given = {"arrival_s": arrivals, "input_len": inputs, "output_len": outputs, **columns}
    for name, values in given.items():
        filled[name] = np.broadcast_to(np.asarray(values), (count,)).astype(traffic.COLUMNS[name][0])
    lists = blocks if blocks is not None else [[] for _ in range(count)]
    return Trace(
        **filled,  # type: ignore[arg-type]
        block_size=block_size,
        block_offsets=np.cumsum([0, *map(len, lists)]).astype(np.int64),
        blocks=np.array([one for row in lists for one in row], np.int64),
    )
