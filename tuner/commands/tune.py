"""`tuner tune` and `tuner demo`: tune an engine on its node, or a simulated one to see how it works."""

import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, now, open_store, print_json, say, settings
from tuner.commands.plan import prepared_study, print_plan, say_unjudged, trials_so_far
from tuner.commands.running import ends_by_signal, interruptible
from tuner.errors import BadInput, Conflict

if TYPE_CHECKING:
    from tuner.history.store import Store
    from tuner.records import Run
    from tuner.tuning.context import RunEvent, Tell
    from tuner.tuning.run import RunLimits
    from tuner.tuning.study import Prepared


StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study file.")]
Trials = Annotated[
    int | None, typer.Option(min=1, help="Trials of this run. Default: the budget of the study file.")
]
Hours = Annotated[
    float | None, typer.Option(help="Hours of this run. Default: the budget of the study file.")
]
Until = Annotated[str | None, typer.Option(metavar="HH:MM", help="End at this local time at the latest.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print command lines, slices and times; launch nothing.")
]
CheckRules = Annotated[
    bool,
    typer.Option("--check-rules", help="Also launch candidates that are known to fail, to check the rules."),
]
AllTrials = Annotated[
    bool, typer.Option("--all-trials", help="Use the whole budget; the search does not end early.")
]
ConfirmOnly = Annotated[
    bool, typer.Option("--confirm-only", help="Only measure the finalists again; no new trials.")
]
MinTrials = Annotated[
    int, typer.Option(min=0, help="Do not start when fewer trials than this fit into the time left.")
]
Cluster = Annotated[
    str | None,
    typer.Option("--on", metavar="CLUSTER", help="A Ray cluster: auto, HOST:PORT or ray://HOST:PORT."),
]
Nodes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE", help="Only these nodes of the cluster: gpu=, name=, class=, host=, or a label."
    ),
]
Isolated = Annotated[
    bool,
    typer.Option(
        "--isolated", help="Nodes that share a host replay at the same time. This makes it another study."
    ),
]
RunId = Annotated[
    str | None, typer.Option("--run", hidden=True, help="The run that the service began for this process.")
]


@ends_by_signal()
def tune(
    study: StudyFile,
    trials: Trials = None,
    hours: Hours = None,
    until: Until = None,
    dry_run: DryRun = False,
    check_rules: CheckRules = False,
    all_trials: AllTrials = False,
    confirm_only: ConfirmOnly = False,
    min_trials: MinTrials = 0,
    on: Cluster = None,
    nodes: Nodes = None,
    isolated: Isolated = False,
    run: RunId = None,
    as_json: Json = False,
) -> None:
    """Find an engine's best configuration for a trace.

    An interrupted run continues where it stopped.
    """
    from dataclasses import replace

    from tuner.tuning import studyfile
    from tuner.tuning.context import hours_left
    from tuner.tuning.run import RunLimits

    refuse(
        hours=hours, alone=on is None and bool(nodes or isolated), idle=confirm_only and trials is not None
    )
    budget = studyfile.read(study).budget
    limits = RunLimits(
        trials=None if confirm_only else trials or budget.trials,
        deadline=deadline(hours or budget.hours, until),
        early=not all_trials,
        run=run,
        confirm_only=confirm_only,
    )
    if on is not None:
        from tuner.commands.fleet import ClusterOptions, tune_on

        tune_on(
            ClusterOptions(study=study, on=on, nodes=nodes or (), limits=limits, dry_run=dry_run,
                  rules=not check_rules, isolated=isolated, as_json=as_json)
        )  # fmt: skip
        return
    prepared = prepared_study(study, check_rules=check_rules)
    if dry_run:
        print_plan(prepared, limits.trials, as_json=as_json)
        return
    if confirm_only:
        check_finalists(prepared)
    say_unjudged(prepared)
    store = open_store(create=True)
    if run is None:  # the service gives what is left of its own deadline
        left = hours_left(store, prepared.study.id, hours or budget.hours, now())
        limits = replace(limits, deadline=deadline(left, until))
    done = on_its_node(prepared, store, limits, min_trials=min_trials, quiet=as_json)
    conclude(store, prepared, done, as_json=as_json)


def refuse(*, hours: float | None, alone: bool, idle: bool) -> None:
    """BadInput for options that exclude each other. `alone`: --nodes or --isolated without --on; `idle`:
    --trials with --confirm-only.
    """
    from tuner.tuning import studyfile

    if hours is not None and not 0 < hours <= studyfile.MOST_HOURS:
        raise BadInput(f"--hours {hours:g}: give more than 0, at most {studyfile.MOST_HOURS} (a year)")
    if alone:
        raise BadInput("--nodes and --isolated need --on: they choose nodes of a cluster")
    if idle:
        raise BadInput("--confirm-only makes no new trials: leave --trials out")


def check_finalists(prepared: "Prepared") -> None:
    """Conflict where the study has no trial that can be measured again."""
    from tuner.tuning.finalists import finalists

    if not finalists(prepared, trials_so_far(prepared), ""):
        raise Conflict(
            f"study {prepared.study.name} has no finalist to measure again: run 'tuner tune' without"
            " --confirm-only first"
        )


