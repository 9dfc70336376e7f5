"""Makes traces from a trace: faster or slower, fewer whole sessions, more load by shifted copies."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInput
from tuner.measures import many
from tuner.records import JSON
from tuner.traffic.trace import COLUMNS, Trace, build

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


def without_beams(trace: Trace, how: str) -> Trace:
    """The trace with its beam searches as sampled answers, one per beam (`sample`), or without them
    (`drop`).
    """
    if how not in ("sample", "drop"):
        raise BadInput(f"beam is '{how}', expected sample or drop")
    if how == "drop":
        return trace.take(np.flatnonzero(trace.beam == 0), start_s=0.0).with_meta(beam=how)
    n = np.where(trace.beam > 0, np.maximum(trace.n, trace.beam), trace.n)
    return trace.changed(n=n, beam=np.zeros_like(trace.beam)).with_meta(beam=how)


def groups(trace: Trace) -> NDArray[np.int64]:
    """A group number per row: its session, else its first block that at most half of the rows share, else the
    row.

    Rows of one group share prefixes; thinning keeps or drops whole groups.
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
    """`copies` of the traffic added together, each shifted in time, with its own blocks and sessions.

    Use it for more than about three times the load: bursts keep their length, and speeding up shortens them.
    A shift cuts a session that goes over the end: its later turns lose their parent.
    """
    if copies < 1:
        raise BadInput(f"copies is {copies}, expected at least 1")
    if copies * len(trace) > MOST:
        raise BadInput(f"{copies} copies of {many(len(trace), 'request')} are more than {MOST:,} requests")
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
