"""`tuner gc`: make room; numbers stay, files go by age."""

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, now, open_store, plain, print_json, say, settings

if TYPE_CHECKING:
    from tuner.history.store import Store

ANSWERS = timedelta(days=2)
"""Answers kept for repeated requests are worth nothing after that."""
MOST = 36_500
"""Days that may be asked for: a hundred years."""
TURN_BYTES = 64 * 2**20
"""A log that is larger is turned: a new one is begun, the old one goes by its age."""


def gc(
    days: Annotated[int, typer.Option(min=0, max=MOST, help="Keep files of trials younger than this.")] = 30,
    log_days: Annotated[
        int, typer.Option(min=0, max=MOST, help="Keep the tuner's own logs younger than this.")
    ] = 90,
    captures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder of captures; none is touched without it.")
    ] = None,
    capture_days: Annotated[
        int, typer.Option(min=0, max=MOST, help="Keep closed captures younger than this.")
    ] = 30,
    apply: Annotated[bool, typer.Option("--apply", help="Delete; without it only tell.")] = False,
    as_json: Json = False,
) -> None:
    """Delete files of old trials, old logs and old captures.

    Numbers, profiles, what profiles and each run's best rest on, traces and open captures stay.
    """
    from tuner.errors import BadInput

    if captures is not None and not captures.is_dir():
        raise BadInput(f"--captures {captures}: there is no such folder")
    store, home, at = open_store(), settings().home, now()
    found = {
        "trials": _trials(store, home, at - timedelta(days=days), apply),
        "logs": _files(_logs(home), at - timedelta(days=log_days), apply),
        "captures": _files(_captures(captures), at - timedelta(days=capture_days), apply),
    }
    if apply:
        _turn(home / "logs" / "tuner.jsonl", at)
        store.forget_answers(at - ANSWERS)
    if as_json:
        rows = {kind: {"count": count, "bytes": size} for kind, (count, size) in found.items()}
        print_json({"deleted": apply, "before": plain(at), **rows})
        return
    told = ", ".join(f"{count} of {kind} ({size / 1e6:.1f} MB)" for kind, (count, size) in found.items())
    say(f"{'deleted' if apply else 'would delete'} {told}")


def _trials(store: "Store", home: Path, before: datetime, apply: bool) -> tuple[int, int]:
    """Folders under this home only, wherever it lay when they were written: what the history says of another
    machine is that machine's.
    """
    from tuner.settings import under_home

    ours = home.resolve()
    placed = [(each, under_home(each.directory, home)) for each in store.leftovers(before)]
    gone = [each for each, folder in placed if ours in folder.resolve().parents]
    folders = {folder for _, folder in placed if ours in folder.resolve().parents}
    size = sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())
    if apply:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        store.forget(gone)
    return len(folders), size


def _logs(home: Path) -> Iterator[Path]:
    """Turned logs, and those of controllers and hand-overs; never the one that is written now."""
    for pattern in ("logs/tuner-*.jsonl", "controllers/*.log", "nodes/*.log"):
        yield from home.glob(pattern)


def _captures(folder: Path | None) -> Iterator[Path]:
    """Closed captures by their name and stamp; a folder of something else is left alone."""
    from tuner.traffic.capture.files import closed_files

    if folder is None:
        return
    names = {path.name.rsplit("-", 1)[0] for path in folder.glob("*-*.jsonl")}
    for name in sorted(names):
        yield from closed_files(folder, name)


def _files(paths: Iterator[Path], before: datetime, apply: bool) -> tuple[int, int]:
    """How many files were last written before a moment, and their bytes."""
    count, size = 0, 0
    for path in paths:
        stat = path.stat()
        if datetime.fromtimestamp(stat.st_mtime, UTC) >= before:
            continue
        count, size = count + 1, size + stat.st_size
        if apply:
            path.unlink(missing_ok=True)
    return count, size


def _turn(log: Path, at: datetime) -> None:
    if log.is_file() and log.stat().st_size > TURN_BYTES:
        log.rename(log.with_name(f"tuner-{at:%Y%m%dT%H%M%SZ}.jsonl"))
