"""`tuner tune`: the main job."""

import shlex
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, now, open_store, print_json, print_windows, say, settings, windows
from tuner.commands.running import ends_by_signal, interruptible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.history.store import Store
    from tuner.records import JSON, Run, Trial
    from tuner.tuning.events import Event, Tell
    from tuner.tuning.run import Limits
    from tuner.tuning.study import Prepared


@ends_by_signal()
def tune(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study file.")],
    trials: Annotated[
        int | None, typer.Option(min=1, help="Trials of this run; the file's budget else.")
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Hours of this run; the file's budget else.")] = None,
    until: Annotated[str | None, typer.Option(metavar="HH:MM", help="Be done by this local time.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print command lines, slices and times; launch nothing.")
    ] = False,
    check_rules: Annotated[
        bool, typer.Option("--check-rules", help="Launch also what is known to fail, to check the rules.")
    ] = False,
    all_trials: Annotated[
        bool, typer.Option("--all-trials", help="Spend the whole budget; no early end of the search.")
    ] = False,
    confirm_only: Annotated[
        bool, typer.Option("--confirm-only", help="Measure the finalists again; no new trials.")
    ] = False,
    min_trials: Annotated[
        int, typer.Option(min=0, help="Refuse to begin when the time left cannot hold so many trials.")
    ] = 0,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="CLUSTER", help="A Ray cluster: auto, HOST:PORT or ray://HOST:PORT."),
    ] = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Which of its nodes: gpu=, name=, class=, host=, a label."),
    ] = None,
    isolated: Annotated[
        bool, typer.Option("--isolated", help="Nodes of one host replay side by side; a study of its own.")
    ] = False,
    run: Annotated[
        str | None,
        typer.Option("--run", hidden=True, help="The run that the service began for this process."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tune an engine on a trace. A run that was interrupted goes on where it was."""
    from dataclasses import replace

    from tuner.tuning import studyfile
    from tuner.tuning.budget import hours_left
    from tuner.tuning.run import Limits

    refuse(
        hours=hours, alone=on is None and bool(nodes or isolated), idle=confirm_only and trials is not None
    )
    budget = studyfile.read(study).budget
    limits = Limits(
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
    """BadInput for what does not go together. `alone`: nodes of no cluster; `idle`: trials of no search."""
    from tuner.errors import BadInput
    from tuner.tuning import studyfile

    if hours is not None and not 0 < hours <= studyfile.MOST_HOURS:
        raise BadInput(f"--hours {hours:g}: give more than 0, at most {studyfile.MOST_HOURS} (a year)")
    if alone:
        raise BadInput("--nodes and --isolated are about nodes of a cluster: give --on as well")
    if idle:
        raise BadInput("--confirm-only makes no new trials: leave --trials out")


def check_finalists(prepared: "Prepared") -> None:
    """Conflict where the study has nothing that could be measured again."""
    from tuner.errors import Conflict
    from tuner.tuning.confirm import finalists

    if not finalists(prepared, trials_so_far(prepared), ""):
        raise Conflict(
            f"study {prepared.study.name} has no trial that could be a finalist: 'tuner tune' without"
            " --confirm-only searches for one"
        )


def on_its_node(
    prepared: "Prepared",
    store: "Store",
    limits: "Limits",
    *,
    min_trials: int = 0,
    quiet: bool = False,
    listen: "Tell | None" = None,
) -> "Run":
    """Take the node from production, run, give it back before the deadline; tells of what came out.

    Conflict when the time left cannot hold `min_trials` trials, by what a trial took on this node.
    """
    from dataclasses import replace

    from tuner.errors import Conflict
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
            raise Conflict(f"the run is not begun: {reason}")
    taken = handover.handed_over(store, prepared.node, home=home, clock=now, say=say)
    with notify.failures(home, study, clock=now, say=say), taken as held:
        run = execute(prepared, held, limits, quiet=quiet, listen=listen)
    notify.concluded(home, store, study, run, clock=now, say=say)
    return run


def prepared_study(path: Path, *, check_rules: bool = False) -> "Prepared":
    """A study file, checked, with what the history says of it."""
    from dataclasses import replace

    from tuner.errors import NotFound
    from tuner.tuning import study

    try:
        store = open_store()
    except NotFound:
        store = None
    prepared = study.load(path, store=store, now=now())
    return replace(prepared, rules=not check_rules)


def deadline(hours: float | None, until: str | None) -> datetime | None:
    """The earlier of now + hours and the next time that the local clock shows `until`."""
    from tuner.errors import BadInput

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
    limits: "Limits",
    *,
    quiet: bool = False,
    listen: "Tell | None" = None,
) -> "Run":
    """Run to the end; SIGINT and SIGTERM stop the engine and leave a run that can be resumed (exit 8)."""
    from tuner.commands.progress import listener
    from tuner.tuning.budget import steady
    from tuner.tuning.run import tune as loop

    home = settings().home
    with listener(home, prepared.study.objectives, quiet=quiet) as shown:
        tell = shown if listen is None else both(shown, listen)
        work = loop(prepared, store, home=home, limits=limits, clock=steady(now), tell=tell)
        return interruptible(work, tell)


def both(one: "Tell", other: "Tell") -> "Tell":
    """Two listeners as one."""

    def tell(event: "Event") -> None:
        one(event)
        other(event)

    return tell


def print_plan(prepared: "Prepared", trials: int | None, *, as_json: bool = False) -> None:
    """What would be launched (the baseline and the next candidate), which slices are replayed, and how long a
    trial takes.
    """
    if as_json:
        print_json(plan_of(prepared, trials))
        return
    past = trials_so_far(prepared)
    lines, times, foreseen = commands(prepared, past), seconds(prepared, past), confirmation(prepared)
    parts = windows(prepared.trace, prepared.study.slices)
    for line in lines.values():
        typer.echo(shlex.join(line))
    from tuner.tuning.run import idle_of

    if (idle := idle_of(prepared)) is not None:
        say(idle)
    for name, reason in prepared.space.dropped.items():
        say(f"not turned: {name}: {reason}")
    say_unjudged(prepared)
    typer.echo()
    print_windows(parts)
    replay, each = times["replay"], times["replay"] + times["launch"]
    typer.echo(f"\nA trial in an engine of its own takes about {each:.0f} s, {replay:.0f} s of it to replay.")
    if trials is not None:
        for line in budget_words(trials, each):
            typer.echo(line)
    typer.echo(confirmation_words(foreseen))


def plan_of(prepared: "Prepared", trials: int | None) -> dict[str, object]:
    """What `print_plan` prints, as data."""
    from tuner.tuning.budget import most_launches
    from tuner.tuning.unjudged import unjudged

    past = trials_so_far(prepared)
    return {
        "commands": commands(prepared, past),
        "slices": windows(prepared.trace, prepared.study.slices),
        "seconds": seconds(prepared, past),
        "space": prepared.space.levels,
        "dropped": prepared.space.dropped,
        "unjudged": unjudged(prepared),
        "trials": trials,
        "launches": None if trials is None else most_launches(trials),
        "confirmation": confirmation(prepared),
    }


def confirmation(prepared: "Prepared") -> "dict[str, JSON]":
    """The confirmation as it is planned, and what earlier ones of this node say of how often to repeat."""
    from tuner.errors import NotFound
    from tuner.tuning import confirm

    try:
        store = open_store()
    except NotFound:
        store = None
    launches = store.launches(prepared.study.id) if store else ()
    plan = confirm.planned(prepared, launches)
    return {
        "finalists": plan.arms - 1,
        "repeats": plan.rounds,
        "most_repeats": plan.most,
        "seconds": round(plan.seconds),
        "most_seconds": round(plan.most * plan.round_s),
        "repeats_for_ten_percent": confirm.repeats_for_ten_percent(prepared, store),
    }


def confirmation_words(found: "Mapping[str, JSON]") -> str:
    """The planned confirmation as sentences."""
    needed = found["repeats_for_ten_percent"]
    minutes = [float(str(found[name])) / 60 for name in ("seconds", "most_seconds")]
    said = (
        f"The confirmation launches the baseline and the finalists (at most {found['finalists']}),"
        f" {found['repeats']} times each, about {minutes[0]:.0f} min; up to {found['most_repeats']} times"
        f" ({minutes[1]:.0f} min) while the answer is open and the window lasts."
    )
    if not isinstance(needed, dict) or not needed:
        return f"{said} How much launches differ on this node is not known yet: one repeat decides nothing."
    words = ", ".join(f"{name} {'more than 100' if n is None else n}" for name, n in needed.items())
    return f"{said} Repeats that this node needs to show a difference of 10 %: {words}."


def say_unjudged(prepared: "Prepared") -> None:
    """Say aloud which knobs this traffic cannot judge."""
    from tuner.tuning.unjudged import unjudged

    for name, reason in unjudged(prepared).items():
        say(f"cannot be judged with this trace: {name}: {reason}")


def budget_words(trials: int, each_s: float) -> list[str]:
    """What a run of so many trials may spend: numbers, launches, hours."""
    from tuner.tuning.budget import BESIDE, most_launches

    most = most_launches(trials)
    return [
        f"{trials} trial numbers at most, the baseline and every finalist that is relaunched among them:"
        f" about {trials * each_s / 3600:.1f} h, screened ones less.",
        f"{most:.0f} launches at most: one a trial, and {BESIDE * trials} for second tries, discarded first"
        f" boots and the confirmation: {most * each_s / 3600:.1f} h, or what `hours` or --until leave.",
    ]


def commands(prepared: "Prepared", past: "Sequence[Trial]") -> "dict[str, Sequence[str]]":
    """The command line of the baseline and of the next candidate, as they would be launched."""
    from tuner import masking
    from tuner.engine.server import arguments
    from tuner.tuning.cores import Cores
    from tuner.tuning.next_trial import propose
    from tuner.tuning.trial import launch_spec

    found = propose(prepared, past)
    following = {"baseline": prepared.baseline}
    if found is not None and found.origin != "baseline":
        following["next"] = found.candidate
    specs = {
        name: launch_spec(prepared, candidate, Path("."), Cores(engine=None, sender=None))
        for name, candidate in following.items()
    }
    return {name: masking.arguments(arguments(spec, 8000, "tuner-nonce")) for name, spec in specs.items()}


def seconds(prepared: "Prepared", past: "Sequence[Trial]") -> dict[str, float]:
    """How long a trial takes, about: its replay, and its launch by what launches took so far."""
    from tuner.tuning.calibrated_predictor import launch_s, replay_s

    replay = replay_s(prepared)
    return {"replay": replay, "launch": launch_s(past, replay)}


def trials_so_far(prepared: "Prepared") -> "Sequence[Trial]":
    """The study's trials so far; none where there is no history."""
    from tuner.errors import NotFound

    try:
        return open_store().trials(prepared.study.id)
    except NotFound:
        return ()


def conclude(store: "Store", prepared: "Prepared", run: "Run", *, as_json: bool) -> None:
    """What came out: the verdict, the front beside the baseline, and how to pull the winner."""
    from tuner.commands import front
    from tuner.commands.run import show_end

    study = prepared.study
    if as_json:
        print_json({"run": run, **front.as_data(store, study)})
        return
    show_end(store, study, run)
