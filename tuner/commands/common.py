"""Shared by all commands: the store, the home, and how records are shown. Heavy imports are in functions."""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tuner.history.store import Store
    from tuner.records import Slice
    from tuner.settings import Settings
    from tuner.traffic.trace import Trace

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
StudyRef = Annotated[str, typer.Argument(metavar="STUDY", help="A study's name, id, or beginning of the id.")]


def finite(value: float | None) -> float | None:
    """Check the value of an option: NaN and infinite numbers are refused."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


def now() -> datetime:
    """The time of day, UTC."""
    return datetime.now(UTC)


def settings() -> "Settings":
    """The settings by `TUNER_*`. A home that other users can read is closed to them."""
    from tuner import masking
    from tuner.settings import Settings

    found = Settings()
    masking.tighten(found.home)
    return found


def open_store(*, create: bool = False) -> "Store":
    """The history. NotFound when there is none yet and the command only reads."""
    from tuner import masking
    from tuner.history.store import Store

    store = Store(settings().url, create=create)
    if (path := store.database.path) is not None:
        masking.tighten_files(path.with_name(path.name + end) for end in ("", "-wal", "-shm"))
    return store


def plain(value: object) -> object:
    """A record as JSON: ±inf and NaN are null, times ISO 8601, mappings and tuples plain."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


def print_json(value: object) -> None:
    """JSON on standard output."""
    sys.stdout.write(json.dumps(plain(value), indent=2) + "\n")


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    empty: str = "nothing yet",
) -> None:
    """A table on standard output. A column whose name begins with `<` is text, the others are numbers.

    Without rows, `empty` is printed instead.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    rows = list(rows)
    if not rows:
        typer.echo(f"{title}: {empty}" if title else empty)
        return

    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for column in columns:
        is_text = column.startswith("<")
        table.add_column(
            escape(column.lstrip("<")), justify="left" if is_text else "right", no_wrap=not is_text
        )
    for row in rows:
        table.add_row(*(escape(text(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)


def text(value: object) -> str:
    """The text of a cell: numbers with four digits, ∞, an en dash for nothing, times to the minute."""
    if value is None or value in ({}, [], ()):
        return "–"
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(text(item) for item in value)
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M")
    if isinstance(value, float):
        if math.isinf(value):
            return "∞" if value > 0 else "-∞"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def windows(trace: "Trace", parts: Iterable["Slice"]) -> list[dict[str, object]]:
    """A row per slice, with the requests that arrive in it; times are the trace's own."""
    from tuner.traffic import slices

    return [
        {"name": s.name, "start_s": s.start_s, "duration_s": s.duration_s,
         "requests": len(slices.rows(trace, s)), "held_out": s.held_out}
        for s in parts
    ]  # fmt: skip


def print_windows(rows: Iterable[Mapping[str, object]], title: str | None = None) -> None:
    """The rows of `windows` as a table."""
    heads = ["<slice", "start_s", "duration_s", "requests", "<held out"]
    print_table(heads, (list(row.values()) for row in rows), title=title)


def knobs(candidate: Mapping[str, object]) -> str:
    """A candidate on one line."""
    return " ".join(f"{name}={value}" for name, value in candidate.items()) or "(engine defaults)"


def say(sentence: str) -> None:
    """A line for people, on standard error, so that standard output stays clean."""
    typer.echo(sentence, err=True)


def model_name(given: str | None) -> str | None:
    """The name of a model in studies: a folder by its full path, anything else as written."""
    folder = Path(given).expanduser() if given else None
    return str(folder.resolve()) if folder is not None and folder.is_dir() else given
