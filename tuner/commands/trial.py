"""`tuner trial`: one candidate as it was launched and measured."""

from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, StudyRef, knobs, open_store, print_json, print_table

if TYPE_CHECKING:
    from tuner.records import Trial

app = typer.Typer(help="Trials: candidates launched and measured.", no_args_is_help=True)
Number = Annotated[int, typer.Argument(metavar="NUMBER", help="The trial's number in its study.")]
Attempt = Annotated[int | None, typer.Option(help="Which attempt; the last one else.")]


def find_trial(study: str, number: int, attempt: int | None) -> "Trial":
    """A trial of a study, its last attempt unless one is named."""
    from tuner.commands.front import find_study
    from tuner.errors import NotFound

    store = open_store()
    found = find_study(store, study)
    trials = [t for t in store.trials(found.id) if t.number == number and attempt in (None, t.attempt)]
    if not trials:
        last = max((t.number for t in store.trials(found.id)), default=None)
        raise NotFound(f"study {found.name} has no such trial {number}; its last one is {last}")
    return trials[-1]


@app.command("show")
def show(study: StudyRef, number: Number, attempt: Attempt = None, as_json: Json = False) -> None:
    """Show one trial: its configuration, its numbers, how it ended."""
    from tuner.settings import under_home

    trial = find_trial(study, number, attempt)
    if as_json:
        print_json(trial)
        return
    typer.echo(
        f"trial {trial.number}.{trial.attempt} {trial.state.value} ({trial.origin}): {knobs(trial.candidate)}"
    )
    if trial.reason:
        typer.echo(why(trial))
    where = under_home(trial.directory) if trial.directory else "not on this host"
    typer.echo(f"directory: {where}")
    names = sorted({name for m in trial.measurements for name in m.values})
    heads = [f"{m.purpose} {m.repeat}" for m in trial.measurements]
    print_table(
        ["<measurement", *heads],
        ([n, *(m.values.get(n) for m in trial.measurements)] for n in names),
        empty="nothing was measured",
    )


@app.command("log")
def log(
    study: StudyRef,
    number: Number,
    attempt: Attempt = None,
    lines: Annotated[int, typer.Option(help="How many lines from the end; 0 = all.")] = 40,
) -> None:
    """Print the engine's log of a trial; of one that failed, why and the line that says so come first."""
    from tuner.errors import NotFound
    from tuner.settings import under_home

    trial = find_trial(study, number, attempt)
    path = under_home(_where(trial) or "") / "engine.log"
    if not path.is_file():
        raise NotFound(f"the log {path} is not on this host any more")
    whole = path.read_text(errors="replace")
    text = whole.splitlines()
    for line in _first(trial, whole):
        typer.echo(line)
    typer.echo("\n".join(text[-lines:] if lines else text))


def why(trial: "Trial") -> str:
    """How a trial ended badly: its cause, where one is known, and the reason."""
    return f"{trial.cause}: {trial.reason}" if trial.cause else str(trial.reason)


def _first(trial: "Trial", log: str) -> list[str]:
    """What a failed trial's log is read for: the reason, and the line of the root cause if it names one."""
    from tuner.engine import failures
    from tuner.engine.failures import KINDS

    if not trial.reason:
        return []
    said = [why(trial)]
    if trial.cause in KINDS:
        said.append(f"root cause: {failures.classify(log, None, 'startup').evidence}")
    return [*said, "---"]


def _where(trial: "Trial") -> str | None:
    """The directory of the launch that measured it: a screened trial shares its engine with others."""
    by = trial.measurement.launch_id if trial.measurement else None
    launches = open_store().launches(trial.study_id) if by else ()
    return next((each.directory for each in launches if each.id == by), trial.directory)
