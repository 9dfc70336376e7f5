"""Reads a trace of any known format. Each format is an importer in a file of this package. The content of a
file shows its format.

Odd rows are repaired or left out, and counted. Wrong values are refused. docs/extending.md shows how to add a
format.
"""

import csv
import importlib
import json
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tuner.errors import BadInput, nearest
from tuner.traffic import trace as canonical
from tuner.traffic.importers.reading import head
from tuner.traffic.importers.stamps import LONGEST_TRACE_S, UNITS_NS, check_unit, date_unit
from tuner.traffic.importers.trace_builder import ImportOptions
from tuner.traffic.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStart:
    """The first 64 KiB of a file, unpacked, without spaces at the beginning.

    `first` is the first JSON object of the file; None if there is none, or if it does not end within these 64
    KiB.
    """

    text: str
    first: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Importer:
    """How files of one format are recognised and read.

    A file has the format if the header of a CSV file has all `csv_columns`, or if the first object of a JSON
    file has all keys of one of `json_keys`. If several formats match, the one with the most names is used. If
    none matches, `fits` decides.
    """

    format: str
    read: Callable[[Path, ImportOptions], Trace]
    csv_columns: tuple[str, ...] = ()
    json_keys: tuple[tuple[str, ...], ...] = ()
    fits: Callable[[FileStart], bool] = lambda start: False
    columns: Collection[str] = ()
    """The names that users can map to names in their file (`--column`)."""
    takes_unit: bool = False
    """Whether times may be numbers without a unit (`--unit`)."""
    takes_tokenizer: bool = False
    """Whether the importer counts the tokens of texts (`--tokenizer`)."""


_registered: dict[str, Importer] = {}


def register(importer: Importer) -> None:
    """Adds an importer under the name of its format."""
    _registered[importer.format] = importer


@cache
def importers() -> Mapping[str, Importer]:
    """Every importer by the name of its format, from all files of this package."""
    for each in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{each.name}")
    return dict(sorted(_registered.items()))


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
    """Reads the trace in a file of any known format. The content shows the format, unless `format` names it.

    `columns` maps what an importer looks for to names in the file. `tokenizer` counts the tokens of texts.
    `unit` (s, ms, us, ns) is the unit of times that are plain numbers. Requests longer than `max_len` tokens
    (prompt and answer) are left out and counted. If time stamps are coarser than 5 ms, arrivals are spread
    within a step, unless `dequantise` is False. BadInput names file, line and key.
    """
    source = Path(path)
    if not source.is_file():
        return canonical.read(source)
    known, named = importers(), format or _detected(source, columns or {})
    if named not in known:
        raise BadInput(f"format '{named}' is not known{nearest(named, known)}; known: {list(known)}")
    chosen = known[named]
    options = ImportOptions(
        columns=columns or {},
        unit=None if unit is None else check_unit(unit),
        max_len=max_len,
        dequantise=dequantise,
        tokenizer=tokenizer,
    )
    _check(source, chosen, options)
    found = chosen.read(source, options)
    start = int(str(found.meta.get("start_ns") or 0))
    dated = date_unit(start, start) == "ns"
    if chosen.takes_unit and dated and unit is None and found.duration_s > LONGEST_TRACE_S:
        raise BadInput(
            f"{source}: its first and last request are {found.duration_s / 86_400:,.0f} days apart. If its"
            f" times are plain numbers that count from 1970, give their unit: --unit {'|'.join(UNITS_NS)}"
            " (times that are written as dates stay the same)"
        )
    return found


def _check(path: Path, chosen: Importer, options: ImportOptions) -> None:
    """Raises BadInput if an option does not apply to the format."""
    if options.columns and not chosen.columns:
        mapped = " and ".join(name for name, each in importers().items() if each.columns)
        raise BadInput(f"{path}: columns can be mapped only for {mapped}, not for '{chosen.format}'")
    for wanted in options.columns:
        if wanted not in chosen.columns:
            close = nearest(wanted, chosen.columns)
            raise BadInput(f"columns: format '{chosen.format}' has no column '{wanted}'{close}")
    if options.tokenizer is not None and not chosen.takes_tokenizer:
        counting = " and ".join(f"'{name}'" for name, each in importers().items() if each.takes_tokenizer)
        raise BadInput(f"{path}: a tokenizer works only with format {counting}, not with '{chosen.format}'")
    if options.unit is not None and not chosen.takes_unit:
        raise BadInput(f"{path}: format '{chosen.format}' names the unit of its times; leave --unit out")


def _detected(path: Path, columns: Mapping[str, str]) -> str:
    """The detected format. If columns are named, it is the format that looks for most of them."""
    if not columns:
        return detect(path)
    counts = {name: len(columns.keys() & set(each.columns)) for name, each in importers().items()}
    return max(counts, key=lambda name: (counts[name], name == "generic"))


def detect(path: str | Path) -> str:
    """The format of a file by its content; `generic` if no format matches. BadInput if the file is empty."""
    text = head(Path(path)).decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    if not text:
        raise BadInput(f"{path}: the file is empty")
    is_json = text[0] in "{["
    start = FileStart(text=text, first=_first_object(text) if is_json else None)
    header = set() if is_json else {name.strip() for name in next(csv.reader([text.splitlines()[0]]), [])}
    found: dict[str, int] = {}
    for name, each in importers().items():
        wanted = each.json_keys if is_json else (each.csv_columns,)
        keys = set(start.first or ()) if is_json else header
        found[name] = max((len(marks) for marks in wanted if keys.issuperset(marks)), default=0)
    best = max(found, key=lambda name: found[name])
    if found[best]:
        return best
    return next((name for name, each in importers().items() if each.fits(start)), "generic")


def _first_object(text: str) -> Mapping[str, Any] | None:
    try:
        first, _ = json.JSONDecoder().raw_decode(text.lstrip("[ \t\r\n"))
    except (ValueError, RecursionError):
        return None
    return first if isinstance(first, dict) else None
