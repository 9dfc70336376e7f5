"""What a study would do, before anything is launched: the plan of `tuner tune --dry-run`, and `tuner
predict`.
"""

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import (
    Json,
    now,
    print_json,
    print_table,
    print_windows,
    say,
    settings,
    store_if_any,
    windows,
)
from tuner.measures import SAMPLED, many

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.records import JSON, Prediction, Trial
    from tuner.simulator.cost import Coefficients
    from tuner.tuning.confirm import Confirmation, Planned
    from tuner.tuning.predicted_night import Forecast, PredictedNight
    from tuner.tuning.study import Prepared


def prepared_study(path: Path, *, check_rules: bool = False) -> "Prepared":
    """A checked study file, with what the history knows of the study."""
    from tuner.tuning import study

    prepared = study.load(path, store=store_if_any(), now=now())
    return replace(prepared, rules=not check_rules)


def print_plan(
    prepared: "Prepared",
    trials: int | None,
    *,
    as_json: bool = False,
    then_runs: bool = False,
    confirm_only: bool = False,
    window_s: float | None = None,
) -> None:
    """Print the command lines (of the baseline and of what is measured next), the slices to replay, and the
    time of a trial. `then_runs`: a run follows at once, which warns by itself of few requests. `window_s`:
    the time that the run has.
    """
    from tuner.tuning.context import changeable
    from tuner.tuning.run import idle_of

    if not then_runs:
        say_notes(prepared)
    if as_json:
        print_json(plan_of(prepared, trials, confirm_only=confirm_only))
        return
    asked = None if confirm_only else trials
    times, first = seconds(prepared), unfinished(prepared, asked)
    plan, bounded = planned(prepared, asked)
    screens = changeable(prepared)
    lines = commands(prepared, confirm_only, first)
    parts = windows(prepared.trace, prepared.study.slices)
    for line in lines.values():
        typer.echo(shlex.join(line))
    if (idle := idle_of(prepared)) is not None:
        say(idle)
    for name, reason in prepared.space.dropped.items():
        say(f"left out of the search: {name}: {reason}")
    say_unjudged(prepared)
    typer.echo()
    print_windows(parts)
    replay, each = times["replay"], times["replay"] + times["launch"]
    guess = "" if any(t.measurements for t in trials_so_far(prepared)) else GUESS
    typer.echo(
        f"\nA trial with its own launch takes about {each:.0f} s. The replay takes {replay:.0f} s of"
        f" this.{guess}"
    )
    if first is not None:
        typer.echo(first_words(first, plan, window_s))
    if trials is not None:
        for line in budget_words(trials, each, plan, continued(prepared), screens=screens):
            typer.echo(line)
    if first is None or not confirm_only:
        needed = _for_ten_percent(prepared)
        said = confirmation_words(plan, bounded, needed, another=first is not None, screens=screens)
        typer.echo(said + window_words(window_s, 0 if confirm_only else trials, each, bounded))


def window_words(window_s: float | None, trials: int | None, each_s: float, plan: "Planned") -> str:
    """A line that says what the window is too short for; empty if it has time for all trials (None: as many
    as fit) and the confirmation, and if there is no window.
    """
    from tuner.report.words import seconds
    from tuner.tuning.run import CONFIRMING

    left_s = math.inf if window_s is None else window_s
    search_s = (1 if trials is None else trials) * each_s
    if trials is not None and search_s + plan.seconds <= left_s:
        return ""
    short = ""
    if trials == 0:
        short = "the confirmation: the run may end without it"
    elif plan.rounds and plan.seconds + plan.launch_s > CONFIRMING * left_s:
        short = "trials and a confirmation: the run may end without a confirmation"
    elif search_s + plan.seconds > left_s:
        fits = ", so that the confirmation fits" if plan.rounds else ""
        short = f"all trials: the search ends early{fits}"
    return f"\nThe window of {seconds(round(left_s))} is too short for {short}." if short else ""


