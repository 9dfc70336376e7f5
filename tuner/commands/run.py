"""`tuner run`: executions of studies."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated, cast

import typer

from tuner.commands.common import (
    Json,
    now,
    open_store,
    plain,
    print_json,
    print_table,
    say,
    settings,
    text,
)
from tuner.errors import BadInput, NotFound, nearest
from tuner.measures import many

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.history.store import Store
    from tuner.records import Run, Study, Trial

app = typer.Typer(help="List runs, show how they are going, stop them.", no_args_is_help=True)
RunRef = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or the beginning of it.")]


@app.command("list")
def list_runs(
    study: Annotated[str | None, typer.Option(help="Only the runs of this study.")] = None,
    as_json: Json = False,
) -> None:
    """List runs, the newest first."""
    from tuner.commands.front import find_study
    from tuner.report.words import CONTINUES, run_state, state

    store = open_store()
    studies = store.studies()
    several = {name for name, count in Counter(s.name for s in studies).items() if count > 1}
    names = {s.id: f"{s.name} ({s.id[:12]})" if s.name in several else s.name for s in studies}
    said = {c.run_id: c for c in store.conclusions()}
    stopped = store.stopped_runs(now=now())
    found = store.runs(find_study(store, study).id if study else None)
    if as_json:
        print_json([_as_data(r, stopped) for r in found])
        return

    def row(r: "Run") -> list[object]:
        lost, word = r.id in stopped, run_state(r, stopped)
        outcome, reason = ("", CONTINUES) if lost else (state(said.get(r.id), r), r.reason)
        return [r.id, names.get(r.study_id, ""), word, outcome, r.started_at, r.ended_at, reason]

    heads = ["<run", "<study", "<state", "<outcome", "<started", "<ended", "<reason"]
    print_table(heads, map(row, found))


def _as_data(run: "Run", stopped: "frozenset[str]") -> dict[str, object]:
    """A run as the API tells it."""
    from tuner.report.words import run_state

    told = {"state": run_state(run, stopped), "stopped": run.id in stopped}
    return {**cast(dict[str, object], plain(run)), **told}


def find_run(store: "Store", ref: str) -> "Run":
    """A run by its id or the beginning of it."""

    found = [r for r in store.runs() if r.id.startswith(ref)]
    if len(found) > 1:
        raise BadInput(f"more than one run has an id that begins with '{ref}': give more characters")
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
    from tuner.commands.common import program
    from tuner.report.card import run_lines
    from tuner.report.words import CONTINUES, no_trial, run_state, time_left, told_counts, trial_counts
    from tuner.tuning.now import left_of

    store = open_store()
    found = newest_run(store) if run is None else find_run(store, run)
    trials = [t for t in store.trials(found.study_id) if t.run_id == found.id]
    said, stopped = store.conclusion(found.id), store.stopped_runs(now=now())
    left = left_of(store, settings().home, found, now())
    if as_json:
        told = None if said is None else said.to_json()
        counts = trial_counts(trials, stopped)
        print_json({"run": _as_data(found, stopped), "trials": counts, "conclusion": told, "left_s": left})
        return
    done = told_counts(trials, stopped) or no_trial(found)
    state, lost = run_state(found, stopped), found.id in stopped
    typer.echo(f"{found.id} {state}{' (asked to stop)' if found.cancel_requested else ''}: {done}")
    typer.echo(found.reason or (f"{CONTINUES}; " if lost else "") + _limits(found) + time_left(left))
    if said is not None:
        typer.echo("\n".join(run_lines(said, store.attribution(found.id), program())))


def _limits(run: "Run") -> str:
    trials = "no limit of trials"
    if run.trials_limit == 0:
        trials = "only the confirmation"
    elif run.trials_limit is not None:
        trials = f"limit {many(run.trials_limit, 'trial')}"
    return f"{trials}, {f'until {text(run.deadline)}' if run.deadline else 'no deadline'}"


def show_end(store: "Store", study: "Study", run: "Run") -> None:
    """Show how a run ended: its answer card, and the front beside the baseline."""
    from tuner.commands import front
    from tuner.profiles import registry
    from tuner.search.guides import LADDER_WORSE

    said = store.conclusion(run.id)
    typer.echo(f"{run.state.value}: {run.reason or 'it ended'}")
    front.show(store, study)
    if rows := ladder_table(store.trials(study.id)):
        title = f"the ladder: max_num_seqs is doubled until p95 is worse by {LADDER_WORSE:.0%}, then bisected"
        print_table(LADDER_COLUMNS, rows, title=title)
    for alias, made in said.profiles.items() if said is not None else ():
        profile = store.profile(made.id)
        if (first := registry.serves_as(store, profile)) is not None:
            typer.echo(
                f"version {made.version} ({alias}) is a new measurement of the configuration of"
                f" version {first} (tuner profile show {made.id})"
            )
        unproved = profile.evidence.get("unproved") if alias == "challenger" else None
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


LADDER_COLUMNS = (
    "max_num_seqs", "p50 ms", "p95 ms", "p99 ms", "good/s", "tokens/s", "KV %", "preemptions", "<what",
)  # fmt: skip


def ladder_table(trials: "Sequence[Trial]") -> list[tuple[object, ...]]:
    """The rungs as rows of LADDER_COLUMNS; the last column names the lowest p95, and what was worse."""
    from tuner.search.guides import LADDER_WORSE, rungs

    tried = rungs(trials)
    if not tried:
        return []
    best = min(tried, key=lambda rung: (rung.tail, rung.level))
    rows: list[tuple[object, ...]] = []
    for rung in tried:
        values = rung.trial.measurement.values if rung.trial.measurement else {}
        numbers = [values.get(f"e2e_{p}_ms") for p in ("p50", "p95", "p99")]
        numbers += [values.get("goodput_rps"), values.get("output_tokens_per_s")]
        kv = values.get("kv_usage_max")
        said = rung.trial.reason or f"worse by more than {LADDER_WORSE:.0%}"
        word = "lowest p95" if rung is best else said if rung.tail > best.tail * (1 + LADDER_WORSE) else ""
        rows.append((rung.level, *numbers, None if kv is None else kv * 100, values.get("preemptions"), word))
    return rows
