"""`tuner study`: the studies of the history."""

from pathlib import Path
from typing import Annotated

import typer

from tuner.commands.common import Json, StudyRef, knobs, open_store, print_json, print_table, settings
from tuner.errors import BadInput

app = typer.Typer(help="Studies: what makes trials comparable.", no_args_is_help=True)


@app.command("list")
def list_studies(as_json: Json = False) -> None:
    """List all studies, the newest first."""
    store = open_store()
    studies = store.studies()
    if as_json:
        print_json([{k: v for k, v in _row(s).items()} for s in studies])
        return
    names = ("id", "name", "model", "node", "engine_version", "workload", "created_at")
    print_table([f"<{n}" for n in names], ([_row(s)[n] for n in names] for s in studies))


def _row(study: object) -> dict[str, object]:
    names = ("name", "model", "node", "gpu_class", "engine_version", "workload", "objectives", "created_at")
    row: dict[str, object] = {n: getattr(study, n) for n in names}
    return {"id": str(getattr(study, "id"))[:12], **row}  # noqa: B009


@app.command("show")
def show_study(study: StudyRef, as_json: Json = False) -> None:
    """Show a study and its trials."""
    from tuner.commands.front import find_study

    store = open_store()
    found = find_study(store, study)
    trials = store.trials(found.id)
    if as_json:
        print_json({"study": found, "trials": trials})
        return
    typer.echo(
        f"{found.name} ({found.id[:12]}): {found.model} on {found.gpu_class}, vLLM {found.engine_version}"
    )
    typer.echo(f"trace {found.trace_digest[:12]}, slices {', '.join(s.name for s in found.slices)}")
    rows = []
    for trial in trials:
        values = trial.measurement.values if trial.measurement else {}
        shown = [values.get(name) for name in found.objectives]
        label = f"{trial.number}.{trial.attempt}" if trial.attempt else str(trial.number)
        rows.append([label, trial.state, trial.origin, *shown, knobs(trial.candidate), trial.reason or ""])
    print_table(["trial", "<state", "<origin", *found.objectives, "<configuration", "<reason"], rows)


@app.command("export")
def export_study(
    study: StudyRef,
    optuna: Annotated[
        str,
        typer.Option(help="Write it into this Optuna storage, such as sqlite:///study.db."),
    ] = "",
    csv: Annotated[Path | None, typer.Option(help="Write every trial as a row of this CSV file.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="The same as a Parquet file.")] = None,
) -> None:
    """Write a study and all its trials for other tools."""
    from tuner.commands.front import find_study
    from tuner.report import trial_table

    if not (optuna or csv or parquet):
        raise BadInput("say what to write: --optuna URL, --csv FILE or --parquet FILE")
    store = open_store()
    found = find_study(store, study)
    trials = store.trials(found.id)
    try:
        if csv is not None:
            trial_table.write_csv(trials, csv)
        if parquet is not None:
            trial_table.write_parquet(trials, parquet)
    except OSError as error:
        raise BadInput(f"cannot write {csv or parquet}: {error}") from error
    if optuna:
        from tuner.search import optuna_study

        if optuna == settings().url:
            raise BadInput("--optuna: this is the tuner's own database; give Optuna one of its own")
        name = optuna_study.export(found, trials, optuna)
        typer.echo(f"study {name} is in {optuna}; look at it with: optuna-dashboard {optuna}", err=True)
