"""Traces from anywhere: the format is told by the content; what is odd is repaired and counted or refused."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tuner.errors import BadInput, nearest
from tuner.traffic import trace as canonical
from tuner.traffic.importers import azure, generic, mooncake
from tuner.traffic.importers.reading import head
from tuner.traffic.trace import Trace

Reader = Callable[..., Trace]

FORMATS: Mapping[str, Reader] = {
    "azure": azure.read,
    "mooncake": mooncake.read,
    "generic": generic.read,
}
"""Format → reader(path, max_len=, dequantise=); `generic` takes `columns` too; `parquet` is our own file."""


def read_any(
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    format: str | None = None,
    *,
    max_len: int | None = None,
    dequantise: bool = True,
) -> Trace:
    """The trace in a file of any known format; `columns` names columns of a generic one.

    Requests longer than `max_len` tokens (prompt and answer) are dropped and counted; stamps coarser than
    5 ms are spread unless `dequantise` is False. BadInput names file, line and key.
    """
    source = Path(path)
    if not source.is_file():
        return canonical.read(source)
    chosen = format or ("generic" if columns else detect(source))
    if chosen == "parquet":
        return canonical.read(source)
    if chosen not in FORMATS:
        raise BadInput(f"format '{chosen}' is not known{nearest(chosen, FORMATS)}; known: {sorted(FORMATS)}")
    if columns and chosen != "generic":
        raise BadInput(f"{source}: columns can be named for format 'generic', not for '{chosen}'")
    if chosen == "generic":
        return generic.read(source, columns, max_len=max_len, dequantise=dequantise)
    return FORMATS[chosen](source, max_len=max_len, dequantise=dequantise)


def detect(path: str | Path) -> str:
    """The format of a file by its content. BadInput when it is empty or neither CSV, JSON nor Parquet."""
    source = Path(path)
    start = head(source)
    if start[:4] == b"PAR1":
        return "parquet"
    text = start.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    if not text:
        raise BadInput(f"{source}: the file is empty")
    if text[0] in "{[":
        return _detect_json(text)
    return _detect_csv(text.splitlines()[0])


def _detect_csv(header: str) -> str:
    names = {name.strip() for name in next(csv.reader([header]), [])}
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        return "azure"
    return "generic"


def _detect_json(text: str) -> str:
    try:
        first, _ = json.JSONDecoder().raw_decode(text.lstrip("["))
    except (ValueError, RecursionError):
        return "generic"
    keys = set(first) if isinstance(first, dict) else set()
    if {"timestamp", "input_length"} <= keys or {"delay", "input_length"} <= keys:
        return "mooncake"
    return "generic"
