"""`tuner knobs`: what an installed engine lets you turn."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from tuner.commands.common import Json, print_json, print_table, text


def knobs(
    python: Annotated[
        str | None,
        typer.Option(metavar="PY", help="The interpreter that has vllm; the simulated engine else."),
    ] = None,
    space: Annotated[
        str | None, typer.Option(help="A search space: what of it this engine can turn.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the knobs of an installed engine with their effective defaults, and those it lacks."""
    from tuner.knobs import arguments
    from tuner.knobs import space as spaces
    from tuner.knobs.catalogue import CATALOGUE
    from tuner.knobs.discover import discover

    facts = discover(_command(python))
    if space is not None:
        left = spaces.load(space).restricted(facts)
        if as_json:
            print_json({"space": left.name, "levels": left.levels, "dropped": left.dropped})
            return
        rows = [[name, "  ".join(text(v) for v in levels), ""] for name, levels in left.levels.items()]
        rows += [[name, "", reason] for name, reason in left.dropped.items()]
        print_table(["<knob", "<levels", "<why not"], rows, title=f"{left.name} on vLLM {facts.version}")
        return
    found = []
    for name, knob in CATALOGUE.items():
        absent = knob.flag_in(facts) is None and knob.kind != "preemption"
        reason = None
        if absent:
            sample = facts.defaults.get(name)
            reason = arguments.refusal(name, sample, facts) if sample is not None else "not in this engine"
        found.append(
            {
                "knob": name,
                "flag": knob.flag_in(facts),
                "default": facts.defaults.get(name),
                "why_not": reason,
            }
        )
    if as_json:
        print_json(
            {"version": facts.version, "platform": facts.platform, "gpu": facts.gpu_name, "knobs": found}
        )
        return
    cells = ([row[n] for n in ("knob", "flag", "default", "why_not")] for row in found)
    title = f"vLLM {facts.version} ({facts.kind}, {facts.platform})"
    print_table(["<knob", "<flag", "<default", "<why not"], cells, title=title)


def _command(python: str | None) -> tuple[str, ...]:
    from tuner.errors import BadInput
    from tuner.tuning.study import VLLM_MODULE, engine_command
    from tuner.tuning.studyfile import EngineFile

    if python is None:
        return engine_command(EngineFile(kind="simulated"), Path.cwd())
    found = shutil.which(python)
    if found is None:
        raise BadInput(f"--python {python}: there is no such interpreter")
    return (found, *VLLM_MODULE)
