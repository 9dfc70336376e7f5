"""`tuner compare`: configurations and engines compared fairly on one's own traffic."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tuner.commands.common import Json, open_store, print_json, print_table, say
from tuner.commands.running import ends_by_signal
from tuner.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tuner.conclusions import Arm, Conclusion
    from tuner.history.store import Store
    from tuner.records import Run
    from tuner.tuning.study import Prepared
    from tuner.tuning.studyfile import EngineFile

WORSE, UNDECIDED = 22, 23
"""Exit codes of `--fail-if`: an arm is worse than the limit or did not serve; a difference is open."""

ArmTexts = Annotated[
    list[str],
    typer.Argument(
        metavar="ARM ARM [ARM…]",
        help="[NAME=]WHAT[@ENGINE]: today, defaults, an alias, a profile's id, a file or a command line;"
        " the engine is an interpreter or an image.",
    ),
]
Study = Annotated[
    Path, typer.Option("--study", metavar="STUDY.yaml", help="Trace, slices, SLO, objectives and engine.")
]
Rounds = Annotated[int, typer.Option(min=2, max=100, help="Launches of each arm, at most.")]
Hours = Annotated[float | None, typer.Option(help="Hours, at most.")]
Until = Annotated[str | None, typer.Option(metavar="HH:MM", help="Be done by this local time.")]
FailIf = Annotated[
    list[str] | None,
    typer.Option(
        metavar="worse:SHARE|open",
        help="Exit code 22 where an arm is clearly worse than the first by more than the share (worse:5%) or"
        " does not serve; open: 23 where a difference stays open (repeat).",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the command lines; launch nothing.")]
RunId = Annotated[
    str | None, typer.Option("--run", hidden=True, help="The run that the service began for this process.")
]


@ends_by_signal()
def compare(
    arms: ArmTexts,
    study: Study,
    rounds: Rounds = 6,
    hours: Hours = None,
    until: Until = None,
    fail_if: FailIf = None,
    dry_run: DryRun = False,
    run: RunId = None,
    as_json: Json = False,
) -> None:
    """Compare configurations or engines in turns.

    Each round launches every arm and replays the same requests, until every difference is known or the budget
    is spent. The first arm is what the others are compared with.
    """
    from tuner.commands import plan
    from tuner.tuning.arms import arm_of
    from tuner.tuning.comparison import compared

    share, strict = gates(fail_if or ())
    prepared, store = plan.prepared_study(study), open_store(create=True)
    engines = registered_engines(prepared)
    made = [arm_of(text, prepared, store, base=Path(), engines=engines) for text in arms]
    comparison = compared(made, rounds=rounds, margin=MARGIN if share is None else share)
    carried_out(
        comparison, store, Bounds(hours, until, run), Gate(share, strict), dry=dry_run, as_json=as_json
    )


class Bounds(NamedTuple):
    """When a comparison must end, and the run that the service began for it."""

    hours: float | None
    until: str | None
    run: str | None


class Gate(NamedTuple):
    """What `--fail-if` asks: the share that nothing may be worse by, and whether everything must be known."""

    share: float | None
    strict: bool


def carried_out(
    comparison: "Prepared", store: "Store", bounds: Bounds, gate: Gate, *, dry: bool, as_json: bool
) -> None:
    """Measure a comparison and show it; or, `dry`, its command lines. Ends with the code of `--fail-if`."""
    from tuner.commands import tune
    from tuner.tuning.run import RunLimits

    if dry:
        for name, line in command_lines(comparison):
            typer.echo(f"{name}: {shlex.join(line)}")
        return
    tune.refuse(hours=bounds.hours, alone=False, idle=False)
    limits = RunLimits(deadline=tune.deadline(bounds.hours, bounds.until), run=bounds.run)
    done = tune.on_its_node(comparison, store, limits, quiet=as_json)
    said = store.conclusion(done.id)
    show(store, done, said, as_json=as_json)
    if (code := exit_code(said, gate.share, strict=gate.strict)) is not None:
        raise typer.Exit(code)


@ends_by_signal()
def upgrade_check(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study file.")],
    new: Annotated[str, typer.Option("--to", metavar="PY|IMAGE", help="The new version.")],
    old: Annotated[
        str, typer.Option("--from", metavar="PY|IMAGE", help="The old version. Default: the study's engine.")
    ] = "",
    alias: Annotated[
        str, typer.Option(help="What runs: an alias, a profile's id, a file, today or defaults.")
    ] = "champion",
    rounds: Rounds = 6,
    hours: Hours = None,
    until: Until = None,
    fail_if: FailIf = None,
    dry_run: DryRun = False,
    run: RunId = None,
    as_json: Json = False,
) -> None:
    """Say whether a new vLLM serves your traffic as well.

    The configuration runs on both versions in turns, and a third time on the new one with every default that
    moved pinned to its old value, so that the cause is named: the code, or a default.
    """
    from tuner.commands import plan
    from tuner.tuning.upgrade import upgrade_check as checked

    share, strict = gates(fail_if or ())
    prepared, store = plan.prepared_study(study), open_store(create=True)
    check = checked(
        prepared, store, old=old, new=new, configuration=alias, base=Path(), rounds=rounds,
        margin=MARGIN if share is None else share, engines=registered_engines(prepared),
    )  # fmt: skip
    carried_out(check, store, Bounds(hours, until, run), Gate(share, strict), dry=dry_run, as_json=as_json)


MARGIN = 0.10
"""Differences below this share are not sought, unless `--fail-if` names a smaller one."""


def gates(texts: "Sequence[str]") -> tuple[float | None, bool]:
    """(the share of `worse:SHARE`, whether `open` is asked for). BadInput for anything else."""
    share, strict = None, False
    for text in texts:
        word, _, limit = text.partition(":")
        if text == "open":
            strict = True
            continue
        try:
            share = float(limit.removesuffix("%")) / (100.0 if limit.endswith("%") else 1.0)
        except ValueError:
            share = -1.0
        if word != "worse" or not 0 < share < 10:
            raise BadInput(f"--fail-if {text}: give worse:5% (a share of the first arm's value) or open")
    return share, strict


def registered_engines(prepared: "Prepared") -> "dict[str, EngineFile]":
    """The engines that are registered for the study's node, by name."""
    from tuner.commands.common import settings
    from tuner.service.study_requests import engines_of

    return engines_of(settings().home, prepared.study.node)