def unfinished(prepared: "Prepared", trials: int | None) -> "Confirmation | None":
    """The confirmation that a run of so many trials finishes before its search; None if there is none, or
    nothing of it is left.
    """
    from tuner.records import Run, RunState
    from tuner.tuning import confirm
    from tuner.tuning.context import RunContext, budget_of, silent

    store, study = store_if_any(), prepared.study.id
    if store is None:
        return None
    fresh = Run(id="", study_id=study, state=RunState.RUNNING, started_at=now())
    run = next(iter(store.runs(study, state=RunState.RUNNING, limit=1)), fresh)
    run = replace(run, trials_limit=trials)
    context = RunContext(
        prepared=prepared, store=store, home=settings().home, clock=now, tell=silent,
        budget=budget_of(run, store.launches(study)),
    )  # fmt: skip
    found = confirm.unfinished(context, run)
    return found if found is not None and found.left else None


def first_words(first: "Confirmation", plan: "Planned", window_s: float | None) -> str:
    """The confirmation that the run finishes before its search, as sentences."""
    from tuner.report.words import seconds

    takes_s = first.left * plan.launch_s
    said = f"The run {first.task}. This takes {many(first.left, 'launch')}, about {seconds(takes_s)}."
    if window_s is None or takes_s <= window_s:
        return said
    return f"{said}\nThe window of {seconds(round(window_s))} is too short for this confirmation."


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """The run without an end that the same command continues: its trials and launches so far."""

    run: str
    trials: int
    launches: int


def continued(prepared: "Prepared") -> Continued | None:
    """The study's run that has no end; None if a new one begins. A number that is measured again does not
    count.
    """
    from tuner.records import RunState, TrialState
    from tuner.tuning.context import budget_of, numbers_of

    store, study = store_if_any(), prepared.study.id
    run = next(iter(store.runs(study, state=RunState.RUNNING, limit=1)), None) if store else None
    if run is None or store is None:
        return None
    lost = (TrialState.RUNNING, TrialState.ABORTED)
    done = [t for t in store.trials(study) if t.state not in lost]
    return Continued(
        run=run.id,
        trials=len(numbers_of(done, run.id)),
        launches=budget_of(run, store.launches(study)).begun,
    )


def say_notes(prepared: "Prepared") -> None:
    """What a user should know before a run begins."""
    from tuner.tuning.execution import few_requests

    for note in (few_requests(prepared), in_use(prepared)):
        if note is not None:
            say(note)


def in_use(prepared: "Prepared") -> str | None:
    """What a run of the node means for `tuner tune` while it goes on; None: there is no such run."""
    from tuner.records import RunState

    store, node = store_if_any(), prepared.study.node
    if store is None:
        return None
    stopped = store.stopped_runs(now=now())
    left = [r for r in store.runs(state=RunState.RUNNING) if r.host and not r.cancel_requested]
    going_on = (r for r in left if r.id not in stopped and store.study(r.study_id).node == node)
    found = next((run.id for run in going_on), None)
    if found is None:
        return None
    return (
        f"run {found} is using node '{node}': `tuner tune` is refused until it ends. This plan is what `tuner"
        " tune` would do if that run stopped now"
    )


def plan_of(prepared: "Prepared", trials: int | None, *, confirm_only: bool = False) -> dict[str, object]:
    """What `print_plan` prints, as data."""
    from tuner.tuning.context import most_launches
    from tuner.tuning.execution import unjudged

    first = unfinished(prepared, None if confirm_only else trials)
    return {
        "commands": commands(prepared, confirm_only, first),
        "continues": continued(prepared),
        "slices": windows(prepared.trace, prepared.study.slices),
        "seconds": seconds(prepared),
        "space": prepared.space.levels,
        "dropped": prepared.space.dropped,
        "unjudged": unjudged(prepared),
        "trials": trials,
        "launches": None if trials is None else most_launches(trials),
        "confirmation": confirmation(prepared, None if confirm_only else trials),
        "first_confirms": None
        if first is None
        else {"trials": [t.number for t in first.chosen], "launches": first.left},
    }


