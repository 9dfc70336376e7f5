"""Prefix reuse: what a KV cache of some size would have held, and the engine's count, request by request."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tuner.traffic.trace import Trace


def reuse_by_capacity(trace: Trace, capacities: Sequence[int | None]) -> dict[int | None, float]:
    """Share of input tokens found in an LRU prefix cache of so many tokens (None: of any size), per capacity.

    Served one after another in order of arrival, by blocks of the trace's own size, prompts only.
    """
    total = int(trace.input_len.sum(dtype=np.int64))
    if not len(trace.blocks) or not total:
        return {capacity: 0.0 for capacity in capacities}
    size = trace.block_size
    return {
        capacity: _served(trace, None if capacity is None else max(1, capacity // size)) * size / total
        for capacity in capacities
    }


def _served(trace: Trace, most: int | None) -> int:
    """Whole blocks found at the front of prompts by an LRU of `most` blocks; tails go before heads."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits, offsets, blocks = 0, trace.block_offsets.tolist(), trace.blocks.tolist()
    lengths = trace.input_len.tolist()
    for row, length in enumerate(lengths):
        ids = blocks[offsets[row] : offsets[row + 1]][: length // trace.block_size]
        for block in ids:
            if block not in cache:
                break
            hits += 1
        for block in reversed(ids):
            cache[block] = None
            cache.move_to_end(block)
        while most is not None and len(cache) > most:
            cache.popitem(last=False)
    return hits


def predicted_hits(
    trace: Trace, rows: ArrayLike, block_size: int, capacity_tokens: int | None = None
) -> NDArray[np.int64]:
    """Tokens that an engine with blocks of `block_size` finds cached, per row, served in turn from empty.

    The engine's own rules: only whole engine blocks that are the same tokens from the very start, never the
    whole prompt (its last token is always computed); answers take up cache and are never found. With
    `capacity_tokens` the least recently used blocks go first.
    """
    chosen = np.asarray(rows, np.int64)
    found = np.zeros(len(chosen), np.int64)
    most = None if capacity_tokens is None else max(1, capacity_tokens // block_size)
    cache: OrderedDict[int, None] = OrderedDict()
    names: dict[tuple[int, tuple[int, ...]], int] = {}
    answers = -1
    for place, row in enumerate(chosen.tolist()):
        chain = engine_blocks(trace, row, block_size, names)
        limit = (int(trace.input_len[row]) - 1) // block_size
        for block in chain[:limit]:
            if block not in cache:
                break
            found[place] += block_size
        whole = (int(trace.input_len[row]) + max(0, int(trace.output_len[row]) - 1)) // block_size
        extra = max(0, whole - len(chain))
        for block in (*range(answers - extra + 1, answers + 1), *reversed(chain)):
            cache[block] = None
            cache.move_to_end(block)
        answers -= extra
        while most is not None and len(cache) > most:
            cache.popitem(last=False)
    return found


def engine_blocks(
    trace: Trace, row: int, block_size: int, names: dict[tuple[int, tuple[int, ...]], int]
) -> list[int]:
    """Numbers of the whole engine blocks that a row's shared blocks cover; the same number, the same prefix.

    `names` is filled as it goes and must be kept for all rows of one question. A block that the row's own
    tail reaches into is nobody else's and left out.
    """
    ids = trace.row_blocks(row).tolist()
    size, length = trace.block_size, int(trace.input_len[row])
    covered = min(length, size * len(ids))
    chain: list[int] = []
    before = 0
    for start in range(0, covered - block_size + 1, block_size):
        span = tuple(ids[start // size : (start + block_size - 1) // size + 1])
        before = names.setdefault((before, span), len(names) + 1)
        chain.append(before)
    return chain