def command_lines(prepared: "Prepared") -> "Iterable[tuple[str, list[str]]]":
    """The command line of each arm."""
    from tuner.tuning.context import Cores
    from tuner.tuning.trial import launch_spec

    assert prepared.comparison is not None
    for arm in prepared.comparison.arms:
        spec = launch_spec(arm.prepared, arm.candidate, Path("."), Cores(engine=None, sender=None))
        yield arm.name, [*spec.command, "--model", spec.model, *spec.argv]


def show(store: "Store", run: "Run", said: "Conclusion | None", *, as_json: bool) -> None:
    """The values of every arm, and the conclusion."""
    from tuner.report import words

    if as_json:
        print_json({"run": run, "conclusion": None if said is None else said.to_json()})
        return
    say(f"{run.state.value}: {run.reason or 'it ended'}")
    if said is None:
        return
    metrics = [m for m in store.study(run.study_id).objectives]
    arms = [*([said.baseline] if said.baseline else []), *said.finalists]
    rows = [[arm.title, arm.engine, *(arm.confirmed.get(m) for m in metrics)] for arm in arms]
    print_table(["<arm", "<engine", *metrics], rows)
    typer.echo(words.headline(said))
    typer.echo(f"took {words.cost(said.cost)}")


def exit_code(said: "Conclusion | None", share: float | None, *, strict: bool) -> int | None:
    """What `--fail-if` makes of a conclusion; None where nothing fails."""
    from tuner.tuning.comparison import undecided

    arms: Sequence[Arm] = () if said is None else said.finalists
    if share is not None and any(arm.dropped is not None or _worse(arm, share) for arm in arms):
        return WORSE
    measured = said is not None and said.measured_again
    if strict and (not measured or any(undecided(arms, share or MARGIN))):
        return UNDECIDED
    return None


def _worse(arm: "Arm", share: float) -> bool:
    return any(c.word == "worse" and (c.change is None or abs(c.change) > share) for c in arm.changes)
