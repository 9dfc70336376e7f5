"""`tuner predict`: a study's candidates in virtual time; nothing is launched."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, knobs, print_json, print_table, say

if TYPE_CHECKING:
    from tuner.records import Prediction, Trial
    from tuner.tuning.predicting import Forecast


def predict(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study file.")],
    candidates: Annotated[int, typer.Option(min=1, help="How many candidates to draw from the space.")] = 64,
    as_json: Json = False,
) -> None:
    """Predict what a study's candidates would measure, calibrated on its trials so far."""
    from tuner.commands.tune import prepared_study, trials_so_far
    from tuner.tuning.predicting import forecast

    prepared = prepared_study(study)
    found = forecast(prepared, trials_so_far(prepared), count=candidates)
    if as_json:
        print_json(found)
        return
    _show(found)


def _show(found: "Forecast") -> None:
    names = found.objectives
    calibrated = found.calibration
    say(
        f"calibrated on {calibrated.trials} trials, step times known to {calibrated.error:.0%}"
        if calibrated
        else "not calibrated: nothing of this study was measured yet, so these are the card's datasheet"
    )
    rows = [
        [mark, *(_with_spread(each.prediction, name) for name in names), knobs(each.candidate)]
        for mark, each in [("baseline", found.baseline), *(("front", each) for each in found.front)]
    ]
    title = f"predicted front of {found.study}: {found.feasible} of {found.asked} candidates would run"
    print_table(["<", *(f"<{name}" for name in names), "<configuration"], rows, title=title)
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
