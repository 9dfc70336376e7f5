"""`tuner profile`: the published configurations, their aliases, and how pipelines pull them."""

import getpass
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import (
    Json,
    model_name,
    now,
    open_store,
    print_json,
    print_table,
    say,
    write_file,
)  # fmt: skip
from tuner.errors import BadInput, NotFound, nearest
from tuner.measures import many

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tuner.history.store import Store
    from tuner.records import JSON, AliasEvent, Profile, ProfileKey

app = typer.Typer(help="List, compare, promote and export winning profiles.", no_args_is_help=True)
Model = Annotated[str, typer.Option(callback=model_name, help="The model that the profile is for.")]
NodeName = Annotated[str | None, typer.Option(help="The node. Not needed when there is only one.")]
Workload = Annotated[str | None, typer.Option(help="The workload. Not needed when there is only one.")]


def _formats(begun: str) -> "list[str]":
    from tuner.profiles.export import FORMATS

    return [name for name in FORMATS if name.startswith(begun)]


Format = Annotated[
    str,
    typer.Option(
        help="vllm-yaml, args, env, json, or another format of docs/profiles.md.", autocompletion=_formats
    ),
]
Reason = Annotated[str, typer.Option(help="The reason, which is stored with the event.")]
ID = "The profile's id (first column of `tuner profile list`), not its version."
CHANGED, UNCHANGED, NONE = 0, 3, 4
"""Exit codes of `resolve --exit-code`."""


@app.command("list")
def list_profiles(
    model: Annotated[str | None, typer.Option(callback=model_name, help="Only this model.")] = None,
    as_json: Json = False,
) -> None:
    """List profile versions and their aliases, the newest first."""
    from tuner.report.words import knobs

    store = open_store()
    profiles, aliases = store.profiles(model=model), store.aliases()
    rows = []
    for p in profiles:
        names = sorted(e.alias for e in aliases if e.key == p.key and e.to_version == p.version)
        rows.append((p, names))
    if as_json:
        print_json([{"profile": p, "aliases": names} for p, names in rows])
        return
    table = [
        [
            p.id,
            p.key.model,
            p.key.target,
            p.key.workload,
            p.version,
            " ".join(names),
            p.engine_version,
            knobs(p.candidate),
        ]
        for p, names in rows
    ]
    heads = [
        "id",
        "<model",
        "<node or class",
        "<workload",
        "version",
        "<aliases",
        "<engine",
        "<configuration",
    ]
    print_table(heads, table)


@app.command("show")
def show(profile: Annotated[int, typer.Argument(help=ID)], as_json: Json = False) -> None:
    """Show a version, its evidence and the moves of its aliases."""
    from tuner.profiles import registry
    from tuner.report.words import knobs

    store = open_store()
    found = store.profile(profile)
    events = [e for e in store.alias_events(found.key) if found.version in (e.from_version, e.to_version)]
    if as_json:
        print_json({"profile": found, "events": events})
        return
    key = found.key
    typer.echo(f"profile {found.id}: {key.model} on {key.target} for {key.workload}, version {found.version}")
    typer.echo(
        f"engine {found.engine_version}, {found.gpu_class}, study {found.study_id[:12]}:"
        f" {knobs(found.candidate)}"
    )
    if found.env:
        typer.echo(f"in the environment: {knobs(dict(sorted(found.env.items())))}")
    if (first := registry.serves_as(store, found)) is not None:
        typer.echo(f"the same configuration as version {first}, with the evidence of a later run")
    print_table(["<evidence", "<value"], _lines(found.evidence, gpus=store.study(found.study_id).has_gpus))
    if found.evidence.get("repeats"):
        typer.echo(f"the values come from {many(int(str(found.evidence['repeats'])), 'repeat')}")
    rows = [[e.at, e.alias, e.from_version, e.to_version, e.actor, e.reason] for e in events]
    print_table(["<at", "<alias", "from", "to", "<by", "<why"], rows)


