"""`tuner db`: the history database."""

from pathlib import Path
from typing import Annotated

import typer

from tuner.commands.common import now, open_store, say, settings

app = typer.Typer(help="The history database.", no_args_is_help=True)


@app.command("upgrade")
def upgrade() -> None:
    """Bring the database to this release's form; makes it where there is none."""
    from tuner.history.store import Store

    before, after = Store(settings().url, check=False).upgrade()
    say(f"database at revision {after}" + (f", before {before}" if before not in (None, after) else ""))


@app.command("backup")
def backup(to: Annotated[Path, typer.Argument(help="A new file, or a folder to put one in.")]) -> None:
    """Write a consistent copy of an SQLite database while it is in use."""
    from tuner.history.copy import backup as write

    say(f"wrote {write(open_store(), to, now=now())}")


@app.command("copy")
def copy_to(
    url: Annotated[str, typer.Argument(metavar="URL", help="A new, empty database; it is made.")],
) -> None:
    """Copy every row of the history, ids included, into another database: SQLite to PostgreSQL or back."""
    from tuner.history.copy import copy
    from tuner.history.store import Store

    source = open_store()
    rows = copy(source, target := Store(url, create=True))
    say(f"copied {sum(rows.values())} rows of {len(rows)} tables into {target.database.name}")