def on_its_node(
    prepared: "Prepared",
    store: "Store",
    limits: "RunLimits",
    *,
    min_trials: int = 0,
    quiet: bool = False,
    listen: "Tell | None" = None,
) -> "Run":
    """Take the node from production, run, and give it back before the deadline. Notifications are sent.

    Conflict when fewer than `min_trials` trials fit into the time left, by the past trials of this node.
    """
    from dataclasses import replace

    from tuner.fleet import handover, notify, schedule
    from tuner.tuning.traffic_notes import traffic_notes

    home, study = settings().home, prepared.study
    for sentence in traffic_notes(prepared, store):
        say(sentence)
    if limits.deadline is not None:
        end = limits.deadline - timedelta(seconds=handover.budget_s(home, study.node))
        limits = replace(limits, deadline=end)
        known = schedule.trial_times(store, study.node, study.id)
        if (reason := schedule.too_short(known, (end - now()).total_seconds(), min_trials)) is not None:
            raise Conflict(f"the run does not start: {reason}")
    taken = handover.handed_over(store, prepared.node, home=home, clock=now, say=say)
    with notify.failures(home, study, clock=now, say=say), taken as held:
        run = execute(prepared, held, limits, quiet=quiet, listen=listen)
    notify.concluded(home, store, study, run, clock=now, say=say)
    return run


def deadline(hours: float | None, until: str | None) -> datetime | None:
    """The earlier of now + hours and the next time that the local clock shows `until`."""

    ends = [now() + timedelta(hours=hours)] if hours else []
    if until:
        try:
            clock = datetime.strptime(until, "%H:%M").time()
        except ValueError:
            raise BadInput(f"--until {until}: give a time of day such as 05:30") from None
        here = datetime.now().astimezone()
        end = here.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
        ends.append((end if end > here else end + timedelta(days=1)).astimezone(now().tzinfo))
    return min(ends, default=None)


def execute(
    prepared: "Prepared",
    store: "Store",
    limits: "RunLimits",
    *,
    quiet: bool = False,
    listen: "Tell | None" = None,
) -> "Run":
    """Run to the end; SIGINT and SIGTERM stop the engine and leave a run that can be resumed (exit 8)."""
    from tuner.commands.progress import listener
    from tuner.tuning.context import steady
    from tuner.tuning.run import tune as loop

    home = settings().home
    with listener(home, prepared.study.objectives, quiet=quiet) as shown:
        tell = shown if listen is None else both(shown, listen)
        work = loop(prepared, store, home=home, limits=limits, clock=steady(now), tell=tell)
        return interruptible(work, tell)


def both(one: "Tell", other: "Tell") -> "Tell":
    """Two listeners as one."""

    def tell(event: "RunEvent") -> None:
        one(event)
        other(event)

    return tell


def conclude(store: "Store", prepared: "Prepared", run: "Run", *, as_json: bool) -> None:
    """Show the result: the conclusion, the front beside the baseline, and how to pull the winner."""
    from tuner.commands import front
    from tuner.commands.run import show_end

    study = prepared.study
    if as_json:
        print_json({"run": run, **front.as_data(store, study)})
        return
    show_end(store, study, run)


DemoTrials = Annotated[
    int | None, typer.Option(min=2, help="How many trials. Default: 10, with --python 3, with --trace 4.")
]
DemoHome = Annotated[
    Path | None,
    typer.Option(help="The folder to use. Default: TUNER_HOME/demo, with --python TUNER_HOME/demo-cpu."),
]
DemoPython = Annotated[
    Path | None,
    typer.Option(
        metavar="PY", help="Tune this interpreter's vLLM on a tiny model: a real engine, no GPU needed."
    ),
]
DemoTrace = Annotated[
    str | None,
    typer.Option(
        metavar="TRACE",
        help="With --python: on your own traffic. A file, the name of a known trace, or latest:CAPTURE.",
    ),
]


@ends_by_signal()
def demo(
    trials: DemoTrials = None, home: DemoHome = None, python: DemoPython = None, trace: DemoTrace = None
) -> None:
    """Tune a simulated engine on a slice of a real trace; a minute."""
    from tuner.commands import front, report
    from tuner.commands.demo_files import write_study
    from tuner.commands.trace import open_trace
    from tuner.tuning.run import RunLimits
    from tuner.tuning.study import load

    if trace is not None and python is None:
        raise BadInput("--trace needs --python PY: the interpreter that has vLLM, for a GPU or a CPU")
    own = None if trace is None else open_trace(trace)[0]  # before the home changes
    if python is not None:  # not resolved: a virtual environment's Python is a link
        python = python.expanduser().absolute()
    place = (home or settings().home / ("demo" if python is None else "demo-cpu")).resolve()
    os.environ["TUNER_HOME"] = str(place)
    os.environ.pop("TUNER_DATABASE_URL", None)
    study_file = write_study(place, python, own)
    say(f"the study file is {study_file}")
    store = open_store(create=True)
    prepared = load(study_file, store=store, now=now())
    limit = trials or prepared.file.budget.trials
    if own is not None:
        print_plan(prepared, limit, then_runs=True)
    execute(prepared, store, RunLimits(trials=limit, early=False))
    typer.echo(said_of_demo(python, own is not None))
    front.show(store, prepared.study)
    written = report.write(store, prepared.study, place / "report.html")
    typer.echo(f"report: {written}")


def said_of_demo(python: Path | None, own: bool) -> str:
    """What the numbers of a demo are worth, in one sentence."""
    if own:
        return "YOUR TRAFFIC on a tiny model: what wins here may lose with your model and card.\n"
    return f"DEMONSTRATION on {'a simulated engine' if python is None else 'a tiny model'}.\n"