def _lines(evidence: "Mapping[str, JSON]", above: str = "", *, gpus: bool) -> "Iterator[tuple[str, JSON]]":
    """A row per value; a value inside another is named like `values.goodput_rps`. A measured null is +inf.
    `gpus`: the engine held GPUs.
    """
    for name, value in sorted(evidence.items()):
        if name == "changes" and isinstance(value, list):
            yield from _changes(value)
        elif name == "attribution" and value:
            yield from _attribution(value, gpus=gpus)
        elif isinstance(value, dict) and value:
            yield from _lines(value, f"{above}{name}.", gpus=gpus)
        elif name == "verdict" and evidence.get("demonstration") is True:
            yield name, f"{value} (a demonstration)"
        else:
            yield f"{above}{name}", math.inf if value is None and above == "values." else value


def _attribution(value: "JSON", *, gpus: bool) -> "Iterator[tuple[str, JSON]]":
    """What each knob gives, and the last comparison, written as everywhere."""
    from tuner.conclusions import Attribution
    from tuner.report.explain import knob_line
    from tuner.report.words import change, took

    found = Attribution.from_json(value)
    yield "attribution", found.sentence
    yield from ((f"attribution.{gain.name}", knob_line(gain)) for gain in found.knobs)
    for each in found.last:
        where = "" if each.where == "confirm" else " (held-out slice)"
        yield f"attribution.last comparison.{each.metric}{where}", change(each)
    yield "attribution.took", took(found.seconds, gpus=gpus)


def _changes(rows: "list[JSON]") -> "Iterator[tuple[str, JSON]]":
    """The differences from the baseline, written as everywhere."""
    from tuner.conclusions import Difference
    from tuner.report.words import change

    for row in rows:
        made = Difference(**row) if isinstance(row, dict) else None  # type: ignore[arg-type]
        if made is not None:
            where = "" if made.where == "confirm" else " (held-out slice)"
            yield f"change.{made.metric}{where}", change(made)


@app.command("diff")
def diff(
    one: Annotated[int, typer.Argument(help=ID)],
    other: Annotated[int, typer.Argument(help="The id of the other profile.")],
    as_json: Json = False,
) -> None:
    """Show the differences of two versions.

    Engine, traffic, GPU, knobs, fixed arguments and environment.
    """
    from tuner.profiles import registry

    store = open_store()
    changes = registry.diff(store.profile(one), store.profile(other))
    if as_json:
        print_json(changes)
        return
    rows = [[change.kind, change.name, change.before, change.after] for change in changes]
    empty = "No knob, engine, traffic or GPU differs."
    print_table(["<kind", "<name", f"<profile {one}", f"<profile {other}"], rows, empty=empty)


@app.command("resolve")
def resolve(
    model: Model,
    node: NodeName = None,
    gpu_class: Annotated[
        str | None, typer.Option(help="The GPU class to use when the node has no profile.")
    ] = None,
    workload: Workload = None,
    alias: Annotated[str, typer.Option(help="The alias: champion, challenger or baseline.")] = "champion",
    engine_version: Annotated[str | None, typer.Option(help="The engine version that will run it.")] = None,
    format: Format = "vllm-yaml",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file.")] = None,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help="Exit with 0 if the file of --output changed, 3 if it did not, 4 if there is no profile.",
        ),
    ] = False,
) -> None:
    """Print an alias's configuration in the format of your chart."""
    from tuner.profiles import export, registry

    store = open_store()
    key = find_key(store, model, node, workload, needs_node=gpu_class is None)
    found = registry.resolve(
        store,
        model=model,
        workload=key.workload,
        node=key.target if gpu_class is None or node else None,
        gpu_class=gpu_class,
        alias=alias,
        engine_version=engine_version,
    )
    _put(export.render(found.profile, format), output, exit_code)


@app.command("export")
def export_profile(
    profile: Annotated[int, typer.Argument(help=ID)],
    format: Format = "vllm-yaml",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file.")] = None,
) -> None:
    """Print the version with this id in a format."""
    from tuner.profiles import export

    _put(export.render(open_store().profile(profile), format), output, False)


