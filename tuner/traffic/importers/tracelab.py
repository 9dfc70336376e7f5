"""TraceLab's agent sessions: rounds with the length of the cached prefix, which becomes virtual blocks."""

from pathlib import Path
from typing import Any

from tuner.traffic.importers import Importer, register
from tuner.traffic.importers.reading import Record, json_lines
from tuner.traffic.importers.stamps import parse_stamp
from tuner.traffic.importers.trace_builder import ImportOptions, Row, TraceBuilder
from tuner.traffic.trace import Trace

BLOCK_SIZE = 16
LICENCE = "CC-BY 4.0, UW SyFI (github.com/uw-syfi/TraceLab), when it is the published data"
INPUTS = ("user_message", "tool_result")


class _Minter:
    """Virtual block ids: a round shares as many blocks with its session's context as it had cached tokens."""

    def __init__(self) -> None:
        self._next = 0
        self._contexts: dict[str, list[int]] = {}
        self._shared: dict[str, list[int]] = {}

    def blocks(self, session: str, model: str, prefix: int, total: int, output: int) -> list[int]:
        """Ids of the prompt's complete blocks. All sessions of a model share the prefix of their
        first round.
        """
        context = self._contexts.get(session)
        wanted = min(prefix, total) // BLOCK_SIZE
        if context is None:
            shared = self._shared.setdefault(model, [])
            while len(shared) < wanted:
                shared.append(self._new())
            context = shared
        kept = context[:wanted]
        ids = kept + [self._new() for _ in range(total // BLOCK_SIZE - len(kept))]
        grown = (total + output) // BLOCK_SIZE - len(ids)
        self._contexts[session] = ids + [self._new() for _ in range(grown)]
        return ids

    def _new(self) -> int:
        self._next += 1
        return self._next


def read(path: Path, options: ImportOptions) -> Trace:
    """One request per round; it arrives when its last input (message or tool result) was there."""
    builder = TraceBuilder(path, options, block_size=BLOCK_SIZE)
    minter = _Minter()
    ends: dict[str, tuple[int, int]] = {}
    for record in json_lines(path, builder.quality):
        session = str(record.data[record.first("session_id")])
        arrival, end = _times(record)
        turn, before = ends.get(session, (-1, arrival))
        total, output = record.whole("input_tokens_total"), record.whole("output_tokens")
        prefix = record.whole("prefix_tokens") if record.has("prefix_tokens") else 0
        if min(total, output, prefix) < 0 or total > 50_000_000 or output > 50_000_000:
            total, output, prefix = -1, 0, 0
        values: dict[str, Any] = {}
        if turn >= 0:
            values = {"parent": (session, turn), "think_s": max(0, arrival - before) / 1e9}
        row = Row(
            arrival=arrival,
            input_len=total,
            output_len=output,
            session=session,
            turn=turn + 1,
            key=(session, turn + 1),
            obs_e2e_s=(end - arrival) / 1e9,
            obs_cached=prefix,
            blocks=minter.blocks(session, str(record.data.get("model")), prefix, total, output)
            if total > 0
            else [],
            **values,
        )
        if builder.add(row):
            ends[session] = (turn + 1, end)
    return builder.trace(
        "tracelab",
        licence=LICENCE,
        known_step_s=0.001,
        blocks_from="prefix lengths",
    )


def _times(record: Record) -> tuple[int, int]:
    """(arrival, end) in nanoseconds: the last input before the model's first event, and the last event."""
    arrival, end, answered = None, None, False
    for event in record.items("timing_events"):
        stamp = event.get("timestamp") if isinstance(event, dict) else None
        at = parse_stamp(stamp) if isinstance(stamp, str) else None
        if at is None:
            raise record.bad("timing_events", f"holds the timestamp {stamp!r}, expected ISO 8601")
        answered = answered or event.get("event_type") not in INPUTS
        if arrival is None or not answered:
            arrival = at
        end = at if end is None else max(end, at)
    if arrival is None or end is None:
        raise record.bad("timing_events", "is empty, expected at least one event")
    return arrival, max(arrival, end)


register(
    Importer(
        format="tracelab",
        read=read,
        json_keys=(("round_index", "timing_events", "input_tokens_total"),),
    )
)
