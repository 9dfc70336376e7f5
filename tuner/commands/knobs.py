"""`tuner knobs` and `tuner baseline`: the knobs of an installed engine, and the configuration that runs
today.
"""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, print_json, print_table, say, text, write_file
from tuner.errors import BadInput

if TYPE_CHECKING:
    from tuner.records import EngineFacts

app = typer.Typer(help="List the knobs of an installed engine.", invoke_without_command=True)
Python = Annotated[
    str | None,
    typer.Option(metavar="PY", help="The interpreter that has vllm. Default: the simulated engine."),
]


@app.callback()
def knobs(
    context: typer.Context,
    python: Python = None,
    space: Annotated[
        str | None, typer.Option(help="Show which knobs of this search space the engine has.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the knobs of an installed engine with their defaults, and the knobs that it does not have."""
    if context.invoked_subcommand is not None:
        context.obj = python
        return
    facts = facts_of(python)
    if space is not None:
        _show_space(space, facts, as_json=as_json)
        return
    _show_all(facts, as_json=as_json)


def _show_space(name: str, facts: "EngineFacts", *, as_json: bool) -> None:
    from tuner.knobs import space as spaces
    from tuner.knobs.arguments import title

    left = spaces.load(name).restricted(facts)
    if as_json:
        print_json({"space": left.name, "levels": left.levels, "dropped": left.dropped})
        return
    rows = [[name, "  ".join(text(v) for v in levels), ""] for name, levels in left.levels.items()]
    rows += [[name, "", reason] for name, reason in left.dropped.items()]
    print_table(["<knob", "<levels", "<why not"], rows, title=f"{left.name} on {title(facts)}")


def _show_all(facts: "EngineFacts", *, as_json: bool) -> None:
    from tuner.knobs.arguments import title
    from tuner.knobs.space import knob_rows

    found = [
        {
            "knob": row.name,
            "flag": row.flag,
            "default": row.default,
            "choices": row.choices,
            "why_not": row.why_not,
        }
        for row in knob_rows(facts)
    ]
    if as_json:
        print_json(
            {"version": facts.version, "platform": facts.platform, "gpu": facts.gpu_name, "knobs": found}
        )
        return
    cells = ([row[n] for n in ("knob", "flag", "default", "why_not")] for row in found)
    table = f"{title(facts)} ({facts.kind}, {facts.platform})"
    print_table(["<knob", "<flag", "<default", "<why not"], cells, title=table)


@app.command("check")
def check(
    context: typer.Context,
    space: Annotated[str, typer.Argument(metavar="SPACE", help="A shipped space's name, or a file.")],
    python: Python = None,
    model: Annotated[
        str | None,
        typer.Option(help="Also report combinations that fail with this model."),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="The engine's --max-model-len.")] = None,
    as_json: Json = False,
) -> None:
    """Check a search space against an engine.

    It lists errors, dropped knobs and notes. The exit code is 2 if a study with this space cannot start.
    """
    from tuner.knobs import model as models
    from tuner.knobs import space as spaces
    from tuner.knobs.arguments import title

    facts = facts_of(python or context.obj)
    shape = None if model is None else models.read(model, env={})
    length = max_model_len or (None if shape is None else shape.max_len)
    found = spaces.check_space(spaces.load(space), facts, max_model_len=length, model=shape)
    if as_json:
        print_json({"version": facts.version, "platform": facts.platform, "findings": found})
    elif found:
        rows = ([finding.kind, finding.about, finding.text] for finding in found)
        print_table(["<kind", "<about", "<finding"], rows, title=f"{space} on {title(facts)}")
    else:
        typer.echo(f"{space} on {title(facts)}: no problem found")
    if any(finding.kind == "error" for finding in found):
        raise typer.Exit(2)


def facts_of(python: str | None) -> "EngineFacts":
    """The facts of an interpreter's vllm, or of the simulated engine when no interpreter is given."""
    from tuner.adapters import adapter_of
    from tuner.knobs.discover import discover
    from tuner.tuning.survey import EngineFile, engine_command

    if python is None:
        return discover(engine_command(EngineFile(kind="simulated"), Path.cwd()))
    found = shutil.which(python)
    if found is None:
        raise BadInput(f"--python {python}: there is no such interpreter")
    return discover((found, *adapter_of("vllm").command))


baseline_app = typer.Typer(help="Read the configuration that runs today.", no_args_is_help=True)


@baseline_app.command("import")
def import_baseline(
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE|COMMAND",
            help="A command line in quotes, or a file: script, unit, compose file, manifest or Helm values.",
        ),
    ],
    pick: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which engine, if the file has several.")
    ] = None,
    space: Annotated[
        str | None, typer.Option(help="The space that the study will search: its knobs go into the baseline.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PY", help="The interpreter that has vllm, to check the flags.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write here instead of standard output.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read today's configuration into a study file.

    Prints the keys `model`, `engine` and `baseline` of the study.
    Notes on standard error say what was left out or is uncertain. Values of secrets are left out.
    """
    import yaml

    from tuner.knobs import manifests
    from tuner.knobs import space as spaces

    facts = None if python is None else facts_of(python)
    found = manifests.read(what, pick=pick, facts=facts)
    keys = found.study(None if space is None else spaces.load(space))
    if as_json:
        print_json({"source": found.source, "name": found.name, "study": keys, "notes": found.notes})
        return
    text = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True)
    if output is None:
        sys.stdout.write(text)
    else:
        if output.exists():
            raise BadInput(f"--output {output}: this file exists: give another name")
        write_file(output, text)
    for note in found.notes:
        say(f"note: {note}")