def planned(prepared: "Prepared", trials: int | None) -> "tuple[Planned, Planned]":
    """(the planned confirmation, the same by the launches that a run of so many trials has beside them)."""
    from tuner.tuning.confirm import expected
    from tuner.tuning.context import BESIDE

    _, plan = expected(prepared, store_if_any())
    return plan, plan.within(BESIDE * trials) if trials else plan


def _for_ten_percent(prepared: "Prepared") -> "Mapping[str, JSON]":
    from tuner.tuning.confirm import repeats_for_ten_percent

    return repeats_for_ten_percent(prepared, store_if_any())


def confirmation(prepared: "Prepared", trials: int | None) -> "dict[str, JSON]":
    """The confirmation of a run of so many trials, and the repeats that earlier ones of this node suggest."""
    _, plan = planned(prepared, trials)
    return {
        "finalists": plan.finalists,
        "baseline": plan.baseline,
        "repeats": plan.rounds,
        "most_repeats": plan.most,
        "seconds": round(plan.seconds),
        "most_seconds": round(plan.most * plan.round_s),
        "repeats_for_ten_percent": dict(_for_ten_percent(prepared)),
    }


def confirmation_words(
    plan: "Planned",
    bounded: "Planned",
    needed: "Mapping[str, JSON]",
    *,
    another: bool = False,
    screens: bool = False,
) -> str:
    """The planned confirmation as sentences. `bounded`: what the run's launches are enough for. `needed`: the
    repeats that show a difference of 10 %. `another`: it comes after one that is finished first. `screens`:
    whether the study may screen trials.
    """
    from tuner.report.words import seconds
    from tuner.tuning.confirm import LEAST_ROUNDS

    begins = "The confirmation launches"
    if another:
        begins = "If the search finds other finalists, another confirmation launches"
    if not bounded.rounds:
        least = min(LEAST_ROUNDS, plan.rounds) * (1 + plan.baseline)
        return (
            f"The launches that are not for trials are too few for a confirmation: it needs at least {least}."
        )
    who = f"{'the baseline and ' * plan.baseline}at most {many(bounded.finalists, 'finalist')}"
    said = (
        f"{begins} {who}, {many(bounded.rounds, 'time')} each. This takes about {seconds(bounded.seconds)}."
    )
    if not plan.baseline:
        said += " So far the baseline has not served the traffic; if it does, it is launched too."
    if plan.most != plan.rounds:
        most = replace(plan, finalists=bounded.finalists)
        said += (
            " While the result is open, and time and launches are left, it adds repeats, up to"
            f" {plan.most} ({seconds(most.most * most.round_s)})."
        )
    if bounded != plan:
        enough = many(bounded.most, "repeat")
        if bounded.finalists < plan.finalists:
            enough = f"{bounded.finalists} of {many(plan.finalists, 'finalist')} and {enough}"
        said += f" The launches that are not for trials are enough for {enough}."
        said += " If trials are screened, more launches are left." * screens
    if not needed:
        alone = ", so one repeat decides nothing" if plan.rounds == 1 else ""
        return f"{said} It is not known how much launches differ on this node{alone}."
    words = ", ".join(f"{name} {'more than 100' if n is None else n}" for name, n in needed.items())
    return (
        f"{said} Because launches differ, this node needs at least these repeats to show a difference"
        f" of 10 %: {words}."
    )


def say_unjudged(prepared: "Prepared") -> None:
    """Name the knobs that cannot be judged with this traffic."""
    from tuner.tuning.execution import unjudged

    for name, reason in unjudged(prepared).items():
        say(f"this trace cannot judge {name}: {reason}")


GUESS = " No trial of this study was measured yet, so the times are a guess."

ENOUGH_TRIALS = 4
"""With this many trials or more, the launches beside the trials suffice even if every first boot is
discarded. They are one for each trial, and four for a confirmation with two rounds and one finalist."""


