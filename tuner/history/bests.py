"""The best of a run per metric, written when it has ended, so that `history` need not read all trials."""

import math
from collections.abc import Iterable, Sequence
from statistics import median

from sqlalchemy import Connection, delete, insert, select

from tuner.history.codec import unpack_values
from tuner.history.tables import measurements, run_bests, trials
from tuner.measures import NAMES, direction_of
from tuner.records import TrialState

CONFIRM = "confirm"


class _Measured:
    """The values of one complete trial: the last search measurement, and the confirmation repeats."""

    def __init__(self, trial_id: int, *, baseline: bool):
        self.trial_id = trial_id
        self.baseline = baseline
        self.search: dict[str, float] = {}
        self.confirm: list[dict[str, float]] = []

    def values(self, metric: str, *, confirmed: bool) -> list[float]:
        taken = self.confirm if confirmed else [self.search]
        return [each[metric] for each in taken if metric in each and math.isfinite(each[metric])]


def _measured(connection: Connection, run_id: str) -> list[_Measured]:
    query = (
        select(trials.c.id, trials.c.origin, measurements.c.purpose, measurements.c["values"])
        .join(measurements, measurements.c.trial_id == trials.c.id)
        .where(trials.c.run_id == run_id, trials.c.state == TrialState.COMPLETE.value)
        .where(trials.c.screened.is_(False), measurements.c.kind == "full")
        .order_by(measurements.c.id)
    )
    found: dict[int, _Measured] = {}
    for trial_id, origin, purpose, values in connection.execute(query):
        trial = found.setdefault(trial_id, _Measured(trial_id, baseline=origin == "baseline"))
        if purpose == "search":
            trial.search = unpack_values(values)
        elif purpose == CONFIRM:
            trial.confirm.append(unpack_values(values))
    return list(found.values())


def _best(metric: str, measured: Sequence[_Measured]) -> dict[str, object] | None:
    confirmed = any(trial.values(metric, confirmed=True) for trial in measured if not trial.baseline)
    scored = [(trial, trial.values(metric, confirmed=confirmed)) for trial in measured]
    scored = [(trial, values) for trial, values in scored if values]
    if not scored:
        return None
    choose = max if direction_of(metric) == "maximize" else min
    best, values = choose(scored, key=lambda pair: median(pair[1]))
    baseline = [
        median(trial.values(metric, confirmed=True) or trial.values(metric, confirmed=False) or [math.nan])
        for trial in measured
        if trial.baseline
    ]
    baseline = [value for value in baseline if not math.isnan(value)]
    return {
        "metric": metric,
        "trial_id": best.trial_id,
        "value": median(values),
        "low": min(values),
        "high": max(values),
        "repeats": len(values),
        "confirmed": confirmed,
        "trials": len(measured),
        "baseline": baseline[-1] if baseline else None,
    }


def of_run(connection: Connection, run_id: str, metrics: Iterable[str]) -> list[dict[str, object]]:
    """One row per metric that a complete trial of the run has a finite value for."""
    measured = _measured(connection, run_id)
    rows = [_best(metric, measured) for metric in metrics]
    return [{"run_id": run_id, **row} for row in rows if row is not None]


def write(connection: Connection, run_id: str) -> None:
    """Replaces the rows of a run that has ended."""
    connection.execute(delete(run_bests).where(run_bests.c.run_id == run_id))
    if rows := of_run(connection, run_id, sorted(NAMES)):
        connection.execute(insert(run_bests), rows)
