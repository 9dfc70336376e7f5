"""`tuner study`: the studies of the history."""

import typer

from tuner.commands.common import Json, StudyRef, knobs, open_store, print_json, print_table

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
