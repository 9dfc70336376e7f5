"""`tuner run`: executions of studies."""

from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import (
    CONTINUES,
    Json,
    now,
    open_store,
    print_json,
    print_records,
    print_table,
    say,
    settings,
    stopped,
    text,
)
from tuner.errors import BadInput, NotFound, nearest

if TYPE_CHECKING:
    from tuner.history.store import Store
    from tuner.records import Run, Study

app = typer.Typer(help="List runs, show how they are going, stop them.", no_args_is_help=True)
RunRef = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or the beginning of it.")]


@app.command("list")
def list_runs(
    study: Annotated[str | None, typer.Option(help="Only the runs of this study.")] = None,
    as_json: Json = False,
) -> None:
    """List runs, the newest first."""
    from tuner.commands.front import find_study
    from tuner.report.words import state

    store = open_store()
    names = {s.id: s.name for s in store.studies()}
    said = {c.run_id: c for c in store.conclusions()}

    def row(r: "Run") -> list[object]:
        lost = stopped(store, r)
        word, outcome = ("stopped", "") if lost else (r.state, state(said.get(r.id), r))
        reason = CONTINUES if lost else r.reason
        return [r.id, names.get(r.study_id, ""), word, outcome, r.started_at, r.ended_at, reason]

    print_records(
        store.runs(find_study(store, study).id if study else None),
        ["<run", "<study", "<state", "<outcome", "<started", "<ended", "<reason"],
        row,
        as_json=as_json,
    )


def find_run(store: "Store", ref: str) -> "Run":
    """A run by its id or the beginning of it."""

    found = [r for r in store.runs() if r.id.startswith(ref)]
    if len(found) > 1:
        raise BadInput(f"'{ref}' fits more than one run: give more of the id")
    if not found:
        raise NotFound(f"there is no run '{ref}'{nearest(ref, (r.id for r in store.runs()))}")
    return found[0]


def newest_run(store: "Store") -> "Run":
    """The run that started last. NotFound when there is none yet."""
    for found in store.runs(limit=1):
        return found
    raise NotFound("there is no run yet: `tuner tune STUDY.yaml` starts one")


@app.command("status")
def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run's id, or the beginning of it. Default: the newest run."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the progress of a run, and its answer card."""
    from tuner.commands.running import program
    from tuner.report.card import key_of, run_lines

    store = open_store()
    found = newest_run(store) if run is None else find_run(store, run)
    trials = [t for t in store.trials(found.study_id) if t.run_id == found.id]
    states = {s: sum(1 for t in trials if t.state == s) for s in sorted({t.state for t in trials})}
    said = store.conclusion(found.id)
    if as_json:
        told = None if said is None else said.to_json()
        print_json({"run": found, "trials": states, "conclusion": told})
        return
    done = ", ".join(f"{count} {state.value}" for state, count in states.items()) or "no trial yet"
    lost = stopped(store, found)
    state = "stopped" if lost else found.state.value
    typer.echo(f"{found.id} {state}{' (cancel asked for)' if found.cancel_requested else ''}: {done}")
    typer.echo(found.reason or (f"{CONTINUES}; " if lost else "") + _limits(found))
    if said is not None:
        key = key_of(store.study(found.study_id))
        typer.echo("\n".join(run_lines(said, key, program=program())))


def _limits(run: "Run") -> str:
    trials = "no limit of trials" if run.trials_limit is None else f"limit {run.trials_limit} trials"
    return f"{trials}, {f'until {text(run.deadline)}' if run.deadline else 'no deadline'}"


def show_end(store: "Store", study: "Study", run: "Run") -> None:
    """Show how a run ended: its answer card, and the front beside the baseline."""
    from tuner.commands import front
    from tuner.search import ladder

    said = store.conclusion(run.id)
    typer.echo(f"{run.state.value}: {run.reason or 'it ended'}")
    front.show(store, study)
    if rows := ladder.table(store.trials(study.id)):
        title = f"the ladder: max_num_seqs doubled until p95 is worse by {ladder.WORSE:.0%}, then bisected"
        print_table(ladder.COLUMNS, rows, title=title)
    if screened := run.summary.get("screened"):
        typer.echo(
            f"{screened} trials were only screened in a running engine; the front shows relaunched trials"
        )
    made = said.profiles.get("challenger") if said is not None else None
    if made is not None:
        unproved = store.profile(made.id).evidence.get("unproved")
        for name, why in (unproved if isinstance(unproved, dict) else {}).items():
            typer.echo(f"not verified: whether the engine used {name} ({why})")


@app.command("cancel")
def cancel(run: RunRef) -> None:
    """Stop a run: its engine is stopped and its trial aborted. An interrupted run is ended."""
    from tuner.records import RunState
    from tuner.service.runner import Controllers

    store = open_store()
    found = Controllers(store, settings(), now).cancel(find_run(store, run).id, say=say)
    if found.state is RunState.RUNNING:
        say(f"run {found.id} was asked to stop")
    else:
        say(f"run {found.id} is {found.state.value}: {found.reason}")
