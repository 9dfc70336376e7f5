"""`tuner baseline`: what runs today, as the keys of a study file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tuner import private
from tuner.commands.common import Json, print_json, say

app = typer.Typer(help="Baselines: what runs today, as the start of a study.", no_args_is_help=True)


@app.command("import")
def import_baseline(
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE|COMMAND",
            help="A script, unit, compose file, manifest or Helm values, or a command line in quotes.",
        ),
    ],
    pick: Annotated[str | None, typer.Option(metavar="NAME", help="Which engine of several.")] = None,
    space: Annotated[
        str | None, typer.Option(help="The space to be searched: its knobs become the baseline.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PY", help="The interpreter that has vllm: flags are checked by it.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write here instead of standard output.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print `model`, `engine` and `baseline` of a study file for an engine that runs today.

    What was left out, or read with a doubt, is told on standard error. Values of secrets are left out.
    """
    import yaml

    from tuner.commands import knobs
    from tuner.knobs import manifests
    from tuner.knobs import space as spaces

    facts = None if python is None else knobs.facts_of(python)
    found = manifests.read(what, pick=pick, facts=facts)
    keys = found.study(None if space is None else spaces.load(space))
    if as_json:
        print_json({"source": found.source, "name": found.name, "study": keys, "notes": found.notes})
        return
    text = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True)
    if output is None:
        sys.stdout.write(text)
    else:
        _write(output, text)
    for note in found.notes:
        say(f"note: {note}")


def _write(path: Path, text: str) -> None:
    from tuner.errors import BadInput, Unavailable

    if path.exists():
        raise BadInput(f"--output {path}: it exists already")
    try:
        path.write_text(text, encoding="utf-8")
        private.publish(path)
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror or error}") from error
