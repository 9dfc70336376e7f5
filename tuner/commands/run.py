"""`tuner run`: executions of studies."""

from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, now, open_store, print_json, print_table, say, settings

if TYPE_CHECKING:
    from tuner.history.store import Store
    from tuner.records import Run

app = typer.Typer(help="Runs: executions of a study within a budget.", no_args_is_help=True)
RunRef = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or the beginning of it.")]


@app.command("list")
def list_runs(
    study: Annotated[str | None, typer.Option(help="Only the runs of this study.")] = None,
    as_json: Json = False,
) -> None:
    """List runs, the newest first."""
    from tuner.commands.front import find_study

    store = open_store()
    runs = store.runs(find_study(store, study).id if study else None)
    if as_json:
        print_json(runs)
        return
    names = {s.id: s.name for s in store.studies()}
    rows = [(r.id, names.get(r.study_id, ""), r.state, r.started_at, r.ended_at, r.reason) for r in runs]
    print_table(["<run", "<study", "<state", "<started", "<ended", "<reason"], rows)


def find_run(store: "Store", ref: str) -> "Run":
    """A run by its id or the beginning of it."""
    from tuner.errors import BadInput, NotFound, nearest

    found = [r for r in store.runs() if r.id.startswith(ref)]
    if len(found) > 1:
        raise BadInput(f"'{ref}' begins the id of more than one run: give more of it")
    if not found:
        raise NotFound(f"there is no run '{ref}'{nearest(ref, (r.id for r in store.runs()))}")
    return found[0]


@app.command("status")
def status(run: RunRef, as_json: Json = False) -> None:
    """Show how far a run is, and what it concluded."""
    store = open_store()
    found = find_run(store, run)
    trials = [t for t in store.trials(found.study_id) if t.run_id == found.id]
    states = {s: sum(1 for t in trials if t.state == s) for s in sorted({t.state for t in trials})}
    if as_json:
        print_json({"run": found, "trials": states})
        return
    done = ", ".join(f"{count} {state.value}" for state, count in states.items()) or "no trial yet"
    typer.echo(
        f"{found.id} {found.state.value}{' (cancel asked for)' if found.cancel_requested else ''}: {done}"
    )
    typer.echo(found.reason or f"limit {found.trials_limit} trials, deadline {found.deadline or 'none'}")
    if found.summary:
        typer.echo(f"{found.summary.get('verdict')}: {found.summary.get('sentence')}")


@app.command("cancel")
def cancel(run: RunRef) -> None:
    """Ask a running run to stop; its engine is stopped, its trial aborted. An interrupted one ends."""
    from tuner.records import RunState
    from tuner.service.runner import Controllers

    store = open_store()
    found = Controllers(store, settings(), now).cancel(find_run(store, run).id, say=say)
    if found.state is RunState.RUNNING:
        say(f"run {found.id} was asked to stop")
    else:
        say(f"run {found.id} is {found.state.value}: {found.reason}")