def budget_words(
    trials: int, each_s: float, plan: "Planned", begun: Continued | None = None, *, screens: bool = False
) -> list[str]:
    """What a run of that many trials may use: trial numbers, launches, time. A launch beside the trials is
    taken to last as long as one of the confirmation. `begun` is the run that it continues. `screens`:
    whether the study may screen trials.
    """
    from tuner.report.words import seconds
    from tuner.tuning.context import BESIDE, most_launches

    most = most_launches(trials)
    most_s = trials * each_s + BESIDE * trials * max(each_s, plan.launch_s)
    spare = f" Fewer than {ENOUGH_TRIALS} trials may leave no launches for the confirmation."
    goes_on = []
    if begun is not None:
        left_s = seconds(max(0, trials - begun.trials) * each_s)
        goes_on = [
            f"This continues run {begun.run}: {begun.trials} of {many(trials, 'trial')} and {begun.launches}"
            f" of {most:.0f} launches are done. The search has about {left_s} left. The next lines are about"
            " the whole run."
        ]
    return [
        *goes_on,
        f"Trials: at most {trials}, with the baseline{' and relaunched finalists' * screens}. They take about"
        f" {seconds(trials * each_s)}{', or less if trials are screened in a running engine' * screens}.",
        f"Launches: at most {most:.0f} (one per trial, and {BESIDE * trials} for retries, discarded first"
        f" boots and the confirmation). They take at most {seconds(most_s)}; --hours and --until can end"
        " the run earlier." + spare * (trials < ENOUGH_TRIALS),
    ]


def calibration_before(prepared: "Prepared") -> "Coefficients | None":
    """The calibration that the search would begin with: that of the last study of this model and engine."""
    from tuner.tuning.next_trial import last_calibration

    store = store_if_any()
    return last_calibration(store, prepared, None) if store else None


def commands(
    prepared: "Prepared", confirm_only: bool, first: "Confirmation | None" = None
) -> "dict[str, Sequence[str]]":
    """The command line of the baseline and of the next candidate, as they would be launched. If the run
    begins with a confirmation (`first`, or `confirm_only`): those of the finalists, and of the baseline if it
    served the traffic. A trial that was interrupted is the next one.
    """
    from tuner import masking
    from tuner.engine.server import arguments
    from tuner.records import TrialState
    from tuner.search import trial_view
    from tuner.tuning.context import Cores
    from tuner.tuning.finalists import finalists
    from tuner.tuning.next_trial import StudyPredictor, propose
    from tuner.tuning.trial import launch_spec

    past, following = trials_so_far(prepared), {"baseline": prepared.baseline}
    if first is not None or confirm_only:
        if trial_view.baseline_of(past) is None:
            following = {}
        chosen = first.chosen if first is not None else finalists(prepared, past, "")
        following |= {f"trial {t.label}": t.candidate for t in chosen}
    elif past and past[-1].state in (TrialState.RUNNING, TrialState.ABORTED):
        following["next"] = past[-1].candidate
    else:
        predictor = StudyPredictor(prepared=prepared, start=calibration_before(prepared))
        found = propose(prepared, past, predictor=predictor)
        if found is not None and found.origin != "baseline":
            following["next"] = found.candidate
    specs = {
        name: launch_spec(prepared, candidate, Path("."), Cores(engine=None, sender=None))
        for name, candidate in following.items()
    }
    return {name: masking.arguments(arguments(spec, 8000, "tuner-nonce")) for name, spec in specs.items()}


def seconds(prepared: "Prepared") -> dict[str, float]:
    """About how long a trial takes: its replay, and its launch."""
    from tuner.tuning.context import usual_launch_s, usual_replays_s

    store = store_if_any()
    replay, _ = usual_replays_s(store, prepared)
    return {"replay": replay, "launch": usual_launch_s(store, prepared)}


def trials_so_far(prepared: "Prepared") -> "Sequence[Trial]":
    """The study's trials so far; none if there is no history."""
    store = store_if_any()
    return store.trials(prepared.study.id) if store else ()


