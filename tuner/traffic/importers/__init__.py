"""Traces from anywhere: the format is told by the content; what is odd is repaired and counted or refused."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tuner.errors import BadInput, nearest
from tuner.records import JSON
from tuner.traffic import trace as canonical
from tuner.traffic.importers import (
    azure,
    bailian,
    burstgpt,
    captured,
    generic,
    litellm,
    mooncake,
    openai,
    otlp,
    tracelab,
    vllm_log,
)
from tuner.traffic.importers.reading import head
from tuner.traffic.importers.units import check_unit
from tuner.traffic.trace import Trace

Reader = Callable[..., Trace]

FORMATS: Mapping[str, Reader] = {
    "azure": azure.read,
    "mooncake": mooncake.read,
    "burstgpt": burstgpt.read,
    "bailian": bailian.read,
    "litellm": litellm.read,
    "otlp": otlp.read,
    "openai": openai.read,
    "vllm-log": vllm_log.read,
    "capture": captured.read,
    "tracelab": tracelab.read,
    "generic": generic.read,
}
"""Format → reader(path, max_len=, dequantise=), of COUNTED unit= too; `parquet` is our own file."""

MAPPED = {"generic": generic.read, "openai": openai.read}
"""Formats whose columns can be named."""
COUNTED = ("mooncake", "burstgpt", "bailian", "generic", "openai")
"""Formats whose times may be numbers without a unit."""


def read_any(
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    format: str | None = None,
    *,
    unit: str | None = None,
    max_len: int | None = None,
    dequantise: bool = True,
    tokenizer: str | Path | None = None,
) -> Trace:
    """The trace in a file of any known format, told by its content unless named.

    `columns` names columns of a `generic` or `openai` file; `tokenizer` counts what `openai` logs do not;
    `unit` (s, ms, us, ns) is that of times which are numbers, asked for where the file leaves it open.
    Requests longer than `max_len` tokens (prompt and answer) are dropped and counted; stamps coarser than
    5 ms are spread unless `dequantise` is False. BadInput names file, line and key.
    """
    source = Path(path)
    if not source.is_file():
        return canonical.read(source)
    chosen = format or _detected(source, columns)
    if chosen != "parquet" and chosen not in FORMATS:
        raise BadInput(f"format '{chosen}' is not known{nearest(chosen, FORMATS)}; known: {sorted(FORMATS)}")
    if columns and chosen not in MAPPED:
        raise BadInput(f"{source}: columns can be named for {' and '.join(MAPPED)}, not for '{chosen}'")
    if tokenizer is not None and chosen != "openai":
        raise BadInput(f"{source}: a tokenizer is of use for format 'openai', not for '{chosen}'")
    if unit is not None and chosen not in COUNTED:
        raise BadInput(f"{source}: format '{chosen}' writes the unit of its times itself; leave --unit out")
    if chosen == "parquet":
        return _short(canonical.read(source), max_len)
    options: dict[str, object] = {"max_len": max_len, "dequantise": dequantise}
    if unit is not None:
        options["unit"] = check_unit(unit)
    if chosen in MAPPED:
        options["columns"] = columns
    if chosen == "openai":
        options["tokenizer"] = tokenizer
    return FORMATS[chosen](source, **options)


def _short(trace: Trace, max_len: int | None) -> Trace:
    """A trace without requests of more tokens, counted as importers count them."""
    over = trace.input_len.astype(np.int64) + trace.output_len > (max_len or np.inf)
    if not over.any():
        return trace
    told = trace.meta.get("quality")
    quality: dict[str, JSON] = dict(told) if isinstance(told, dict) else {"rows_read": len(trace)}
    before = quality.get("dropped_over_length", 0)
    quality["dropped_over_length"] = int(over.sum()) + (before if isinstance(before, int) else 0)
    return trace.take(np.flatnonzero(~over)).with_meta(quality=quality)


def detect(path: str | Path) -> str:
    """The format of a file by its content; `generic` when nothing fits. BadInput when it is empty."""
    source = Path(path)
    start = head(source)
    if start[:4] == b"PAR1":
        return "parquet"
    text = start.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    if not text:
        raise BadInput(f"{source}: the file is empty")
    if text[0] in "{[":
        return _detect_json(text)
    if any(mark in text for mark in ("Received request ", "Generated response ")):
        return "vllm-log"
    return _detect_csv(text.splitlines()[0])


def _detected(path: Path, columns: Mapping[str, str] | None) -> str:
    """Detection; named columns mean a generic file unless they name parts of an exchange."""
    if not columns:
        return detect(path)
    return "openai" if {"request", "response"} & set(columns) else "generic"


def _detect_csv(header: str) -> str:
    names = {name.strip() for name in next(csv.reader([header]), [])}
    for format, wanted in CSV_MARKS.items():
        if wanted <= names:
            return format
    return "generic"


def _detect_json(text: str) -> str:
    try:
        first, _ = json.JSONDecoder().raw_decode(text.lstrip("[ \t\r\n"))
    except (ValueError, RecursionError):
        first = None
    if not isinstance(first, dict):
        return "otlp" if '"resourceSpans"' in text or '"scopeSpans"' in text else "generic"
    keys = set(first)
    for format, marks in JSON_MARKS:
        if marks <= keys:
            return format
    nested = {key for value in first.values() if isinstance(value, dict) for key in value}
    return "openai" if "usage" in keys | nested or {"messages", "prompt"} & (keys | nested) else "generic"


CSV_MARKS: Mapping[str, frozenset[str]] = {
    "azure": frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),
    "burstgpt": frozenset({"Timestamp", "Request tokens", "Response tokens"}),
    "litellm": frozenset({"startTime", "prompt_tokens", "completion_tokens"}),
}
JSON_MARKS: tuple[tuple[str, frozenset[str]], ...] = (
    ("capture", frozenset({"capture"})),
    ("otlp", frozenset({"resourceSpans"})),
    ("bailian", frozenset({"chat_id", "parent_chat_id", "timestamp"})),
    ("tracelab", frozenset({"round_index", "timing_events", "input_tokens_total"})),
    ("litellm", frozenset({"startTime", "prompt_tokens", "completion_tokens"})),
    ("mooncake", frozenset({"timestamp", "input_length"})),
    ("mooncake", frozenset({"delay", "input_length"})),
    ("mooncake", frozenset({"timestamp", "text_input"})),
)
