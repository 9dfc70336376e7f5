"""`tuner study` and `tuner trial`: the studies of the history and their trials."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from tuner.commands.common import (
    Json,
    StudyRef,
    now,
    open_store,
    plain,
    print_json,
    print_records,
    print_table,
    settings,
    text,
)
from tuner.errors import BadInput, NotFound, page_of

if TYPE_CHECKING:
    from tuner.records import Trial

app = typer.Typer(help="List, show and export studies.", no_args_is_help=True)


@app.command("list")
def list_studies(as_json: Json = False) -> None:
    """List all studies, the newest first."""
    names = ("name", "model", "node", "gpu_class", "engine_version", "workload", "objectives", "created_at")
    rows = [{"id": s.id[:12], **{name: getattr(s, name) for name in names}} for s in open_store().studies()]
    shown = ("id", "name", "model", "node", "engine_version", "workload", "created_at")
    print_records(rows, [f"<{n}" for n in shown], lambda row: [row[n] for n in shown], as_json=as_json)


@app.command("show")
def show_study(study: StudyRef, as_json: Json = False) -> None:
    """Show a study and its trials."""
    from tuner.commands.front import find_study, say_last_confirmed
    from tuner.report.board import board_of
    from tuner.report.words import headline, knobs, trial_word, unended

    store = open_store()
    found = find_study(store, study)
    shown, stopped = board_of(store, found), store.stopped_runs(now=now())
    trials = shown.trials
    if as_json:
        rows = [as_data(t, stopped) for t in trials]
        print_json({"study": found, **shown.found(), "trials": rows})
        return
    typer.echo(
        f"{found.name} ({found.id[:12]}): {found.model} on {found.gpu_class}, vLLM {found.engine_version}"
    )
    typer.echo(f"trace {found.trace_digest[:12]}, slices {', '.join(s.name for s in found.slices)}")
    if said := unended(next(iter(store.runs(found.id, limit=1)), None), stopped):
        typer.echo(said)
    if shown.conclusion is not None:
        typer.echo(headline(shown.conclusion))
    say_last_confirmed(shown)
    names, again = found.objectives, shown.confirmation is not None and shown.confirmation.measured_again

    def row(trial: "Trial") -> list[object]:
        beside = shown.row(trial)
        values = [(beside.first(n), beside.confirmed(n)) if again else (beside.first(n),) for n in names]
        cells = [cell for pair in values for cell in pair]
        return [trial.label, trial_word(trial, stopped), trial.origin, *cells,
                knobs(shown.configuration(trial)), trial.reason or ""]  # fmt: skip

    measured = [head for n in names for head in ((f"{n} first", "confirmed") if again else (n,))]
    heads = ["trial", "<state", "<origin", *measured, "<configuration", "<reason"]
    print_table(heads, map(row, trials), title="trials, by first measurements")
    if shown.sources:
        typer.echo(shown.sources)


@app.command("export")
def export_study(
    study: StudyRef,
    optuna: Annotated[
        str,
        typer.Option(help="Write the study into this Optuna storage, such as sqlite:///study.db."),
    ] = "",
    csv: Annotated[Path | None, typer.Option(help="Write every trial as a row of this CSV file.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write the same rows into this Parquet file.")] = None,
) -> None:
    """Write a study and all its trials for other tools."""
    from tuner.commands.front import find_study
    from tuner.report import trial_table

    if not (optuna or csv or parquet):
        raise BadInput("nothing to write: give --optuna URL, --csv FILE or --parquet FILE")
    store = open_store()
    found = find_study(store, study)
    trials = store.trials(found.id)
    table = trial_table.table_of(trials)
    try:
        if csv is not None:
            csv.write_bytes(trial_table.as_csv(table))
        if parquet is not None:
            parquet.write_bytes(trial_table.as_parquet(table))
    except OSError as error:
        raise BadInput(f"cannot write {csv or parquet}: {error}") from error
    if optuna:
        from tuner.report import optuna_study

        if optuna == settings().url:
            raise BadInput("--optuna: this is the tuner's own database; give another database for Optuna")
        name = optuna_study.export(found, trials, optuna)
        typer.echo(f"study {name} is in {optuna}; look at it with: optuna-dashboard {optuna}", err=True)


def as_data(trial: "Trial", stopped: "frozenset[str]") -> dict[str, object]:
    """A trial as the API tells it."""
    from tuner.report.words import trial_state

    return {**cast(dict[str, object], plain(trial)), "state": trial_state(trial, stopped)}


trial_app = typer.Typer(help="Show a trial's numbers, or its engine's log.", no_args_is_help=True)
Number = Annotated[
    str,
    typer.Argument(
        metavar="NUMBER", help="The trial's number in its study, or the name of one attempt, such as 2.1."
    ),
]
Attempt = Annotated[int | None, typer.Option(help="Which attempt. Default: the last one.")]


def find_trial(study: str, name: str, attempt: int | None) -> "Trial":
    """A trial of a study: the given attempt (`2.1`, or the option), or the last one."""
    from tuner.commands.front import find_study
    from tuner.report.board import attempts_of

    named = re.fullmatch(r"(\d{1,9})(?:\.(\d{1,9}))?", name)
    if named is None:
        raise BadInput(f"'{name}' is no trial: give its number, such as 2, or an attempt's name, such as 2.1")
    if named[2] and attempt is not None:
        raise BadInput(f"'{name}' already names an attempt: leave out --attempt")
    store = open_store()
    found = find_study(store, study)
    chosen = int(named[2]) if named[2] else attempt
    return attempts_of(found, store.trials(found.id), int(named[1]), chosen)[0]


@trial_app.command("show")
def show_trial(study: StudyRef, number: Number, attempt: Attempt = None, as_json: Json = False) -> None:
    """Show a trial's configuration, measurements and end."""
    from tuner.report.board import measured_at
    from tuner.report.evidence import log_path, to_screen
    from tuner.report.words import CONTINUES, TOGETHER, configuration, knobs, pass_name, trial_word
    from tuner.settings import under_home

    trial, store = find_trial(study, number, attempt), open_store()
    if as_json:
        print_json(as_data(trial, store.stopped_runs(now=now())))
        return
    word = trial_word(trial, store.stopped_runs(now=now()))
    study_of, launches = store.study(trial.study_id), store.launches(trial.study_id)
    asked = configuration(trial, study_of, store.trials(study_of.id))
    typer.echo(f"trial {trial.label} {word} ({trial.origin}): {knobs(asked)}")
    if word == "interrupted":
        typer.echo(f"its run was stopped; {CONTINUES}")
    if trial.reason:
        typer.echo(why(trial))
    if larger := to_screen(trial, launches):
        typer.echo(larger)
    where = under_home(trial.directory) if trial.directory else log_path(trial, launches).parent
    typer.echo(f"directory: {where if where.is_dir() else 'not on this host'}")
    names = sorted({name for m in trial.measurements for name in m.values})
    times = measured_at(trial, trial.measurements, launches)
    heads = [
        pass_name(m, study_of) + (f", {text(at)}" if at else "")
        for m, at in zip(trial.measurements, times, strict=True)
    ]
    print_table(
        ["<measurement", *heads],
        ([n, *(m.values.get(n) for m in trial.measurements)] for n in names),
        empty="nothing was measured",
    )
    if any(m.purpose == "confirm" for m in trial.measurements):
        typer.echo(TOGETHER)


@trial_app.command("log")
def show_log(
    study: StudyRef,
    number: Number,
    attempt: Attempt = None,
    lines: Annotated[int, typer.Option(help="How many lines from the end; 0 = all.")] = 40,
) -> None:
    """Print the engine's log of a trial. For a failed trial, the reason and the line that shows it come
    first.
    """
    from tuner.report.evidence import log_path, root_cause

    trial = find_trial(study, number, attempt)
    path = log_path(trial, open_store().launches(trial.study_id))
    if not path.is_file():
        raise NotFound(f"the log {path} is not on this host")
    if trial.reason:
        typer.echo(why(trial))
        if cause := root_cause(trial, path):
            typer.echo(f"root cause: {cause}")
        typer.echo("---")
    found = path.read_text(errors="replace").splitlines()
    typer.echo("\n".join(found[-lines:] if lines else found))


def why(trial: "Trial") -> str:
    """Why a trial failed: its cause, if one is known, the reason, and what to read."""
    return f"{trial.cause}: {trial.reason}{page_of(trial.cause)}" if trial.cause else str(trial.reason)
