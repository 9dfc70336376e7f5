"""What a run shows for each metric, written once when it ends, so that `history` need not read all trials."""

import math
from collections.abc import Iterable, Sequence
from statistics import median

from sqlalchemy import Connection, insert, select

from tuner.conclusions import Arm, Conclusion, Judgement
from tuner.history.codec import unpack_values
from tuner.history.tables import launches, measurements, run_bests, runs, trials
from tuner.measures import NAMES, direction_of
from tuner.records import TrialState


class _Measured:
    """The values of one complete trial in one run: its search measurement, and the confirmation's repeats."""

    def __init__(self, trial_id: int, number: int, *, ours: bool):
        self.trial_id, self.number, self.ours = trial_id, number, ours
        self.search: dict[str, float] = {}
        self.confirm: list[dict[str, float]] = []

    def repeats(self, metric: str) -> list[float]:
        return [v for each in self.confirm if math.isfinite(v := each.get(metric, math.inf))]


def _measured(connection: Connection, run_id: str, arms: Sequence[int]) -> list[_Measured]:
    """The run's complete trials and those of the study's numbers in `arms`. A repeat counts to the run that
    launched it: a later run measures earlier trials again, and that changes nothing of what was found before.
    """
    study_id, begun, ended = connection.execute(
        select(runs.c.study_id, runs.c.started_at, runs.c.ended_at).where(runs.c.id == run_id)
    ).one()
    wanted = trials.c.run_id == run_id
    if arms:
        wanted |= (trials.c.study_id == study_id) & trials.c.number.in_(arms)
    query = (
        select(trials.c.id, trials.c.number, trials.c.run_id, measurements.c.purpose,
               measurements.c["values"], launches.c.started_at)
        .join(measurements, measurements.c.trial_id == trials.c.id)
        .outerjoin(launches, launches.c.id == measurements.c.launch_id)
        .where(wanted, trials.c.state == TrialState.COMPLETE.value)
        .where(trials.c.screened.is_(False), measurements.c.kind == "full")
        .order_by(measurements.c.id)
    )  # fmt: skip
    found: dict[int, _Measured] = {}
    for trial_id, number, made_by, purpose, values, launched in connection.execute(query):
        ours = made_by == run_id
        trial = found.setdefault(trial_id, _Measured(trial_id, number, ours=ours))
        meanwhile = launched is not None and begun <= launched and (ended is None or launched < ended)
        if purpose == "search":
            trial.search = unpack_values(values)
        elif purpose == "confirm" and (meanwhile or (launched is None and ours)):
            trial.confirm.append(unpack_values(values))
    return list(found.values())


def _first(metric: str, measured: Sequence[_Measured]) -> dict[str, object] | None:
    """The best of the run's own first measurements; of equal ones the earliest."""
    scored = [(t, v) for t in measured if math.isfinite(v := t.search.get(metric, math.inf))]
    if not scored:
        return None
    sign = 1 if direction_of(metric) == "maximize" else -1
    best, value = max(scored, key=lambda pair: sign * pair[1])
    return {"trial_id": best.trial_id, "value": value, "low": value, "high": value, "repeats": 1}


def _again(metric: str, measured: Sequence[_Measured], arm: Arm | None) -> dict[str, object] | None:
    """One configuration as the run measured it again: the conclusion's value, and the span of the repeats."""
    trial = next((t for t in measured if arm is not None and t.number == arm.trial), None)
    values = trial.repeats(metric) if trial is not None else []
    told = arm.confirmed.get(metric) if arm is not None else None
    if trial is None or (told is None and not values):
        return None
    value = median(values) if told is None else told
    spans = [value, *values]
    return {"trial_id": trial.trial_id, "value": value, "low": min(spans), "high": max(spans),
            "repeats": max(1, len(values))}  # fmt: skip


def concluded_on(conclusion: Conclusion | None) -> Arm | None:
    """The configuration that a run ended with: its winner, else the baseline that stays (also where the run
    is not to be trusted: it shows how the machine served today's configuration). None where nothing was
    measured again.
    """
    if conclusion is None or conclusion.outcome in (Judgement.NOT_CONFIRMED, Judgement.NOTHING_SERVED):
        return None
    chosen = conclusion.arm(conclusion.winner) or conclusion.baseline
    return chosen if chosen is not None and chosen.confirmed else None


def of_run(
    connection: Connection, run_id: str, metrics: Iterable[str], conclusion: Conclusion | None = None
) -> list[dict[str, object]]:
    """One row per metric: of the configuration that the run ended with, as it was measured again; where
    nothing was, the best of the run's own first measurements.
    """
    chosen = concluded_on(conclusion)
    base = conclusion.baseline if conclusion is not None and chosen is not None else None
    measured = _measured(connection, run_id, [arm.trial for arm in (chosen, base) if arm is not None])
    ours = [trial for trial in measured if trial.ours]
    rows: list[dict[str, object]] = []
    for metric in metrics:
        row = _first(metric, ours) if chosen is None else _again(metric, measured, chosen)
        before = _again(metric, measured, base)
        if row is not None:
            rows.append({
                "run_id": run_id, "metric": metric, **row, "trials": len(ours),
                "confirmed": chosen is not None and conclusion is not None and conclusion.confirmed,
                "baseline": before["value"] if before else None,
            })  # fmt: skip
    return rows


def write(connection: Connection, run_id: str, conclusion: Conclusion | None = None) -> None:
    """Writes the rows of a run that ends; rows that are there stay as they are."""
    known = select(run_bests.c.run_id).where(run_bests.c.run_id == run_id).limit(1)
    if connection.execute(known).first() is not None:
        return
    arms = (conclusion.baseline, *conclusion.finalists) if conclusion is not None else ()
    of_classes = {name for arm in arms if arm is not None for name in (*arm.searched, *arm.confirmed)}
    if rows := of_run(connection, run_id, sorted({*NAMES, *of_classes}), conclusion):
        connection.execute(insert(run_bests), rows)
