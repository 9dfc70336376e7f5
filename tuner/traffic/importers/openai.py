"""Gateway logs in OpenAI's format, one exchange per line; `columns` can map where its parts are."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.traffic.exchange import (
    TOKEN_BLOCK,
    Fingerprints,
    RequestFacts,
    ResponseFacts,
    Tokenizer,
    count_tokens,
    read_request,
    read_response,
)
from tuner.traffic.importers import FileStart, Importer, register
from tuner.traffic.importers.reading import Record, json_lines
from tuner.traffic.importers.trace_builder import ERROR, OK, ImportOptions, Row, TraceBuilder
from tuner.traffic.trace import Trace

# What is looked for, and the usual places; a dot steps into an object. A map overrides them.
PLACES: Mapping[str, tuple[str, ...]] = {
    "arrival": (
        "timestamp",
        "time",
        "ts",
        "created_at",
        "start_time",
        "startTime",
        "created",
        "response.created",
    ),
    "request": ("request.body", "request", "body", "request_body", "input"),
    "response": ("response.body", "response", "response_body", "output"),
    "end": ("end_time", "endTime", "finished_at"),
    "first_token": ("first_token_time", "completionStartTime"),
    "session": ("session_id", "conversation_id"),
    "client": ("client", "user", "api_key_hash", "tenant"),
    "id": ("id", "request_id", "custom_id"),
    "status_code": ("status_code", "response.status_code", "status"),
}


def read(path: Path, options: ImportOptions) -> Trace:
    """Reads the lines. Lengths come from `usage`, otherwise from the tokenizer. Texts are hashed into blocks
    and not kept.
    """
    builder = TraceBuilder(path, options, block_size=TOKEN_BLOCK)
    counter = None if options.tokenizer is None else Tokenizer(options.tokenizer)
    prints, sources = Fingerprints(), set()
    for record in json_lines(path, builder.quality):
        sources.add(_add(builder, record, options, (prints, counter)))
    prints.destroy()
    origin = "bytes" if "bytes" in sources else "tokens"
    return builder.trace("openai", blocks_from=origin)


def _add(
    builder: TraceBuilder,
    record: Record,
    options: ImportOptions,
    tools: tuple[Fingerprints, Tokenizer | None],
) -> str:
    columns = options.columns
    body = _document(record, columns, "request")
    if body is None and ("messages" in record.data or "prompt" in record.data):
        body = record.data
    if body is None:
        raise record.bad(
            columns.get("request", "request"),
            f"is missing; the fields are {sorted(map(str, record.data))[:12]}",
        )
    response = _document(record, columns, "response")
    if response is None and "usage" in record.data:
        response = record.data
    answer = ResponseFacts() if response is None else read_response(json.dumps(response).encode())
    request = read_request(body)
    size, out, blocks, source = count_tokens(request, answer, *tools)
    if size is None:
        builder.drop("dropped_no_length")
        return source
    counted = (size, -(-(out or 0) // max(1, request.n)), answer, blocks)
    builder.add(_row(record, options, request, counted))
    return source


def _row(
    record: Record,
    options: ImportOptions,
    request: RequestFacts,
    counted: tuple[int, int, ResponseFacts, list[int]],
) -> Row:
    columns, unit = options.columns, options.unit
    size, out, answer, blocks = counted
    at = _place(record, columns, "arrival")
    if at is None:
        raise record.bad(
            columns.get("arrival", "timestamp"),
            f"is missing; the fields are {sorted(map(str, record.data))[:12]}",
        )
    arrival = at[0].moment(at[1], unit)
    values: dict[str, Any] = {}
    for name, wanted in (("obs_e2e_s", "end"), ("obs_ttft_s", "first_token")):
        if place := _place(record, columns, wanted):
            values[name] = max(0, place[0].moment(place[1], unit) - arrival) / 1e9
    for name, wanted in (("session", "session"), ("client", "client"), ("key", "id")):
        if place := _place(record, columns, wanted):
            values[name] = str(place[0].data[place[1]])
    if place := _place(record, columns, "status_code"):
        code = str(place[0].data[place[1]])
        answer_failed = answer.failed or (code.isdigit() and int(code) >= 400) or code in ("error", "failure")
    else:
        answer_failed = answer.failed
    return Row(
        arrival=arrival,
        input_len=size,
        output_len=out,
        max_tokens=request.max_tokens,
        priority=request.priority,
        n=max(1, request.n),
        beam=request.beam,
        status=ERROR if answer_failed else OK,
        obs_cached=-1 if answer.cached_tokens is None else answer.cached_tokens,
        blocks=blocks,
        **({"session": request.session, "client": request.client} | values),
    )


def _place(record: Record, columns: Mapping[str, str], wanted: str) -> tuple[Record, str] | None:
    """(object, key) that holds a part; None if there is none, or if the line does not have a mapped part."""
    for path in (columns[wanted],) if wanted in columns else PLACES[wanted]:
        holder, *rest = [record], *path.split(".")
        at = holder[0]
        for step in rest[:-1]:
            inner = at.data.get(step)
            if not isinstance(inner, dict):
                break
            at = Record(record.path, record.line, inner)
        else:
            if at.has(rest[-1]):
                return at, rest[-1]
    return None


def _document(record: Record, columns: Mapping[str, str], wanted: str) -> Mapping[str, Any] | None:
    place = _place(record, columns, wanted)
    if place is None or isinstance(place[0].data[place[1]], list):
        return None
    if isinstance(value := place[0].data[place[1]], str) and value[:1] != "{":
        return None
    found = place[0].child(place[1])
    return None if found is None else found.data


def _fits(start: FileStart) -> bool:
    """Whether the first object, or an object in it, has a part of an exchange."""
    first = start.first or {}
    keys = set(first).union(*(value for value in first.values() if isinstance(value, dict)))
    return bool(keys & {"usage", "messages", "prompt"})


register(
    Importer(format="openai", read=read, fits=_fits, columns=PLACES, takes_unit=True, takes_tokenizer=True)
)
