"""`tuner schedule`: nightly runs inside a window."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.commands.common import (
    Json,
    ends_by_signal,
    now,
    open_store,
    print_json,
    print_records,
    print_table,
    say,
    settings,
)
from tuner.errors import BadInput, NotFound, TunerError

if TYPE_CHECKING:
    from tuner.fleet.schedule import Firing
    from tuner.history.entities import Schedule
    from tuner.history.store import Store
    from tuner.records import JSON, Run
    from tuner.tuning.context import RunEvent, Tell

app = typer.Typer(help="Tune every night inside a window.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="A schedule's name.")]
REFUSED = 9
"""Exit code of `schedule run` when the run was refused; the message says why."""


@app.command("add")
def add(
    name: Name,
    study: Annotated[Path, typer.Option(metavar="STUDY.yaml", help="The study file to run.")],
    cron: Annotated[str, typer.Option(help="Minute hour day month weekday, such as '0 1 * * 1-5'.")],
    zone: Annotated[
        str, typer.Option(metavar="ZONE", help="The time zone of the schedule, such as Europe/Berlin.")
    ] = "UTC",
    until: Annotated[
        str | None,
        typer.Option(metavar="HH:MM", help="The end of the window. Production is back at this local time."),
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="The length of the window in hours, instead of --until.")
    ] = None,
    missed: Annotated[
        str, typer.Option(help="What to do with a missed start: run starts late, skip does not start.")
    ] = "run",
    grace: Annotated[
        float, typer.Option(min=0, help="A start that is later than this many seconds counts as missed.")
    ] = 300.0,
    blackout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATE[/DATE]", help="Do not start a window that touches these dates. May be repeated."
        ),
    ] = None,
    min_trials: Annotated[
        int, typer.Option(min=0, help="Start only if at least this many trials fit into the window.")
    ] = 3,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Trials per run. Default: the budget of the study.")
    ] = None,
    reserve: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds at the end of the window that are reserved for stopping the engine."
        ),
    ] = 60.0,
    upgrade_to: Annotated[
        str | None,
        typer.Option(
            metavar="PY|IMAGE",
            help="Do not tune, but check this engine once if it is new (see upgrade-check --to). It can be a"
            " pattern such as '/opt/vllm-*/bin/python': then the newest match is checked.",
        ),
    ] = None,
    upgrade_from: Annotated[
        str,
        typer.Option(
            metavar="PY|IMAGE",
            help="Compare the engine of --upgrade-to with this one. Default: the study's engine.",
        ),
    ] = "",
    alias: Annotated[
        str, typer.Option(help="The configuration to check: an alias or a profile's id.")
    ] = "champion",
    disabled: Annotated[
        bool, typer.Option("--disabled", help="Store the schedule, but do not start runs.")
    ] = False,
) -> None:
    """Add a schedule, or change the schedule of that name. `tuner serve` or a timer (deploy/) starts its
    runs.
    """
    from tuner.fleet import window
    from tuner.history.entities import Schedule

    store = open_store(create=True)
    spec: dict[str, JSON] = {
        "study": str(study.absolute()), "until": until, "hours": hours, "missed": missed, "grace_s": grace,
        "blackout": list(blackout or []), "min_trials": min_trials, "trials": trials, "reserve_s": reserve,
    }  # fmt: skip
    if upgrade_to is not None:
        engines = {"to": _absolute(upgrade_to), "from": _absolute(upgrade_from)}
        spec["upgrade"] = {**engines, "alias": alias}
    made = Schedule(
        name=name,
        node=_node_of(study),
        cron=cron,
        timezone=zone,
        spec=window.terms(spec).spec(),
        created_at=now(),
        enabled=not disabled,
    )
    window.check(made)
    before = ""
    try:
        old = store.schedule(name)
        before = "replaces the earlier one; "
        made = replace(made, last_due=old.last_due, last_run_id=old.last_run_id)
    except NotFound:
        pass
    store.put_schedule(made)
    say(f"schedule {name}: {before}{_next_line(made)}")


def _absolute(engine: str) -> str:
    """A path that holds wherever the schedule is run; other names as they are."""
    there = engine and ("*" in engine or Path(engine).expanduser().exists())
    return str(Path(engine).expanduser().absolute()) if there else engine


def _node_of(path: Path) -> str:
    """The node of a study file. The whole file is checked, so that an error shows now and not at night."""
    from tuner.tuning.study import read

    return read(path).node


def _next_line(schedule: "Schedule") -> str:
    from tuner.fleet import window

    due = window.next_due(schedule, now()) if schedule.enabled else None
    if due is None:
        return "disabled" if not schedule.enabled else "no due time is left"
    found, local = window.window(schedule, due), window.zone(schedule.timezone)
    return (
        f"next on {due.astimezone(local):%a %Y-%m-%d %H:%M} until {found.end.astimezone(local):%H:%M %Z},"
        f" node {schedule.node}"
    )


@app.command("list")
def list_schedules(as_json: Json = False) -> None:
    """List schedules with their next window and their last run."""
    from tuner.fleet import window

    rows: list[dict[str, Any]] = []
    for each in open_store().schedules():
        due = window.next_due(each, now()) if each.enabled else None
        end = window.window(each, due).end if due else None
        rows.append(
            {
                **{name: getattr(each, name) for name in each.__dataclass_fields__},
                "next_due": due,
                "next_end": end,
            }
        )
    names = ("name", "node", "cron", "timezone", "next_due", "next_end", "last_due", "last_run_id")
    moments = {"next_due", "next_end", "last_due"}
    print_records(
        rows, ["<schedule", "<node", "<cron", "<zone", "<next", "<until", "<last due", "<last run"],
        lambda row: [_local(row[n], row["timezone"]) if n in moments else row[n] for n in names],
        as_json=as_json,
    )  # fmt: skip


def _local(moment: Any, timezone: str) -> str | None:
    from tuner.fleet import window

    return f"{moment.astimezone(window.zone(timezone)):%Y-%m-%d %H:%M}" if moment else None


@app.command("remove")
def remove(name: Name) -> None:
    """Remove a schedule. A run that has started continues."""
    open_store().remove_schedule(name)
    say(f"schedule {name} is removed")


@app.command("next")
def upcoming(
    name: Name,
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many windows to show.")] = 7,
    as_json: Json = False,
) -> None:
    """Show the next windows of a schedule, and blackout dates."""
    from itertools import islice

    from tuner.fleet import window

    schedule = open_store().schedule(name)
    local, begin = window.zone(schedule.timezone), now()
    dues = islice(window.dues(schedule, begin, begin.replace(year=begin.year + 5)), count)
    rows: list[dict[str, Any]] = []
    for due in dues:
        found = window.window(schedule, due)
        rows.append({"due": due, "end": found.end, "blackout": window.blacked_out(schedule, found)})
    if as_json:
        print_json([{**row, "blackout": row["blackout"] and str(row["blackout"])} for row in rows])
        return
    cells = (
        [f"{moment.astimezone(local):%a %Y-%m-%d %H:%M %Z}" for moment in (row["due"], row["end"])]
        + [str(row["blackout"] or "")]
        for row in rows
    )
    print_table(["<due", "<end", "<blackout"], cells, title=f"{name} ({schedule.timezone})")


@app.command("run")
@ends_by_signal()
def run_now(
    name: Name,
    at_once: Annotated[
        bool, typer.Option("--now", help="Start a run now, even if none is due. Its window begins now.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start the run that is due now. It ends with its window.

    For cron, systemd timers and CronJobs. A run that died in the same window is resumed. Exit code 0: done,
    or nothing is due; 9: refused.
    """
    from tuner.fleet import handover, notify, schedule
    from tuner.fleet.schedule import Firing, Happening

    store, home = open_store(), settings().home
    handover.recover_all(store, home=home, clock=now, say=say)
    row = store.schedule(name)
    if at_once:
        found: Firing | Happening | None = schedule.begin_now(store, row, now())
    else:
        found = schedule.claim(store, row, now()) or schedule.unfinished(store, row, now())
    if found is None:
        say(f"schedule {name}: nothing is due (--now starts a run); {_next_line(row)}")
        return
    if not isinstance(found, Firing):
        schedule.record(store, found)
        if (notice := notify.happening(found)) is not None:
            notify.send(home, notice, say=say)
        say(f"schedule {name}: {found.kind}: {found.sentence}")
        if found.kind != "blackout":
            raise typer.Exit(REFUSED)
        return
    try:
        run = _run(store, found)
    except TunerError as error:
        schedule.record(store, schedule.failed(found, str(error), now()))
        raise
    schedule.record(store, schedule.ended(found, run, now()))
    if as_json:
        print_json(run)
    elif run is not None:
        say(f"schedule {name}: {run.state.value}: {run.reason}")


