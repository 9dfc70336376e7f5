"""Public traces as JSONL with ids of prompt blocks: Mooncake's (times in ms, blocks of 512 tokens), AIPerf's
wider form of it, and Qwen-Bailian's (times in s, blocks of 16 tokens, chats by parent).
"""

from pathlib import Path

from tuner.traffic.importers import Importer, register
from tuner.traffic.importers.reading import Record, json_lines
from tuner.traffic.importers.stamps import BareClock
from tuner.traffic.importers.trace_builder import ImportOptions, Row, TraceBuilder
from tuner.traffic.trace import Trace

MOONCAKE = "Apache-2.0, Moonshot AI (github.com/kvcache-ai/Mooncake), when it is the published trace"
BAILIAN = "Apache-2.0, Alibaba (Qwen-Bailian usage traces), when it is the published trace"
TEXT_KEYS = ("text_input", "messages", "payload")


def read_mooncake(path: Path, options: ImportOptions) -> Trace:
    """Rows `timestamp, input_length, output_length, hash_ids`, and AIPerf's `session_id, delay, priority`.

    Both document milliseconds, but such files in seconds exist too: see stamps.py. BadInput for a row that
    has its prompt as text only, because counting it needs a tokenizer.
    """
    clock = BareClock(path, "timestamp", options.unit)
    builder = TraceBuilder(path, options, block_size=512, clock=clock)
    turns: dict[object, tuple[int, int, float]] = {}
    for record in json_lines(path, builder.quality):
        if "input_length" not in record.data and (text := [k for k in TEXT_KEYS if k in record.data]):
            raise record.bad(text[0], "holds text without 'input_length'; import it as format 'openai'")
        _add(builder, clock, record, turns)
    return builder.trace("mooncake", licence=MOONCAKE)


def _add(
    builder: TraceBuilder, clock: BareClock, record: Record, turns: dict[object, tuple[int, int, float]]
) -> None:
    session = record.data.get("session_id")
    session = None if session is None else str(session)
    turn, previous, at = turns.get(session, (0, -1, 0.0)) if session is not None else (-1, -1, 0.0)
    think = float("nan")
    if record.has("delay"):
        think = record.number("delay")
    if record.has("timestamp") or not record.has("delay"):
        at = clock.since_first(record.plain_number("timestamp"))
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
        blocks=record.block_ids("hash_ids"),
    )
    if builder.add(row) and session is not None:
        turns[session] = (turn + 1, turn, at)


def read_bailian(path: Path, options: ImportOptions) -> Trace:
    """A chat whose parent is known continues its session; a parent of -1 begins one."""
    clock = BareClock(path, "timestamp", options.unit)
    builder = TraceBuilder(path, options, block_size=16, clock=clock, waits=True)
    roots: dict[int, int] = {}
    for record in json_lines(path, builder.quality):
        chat, parent = record.whole("chat_id"), record.whole("parent_chat_id")
        roots[chat] = roots.get(parent, parent) if parent >= 0 else chat
        builder.add(
            Row(
                arrival=clock.since_first(record.plain_number("timestamp")),
                input_len=record.whole("input_length"),
                output_len=record.whole("output_length"),
                session=roots[chat],
                turn=max(0, record.whole("turn") - 1) if record.has("turn") else -1,
                key=chat,
                parent=parent if parent >= 0 else None,
                blocks=record.block_ids("hash_ids"),
            )
        )
    return builder.trace("bailian", licence=BAILIAN)


register(
    Importer(
        format="mooncake",
        read=read_mooncake,
        json_keys=(("timestamp", "input_length"), ("delay", "input_length"), ("timestamp", "text_input")),
        takes_unit=True,
    )
)
register(
    Importer(
        format="bailian",
        read=read_bailian,
        json_keys=(("chat_id", "parent_chat_id", "timestamp"),),
        takes_unit=True,
    )
)
