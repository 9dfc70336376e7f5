"""Qwen-Bailian's traces: chats by parent, seconds, ids of 16-token blocks."""

from pathlib import Path

from tuner.traffic.importers.draft import Draft, Row
from tuner.traffic.importers.mooncake import block_ids
from tuner.traffic.importers.reading import json_lines
from tuner.traffic.importers.units import BareClock
from tuner.traffic.trace import Trace

BLOCK_SIZE = 16
LICENCE = "Apache-2.0, Alibaba (Qwen-Bailian usage traces), when it is the published trace"


def read(
    path: Path, *, unit: str | None = None, max_len: int | None = None, dequantise: bool = True
) -> Trace:
    """A chat whose parent is known continues its session; a parent of -1 begins one."""
    clock = BareClock(path, "timestamp", unit)
    draft = Draft(path, block_size=BLOCK_SIZE, max_len=max_len, clock=clock, waits=True)
    roots: dict[int, int] = {}
    for record in json_lines(path, draft.quality):
        chat, parent = record.whole("chat_id"), record.whole("parent_chat_id")
        roots[chat] = roots.get(parent, parent) if parent >= 0 else chat
        draft.add(
            Row(
                arrival=clock.read(record),
                input_len=record.whole("input_length"),
                output_len=record.whole("output_length"),
                session=roots[chat],
                turn=max(0, record.whole("turn") - 1) if record.has("turn") else -1,
                key=chat,
                parent=parent if parent >= 0 else None,
                blocks=block_ids(record),
            )
        )
    return draft.trace(source="bailian", licence=LICENCE, dequantise=dequantise)