def predict(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study file.")],
    candidates: Annotated[int, typer.Option(min=1, help="Number of candidates to draw from the space.")] = 64,
    night: Annotated[
        bool, typer.Option("--night", help="Simulate a whole run: trials, confirmation, conclusion.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict what a study's candidates would measure.

    The simulator is calibrated on the study's baseline, if the baseline was measured. Nothing is launched.
    """
    from tuner.tuning.predicted_night import forecast

    prepared = prepared_study(study)
    if night:
        _predict_night(prepared, study, as_json=as_json)
        return
    start = calibration_before(prepared)
    found = forecast(prepared, trials_so_far(prepared), count=candidates, start=start)
    if as_json:
        print_json(found)
        return
    _show(found)


def _predict_night(prepared: "Prepared", path: Path, *, as_json: bool) -> None:
    """Simulate a run within the study's budget, and show it. Nothing is stored or published."""
    import asyncio
    from datetime import timedelta

    from tuner.tuning.predicted_night import as_data, predict_night
    from tuner.tuning.run import RunLimits

    store, begun, budget = store_if_any(), now(), prepared.file.budget
    end = begun + timedelta(hours=budget.hours) if budget.hours else None
    limits = RunLimits(trials=budget.trials, deadline=end)
    found = asyncio.run(predict_night(prepared, store, base=path.parent, now=begun, limits=limits))
    if as_json:
        print_json(as_data(found))
        return
    _show_night(found, prepared.study.objectives)


def _show_night(found: "PredictedNight", names: tuple[str, ...]) -> None:
    from tuner.report.card import card, lines
    from tuner.report.words import heading, knobs

    say(f"SIMULATED on {found.card}: nothing was launched, stored or published; {found.basis}")
    if found.left_out:
        say(f"left out, because the simulated engine does not take them: {', '.join(found.left_out)}")
    rows = []
    for t in found.trials:
        values = t.measurement.values if t.measurement else {}
        rows.append([t.label, t.state, t.origin, *map(values.get, names), knobs(t.candidate)])
    title = f"simulated night of {found.study}: {many(found.launches, 'launch')}, {found.hours:.2f} h"
    heads = ["trial", "<state", "<origin", *map(heading, names), "<configuration"]
    print_table(heads, rows, title=title)
    typer.echo(f"simulated: {found.run.reason}")
    told = card(found.conclusion, attribution=found.attribution) if found.conclusion else None
    for line in lines(told) if told else ():
        typer.echo(f"simulated: {line}")


def _show(found: "Forecast") -> None:
    from tuner.report.words import heading, knobs

    names = found.objectives
    say(found.basis)
    rows = [
        [mark, *(_with_spread(each.prediction, name) for name in names), knobs(each.candidate)]
        for mark, each in [("baseline", found.baseline), *(("front", each) for each in found.front)]
    ]
    title = (
        f"predicted front of {found.study}: {found.feasible} of {many(found.asked, 'candidate')} would run"
    )
    heads = [f"<{heading(name)}" for name in names]
    print_table(["<role", *heads, "<configuration"], rows, title=title)
    if found.measured:
        table = [_beside(trial, prediction, names) for trial, prediction in found.measured]
        title = "predicted → measured"
        if sampled := [name for name in names if name in SAMPLED]:
            title += f" ({', '.join(sampled)}: at every step → whenever the metrics were read)"
        print_table(["trial", *heads], table, title=title)


def _with_spread(prediction: "Prediction", name: str) -> str:
    from tuner.report.words import number

    value = prediction.values.get(name)
    if value is None or not prediction.feasible:
        return "fails" if not prediction.feasible else "—"
    spread = prediction.spread.get(name)
    return number(value) + (f" ± {spread:.0%}".replace("%", " %") if spread is not None else "")


def _beside(trial: "Trial", prediction: "Prediction", names: tuple[str, ...]) -> list[object]:
    from tuner.report.words import number

    real = trial.measurement.values if trial.measurement else {}
    cells = [f"{number(prediction.values.get(n))} → {number(real.get(n))}" for n in names]
    return [trial.label, *cells]
