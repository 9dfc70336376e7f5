"""Our own capture: a line when a request came, a line when its answer ended; readable however it was cut."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import BadInput
from tuner.traffic.fingerprint import unpacked
from tuner.traffic.importers.draft import CANCELLED, Draft, Row
from tuner.traffic.importers.reading import Record, json_lines
from tuner.traffic.trace import STATUSES, Trace

VERSION = 1
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
"""Column → key of the lines: the begin's whole numbers, the end's microseconds."""


@dataclass(slots=True)
class _Unanswered:
    """A request whose end has not been read yet."""

    record: Record
    blocks: list[int]


def read(path: Path, *, max_len: int | None = None, dequantise: bool = True) -> Trace:
    """Requests by arrival. One whose end is missing is kept as cancelled when its length is known."""
    draft = Draft(path, max_len=max_len)
    records = json_lines(path, draft.quality)
    header = next(records, None)
    if header is None:
        raise BadInput(f"{path}: the capture is empty")
    _check_header(header, draft)
    rows = _rows(records, draft)
    _estimate(rows, draft)
    _name_adapters(rows)
    for row, _ in sorted(rows, key=lambda one: one[0].arrival):
        if row.input_len < 0:
            draft.drop("dropped_no_length")
        else:
            draft.add(row)
    notes = {key: header.data.get(key) for key in ("name", "started_at", "blocks_from", "tokenizer")}
    return draft.trace(source="capture", dequantise=dequantise, known_step_s=0.0, capture=notes)


def _rows(records: Iterator[Record], draft: Draft) -> list[tuple[Row, int]]:
    """(row, bytes of its prompt or 0): begins and ends put together; what has no end comes last."""
    waiting: dict[int, _Unanswered] = {}
    rows: list[tuple[Row, int]] = []
    for record in records:
        if "dropped" in record.data:
            draft.quality["lost_in_capture"] = record.whole("dropped")
        elif record.has("t"):
            waiting[record.whole("r")] = _Unanswered(record, _blocks(record))
        elif "r" in record.data:
            began = waiting.pop(record.whole("r"), None)
            if began is None:
                draft.quality["end_without_begin"] += 1
            else:
                rows.append(_row(began, record, draft))
        else:
            draft.quality["lines_not_understood"] += 1
    if waiting:
        draft.quality["unfinished_when_cut"] += len(waiting)
    return rows + [_row(left, None, draft) for left in waiting.values()]


def _check_header(record: Record, draft: Draft) -> None:
    version = record.whole("capture")
    if version != VERSION:
        raise record.bad("capture", f"is version {version}; this tuner reads version {VERSION}")
    draft.block_size = record.whole("block_size")
    if not 0 < draft.block_size < 1_000_000:
        raise record.bad("block_size", f"is {draft.block_size}, expected tokens per block")


def _estimate(rows: list[tuple[Row, int]], draft: Draft) -> None:
    """(row, bytes of its prompt or 0): begins and ends put together, what has no end at the end."""
    ratios = sorted(size / row.input_len for row, size in rows if row.input_len > 0 and size > 0)
    for row, size in rows:
        if row.input_len < 0 and size > 0 and ratios:
            row.input_len = max(1, round(size / ratios[len(ratios) // 2]))
            draft.quality["input_len_estimated"] += 1


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


def _row(began: _Unanswered, end: Record | None, draft: Draft) -> tuple[Row, int]:
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
            draft.quality["output_len_from_chunks"] += 1
    row = Row(
        arrival=record.nanoseconds("t", 1),
        input_len=size,
        output_len=output,
        status=status,
        blocks=began.blocks,
        **values,
    )
    return row, record.whole("y") if record.has("y") else 0
