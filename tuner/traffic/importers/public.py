"""Public traces.

As CSV, lengths only: Azure's (2023, 2024, LMM with images) and BurstGPT 1 to 3. As JSONL with ids of prompt
blocks: Mooncake's (times in ms, blocks of 512 tokens), AIPerf's wider form of it, and Qwen-Bailian's (times
in s, blocks of 16 tokens, chats by parent). TraceLab's agent sessions: rounds with the length of the cached
prefix, which becomes virtual blocks.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from tuner.traffic.importers import Importer, register
from tuner.traffic.importers.reading import Record, csv_records, json_lines
from tuner.traffic.importers.stamps import BareClock, parse_stamp
from tuner.traffic.importers.trace_builder import ERROR, OK, ImportOptions, Row, TraceBuilder
from tuner.traffic.trace import Trace


def read_azure(path: Path, options: ImportOptions) -> Trace:
    """Columns TIMESTAMP, ContextTokens, GeneratedTokens; NumImages is counted in the quality report."""
    builder = TraceBuilder(path, options)
    for record in csv_records(path, builder.quality):
        builder.add(
            Row(
                arrival=record.moment("TIMESTAMP"),
                input_len=record.whole("ContextTokens"),
                output_len=record.whole("GeneratedTokens"),
            )
        )
        if record.has("NumImages") and record.whole("NumImages") > 0:
            builder.quality["images_not_replayed"] += 1
    return builder.trace("azure", licence="CC-BY 4.0, Microsoft Azure (github.com/Azure/AzurePublicDataset)")


def read_burstgpt(path: Path, options: ImportOptions) -> Trace:
    """Rows of every model and log type. Versions from 3 on also have sessions, and the time from the request
    to its end.
    """
    clock = BareClock(path, "Timestamp", options.unit)
    builder = TraceBuilder(path, options, clock=clock)
    turns: Counter[str] = Counter()
    for record in csv_records(path, builder.quality):
        output = record.whole("Response tokens")
        row = Row(
            arrival=clock.since_first(record.plain_number("Timestamp")),
            input_len=record.whole("Request tokens"),
            output_len=output,
            status=OK if output else ERROR,
            **_session(record, turns),
        )
        if builder.add(row) and row.session is not None:
            turns[str(row.session)] += 1
    return builder.trace(
        "burstgpt",
        licence="CC-BY 4.0, HPMLL (github.com/HPMLL/BurstGPT), if this is the published trace",
        known_step_s=1.0,
    )


def _session(record: Record, turns: "Counter[str]") -> dict[str, Any]:
    found: dict[str, Any] = {}
    if record.has("Session ID"):
        session = str(record.data["Session ID"])
        turn = turns[session]
        found |= {"session": session, "turn": turn, "key": (session, turn)}
        if turn:
            found["parent"] = (session, turn - 1)
    if record.has("Elapsed time"):
        found["obs_e2e_s"] = record.number("Elapsed time")
    return found


register(
    Importer(format="azure", read=read_azure, csv_columns=("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
)
register(
    Importer(
        format="burstgpt",
        read=read_burstgpt,
        csv_columns=("Timestamp", "Request tokens", "Response tokens"),
        takes_unit=True,
    )
)


MOONCAKE = "Apache-2.0, Moonshot AI (github.com/kvcache-ai/Mooncake), if this is the published trace"
BAILIAN = "Apache-2.0, Alibaba (Qwen-Bailian usage traces), if this is the published trace"
TEXT_KEYS = ("text_input", "messages", "payload")


def read_mooncake(path: Path, options: ImportOptions) -> Trace:
    """Rows `timestamp, input_length, output_length, hash_ids`, and AIPerf's `session_id, delay, priority`.

    Both formats document milliseconds, but there are also such files in seconds: see stamps.py. BadInput for
    a row that has its prompt only as text, because a tokenizer would be needed to count it.
    """
    clock = BareClock(path, "timestamp", options.unit)
    builder = TraceBuilder(path, options, block_size=512, clock=clock)
    turns: dict[object, tuple[int, int, float]] = {}
    for record in json_lines(path, builder.quality):
        if "input_length" not in record.data and (text := [k for k in TEXT_KEYS if k in record.data]):
            raise record.bad(text[0], "holds text without 'input_length'; import it as format 'openai'")
        _add_mooncake(builder, clock, record, turns)
    return builder.trace("mooncake", licence=MOONCAKE)


def _add_mooncake(
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


BLOCK_SIZE = 16
LICENCE = "CC-BY 4.0, UW SyFI (github.com/uw-syfi/TraceLab), if this is the published data"
INPUTS = ("user_message", "tool_result")


class _Minter:
    """Virtual block ids. A round shares as many blocks with the context of its session as it had cached
    tokens.
    """

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


def read_tracelab(path: Path, options: ImportOptions) -> Trace:
    """One request for each round. It arrives when its last input (message or tool result) has arrived."""
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
        read=read_tracelab,
        json_keys=(("round_index", "timing_events", "input_tokens_total"),),
    )
)
