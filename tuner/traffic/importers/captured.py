"""Reads the tuner's own files: captures (one line when a request came, one when its answer ended; also
readable if it was cut off) and traces in Parquet.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import BadInput
from tuner.traffic.exchange import unpacked
from tuner.traffic.importers import Importer, register
from tuner.traffic.importers.reading import Record, json_lines
from tuner.traffic.importers.trace_builder import CANCELLED, ImportOptions, Row, TraceBuilder
from tuner.traffic.structure import up_to
from tuner.traffic.trace import MAGIC, STATUSES, Trace
from tuner.traffic.trace import read as read_trace

VERSION = 1

# Column → key of the lines: whole numbers of the begin, microseconds of the end.
BEGIN: Mapping[str, str] = {
    "client": "c",
    "session": "s",
    "lora": "a",
    "max_tokens": "m",
    "priority": "p",
    "n": "n",
    "beam": "w",
}
END: Mapping[str, str] = {"obs_ttft_s": "f", "obs_e2e_s": "e"}


@dataclass(slots=True)
class _Unanswered:
    """A request whose end has not been read yet."""

    record: Record
    blocks: list[int]


def read(path: Path, options: ImportOptions) -> Trace:
    """The requests by arrival. A request without an end becomes `cancelled` if its length is known."""
    builder = TraceBuilder(path, options)
    records = json_lines(path, builder.quality)
    header = next(records, None)
    if header is None:
        raise BadInput(f"{path}: the capture is empty")
    _check_header(header, builder)
    rows = _rows(records, builder)
    _estimate(rows, builder)
    _name_adapters(rows)
    for row, _ in sorted(rows, key=lambda one: one[0].arrival):
        if row.input_len < 0:
            builder.drop("dropped_no_length")
        else:
            builder.add(row)
    notes = {key: header.data.get(key) for key in ("name", "started_at", "blocks_from", "tokenizer")}
    return builder.trace("capture", known_step_s=0.0, capture=notes)


def _rows(records: Iterator[Record], builder: TraceBuilder) -> list[tuple[Row, int]]:
    """(row, bytes of its prompt or 0) for each request. Requests without an end come last."""
    waiting: dict[int, _Unanswered] = {}
    rows: list[tuple[Row, int]] = []
    for record in records:
        if "dropped" in record.data:
            builder.quality["lost_in_capture"] = record.whole("dropped")
        elif record.has("t"):
            waiting[record.whole("r")] = _Unanswered(record, _blocks(record))
        elif "r" in record.data:
            began = waiting.pop(record.whole("r"), None)
            if began is None:
                builder.quality["end_without_begin"] += 1
            else:
                rows.append(_row(began, record, builder))
        else:
            builder.quality["lines_not_understood"] += 1
    if waiting:
        builder.quality["unfinished_when_cut"] += len(waiting)
    return rows + [_row(left, None, builder) for left in waiting.values()]


def _check_header(record: Record, builder: TraceBuilder) -> None:
    version = record.whole("capture")
    if version != VERSION:
        raise record.bad("capture", f"is version {version}; this tuner reads version {VERSION}")
    builder.block_size = record.whole("block_size")
    if not 0 < builder.block_size < 1_000_000:
        raise record.bad("block_size", f"is {builder.block_size}, expected tokens per block")


def _estimate(rows: list[tuple[Row, int]], builder: TraceBuilder) -> None:
    """Estimates missing prompt lengths from the bytes of the prompts, by the other rows' median ratio."""
    ratios = sorted(size / row.input_len for row, size in rows if row.input_len > 0 and size > 0)
    for row, size in rows:
        if row.input_len < 0 and size > 0 and ratios:
            row.input_len = max(1, round(size / ratios[len(ratios) // 2]))
            builder.quality["input_len_estimated"] += 1


def _name_adapters(rows: list[tuple[Row, int]]) -> None:
    """The model that most requests name is the base; the others are adapters on it."""
    counts = Counter(row.lora for row, _ in rows if row.lora is not None)
    base = counts.most_common(1)[0][0] if counts else None
    for row, _ in rows:
        if row.lora == base:
            row.lora = None


def _status(end: Record) -> int:
    word = str(end.data.get("st", "ok"))
    if word not in STATUSES:
        raise end.bad("st", f"is '{word}', expected one of {list(STATUSES)}")
    return STATUSES.index(word)


def _blocks(record: Record) -> list[int]:
    try:
        return unpacked(record.items("b"))
    except (ValueError, TypeError) as error:
        raise record.bad("b", f"is not a list of [start, length]: {error}") from error


def _row(began: _Unanswered, end: Record | None, builder: TraceBuilder) -> tuple[Row, int]:
    record = began.record
    values: dict[str, Any] = {name: record.whole(key) for name, key in BEGIN.items() if record.has(key)}
    size, status = record.whole("i") if record.has("i") else -1, CANCELLED
    output = 0
    if end is not None:
        size = end.whole("i") if end.has("i") else size
        output = end.whole("o") if end.has("o") else 0
        status = _status(end)
        values |= {name: end.nanoseconds(key, 1_000) / 1e9 for name, key in END.items() if end.has(key)}
        if end.has("k"):
            values["obs_cached"] = end.whole("k")
        if end.data.get("by") == "chunks":
            builder.quality["output_len_from_chunks"] += 1
    row = Row(
        arrival=record.nanoseconds("t", 1),
        input_len=size,
        output_len=output,
        status=status,
        blocks=began.blocks,
        **values,
    )
    return row, record.whole("y") if record.has("y") else 0


register(Importer(format="capture", read=read, json_keys=(("capture",),)))


def read_parquet(path: Path, options: ImportOptions) -> Trace:
    """The trace without requests longer than `max_len` tokens. They are counted, as by other importers."""
    trace = read_trace(path)
    return trace if options.max_len is None else up_to(trace, options.max_len)


register(Importer(format="parquet", read=read_parquet, fits=lambda start: start.text.startswith(MAGIC)))
