"""The best of a run per metric, written when it has ended, so that `history` need not read all trials."""

import math
from collections.abc import Iterable, Sequence
from statistics import median

from sqlalchemy import ColumnElement, Connection, delete, insert, select

from tuner.history.codec import unpack_values
from tuner.history.tables import measurements, run_bests, runs, trials
from tuner.measures import NAMES, direction_of
from tuner.records import TrialState

BASELINE, CONFIRM = "baseline", "confirm"


class _Measured:
    """The values of one complete trial: the last search measurement, and the confirmation repeats."""

    def __init__(self, trial_id: int, number: int, *, baseline: bool):
        self.trial_id, self.number = trial_id, number
        self.baseline = baseline
        self.search: dict[str, float] = {}
        self.confirm: list[dict[str, float]] = []

    def values(self, metric: str, *, confirmed: bool) -> list[float]:
        taken = self.confirm if confirmed else [self.search]
        return [each[metric] for each in taken if metric in each and math.isfinite(each[metric])]


def _measured(connection: Connection, *which: ColumnElement[bool]) -> list[_Measured]:
    query = (
        select(
            trials.c.id, trials.c.number, trials.c.origin, measurements.c.purpose, measurements.c["values"]
        )
        .join(measurements, measurements.c.trial_id == trials.c.id)
        .where(*which, trials.c.state == TrialState.COMPLETE.value)
        .where(trials.c.screened.is_(False), measurements.c.kind == "full")
        .order_by(measurements.c.id)
    )
    found: dict[int, _Measured] = {}
    for trial_id, number, origin, purpose, values in connection.execute(query):
        trial = found.setdefault(trial_id, _Measured(trial_id, number, baseline=origin == BASELINE))
        if purpose == "search":
            trial.search = unpack_values(values)
        elif purpose == CONFIRM:
            trial.confirm.append(unpack_values(values))
    return list(found.values())


def _baseline(metric: str, measured: Sequence[_Measured]) -> float | None:
    """The value of the newest baseline that has one; its confirmation counts before its search."""
    for trial in reversed(measured):
        if values := trial.values(metric, confirmed=True) or trial.values(metric, confirmed=False):
            return median(values)
    return None


def _best(
    metric: str, measured: Sequence[_Measured], baselines: Sequence[_Measured], winner: object
) -> dict[str, object] | None:
    confirmed = any(trial.values(metric, confirmed=True) for trial in measured if not trial.baseline)
    scored = [(trial, trial.values(metric, confirmed=confirmed)) for trial in measured]
    scored = [(trial, values) for trial, values in scored if values]
    if not scored:
        return None
    sign = 1 if direction_of(metric) == "maximize" else -1
    base = _baseline(metric, baselines)
    # Equal values are common where a trial meets all that was asked of it: then the run's own choice is told.
    best, values = max(scored, key=lambda pair: (sign * median(pair[1]), pair[0].number == winner))
    return {
        "metric": metric,
        "trial_id": best.trial_id,
        "value": median(values),
        "low": min(values),
        "high": max(values),
        "repeats": len(values),
        "confirmed": confirmed and base is not None,
        "trials": len(measured),
        "baseline": base,
    }


def of_run(connection: Connection, run_id: str, metrics: Iterable[str]) -> list[dict[str, object]]:
    """One row per metric that a complete trial of the run has a finite value for.

    The baseline is the run's own, else the newest of the study: a later night need not measure it again.
    """
    query = select(runs.c.study_id, runs.c.summary).where(runs.c.id == run_id)
    study_id, summary = connection.execute(query).one()
    measured = _measured(connection, trials.c.run_id == run_id)
    baselines = [trial for trial in measured if trial.baseline]
    if measured and not baselines:
        baselines = _measured(connection, trials.c.study_id == study_id, trials.c.origin == BASELINE)
    rows = [_best(metric, measured, baselines, summary.get("winner")) for metric in metrics]
    return [{"run_id": run_id, **row} for row in rows if row is not None]


def write(connection: Connection, run_id: str) -> None:
    """Replaces the rows of a run that has ended."""
    connection.execute(delete(run_bests).where(run_bests.c.run_id == run_id))
    if rows := of_run(connection, run_id, sorted(NAMES)):
        connection.execute(insert(run_bests), rows)
