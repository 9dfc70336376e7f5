"""What a study would do, before anything is launched: the plan of `tuner tune --dry-run`, and `tuner
predict`.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import (
    Json,
    knobs,
    now,
    print_json,
    print_table,
    print_windows,
    say,
    store_if_any,
    windows,
)
from tuner.measures import many

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.records import JSON, Prediction, Trial
    from tuner.tuning.calibrated_predictor import Forecast
    from tuner.tuning.predicted_night import PredictedNight
    from tuner.tuning.study import Prepared


def prepared_study(path: Path, *, check_rules: bool = False) -> "Prepared":
    """A checked study file, with what the history knows of the study."""
    from dataclasses import replace

    from tuner.tuning import study

    prepared = study.load(path, store=store_if_any(), now=now())
    return replace(prepared, rules=not check_rules)


def print_plan(
    prepared: "Prepared", trials: int | None, *, as_json: bool = False, then_runs: bool = False
) -> None:
    """Print the command lines (baseline and next candidate), the slices to replay, and the time of a trial.
    `then_runs`: a run follows at once, which warns by itself of few requests.
    """
    from tuner.tuning.run import idle_of
    from tuner.tuning.traffic_notes import few_requests

    if not then_runs and (few := few_requests(prepared)) is not None:
        say(few)
    if as_json:
        print_json(plan_of(prepared, trials))
        return
    past = trials_so_far(prepared)
    lines, times, foreseen = commands(prepared, past), seconds(prepared), confirmation(prepared)
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
    typer.echo(
        f"\nA trial with its own launch takes about {each:.0f} s, of which the replay takes {replay:.0f} s."
    )
    if trials is not None:
        for line in budget_words(trials, each, foreseen):
            typer.echo(line)
    typer.echo(confirmation_words(foreseen))


def plan_of(prepared: "Prepared", trials: int | None) -> dict[str, object]:
    """What `print_plan` prints, as data."""
    from tuner.tuning.context import most_launches
    from tuner.tuning.traffic_notes import unjudged

    past = trials_so_far(prepared)
    return {
        "commands": commands(prepared, past),
        "slices": windows(prepared.trace, prepared.study.slices),
        "seconds": seconds(prepared),
        "space": prepared.space.levels,
        "dropped": prepared.space.dropped,
        "unjudged": unjudged(prepared),
        "trials": trials,
        "launches": None if trials is None else most_launches(trials),
        "confirmation": confirmation(prepared),
    }


def confirmation(prepared: "Prepared") -> "dict[str, JSON]":
    """The planned confirmation, and the repeats that earlier confirmations of this node suggest."""
    from tuner.tuning import confirm

    store = store_if_any()
    _, plan = confirm.expected(prepared, store)
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
    from tuner.report.words import seconds

    needed = found["repeats_for_ten_percent"]
    least, most = (seconds(float(str(found[name]))) for name in ("seconds", "most_seconds"))
    said = (
        f"The confirmation launches the baseline and the finalists (at most {found['finalists']}),"
        f" {many(float(str(found['repeats'])), 'time')} each, about {least}."
    )
    if found["most_repeats"] != found["repeats"]:
        said += (
            f" It adds repeats, up to {found['most_repeats']} ({most}), while the answer is open and time is"
            " left."
        )
    if not isinstance(needed, dict) or not needed:
        alone = ", so one repeat decides nothing" if found["repeats"] == 1 else ""
        return f"{said} How much launches differ on this node is not known{alone}."
    words = ", ".join(f"{name} {'more than 100' if n is None else n}" for name, n in needed.items())
    return f"{said} Repeats that this node needs to show a difference of 10 %: {words}."


def say_unjudged(prepared: "Prepared") -> None:
    """Name the knobs that cannot be judged with this traffic."""
    from tuner.tuning.traffic_notes import unjudged

    for name, reason in unjudged(prepared).items():
        say(f"cannot be judged with this trace: {name}: {reason}")


ENOUGH_TRIALS = 4
"""From here on the launches beside the trials suffice where every first boot is discarded: one each, and the
four of a confirmation with two rounds and one finalist."""


def budget_words(trials: int, each_s: float, foreseen: "Mapping[str, JSON]") -> list[str]:
    """What a run of that many trials may use: trial numbers, launches, time. A launch beside the trials is
    taken to last as long as one of the confirmation.
    """
    from tuner.report.words import seconds
    from tuner.tuning.context import BESIDE, most_launches

    most = most_launches(trials)
    arms, rounds, confirm_s = (float(str(foreseen[name])) for name in ("finalists", "repeats", "seconds"))
    most_s = trials * each_s + BESIDE * trials * max(each_s, confirm_s / ((1 + arms) * rounds))
    spare = f" Fewer than {ENOUGH_TRIALS} trials may leave no launches for the confirmation."
    return [
        f"Trials: at most {trials}, the baseline and relaunched finalists included; about"
        f" {seconds(trials * each_s)}, less if trials are screened in a running engine.",
        f"Launches: at most {most:.0f} (one per trial; {BESIDE * trials} for retries, discarded first boots"
        f" and the confirmation); {seconds(most_s)}, unless --hours or --until ends it earlier."
        + spare
        * (trials < ENOUGH_TRIALS),
    ]


def commands(prepared: "Prepared", past: "Sequence[Trial]") -> "dict[str, Sequence[str]]":
    """The command line of the baseline and of the next candidate, as they would be launched."""
    from tuner import masking
    from tuner.engine.server import arguments
    from tuner.tuning.context import Cores
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


def seconds(prepared: "Prepared") -> dict[str, float]:
    """About how long a trial takes: its replay, and its launch."""
    from tuner.tuning.confirm import expected
    from tuner.tuning.context import replays_s

    replay = replays_s(prepared, prepared.study.searched_slices)
    estimate, _ = expected(prepared, store_if_any())
    return {"replay": replay, "launch": max(0.0, estimate.trial_s - replay)}


def trials_so_far(prepared: "Prepared") -> "Sequence[Trial]":
    """The study's trials so far; none where there is no history."""
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

    A simulator predicts, calibrated on the study's trials so far. Nothing is launched.
    """
    from tuner.tuning.calibrated_predictor import forecast

    prepared = prepared_study(study)
    if night:
        _predict_night(prepared, study, as_json=as_json)
        return
    found = forecast(prepared, trials_so_far(prepared), count=candidates)
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

    say(f"SIMULATED on {found.card}: nothing was launched, stored or published; {found.basis}")
    if found.left_out:
        say(f"left out, because the simulated engine does not take it: {', '.join(found.left_out)}")
    rows = []
    for t in found.trials:
        values = t.measurement.values if t.measurement else {}
        rows.append([t.number, t.state, t.origin, *map(values.get, names), knobs(t.candidate)])
    title = f"simulated night of {found.study}: {many(found.launches, 'launch')}, {found.hours:.2f} h"
    print_table(["trial", "<state", "<origin", *names, "<configuration"], rows, title=title)
    typer.echo(f"simulated: {found.run.reason}")
    for line in lines(card(found.conclusion)) if found.conclusion else ():
        typer.echo(f"simulated: {line}")


def _show(found: "Forecast") -> None:
    names = found.objectives
    say(found.basis)
    rows = [
        [mark, *(_with_spread(each.prediction, name) for name in names), knobs(each.candidate)]
        for mark, each in [("baseline", found.baseline), *(("front", each) for each in found.front)]
    ]
    title = (
        f"predicted front of {found.study}: {found.feasible} of {many(found.asked, 'candidate')} would run"
    )
    print_table(["<role", *(f"<{name}" for name in names), "<configuration"], rows, title=title)
    if found.measured:
        table = [_beside(trial, prediction, names) for trial, prediction in found.measured]
        print_table(["trial", *(f"<{name}" for name in names)], table, title="predicted → measured")


def _with_spread(prediction: "Prediction", name: str) -> str:
    value = prediction.values.get(name)
    if value is None or not prediction.feasible:
        return "fails" if not prediction.feasible else "—"
    spread = prediction.spread.get(name)
    return f"{value:.4g}" + (f" ± {spread:.0%}" if spread is not None else "")


def _beside(trial: "Trial", prediction: "Prediction", names: tuple[str, ...]) -> list[object]:
    real = trial.measurement.values if trial.measurement else {}
    cells = [f"{prediction.values.get(n, float('nan')):.4g} → {real.get(n, float('nan')):.4g}" for n in names]
    return [trial.number, *cells]
