"""LiteLLM's SpendLogs, exported as CSV or JSONL: times, token counts and callers; no text."""

from pathlib import Path
from typing import Any

from tuner.traffic.importers import Importer, register
from tuner.traffic.importers.reading import Record, records
from tuner.traffic.importers.trace_builder import ERROR, OK, ImportOptions, Row, TraceBuilder
from tuner.traffic.trace import Trace

# Every export of SpendLogs has these.
MARKS = ("startTime", "prompt_tokens", "completion_tokens")

# Call types that reach a generating model; embeddings, images and the like are counted and left out.
CALLS = frozenset(
    {"completion", "acompletion", "text_completion", "atext_completion", "responses", "aresponses"}
    | {"anthropic_messages", "pass_through_endpoint", ""}
)


def read(path: Path, options: ImportOptions) -> Trace:
    """Rows of generating calls; the first token's time is completionStartTime where the call streamed.

    Answers from LiteLLM's own cache never reached an engine: counted and left out.
    """
    builder = TraceBuilder(path, options)
    for record in records(path, builder.quality):
        call = str(record.data.get("call_type") or "").lower()
        if call not in CALLS:
            builder.drop("dropped_other_call")
        elif str(record.data.get("cache_hit") or "").lower() == "true":
            builder.drop("dropped_cache_hit")
        else:
            builder.add(_row(record))
    return builder.trace("litellm")


def _row(record: Record) -> Row:
    start = record.moment("startTime")
    values: dict[str, Any] = {}
    if record.has("endTime"):
        values["obs_e2e_s"] = max(0, record.moment("endTime") - start) / 1e9
    if record.has("completionStartTime"):
        first = record.moment("completionStartTime") - start
        if 0 < first / 1e9 < values.get("obs_e2e_s", float("inf")):
            values["obs_ttft_s"] = first / 1e9
    for wanted, keys in (("session", ("session_id",)), ("client", ("end_user", "user", "api_key"))):
        if key := next((key for key in keys if record.has(key)), None):
            values[wanted] = str(record.data[key])
    if record.has("request_id"):
        values["key"] = str(record.data["request_id"])
    failed = str(record.data.get("status") or "success").lower() not in ("success", "ok")
    return Row(
        arrival=start,
        input_len=record.whole("prompt_tokens"),
        output_len=record.whole("completion_tokens"),
        status=ERROR if failed else OK,
        **values,
    )


register(Importer(format="litellm", read=read, csv_columns=MARKS, json_keys=(MARKS,)))
