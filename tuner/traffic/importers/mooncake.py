"""Mooncake's JSONL (timestamp in ms, chained ids of 512-token blocks) and AIPerf's wider form of it."""

from pathlib import Path
from typing import Any

from tuner.traffic.importers.draft import Draft, Row
from tuner.traffic.importers.reading import Record, json_lines
from tuner.traffic.importers.units import BareClock
from tuner.traffic.trace import Trace

BLOCK_SIZE = 512
LICENCE = "Apache-2.0, Moonshot AI (github.com/kvcache-ai/Mooncake), when it is the published trace"
TEXT_KEYS = ("text_input", "messages", "payload")


def read(
    path: Path, *, unit: str | None = None, max_len: int | None = None, dequantise: bool = True
) -> Trace:
    """Rows `timestamp, input_length, output_length, hash_ids`, and AIPerf's `session_id, delay, priority`.

    Both say milliseconds in their documents, and files of this form in seconds go round: see units.py.
    A row whose prompt is given as text has no length here: BadInput, because counting it needs a tokenizer.
    """
    clock = BareClock(path, "timestamp", unit)
    draft = Draft(path, block_size=BLOCK_SIZE, max_len=max_len, clock=clock)
    turns: dict[object, tuple[int, int, float]] = {}
    for record in json_lines(path, draft.quality):
        if "input_length" not in record.data and (text := [k for k in TEXT_KEYS if k in record.data]):
            raise record.bad(text[0], "holds text without 'input_length'; import it as format 'openai'")
        _add(draft, clock, record, turns)
    return draft.trace(source="mooncake", licence=LICENCE, dequantise=dequantise)


def _add(draft: Draft, clock: BareClock, record: Record, turns: dict[object, tuple[int, int, float]]) -> None:
    session = record.data.get("session_id")
    session = None if session is None else str(session)
    turn, previous, at = turns.get(session, (0, -1, 0.0)) if session is not None else (-1, -1, 0.0)
    think = float("nan")
    if record.has("delay"):
        think = record.number("delay")
    if record.has("timestamp") or not record.has("delay"):
        at = clock.read(record)
    else:
        at += record.number("delay")
    row = Row(
        arrival=at,
        input_len=record.whole("input_length"),
        output_len=record.whole("output_length"),
        session=session,
        turn=turn,
        key=None if session is None else (session, turn),
        parent=None if previous < 0 else (session, previous),
        think_s=think,
        priority=record.whole("priority") if record.has("priority") else 0,
        blocks=block_ids(record),
    )
    if draft.add(row) and session is not None:
        turns[session] = (turn + 1, turn, at)


def block_ids(record: Record) -> list[Any]:
    """The hash ids: whole numbers or strings, nothing else."""
    ids = record.items("hash_ids")
    for one in ids:
        if type(one) is not int and type(one) is not str:
            raise record.bad("hash_ids", f"holds {one!r}, expected whole numbers")
    return ids
