"""Shared by all commands: the store, the home, how records are shown, and how a signal ends a run. Heavy
imports are in functions.
"""

import json
import math
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tuner.errors import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from rich.text import Text

    from tuner.history.store import Store
    from tuner.records import Slice
    from tuner.settings import Settings
    from tuner.traffic.trace import Trace
    from tuner.tuning.context import Tell

T = TypeVar("T")
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
StudyRef = Annotated[str, typer.Argument(metavar="STUDY", help="A study's name, id, or beginning of the id.")]


def finite(value: float | None) -> float | None:
    """Check the value of an option: NaN and infinite numbers are refused."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
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


def store_if_any() -> "Store | None":
    """The history; None if there is none yet."""
    from tuner.errors import NotFound

    try:
        return open_store()
    except NotFound:
        return None


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


MEANINGS = {
    **dict.fromkeys(("ok", "COMPLETE", "FINISHED"), "green"),
    **dict.fromkeys(("warning", "PRUNED", "ABORTED", "CANCELLED"), "yellow"),
    **dict.fromkeys(("error", "INFEASIBLE", "FAILED", "fault"), "red"),
}
"""The colour of a cell that is this word, on a terminal."""
LEAST = 24
"""The narrowest last column of a table, in characters; where there is less room, rows become blocks."""


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    empty: str = "nothing yet",
) -> None:
    """A table on standard output. A column whose name begins with `<` is text, the others are numbers.

    Nothing is cut: if the terminal is too narrow, each row is a block with a line per column. In a pipe
    a row is one line of any length, without control characters. Without rows, `empty` is printed instead.
    """
    cells = [[escaped(text(each)) for each in row] for row in rows]
    if not cells:
        typer.echo(f"{title}: {empty}" if title else empty)
        return
    from rich.console import Console
    from rich.text import Text

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    console = Console(highlight=False)
    for line in [*([Text(title, "bold")] if title else []), *table(columns, cells, width)]:
        console.print(line, soft_wrap=True)


def print_records(
    records: Sequence[T],
    columns: Sequence[str],
    row: Callable[[T], Sequence[object]],
    *,
    as_json: bool,
    title: str | None = None,
) -> None:
    """Records as JSON, or as a table with a `row` for each (see `print_table`)."""
    if as_json:
        print_json(records)
        return
    print_table(columns, map(row, records), title=title)


def escaped(line: str) -> str:
    """A text as one line: control characters are written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> "list[Text]":
    """The lines of a table, or of a block per row if the columns do not fit into `width`; None: any."""
    from rich.cells import cell_len

    heads = [column.lstrip("<") for column in columns]
    sizes = [max(map(cell_len, column)) for column in zip(heads, *rows, strict=True)]
    room = math.inf if width is None else width - sum(sizes[:-1]) - 2 * len(sizes[:-1])
    longest = max(cell_len(word) for row in (heads, *rows) for word in row[-1].split(" "))
    if sizes[-1] > room and (room < max(LEAST, longest) or not columns[-1].startswith("<")):
        return _blocks(heads, rows, width or 0)
    begin, lines = sum(sizes[:-1]) + 2 * len(sizes[:-1]), []
    for style, row in [("bold", heads), *(("", row) for row in rows)]:
        first, *more = wrapped(row[-1], room)
        padded = [_padded(*each) for each in zip([*row[:-1], first], columns, sizes, strict=True)]
        lines.append(_line([(each, style or _style(each.strip())) for each in padded]))
        lines += [_line([(" " * (begin - 2), ""), (each, style)]) for each in more]
    return lines


