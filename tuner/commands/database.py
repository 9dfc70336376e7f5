"""`tuner db`: the history database."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import now, open_store, say, settings

if TYPE_CHECKING:
    from tuner.history.store import Store

app = typer.Typer(help="The history database.", no_args_is_help=True)


@app.command("upgrade")
def upgrade() -> None:
    """Bring the database to this release's form; makes it where there is none."""
    from tuner.history.store import Store

    before, after = Store(settings().url, check=False).upgrade()
    say(f"database at revision {after}" + (f", before {before}" if before not in (None, after) else ""))


@app.command("backup")
def backup(
    to: Annotated[Path, typer.Argument(help="A new file, or a folder to put one in.")],
    full: Annotated[
        bool,
        typer.Option("--full", help="An archive with traces, nodes and notifications too."),
    ] = False,
) -> None:
    """Write a consistent copy of an SQLite database while it is in use; with --full of any database."""
    from tuner.history import maintenance

    store = open_store()
    if not full:
        say(f"wrote {maintenance.backup(store.database, to, now=now())}")
        return
    files = _files(store, settings().home)
    wrote = maintenance.pack(store.database, files, to, now=now())
    say(f"wrote {wrote}: the history and {len(files)} files; it holds secrets")


def _files(store: "Store", home: Path) -> dict[str, Path]:
    """What belongs to a history beside its database, by its name in the home. What is missing is said."""
    from tuner.errors import NotFound
    from tuner.traffic import kept

    folders = [*home.glob("nodes/*.yaml"), *home.glob("studies/*"), home / "notify.yaml"]
    files = {str(path.relative_to(home)): path for path in folders if path.is_file()}
    for each in store.traces():
        try:
            _, path = kept.find(each.digest, each.path)
        except NotFound as error:
            say(f"left out: {error}")
            continue
        files[f"traces/trace-{each.digest[:12]}.parquet"] = path
    return files


@app.command("restore")
def restore(
    archive: Annotated[Path, typer.Argument(help="What `tuner db backup --full` wrote.")],
) -> None:
    """Put a full backup into this TUNER_HOME and its database, which must be empty; of any release before."""
    from tuner.history.maintenance import unpack

    count = unpack(archive, settings().home, settings().url)
    say(f"restored the history and {count} files into {settings().home}")


@app.command("copy")
def copy_to(
    url: Annotated[str, typer.Argument(metavar="URL", help="A new, empty database; it is made.")],
) -> None:
    """Copy every row of the history, ids included, into another database: SQLite to PostgreSQL or back."""
    from tuner.history.maintenance import copy
    from tuner.history.store import Store

    source = open_store()
    target = Store(url, create=True).database
    rows = copy(source.database, target)
    say(f"copied {sum(rows.values())} rows of {len(rows)} tables into {target.name}")
