"""OpenTelemetry spans in OTLP's JSON (one document, or one export per line), with old and new names of
`gen_ai.*`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuner.errors import BadInput
from tuner.traffic.importers import FileStart, Importer, register
from tuner.traffic.importers.reading import Record, json_lines, whole_json
from tuner.traffic.importers.trace_builder import ERROR, OK, ImportOptions, Row, TraceBuilder
from tuner.traffic.trace import Trace

INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
FIRST = ("gen_ai.latency.time_to_first_token", "gen_ai.server.time_to_first_token")
NAMES = {"session": ("gen_ai.conversation.id", "session.id"), "client": ("enduser.id", "user.id")}
WHOLE = {
    "max_tokens": ("gen_ai.request.max_tokens",),
    "n": ("gen_ai.request.choice.count", "gen_ai.request.n"),
    "obs_cached": ("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cached_tokens"),
}


def read(path: Path, options: ImportOptions) -> Trace:
    """One request for each span with token counts. A span around another such span belongs to the same
    request.
    """
    builder = TraceBuilder(path, options)
    spans: list[tuple[Record, Record]] = []
    parents: dict[str, str] = {}
    for record in _exports(path, builder):
        for span in _spans(record):
            name, above = span.data.get("spanId"), span.data.get("parentSpanId")
            if isinstance(name, str) and isinstance(above, str) and above:
                parents[name] = above
            attributes = _attributes(span)
            if any(attributes.has(key) for key in INPUT):
                spans.append((span, attributes))
            else:
                builder.quality["spans_without_tokens"] += 1
    outer = _outer({str(span.data.get("spanId")) for span, _ in spans}, parents)
    for span, attributes in spans:
        if span.data.get("spanId") in outer:
            builder.drop("dropped_outer_span")
        else:
            builder.add(_row(span, attributes))
    return builder.trace("otlp", known_step_s=0.0)


def _exports(path: Path, builder: TraceBuilder) -> Iterator[Record]:
    """One record for each export: one per line, or the whole file if its first line is not a complete
    document.
    """
    try:
        yield from json_lines(path, builder.quality)
    except BadInput:
        if builder.quality["exports"]:
            raise
        data = whole_json(path)
        if not isinstance(data, dict):
            raise BadInput(
                f"{path}: an object with resourceSpans is expected, not {type(data).__name__}"
            ) from None
        yield Record(path, 1, data)


def _spans(export: Record) -> Iterator[Record]:
    groups = export.items("resourceSpans") if "resourceSpans" in export.data else [export.data]
    for group in groups:
        holder = _object(export, "resourceSpans", group)
        scopes = holder.items("scopeSpans") or holder.items("instrumentationLibrarySpans")
        for scope in scopes or [holder.data]:
            for span in _object(export, "scopeSpans", scope).items("spans"):
                yield _object(export, "spans", span)


def _object(record: Record, key: str, value: Any) -> Record:
    if not isinstance(value, dict):
        raise record.bad(key, f"holds a {type(value).__name__}, expected objects")
    return Record(record.path, record.line, value)


def _attributes(span: Record) -> Record:
    """Attributes as plain values: from OTLP's list of typed pairs, or a mapping."""
    given = span.data.get("attributes")
    if isinstance(given, dict):
        return Record(span.path, span.line, given)
    found: dict[str, Any] = {}
    for pair in span.items("attributes"):
        if not isinstance(pair, dict) or not isinstance(pair.get("key"), str):
            raise span.bad("attributes", "holds something that is not {key, value}")
        value = pair.get("value")
        found[pair["key"]] = next(iter(value.values()), None) if isinstance(value, dict) else value
    return Record(span.path, span.line, found)


def _outer(counted: set[str], parents: dict[str, str]) -> set[str]:
    """The spans around another counted span."""
    found: set[str] = set()
    for name in counted:
        seen = {name}
        above = parents.get(name)
        while above is not None and above not in seen:
            seen.add(above)
            if above in counted:
                found.add(above)
            above = parents.get(above)
    return found


def _row(span: Record, attributes: Record) -> Row:
    start = span.nanoseconds("startTimeUnixNano", 1)
    values: dict[str, Any] = {}
    if span.has("endTimeUnixNano"):
        values["obs_e2e_s"] = max(0, span.nanoseconds("endTimeUnixNano", 1) - start) / 1e9
    values |= attributes.given(attributes.whole, WHOLE)
    values |= attributes.given(attributes.number, {"obs_ttft_s": FIRST})
    values |= attributes.given(attributes.text, NAMES)
    status = span.data.get("status")
    failed = isinstance(status, dict) and status.get("code") in (2, "2", "STATUS_CODE_ERROR")
    if span.has("spanId"):
        values["key"] = (str(span.data.get("traceId")), str(span.data["spanId"]))
    output = attributes.given(attributes.whole, {"output_len": OUTPUT})
    return Row(
        arrival=start,
        input_len=attributes.whole(attributes.first(*INPUT)),
        output_len=output.get("output_len", 0),
        status=ERROR if failed else OK,
        **values,
    )


def _fits(start: FileStart) -> bool:
    """Whether the beginning of a document names OTLP's lists. A document of many lines need not be complete
    JSON here.
    """
    return start.first is None and ('"resourceSpans"' in start.text or '"scopeSpans"' in start.text)


register(Importer(format="otlp", read=read, json_keys=(("resourceSpans",),), fits=_fits))