def _blocks(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> "list[Text]":
    """A block of lines per row, a line per cell with its head; empty cells are left out."""
    from rich.cells import cell_len

    wide = max(map(cell_len, heads))
    lines = []
    for number, row in enumerate(rows):
        lines += [_line([])] * bool(number)
        for head, whole in zip(heads, row, strict=True):
            for place, part in enumerate(wrapped(whole, width - wide - 2) if whole else ()):
                label = _padded("" if place else head, "<", wide)
                lines.append(_line([(label, "bold"), (part, _style(whole))]))
    return lines


def wrapped(value: str, width: float) -> list[str]:
    """A text in lines of at most this width, broken between words; a longer word stays whole."""
    from rich.cells import cell_len

    lines = [""]
    for word in value.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and cell_len(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _padded(value: str, column: str, size: int) -> str:
    from rich.cells import cell_len

    blanks = " " * (size - cell_len(value))
    return value + blanks if column.startswith("<") else blanks + value


def _line(parts: "Sequence[tuple[str, str]]") -> "Text":
    """Cells with their styles as one line, two blanks between them."""
    from rich.text import Text

    line = Text("  ").join(Text(part, style) for part, style in parts)
    line.rstrip()
    return line


def _style(cell: str) -> str:
    """The colour of a cell: green is good, red is bad, yellow asks for attention."""
    for end, colour in (("better)", "green"), ("worse)", "red")):
        if cell.endswith(end):
            return colour
    return MEANINGS.get(cell, "")


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
    from tuner.replay.plan import slice_rows

    return [
        {"name": s.name, "start_s": s.start_s, "duration_s": s.duration_s,
         "requests": len(slice_rows(trace, s)), "held_out": s.held_out}
        for s in parts
    ]  # fmt: skip


def print_windows(rows: Iterable[Mapping[str, object]], title: str | None = None) -> None:
    """The rows of `windows` as a table."""
    heads = ["<slice", "start_s", "duration_s", "requests", "<held out"]
    print_table(heads, (list(row.values()) for row in rows), title=title)


def say(sentence: str) -> None:
    """A line for people, on standard error, so that standard output stays clean."""
    typer.echo(sentence, err=True)


def write_file(path: Path, content: str) -> None:
    """Write a file that the user asked for, whole or not at all, with the permissions of the user's mask.
    Unavailable when it cannot be written.
    """
    from tuner import masking
    from tuner.errors import Unavailable

    special = path.exists() and not path.is_file()  # such as /dev/stdout
    partial = path if special else path.with_name(path.name + ".partial")
    try:
        partial.write_text(content, encoding="utf-8")
        if not special:
            masking.publish(partial)
            partial.replace(path)
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror or error}") from error


def model_name(given: str | None) -> str | None:
    """The name of a model in studies: a folder by its full path, anything else as written."""
    folder = Path(given).expanduser() if given else None
    return str(folder.resolve()) if folder is not None and folder.is_dir() else given


ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ends_by_signal() -> "Iterator[None]":
    """The first SIGINT or SIGTERM inside ends the process with exit code 8; during `interruptible` work, when
    that work has stopped. Later signals are ignored, because engines are being stopped.
    """
    before = {number: signal.signal(number, _end) for number in ENDING}
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    finally:
        _now.cancel, _now.came = None, False
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(slots=True)
class _Now:
    """Whether a signal came, and the function that cancels the current work."""

    came: bool = False
    cancel: "Callable[[], object] | None" = None


_now = _Now()


def _end(number: int, frame: object) -> None:
    if _now.came:
        return
    _now.came = True
    if _now.cancel is None:
        # No KeyboardInterrupt: where one leaves exec() of a string, as in the import of a dataclass, Python
        # ends itself by SIGINT at exit, whoever caught it.
        raise SystemExit(INTERRUPTED)
    _now.cancel()


def interruptible(work: "Coroutine[Any, Any, T]", tell: "Tell") -> T:
    """Run a coroutine. Inside `ends_by_signal` a signal cancels it; then KeyboardInterrupt when it has
    stopped.
    """
    import asyncio

    import uvloop

    from tuner.tuning.context import RunEvent

    async def main() -> T:
        task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
        _now.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if _now.came:  # before, and Python ignored what it raised, as in the callback of a weak reference
            _now.cancel()
        return await task

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(main())
        except asyncio.CancelledError:
            tell(RunEvent(kind="note", text="stopped; the same command continues this run"))
            raise KeyboardInterrupt from None
        finally:
            _now.cancel = None
            work.close()


def program() -> str:
    """How to call this program from any folder: by its name if the shell finds it, otherwise by its path."""
    found = shutil.which("tuner")
    own = Path(sys.argv[0])
    return "tuner" if found or own.name != "tuner" else shlex.quote(str(own.absolute()))
