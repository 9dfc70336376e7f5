"""`tuner knobs`: what an installed engine lets you turn."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, print_json, print_table, text

if TYPE_CHECKING:
    from tuner.records import EngineFacts

app = typer.Typer(help="Knobs: what an installed engine lets you turn.", invoke_without_command=True)
Python = Annotated[
    str | None, typer.Option(metavar="PY", help="The interpreter that has vllm; the simulated engine else.")
]


@app.callback()
def knobs(
    context: typer.Context,
    python: Python = None,
    space: Annotated[
        str | None, typer.Option(help="A search space: what of it this engine can turn.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the knobs of an installed engine with their effective defaults, and those it lacks."""
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
    from tuner.knobs.check import rows

    found = [
        {
            "knob": row.name,
            "flag": row.flag,
            "default": row.default,
            "choices": row.choices,
            "why_not": row.why_not,
        }
        for row in rows(facts)
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
        str | None, typer.Option(help="A model: what is known to fail with it is counted too.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="The engine's --max-model-len.")] = None,
    as_json: Json = False,
) -> None:
    """Check a search space against an engine: what stops a study, what is dropped, what to know.

    Exit 2 when a study with this space could not begin.
    """
    from tuner.knobs import check as checks
    from tuner.knobs import model as models
    from tuner.knobs import space as spaces
    from tuner.knobs.arguments import title

    facts = facts_of(python or context.obj)
    shape = None if model is None else models.read(model, env={})
    length = max_model_len or (None if shape is None else shape.max_len)
    found = checks.check(spaces.load(space), facts, max_model_len=length, model=shape)
    if as_json:
        print_json({"version": facts.version, "platform": facts.platform, "findings": found})
    elif found:
        rows = ([finding.kind, finding.about, finding.text] for finding in found)
        print_table(["<kind", "<about", "<finding"], rows, title=f"{space} on {title(facts)}")
    else:
        typer.echo(f"{space} on {title(facts)}: nothing to say against it")
    if any(finding.kind == "error" for finding in found):
        raise typer.Exit(2)


def facts_of(python: str | None) -> "EngineFacts":
    """What an interpreter says of its vllm; the simulated engine without one."""
    from tuner.adapters import adapter_of
    from tuner.errors import BadInput
    from tuner.knobs.discover import discover
    from tuner.tuning.study import engine_command
    from tuner.tuning.studyfile import EngineFile

    if python is None:
        return discover(engine_command(EngineFile(kind="simulated"), Path.cwd()))
    found = shutil.which(python)
    if found is None:
        raise BadInput(f"--python {python}: there is no such interpreter")
    return discover((found, *adapter_of("vllm").command))
