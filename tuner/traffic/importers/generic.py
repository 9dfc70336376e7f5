"""CSV or JSONL of any origin. The user names its columns, or they have usual names."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.errors import BadInput, nearest
from tuner.traffic.importers import Importer, register
from tuner.traffic.importers.reading import Record, records
from tuner.traffic.importers.stamps import UNITS_NS, parse_stamp
from tuner.traffic.importers.trace_builder import ImportOptions, Row, TraceBuilder
from tuner.traffic.trace import STATUSES, Trace

# Columns whose name gives the unit of their numbers.
ARRIVALS = {f"arrival_{unit}": ns for unit, ns in UNITS_NS.items()}

# What a column may be, and the names that are known to mean it.
WANTED: Mapping[str, tuple[str, ...]] = {
    "arrival": (
        "timestamp",
        "TIMESTAMP",
        "Timestamp",
        "time",
        "start_time",
        "startTime",
        "created_at",
        "received_at",
        "request_time",
        "datetime",
        "ts",
    ),
    "arrival_s": ("timestamp_s", "arrival_time_s"),
    "arrival_ms": ("timestamp_ms", "timestamp_start_unix_ms"),
    "arrival_us": ("timestamp_us",),
    "arrival_ns": ("timestamp_ns", "arrival_time_ns"),
    "input_len": (
        "input_length",
        "input_tokens",
        "prompt_tokens",
        "input_toks",
        "ContextTokens",
        "usage.prompt_tokens",
    ),
    "output_len": (
        "output_length",
        "output_tokens",
        "completion_tokens",
        "output_toks",
        "GeneratedTokens",
        "usage.completion_tokens",
    ),
    "max_tokens": (),
    "client": ("client_id", "user", "tenant"),
    "session": ("session_id", "conversation_id"),
    "turn": (),
    "priority": (),
    "n": (),
    "beam": ("beam_width",),
    "lora": ("adapter",),
    "status": (),
    "obs_ttft_s": (),
    "obs_e2e_s": ("duration_s",),
    "obs_cached": ("cached_tokens",),
    "request_id": ("id",),
    "blocks": ("hash_ids", "block_hashes"),
    "block_size": (),
}


# What a request has beside its arrival and its lengths → what its column is called.
WHOLE = {name: name for name in ("max_tokens", "turn", "priority", "n", "beam", "obs_cached")}
SECONDS = {"obs_ttft_s": "obs_ttft_s", "obs_e2e_s": "obs_e2e_s"}
TEXTS = {"client": "client", "session": "session", "lora": "lora", "key": "request_id"}


_CODES = {408: "timeout", 499: "cancelled", 504: "timeout"}
"""HTTP status codes that mean more than success or error; 499 is nginx's code for a client that closed its
connection.
"""


def read(path: Path, options: ImportOptions) -> Trace:
    """Reads the rows.

    `columns` maps what is looked for (`arrival_s`, `input_len`, ...) to the file's own column names.
    `arrival` is a date and time (ISO 8601 or since 1970), or a number in `unit`. `arrival_s|ms|us|ns` have
    their unit in the name, and may be ISO 8601 too. A status is a word of STATUSES or an HTTP status.
    """
    names, builder = options.columns, TraceBuilder(path, options)
    turns: Counter[object] = Counter()
    resolved: dict[str, str] | None = None
    for record in map(_flat, records(path, builder.quality)):
        if resolved is None:
            resolved = _resolve(record, names)
            if options.unit is not None and "arrival" not in resolved:
                raise BadInput(f"{path}: its column name already gives the unit of times; leave --unit out")
        _add(builder, record, resolved, turns, options.unit)
    return builder.trace("generic")


def _flat(record: Record) -> Record:
    """A line without nested objects. A value in an object inside the line gets a path as its name:
    `usage.prompt_tokens`.
    """
    inner = {
        f"{name}.{key}": value
        for name, object_ in record.data.items()
        if isinstance(object_, dict)
        for key, value in object_.items()
    }
    return replace(record, data={**record.data, **inner}) if inner else record


def _resolve(record: Record, names: Mapping[str, str]) -> dict[str, str]:
    """Which column of the file has which meaning. BadInput if the arrival or a length has no column."""
    have = [str(key) for key in record.data]
    for wanted, name in names.items():
        if name not in have:
            raise BadInput(
                f"{record.path}: no column '{name}' for {wanted}{nearest(name, have)}; the file has {have}"
            )
    resolved = dict(names)
    timed = any(wanted in ("arrival", *ARRIVALS) for wanted in names)
    for wanted, known in WANTED.items():
        if wanted in resolved or (timed and wanted in ("arrival", *ARRIVALS)):
            continue
        if found := next((name for name in (wanted, *known) if name in have), None):
            resolved[wanted] = found
    if not any(wanted in resolved for wanted in ("arrival", *ARRIVALS)):
        raise _absent(record, "arrival_s", have, resolved)
    for wanted in ("input_len", "output_len"):
        if wanted not in resolved:
            raise _absent(record, wanted, have, resolved)
    return resolved


def _absent(record: Record, wanted: str, have: list[str], resolved: Mapping[str, str]) -> BadInput:
    words = [wanted, *WANTED[wanted]]
    have = [name for name in have if name not in resolved.values()]
    close = next((hint for word in words if (hint := nearest(word, have))), "")
    return BadInput(
        f"{record.path}: it is not known which column is {wanted}{close}. Name it with"
        f" `tuner trace import --column {wanted}=COLUMN`. The columns are {have}"
    )


def _add(
    builder: TraceBuilder,
    record: Record,
    names: Mapping[str, str],
    turns: "Counter[object]",
    unit: str | None,
) -> None:
    values: dict[str, Any] = {}
    for read_one, wanted in ((record.whole, WHOLE), (record.number, SECONDS), (record.text, TEXTS)):
        keys = {name: (names[column],) for name, column in wanted.items() if column in names}
        values |= record.given(read_one, keys)
    session = values.get("session")
    if session is not None and "key" not in values:
        number = turns[session]
        values |= {"key": (session, number), "parent": (session, number - 1) if number else None}
        values.setdefault("turn", number)
        turns[session] += 1
    if "blocks" in names:
        values["blocks"] = _blocks(builder, record, names)
    row = Row(
        arrival=_arrival(record, names, unit),
        input_len=record.whole(names["input_len"]),
        output_len=record.whole(names["output_len"]),
        status=_status(record, names),
        **values,
    )
    builder.add(row)


def _arrival(record: Record, names: Mapping[str, str], unit: str | None) -> int:
    for wanted, ns in ARRIVALS.items():
        if wanted in names:
            stamp = parse_stamp(str(record.data.get(names[wanted])))  # a date needs no unit
            return record.nanoseconds(names[wanted], ns) if stamp is None else record.moment(names[wanted])
    return record.moment(names["arrival"], unit)


def _status(record: Record, names: Mapping[str, str]) -> int:
    if "status" not in names or not record.has(names["status"]):
        return 0
    word = str(record.data[names["status"]]).lower()
    if re.fullmatch(r"[1-5]\d\d(\.0)?", word):
        code = int(word[:3])
        word = _CODES.get(code, "ok" if 200 <= code < 300 else "error")
    if word not in STATUSES:
        expected = f"expected an HTTP status or one of {list(STATUSES)}{nearest(word, STATUSES)}"
        raise record.bad(names["status"], f"is '{word}', {expected}")
    return STATUSES.index(word)


def _blocks(builder: TraceBuilder, record: Record, names: Mapping[str, str]) -> list[Any]:
    value = record.data.get(names["blocks"])
    ids = value.split() if isinstance(value, str) else record.block_ids(names["blocks"])
    if ids and not builder.block_size:
        if "block_size" not in names:
            raise record.bad(names["blocks"], "needs a column 'block_size' beside it: tokens per block")
        builder.block_size = record.whole(names["block_size"])
        if builder.block_size < 1:
            raise record.bad(names["block_size"], f"is {builder.block_size}, expected at least 1")
    return ids


register(Importer(format="generic", read=read, columns=WANTED, takes_unit=True))
