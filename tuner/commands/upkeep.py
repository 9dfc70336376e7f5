"""`tuner doctor`, `gc`, `db` and `completion`: check the host, delete old files, look after the database."""

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tuner.commands.common import (
    Json,
    now,
    open_store,
    plain,
    print_json,
    print_records,
    say,
    settings,
)
from tuner.errors import BadInput, NotFound, page_of
from tuner.measures import many

if TYPE_CHECKING:
    from tuner.history.store import Store


def doctor(
    study: Annotated[
        Path | None, typer.Argument(metavar="[STUDY.yaml]", help="A study file to check too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this host and, if given, a study.

    The study's model and engine are checked too. The exit code is 0, or that of the first error.
    """
    from tuner.doctor import examine, exit_code

    checks = list(examine(settings(), study, clock=now))
    heads = ["<check", "<verdict", "<found", "<what to do"]
    print_records(
        checks,
        heads,
        lambda c: (c.name, c.verdict, c.found, c.mend and c.mend + page_of(f"doctor-{c.name}")),
        as_json=as_json,
    )
    if code := exit_code(checks):
        raise typer.Exit(code)


ANSWERS = timedelta(days=2)
"""Stored answers to repeated requests are useless after this time."""
MOST = 36_500
"""The largest number of days: a hundred years."""
TURN_BYTES = 64 * 2**20
"""A larger log is rotated: a new file is begun, and the old one is deleted by its age."""


def gc(
    days: Annotated[
        int, typer.Option(min=0, max=MOST, help="Keep the files of trials from the last N days.")
    ] = 30,
    log_days: Annotated[
        int, typer.Option(min=0, max=MOST, help="Keep logs of the tuner from the last N days.")
    ] = 90,
    captures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A folder with captures. Without --captures, no capture is deleted."
        ),
    ] = None,
    capture_days: Annotated[
        int, typer.Option(min=0, max=MOST, help="Keep closed captures from the last N days.")
    ] = 30,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Delete the files. Without --apply, only show what would be deleted."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete files of old trials, old logs and old captures.

    Measurements, profiles, traces and open captures stay. So do the files that a profile or the best
    trial of a run needs.
    """

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
    told = ", ".join(f"{count} {kind} ({size / 1e6:.1f} MB)" for kind, (count, size) in found.items())
    say(
        f"{'deleted the files of' if apply else 'would delete the files of'} {told}"
        + ("" if apply else "; --apply deletes")
    )


def _trials(store: "Store", home: Path, before: datetime, apply: bool) -> tuple[int, int]:
    """The folders of old trials in this home, also when the home had another path before. Folders of other
    machines are not touched.
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
    """Rotated logs, and the logs of controllers and hand-overs; never the log that is written now."""
    for pattern in ("logs/tuner-*.jsonl", "controllers/*.log", "nodes/*.log"):
        yield from home.glob(pattern)


def _captures(folder: Path | None) -> Iterator[Path]:
    """Closed captures by name and time stamp; other files are left alone."""
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


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell.")],
) -> None:
    """Print the script that completes commands in a shell.

    In ~/.bashrc: eval "$(tuner completion bash)". `tuner --install-completion` writes it there.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    typer.echo(get_completion_script(prog_name="tuner", complete_var="_TUNER_COMPLETE", shell=shell))


database_app = typer.Typer(help="Upgrade, back up, restore or copy the history.", no_args_is_help=True)


@database_app.command("upgrade")
def upgrade() -> None:
    """Upgrade the database to this release. If there is none, create it."""
    from tuner.history.store import Store

    before, after = Store(settings().url, check=False).upgrade()
    say(f"database at revision {after}" + (f", before {before}" if before not in (None, after) else ""))


@database_app.command("backup")
def backup(
    to: Annotated[Path, typer.Argument(help="A new file, or a folder for it.")],
    full: Annotated[
        bool,
        typer.Option("--full", help="Write an archive with traces, nodes and notifications too."),
    ] = False,
) -> None:
    """Write a consistent copy of the history while it is in use.

    Without --full it copies an SQLite database; with --full it archives any database, and the files of
    the home.
    """
    from tuner.history import maintenance

    store = open_store()
    if not full:
        say(f"wrote {maintenance.backup(store.database, to, now=now())}")
        return
    files = _kept_files(store, settings().home)
    wrote = maintenance.pack(store.database, files, to, now=now())
    say(f"wrote {wrote}: the history and {many(len(files), 'file')}. Keep it safe, because it holds secrets")


def _kept_files(store: "Store", home: Path) -> dict[str, Path]:
    """The files of a history beside its database, by their names in the home. A message names
    missing ones.
    """
    from tuner.traffic import trace_files

    folders = [*home.glob("nodes/*.yaml"), *home.glob("studies/*"), home / "notify.yaml"]
    files = {str(path.relative_to(home)): path for path in folders if path.is_file()}
    for each in store.traces():
        try:
            _, path = trace_files.find(each.digest, each.path)
        except NotFound as error:
            say(f"left out: {error}")
            continue
        files[f"traces/trace-{each.digest[:12]}.parquet"] = path
    return files


@database_app.command("restore")
def restore(
    archive: Annotated[Path, typer.Argument(help="What `tuner db backup --full` wrote.")],
) -> None:
    """Restore a full backup into an empty TUNER_HOME.

    The backup may be of this or an earlier release. The database must be empty.
    """
    from tuner.history.maintenance import unpack

    count = unpack(archive, settings().home, settings().url)
    say(f"restored the history and {many(count, 'file')} into {settings().home}")


@database_app.command("copy")
def copy_to(
    url: Annotated[str, typer.Argument(metavar="URL", help="The URL of a new database, which is created.")],
) -> None:
    """Copy the history into another database.

    Every row is copied with its id, from SQLite to PostgreSQL or back.
    """
    from tuner.history.maintenance import copy
    from tuner.history.store import Store

    source = open_store()
    target = Store(url, create=True).database
    rows = copy(source.database, target)
    say(f"copied {many(sum(rows.values()), 'row')} of {many(len(rows), 'table')} into {target.name}")
