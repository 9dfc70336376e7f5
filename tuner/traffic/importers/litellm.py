"""LiteLLM's SpendLogs, exported as CSV or JSONL: when, how long, how many tokens; no text is kept."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuner.traffic.importers.draft import ERROR, OK, Draft, Row
from tuner.traffic.importers.reading import Record, csv_records, head, json_lines
from tuner.traffic.trace import Trace

CALLS = frozenset(
    {"completion", "acompletion", "text_completion", "atext_completion", "responses", "aresponses"}
    | {"anthropic_messages", "pass_through_endpoint", ""}
)
"""Call types that reach a generating model; embeddings, images and the like are counted and left out."""


def read(path: Path, *, max_len: int | None = None, dequantise: bool = True) -> Trace:
    """Rows of generating calls; the first token's time is completionStartTime where the call streamed.

    Answers from LiteLLM's own cache never reached an engine: counted and left out.
    """
    draft = Draft(path, max_len=max_len)
    for record in _records(path, draft.quality):
        call = str(record.data.get("call_type") or "").lower()
        if call not in CALLS:
            draft.drop("dropped_other_call")
        elif str(record.data.get("cache_hit") or "").lower() == "true":
            draft.drop("dropped_cache_hit")
        else:
            draft.add(_row(record))
    return draft.trace(source="litellm", dequantise=dequantise)


def _records(path: Path, quality: "Counter[str]") -> Iterator[Record]:
    is_json = head(path, 4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")
    return json_lines(path, quality) if is_json else csv_records(path, quality)


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
