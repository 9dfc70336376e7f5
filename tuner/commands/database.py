"""`tuner db`: the history database."""

from pathlib import Path
from typing import Annotated

import typer

from tuner.commands.common import say, settings

app = typer.Typer(help="The history database.", no_args_is_help=True)


@app.command("upgrade")
def upgrade() -> None:
    """Bring the database to this release's form; makes it where there is none."""
    from tuner.history.store import Store

    before, after = Store(settings().url, check=False).upgrade()
    say(f"database at revision {after}" + (f", before {before}" if before not in (None, after) else ""))


@app.command("backup")
def backup(to: Annotated[Path, typer.Argument(help="The file to write; must not exist.")]) -> None:
    """Write a consistent copy of an SQLite database while it is in use."""
    from tuner.history.backup import backup as copy

    copy(settings().url, to)
    say(f"wrote {to}")
