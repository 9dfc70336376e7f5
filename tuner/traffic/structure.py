"""Which requests of a trace belong together: conversations, and shared prefixes that a cache finds.

Also traces that are made from a trace: faster or slower, fewer whole sessions, or more load by shifted
copies.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tuner.errors import BadInput
from tuner.measures import many
from tuner.records import JSON
from tuner.traffic.trace import COLUMNS, Trace, build

# So many shared blocks beyond what all requests share make two requests one conversation.
_BEYOND = 2


def infer_sessions(trace: Trace) -> Trace:
    """The trace with sessions, turns and parents, if it has blocks. Rows that already have a session keep it.

    The parent is the latest earlier row that shares the longest prefix. This prefix is at least two blocks
    longer than the prefix that half of all rows share. It contains the parent's own prompt, up to one block.
    A parent may have several children.
    """
    if not len(trace.blocks):
        return trace
    parent, session, turn = (column.copy() for column in (trace.parent, trace.session, trace.turn))
    common = _common_depth(trace)
    last: dict[int, tuple[int, int]] = {}
    new_session = int(session.max(initial=-1)) + 1
    for row in range(len(trace)):
        ids = trace.row_blocks(row).tolist()
        if session[row] < 0 and len(ids) >= common + _BEYOND:
            found = _deepest(ids, last, common + _BEYOND)
            if found is not None and len(trace.row_blocks(found[0])) <= found[1] + 1:
                above = found[0]
                if session[above] < 0:
                    session[above], turn[above], new_session = new_session, 0, new_session + 1
                parent[row], session[row], turn[row] = above, session[above], turn[above] + 1
        for depth, block in enumerate(ids, 1):
            last[block] = (row, depth)
    changed = trace.changed(parent=parent, session=session, turn=turn)
    return fill_think(changed).with_meta(sessions="inferred from shared blocks")


def chain_sessions(trace: Trace) -> Trace:
    """The trace with turns and parents, for sessions whose source has none.

    A turn follows the latest row of its session that had ended when the turn came. If no earlier row had
    ended, the client did not wait, so the turn begins a new conversation.
    """
    if not (trace.session >= 0).any():
        return trace
    parent, turn = trace.parent.copy(), trace.turn.copy()
    told = np.unique(trace.session[(trace.session >= 0) & ((parent >= 0) | (turn > 0))])
    rows = np.flatnonzero((trace.session >= 0) & ~np.isin(trace.session, told))
    ends = trace.arrival_s + np.nan_to_num(trace.obs_e2e_s, nan=0.0)
    before: dict[int, list[int]] = {}
    for row in rows.tolist():
        earlier = before.setdefault(int(trace.session[row]), [])
        arrival = trace.arrival_s[row]
        above = next((one for one in reversed(earlier) if ends[one] <= arrival), -1)
        parent[row], turn[row] = above, turn[above] + 1 if above >= 0 else 0
        earlier.append(row)
    return trace.changed(parent=parent, turn=turn)


def fill_think(trace: Trace) -> Trace:
    """The trace with think times where the parent's end is known: arrival − parent's (arrival + E2E), ≥ 0."""
    known = (trace.parent >= 0) & np.isnan(trace.think_s)
    if not known.any():
        return trace
    ends = trace.arrival_s + trace.obs_e2e_s
    gaps = np.maximum(trace.arrival_s - ends[trace.parent], 0.0)
    return trace.changed(think_s=np.where(known, gaps, trace.think_s))


def new_tokens(trace: Trace) -> NDArray[np.int32]:
    """The tokens that each turn adds to its parent's prompt and answer; -1 for a first turn or a shortened
    history.

    A replay with live history appends these tokens to the conversation that the engine has written.
    """
    before = trace.input_len[trace.parent] + trace.output_len[trace.parent]
    added = trace.input_len - before
    return np.where((trace.parent >= 0) & (added > 0), added, -1).astype(np.int32)


def prefers_live_history(trace: Trace) -> bool:
    """Whether the recorded blocks would miss much reuse: the turns are known, and answers are > 10 % of
    prompts.
    """
    if not (trace.parent >= 0).any():
        return False
    return bool(trace.output_len.mean() > 0.1 * trace.input_len.mean())


def _common_depth(trace: Trace) -> int:
    """The number of leading blocks that more than half of all rows share."""
    depth, rows = 0, len(trace)
    starts = trace.block_offsets[:-1]
    lengths = np.diff(trace.block_offsets)
    while True:
        have = starts[lengths > depth] + depth
        counts = Counter(trace.blocks[have].tolist())
        if not counts or counts.most_common(1)[0][1] <= rows / 2:
            return depth
        depth += 1


def _deepest(ids: list[int], last: dict[int, tuple[int, int]], least: int) -> tuple[int, int] | None:
    """(row, depth) of the latest row that shares the most of these blocks, at the same depth; None if no row
    shares one.
    """
    for depth in range(len(ids), least - 1, -1):
        found = last.get(ids[depth - 1])
        if found is not None and found[1] == depth:
            return found
    return None


def reuse_by_capacity(trace: Trace, capacities: Sequence[int | None]) -> dict[int | None, float]:
    """The share of input tokens that an LRU prefix cache finds, by its size in tokens (None: unlimited).
    Requests are served one after another in order of arrival, in blocks of the trace's size.

    Answers are not cached.
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
    """The number of leading blocks of each prompt that an LRU cache of `most` blocks has. It drops the last
    blocks of a prompt first.
    """
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
    """The tokens that an engine with blocks of `block_size` finds in its cache, for each row. The rows are
    served in order, from an empty cache.

    The rules are the engine's. Only complete blocks count, and all tokens up to their end must be equal. The
    last token of a prompt is always computed, so a whole prompt never counts. Answers fill the cache but are
    never found. With `capacity_tokens`, the least recently used blocks are dropped first.
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
    """Numbers of the complete engine blocks in a row's shared blocks. Two blocks have the same number if
    their whole prefix is the same.

    Each call adds to `names`, so pass the same one for all rows that are compared. A block with tokens that
    only this row has is left out, because no other row has it.
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


