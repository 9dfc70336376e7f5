"""`tuner compare` and `tuner upgrade-check`: configurations and engines compared on one's own traffic."""

import shlex
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tuner.commands.common import Json, ends_by_signal, open_store, print_json, print_table, say
from tuner.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tuner.conclusions import Arm, Conclusion
    from tuner.history.store import Store
    from tuner.records import Run
    from tuner.tuning.study import Prepared
    from tuner.tuning.survey import EngineFile

WORSE, UNDECIDED = 22, 23
"""Exit codes of `--fail-if`: an arm is worse than the limit or did not serve; a difference is open."""


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """The options of every command that compares. The service gives `run`, the run that it began for this
    process, and `registered`: neither a path nor a command line is taken.
    """

    rounds: Annotated[int, typer.Option(min=2, max=100, help="Launches of each arm, at most.")] = 6
    hours: Annotated[float | None, typer.Option(help="Hours, at most.")] = None
    until: Annotated[str | None, typer.Option(metavar="HH:MM", help="End before this local time.")] = None
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="worse:SHARE|open",
            help="With `worse:5%`, the exit code is 22 if an arm is over 5 % worse than the first arm, or"
            " does not serve. With `open`, it is 23 if a difference is still open. May be repeated.",
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print commands; launch nothing.")] = False
    run: Annotated[str | None, typer.Option("--run", hidden=True)] = None
    registered: Annotated[bool, typer.Option("--registered", hidden=True)] = False
    as_json: Json = False


class Asked(NamedTuple):
    """A study, and how it is to be compared: `margin` is the smallest difference that matters."""

    prepared: "Prepared"
    store: "Store"
    engines: "dict[str, EngineFile]"
    options: ComparisonOptions
    margin: float


def _command(study: Any) -> "Callable[[Callable[..., Prepared]], Callable[..., None]]":
    """Makes a command of a function that makes a comparison: its parameters are `study` (as typer is to read
    it), the function's own, and the options of every comparison.
    """

    def decorated(make: "Callable[..., Prepared]") -> "Callable[..., None]":
        shared, (_, *own) = signature(ComparisonOptions).parameters, signature(make).parameters.values()

        @ends_by_signal()
        @wraps(make)
        def command(study: Path, **given: Any) -> None:
            options = ComparisonOptions(**{name: given.pop(name) for name in shared})
            _carried_out(make, study, options, given)

        first = Parameter("study", Parameter.KEYWORD_ONLY, annotation=study)
        found = [first, *(each.replace(kind=first.kind) for each in (*own, *shared.values()))]
        command.__annotations__ = {each.name: each.annotation for each in found}
        command.__dict__["__signature__"] = Signature(found)
        return command

    return decorated


def _carried_out(
    make: "Callable[..., Prepared]", study: Path, options: ComparisonOptions, given: "dict[str, object]"
) -> None:
    """Measure a comparison and show it; with `dry_run` only show its command lines. Ends with the code of
    `--fail-if`.
    """
    from tuner.commands import plan, tune
    from tuner.tuning.comparison import MARGIN
    from tuner.tuning.run import RunLimits

    share, strict = gates(options.fail_if or ())
    prepared, store = plan.prepared_study(study), open_store(create=True)
    asked = Asked(prepared, store, registered_engines(prepared), options, share or MARGIN)
    comparison = make(asked, **given)
    if options.dry_run:
        for name, line in command_lines(comparison):
            typer.echo(f"{name}: {shlex.join(line)}")
        if comparison.comparison is not None and comparison.comparison.upgrade is not None:
            typer.echo("If defaults changed, the run also launches the new version with their old values.")
        return
    tune.refuse(hours=options.hours, alone=False, idle=False)
    limits = RunLimits(deadline=tune.deadline(options.hours, options.until), run=options.run)
    done = tune.on_its_node(comparison, store, limits, quiet=options.as_json)
    said = store.conclusion(done.id)
    show(store, done, said, as_json=options.as_json)
    if (code := exit_code(said, share, strict=strict)) is not None:
        raise typer.Exit(code)


@_command(
    Annotated[
        Path,
        typer.Option(
            "--study", metavar="STUDY.yaml", help="The study file: trace, slices, SLO, objectives and engine."
        ),
    ]
)
def compare(
    asked: Asked,
    arms: Annotated[
        list[str],
        typer.Argument(
            metavar="ARM ARM [ARM…]",
            help="[NAME=]WHAT[@ENGINE]. WHAT is today, defaults, an alias, a profile's id, a file or a"
            " command line. ENGINE is an interpreter, an image, a registered engine or a release file.",
        ),
    ],
) -> "Prepared":
    """Compare configurations or engines in turns.

    Each round launches every arm and replays the same requests, until every difference is known or the budget
    is spent. All other arms are compared with the first one.
    """
    from tuner.tuning.comparison import arm_of, compared

    made = [
        arm_of(
            text, asked.prepared, asked.store, base=Path(), engines=asked.engines,
            files=not asked.options.registered,
        )
        for text in arms
    ]  # fmt: skip
    return compared(made, rounds=asked.options.rounds, margin=asked.margin)


@_command(Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study file.")])
def upgrade_check(
    asked: Asked,
    new: Annotated[str, typer.Option("--to", metavar="PY|IMAGE", help="The new version.")],
    old: Annotated[
        str, typer.Option("--from", metavar="PY|IMAGE", help="The old version. Default: the study's engine.")
    ] = "",
    alias: Annotated[
        str,
        typer.Option(help="The configuration to check: an alias, a profile's id, a file, today or defaults."),
    ] = "champion",
) -> "Prepared":
    """Say whether a new vLLM serves your traffic as well.

    The configuration runs on both versions in turns. If defaults changed, it also runs on the new version
    with their old values. So the check can name the cause: the code, or a default.
    """
    from tuner.tuning.upgrade import upgrade_check as checked

    return checked(
        asked.prepared, asked.store, old=old, new=new, configuration=alias, base=Path(),
        rounds=asked.options.rounds, margin=asked.margin, engines=asked.engines,
        files=not asked.options.registered,
    )  # fmt: skip


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
            raise BadInput(f"--fail-if {text}: write 'worse:5%' (a share of the first arm's value) or 'open'")
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
    typer.echo(f"took {words.cost(said.cost, again='comparison')}")


def exit_code(said: "Conclusion | None", share: float | None, *, strict: bool) -> int | None:
    """What `--fail-if` makes of a conclusion; None if nothing fails."""
    from tuner.tuning.comparison import MARGIN, undecided

    arms: Sequence[Arm] = () if said is None else said.finalists
    if share is not None and any(arm.dropped is not None or _worse(arm, share) for arm in arms):
        return WORSE
    measured = said is not None and said.measured_again
    if strict and (not measured or any(undecided(arms, share or MARGIN))):
        return UNDECIDED
    return None


def _worse(arm: "Arm", share: float) -> bool:
    return any(c.word == "worse" and (c.change is None or abs(c.change) > share) for c in arm.changes)