def _run(store: "Store", firing: "Firing") -> "Run | None":
    """Run the study until the end of the window, minus the time to give production back. None if it checks
    upgrades and no version is new.
    """
    from tuner.commands import tune
    from tuner.fleet.schedule import nothing_begun
    from tuner.service.study_requests import engines_of
    from tuner.tuning import study
    from tuner.tuning.run import RunLimits
    from tuner.tuning.upgrade import NothingNew, unchecked

    prepared = study.load(Path(firing.terms.study), store=store, now=now())
    if prepared.study.node != firing.schedule.node:
        raise BadInput(
            f"schedule {firing.schedule.name} is for node {firing.schedule.node}, but its study file names"
            f" node {prepared.study.node}: add the schedule again"
        )
    if (upgrade := firing.terms.upgrade) is not None:
        engines = engines_of(settings().home, prepared.study.node)
        try:
            prepared = unchecked(
                prepared,
                store,
                engines,
                new=upgrade.to,
                old=upgrade.old,
                configuration=upgrade.alias,
                files=True,
            )
        except NothingNew as same:
            nothing_begun(store, firing)
            say(f"schedule {firing.schedule.name}: {same}")
            return None
    budget = prepared.file.budget
    ends = [firing.deadline, *([now() + timedelta(hours=budget.hours)] if budget.hours else [])]
    limits = RunLimits(trials=firing.terms.trials or budget.trials, deadline=min(ends))
    listen = _remember(store, firing.schedule.name, prepared.study.id)
    return tune.on_its_node(
        prepared, store, limits, min_trials=firing.terms.min_trials, quiet=True, listen=listen
    )


def _remember(store: "Store", schedule: str, study_id: str) -> "Tell":
    """A listener that stores the run of a scheduled start as soon as it exists."""

    def tell(event: "RunEvent") -> None:
        from tuner.records import RunState

        if event.kind == "run":
            for run in store.runs(study_id, state=RunState.RUNNING, limit=1):
                store.scheduled_run(schedule, run.id)

    return tell