# Requests of a trace made by copies.
MOST = 50_000_000


def scaled(trace: Trace, speed: float) -> Trace:
    """The same requests in the same order, `speed` times as fast; think times and prompts stay."""
    if not (np.isfinite(speed) and speed > 0):
        raise BadInput(f"speed is {speed}, expected a number above 0")
    return trace.changed(arrival_s=trace.arrival_s / speed).with_meta(speed=speed)


def up_to(trace: Trace, most: int) -> Trace:
    """The trace without requests of more than `most` tokens (prompt and answer); its quality report counts
    them.
    """
    over = trace.input_len.astype(np.int64) + trace.output_len > most
    if not over.any():
        return trace
    counts = trace.meta.get("quality")
    quality: dict[str, JSON] = dict(counts) if isinstance(counts, dict) else {"rows_read": len(trace)}
    before = quality.get("dropped_over_length", 0)
    quality["dropped_over_length"] = int(over.sum()) + (before if isinstance(before, int) else 0)
    return trace.take(np.flatnonzero(~over)).with_meta(quality=quality)


def counted(trace: Trace) -> Trace:
    """The trace with counts of its own rows. A slice still has the quality report of the trace that it was
    cut from.
    """
    known = trace.meta.get("quality")
    counts = dict(known) if isinstance(known, dict) else {}
    rows = [n for name, n in counts.items() if name.startswith("dropped_") and isinstance(n, int)]
    if not counts or counts.get("rows_read") == len(trace) + sum(rows):
        return trace
    return trace.with_meta(rows=len(trace), quality={"rows_read": len(trace)})


def without_beams(trace: Trace, how: str) -> Trace:
    """The trace with its beam searches as sampled answers, one for each beam (`sample`), or without them
    (`drop`).
    """
    if how not in ("sample", "drop"):
        raise BadInput(f"beam is '{how}', expected sample or drop")
    if how == "drop":
        return trace.take(np.flatnonzero(trace.beam == 0), start_s=0.0).with_meta(beam=how)
    n = np.where(trace.beam > 0, np.maximum(trace.n, trace.beam), trace.n)
    return trace.changed(n=n, beam=np.zeros_like(trace.beam)).with_meta(beam=how)


def groups(trace: Trace) -> NDArray[np.int64]:
    """A group number for each row: its session, otherwise its first block that at most half of the rows
    share, otherwise the row itself.

    Rows of one group share prefixes, and thinning keeps or drops whole groups.
    """
    count = len(trace)
    keys = np.arange(count, dtype=np.int64)
    key = _first_own_block(trace)
    has = key >= 0
    keys[has] = count + key[has]
    base = count + (int(trace.blocks.max()) + 1 if len(trace.blocks) else 0)
    in_session = trace.session >= 0
    keys[in_session] = base + trace.session[in_session]
    return np.asarray(np.unique(keys, return_inverse=True)[1], np.int64)


