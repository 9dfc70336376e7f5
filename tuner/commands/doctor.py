"""`tuner doctor`: what stands in the way, and how to mend it."""

from pathlib import Path
from typing import Annotated

import typer

from tuner.commands.common import Json, now, print_json, print_table, settings


def doctor(
    study: Annotated[
        Path | None, typer.Argument(metavar="[STUDY.yaml]", help="A study to check too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this host, and a study, its model and engine. Exit 0, or the code of the first error found."""
    from tuner.doctor import examine, exit_code

    checks = list(examine(settings(), study, clock=now))
    if as_json:
        print_json(checks)
    else:
        print_table(
            ["<check", "<", "<found", "<mend"], ([c.name, c.verdict, c.found, c.mend] for c in checks)
        )
    if code := exit_code(checks):
        raise typer.Exit(code)