def _put(content: str, output: Path | None, exit_code: bool) -> None:

    if output is None:
        typer.echo(content, nl=not content.endswith("\n"))
        return
    same = output.is_file() and output.read_bytes() == content.encode()
    if not same:
        write_file(output, content)
    say(f"{output} {'is unchanged' if same else 'was written'}")
    if exit_code and same:
        raise typer.Exit(UNCHANGED)


def find_key(
    store: "Store", model: str, node: str | None, workload: str | None, *, needs_node: bool = True
) -> "ProfileKey":
    """The only profile key that matches. NotFound names the nearest model, BadInput the option that is
    missing.
    """
    from tuner.profiles import registry
    from tuner.records import ProfileKey

    known = registry.workloads(store, model)
    chosen = workload or registry.only_workload(store, model, asked_by="--workload")
    targets = sorted(k.target for k in store.profile_keys(model) if k.workload == chosen)
    if node is None and not needs_node:
        return ProfileKey(model=model, target=targets[0] if targets else "", workload=chosen)
    if not targets:
        raise NotFound(f"model '{model}' has no profile for workload '{chosen}'{nearest(chosen, known)}")
    if node is not None and node not in targets:
        raise NotFound(
            f"model '{model}' has no profile on '{node}'{nearest(node, targets)}; it has {', '.join(targets)}"
        )
    if node is None and len(targets) > 1:
        raise BadInput(f"--node is needed: the model has profiles on {', '.join(targets)}")
    return ProfileKey(model=model, target=node or targets[0], workload=chosen)


@app.command("promote")
def promote(
    model: Model,
    node: NodeName = None,
    workload: Workload = None,
    version: Annotated[
        int | None, typer.Option(help="The number of the version (not an id). Default: the challenger.")
    ] = None,
    alias: Annotated[str, typer.Option(help="The alias to move.")] = "champion",
    reason: Reason = "promoted by hand",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Promote even if it is unconfirmed, misses the SLO, is not judged, or is old."
        ),
    ] = False,
) -> None:
    """Move an alias to a version. The version must be confirmed, keep the SLO and be younger than 30 days.
    If it changes a knob that can change the answers, the answers must have been judged. --force skips
    these checks.
    """
    from tuner.profiles import registry

    store = open_store()
    key = find_key(store, model, node, workload)
    if version is None:
        event = store.alias(key, registry.CHALLENGER)
        if event is None or event.to_version is None:
            raise NotFound(
                f"{key.model} on {key.target} for {key.workload} has no challenger; give --version"
            )
        version = event.to_version
    profile: Profile = store.profile_version(key, version)
    gates = registry.NO_GATES if force else registry.Gates()
    moved = registry.promote(
        store, profile, alias, gates=gates, actor=getpass.getuser(), reason=reason, now=now()
    )
    say(f"{alias} of {key.model} on {key.target} for {key.workload} is version {moved.to_version}")
    if turned := registry.unjudged(profile):
        say(f"warning: it sets {', '.join(turned)}, and its answers were not judged")
    _tell(moved)


@app.command("rollback")
def rollback(
    model: Model,
    node: NodeName = None,
    workload: Workload = None,
    alias: Annotated[str, typer.Option(help="The alias to move back.")] = "champion",
    reason: Reason = "rolled back by hand",
) -> None:
    """Move an alias back to the version before."""
    from tuner.profiles import registry

    store = open_store()
    key = find_key(store, model, node, workload)
    moved = registry.rollback(store, key, alias, actor=getpass.getuser(), reason=reason, now=now())
    say(f"{alias} of {key.model} on {key.target} for {key.workload} is version {moved.to_version} again")
    _tell(moved)


def _tell(moved: "AliasEvent") -> None:
    from tuner.commands.common import settings
    from tuner.fleet import notify

    notify.send(settings().home, notify.moved(moved), say=say)