def thinned(trace: Trace, share: float, seed: int = 0) -> Trace:
    """About `share` of the traffic: whole sessions and prefix groups are kept or dropped, arrivals stay."""
    if not 0 < share <= 1:
        raise BadInput(f"share is {share}, expected a number in (0, 1]")
    group = groups(trace)
    kept = np.random.default_rng(seed).random(int(group.max()) + 1 if len(group) else 0) < share
    return trace.take(np.flatnonzero(kept[group]), start_s=0.0).with_meta(share=share, thin_seed=seed)


def superposed(trace: Trace, copies: int, seed: int = 0) -> Trace:
    """`copies` of the traffic added together. Each is shifted in time, and has its own blocks and sessions.

    Use it for more than about three times the load. It keeps the length of bursts, which a higher speed would
    shorten. If a shift cuts a session at the end of the trace, its later turns lose their parent.
    """
    if copies < 1:
        raise BadInput(f"copies is {copies}, expected at least 1")
    if copies * len(trace) > MOST:
        raise BadInput(
            f"{copies} copies of {many(len(trace), 'request')} are too many:"
            f" a trace can have at most {MOST:,} requests"
        )
    span = trace.duration_s + trace.duration_s / max(len(trace) - 1, 1)
    shifts = np.concatenate([[0.0], np.random.default_rng(seed).random(copies - 1) * span])
    columns: dict[str, Any] = {name: np.tile(getattr(trace, name), copies) for name in COLUMNS}
    columns["arrival_s"] = np.concatenate([(trace.arrival_s + shift) % span for shift in shifts])
    for name in ("client", "session", "parent"):
        values = getattr(trace, name)
        step = len(trace) if name == "parent" else (int(values.max()) + 1 if len(values) else 0)
        columns[name] = np.concatenate([np.where(values < 0, -1, values + step * k) for k in range(copies)])
    step = int(trace.blocks.max()) + 1 if len(trace.blocks) else 0
    blocks = np.concatenate([trace.blocks + step * k for k in range(copies)])
    lengths = np.tile(np.diff(trace.block_offsets), copies)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    meta = {**trace.meta, "copies": copies, "copy_seed": seed}
    return build(columns, blocks=(offsets, blocks), block_size=trace.block_size, meta=meta)


def merged(traces: Sequence[Trace]) -> Trace:
    """Several traces from the same start, with separate clients, sessions and blocks. BadInput if their block
    sizes differ.
    """
    sizes = {one.block_size for one in traces if len(one.blocks)}
    if not traces or len(sizes) > 1:
        raise BadInput(f"only traces with the same block size can be merged, got {sorted(sizes)}")
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in COLUMNS}
    bases = {"client": 0, "session": 0, "parent": 0}
    blocks, lengths, base = [], [], 0
    for one in traces:
        for name in COLUMNS:
            values = getattr(one, name)
            if name in bases:
                values = np.where(values < 0, -1, values + bases[name])
                bases[name] = max(bases[name], int(values.max(initial=-1)) + 1)
            columns[name].append(values)
        bases["parent"] = sum(len(part) for part in columns["parent"])
        blocks.append(one.blocks + base)
        base += int(one.blocks.max(initial=-1)) + 1
        lengths.append(np.diff(one.block_offsets))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    meta: dict[str, JSON] = {**traces[0].meta, "merged": [one.digest for one in traces]}
    return build(
        joined, blocks=(offsets, np.concatenate(blocks)), block_size=max(sizes, default=0), meta=meta
    )


def _first_own_block(trace: Trace) -> NDArray[np.int64]:
    """For each row the first block id that at most half of the rows have; -1 if it has none."""
    lengths = np.diff(trace.block_offsets)
    found = np.full(len(trace), -1, np.int64)
    if not len(trace.blocks):
        return found
    rows_of = np.repeat(np.arange(len(trace)), lengths)
    uses = np.bincount(np.unique(trace.blocks, return_inverse=True)[1])
    common = uses[np.unique(trace.blocks, return_inverse=True)[1]] > max(1, len(trace) // 2)
    own = np.flatnonzero(~common)
    rows, first = np.unique(rows_of[own], return_index=True)
    found[rows] = trace.blocks[own[first]]
    return found
