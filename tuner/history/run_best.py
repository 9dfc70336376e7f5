"""The best of each run for each metric, written when the run ends: `history` need not read all trials."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from statistics import median
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, Text, func, insert, or_, select, type_coerce

from tuner.conclusions import Arm, Conclusion, Difference, Judgement
from tuner.errors import BadInput, nearest
from tuner.history.base import StorePart, equal
from tuner.history.best_per_night import newest_runs
from tuner.history.entities import RunBest
from tuner.history.tables import conclusions, launches, measurements, run_bests, runs, studies, trials
from tuner.measures import NAMES, direction_of
from tuner.records import Candidate, ProfileKey, RunState, TrialState, label_in, of_attribution, unpack_values


class _Measured:
    """The values of one complete trial in one run: its search measurement, and the confirmation's repeats."""

    def __init__(self, trial_id: int, number: int):
        self.trial_id, self.number, self.ours = trial_id, number, False
        self.search: dict[str, float] = {}
        self.confirm: dict[str | None, list[dict[str, float]]] = {}

    def repeats(self, metric: str, rounds: int) -> list[float]:
        """Its values in the last confirmation that measured it so often; else in the last one."""
        each = list(self.confirm.values())
        whole = [rows for rows in each if len(rows) >= rounds] or each
        return [v for row in (whole or [[]])[-1] if math.isfinite(v := row.get(metric, math.inf))]


def _measured(connection: Connection, run_id: str, arms: Sequence[int]) -> list[_Measured]:
    """The run's complete trials and those of the study's numbers in `arms`.

    A repeat counts for the run that launched it, and for a later run that finishes the same confirmation. If
    a later run measures earlier trials again, the results of the earlier run stay the same. What an
    attribution measured does not count: the conclusion is without it. Of a trial that was only screened in
    the search, its repeats do.
    """
    study_id, begun, ended = connection.execute(
        select(runs.c.study_id, runs.c.started_at, runs.c.ended_at).where(runs.c.id == run_id)
    ).one()
    wanted = trials.c.run_id == run_id
    if arms:
        wanted |= (trials.c.study_id == study_id) & trials.c.number.in_(arms)
    query = (
        select(trials.c.id, trials.c.number, trials.c.run_id, measurements.c.purpose,
               measurements.c["values"], launches.c.started_at, launches.c.directory)
        .join(measurements, measurements.c.trial_id == trials.c.id)
        .outerjoin(launches, launches.c.id == measurements.c.launch_id)
        .where(wanted, trials.c.state == TrialState.COMPLETE.value)
        .where(or_(trials.c.screened.is_(False), measurements.c.purpose != "search"))
        .where(measurements.c.kind == "full")
        .order_by(measurements.c.id)
    )  # fmt: skip
    rows = connection.execute(query).all()
    before = [(at, label_in(folder)) for *_, at, folder in rows if at and (ended is None or at < ended)]
    labels = {label for at, label in before if label and at >= begun}
    own = {at for at, label in before if at >= begun or label in labels}
    found: dict[int, _Measured] = {}
    for trial_id, number, made_by, purpose, values, launched, folder in rows:
        ours = made_by == run_id
        trial = found.setdefault(trial_id, _Measured(trial_id, number))
        if of_attribution(folder):
            continue
        if purpose == "search":
            trial.search, trial.ours = unpack_values(values), ours
        elif purpose == "confirm" and (ours if launched is None else launched in own):
            trial.confirm.setdefault(label_in(folder), []).append(unpack_values(values))
    return list(found.values())


def _first(metric: str, measured: Sequence[_Measured]) -> dict[str, object] | None:
    """The best of some trials' first measurements; of equal ones the earliest."""
    scored = [(t, v) for t in measured if math.isfinite(v := t.search.get(metric, math.inf))]
    if not scored:
        return None
    sign = 1 if direction_of(metric) == "maximize" else -1
    best, value = max(scored, key=lambda pair: sign * pair[1])
    return {"trial_id": best.trial_id, "value": value, "low": value, "high": value, "repeats": 1}


def _again(
    metric: str, measured: Sequence[_Measured], arm: Arm | None, rounds: int
) -> dict[str, object] | None:
    """One configuration as the run measured it again: the conclusion's value, and the span of the repeats."""
    trial = next((t for t in measured if arm is not None and t.number == arm.trial), None)
    values = trial.repeats(metric, rounds) if trial is not None else []
    told = arm.confirmed.get(metric) if arm is not None else None
    if trial is None or (told is None and not values):
        return None
    value = median(values) if told is None else told
    spans = [value, *values]
    return {"trial_id": trial.trial_id, "value": value, "low": min(spans), "high": max(spans),
            "repeats": max(1, len(values))}  # fmt: skip


def concluded_on(conclusion: Conclusion | None) -> Arm | None:
    """The configuration that a run ended with: its winner, or else the baseline that stays. If the run is
    not to be trusted, this is also the baseline, which shows how the machine served today's configuration.
    None if nothing was measured again.
    """
    if conclusion is None or conclusion.outcome in (Judgement.NOT_CONFIRMED, Judgement.NOTHING_SERVED):
        return None
    chosen = conclusion.arm(conclusion.winner) or conclusion.baseline
    return chosen if chosen is not None and chosen.confirmed else None


def of_run(
    connection: Connection, run_id: str, metrics: Iterable[str], conclusion: Conclusion | None = None
) -> list[dict[str, object]]:
    """One row per metric: the repeats of the configuration that the run ended with. If nothing was measured
    again, it is the first measurement of a baseline that stays, else of the run's first finalist, else the
    best of the run's own.
    """
    chosen = concluded_on(conclusion)
    base = conclusion.baseline if conclusion is not None and chosen is not None else None
    stays = conclusion.baseline if conclusion and conclusion.outcome is Judgement.BASELINE_STAYS else None
    measured = _measured(connection, run_id, [arm.trial for arm in (chosen, base, stays) if arm is not None])
    ours = [trial for trial in measured if trial.ours and trial.search]
    first = [trial for trial in measured if stays is not None and trial.number == stays.trial]
    finalist = conclusion.finalists[0].trial if conclusion is not None and conclusion.finalists else None
    first = first or [trial for trial in ours if trial.number == finalist] or ours
    rounds = conclusion.repeats if conclusion is not None else 0
    rows: list[dict[str, object]] = []
    for metric in metrics:
        row = _first(metric, first) if chosen is None else _again(metric, measured, chosen, rounds)
        before = _again(metric, measured, base, rounds)
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


_FACTS = (
    runs.c.id.label("run_id"),
    runs.c.study_id,
    studies.c.model,
    studies.c.node,
    studies.c.gpu_class,
    studies.c.workload,
    studies.c.engine_version,
    studies.c.trace_digest,
    runs.c.started_at,
    runs.c.ended_at,
)
_FOUND = tuple(run_bests.c[name] for name in run_bests.c.keys() if name != "run_id")  # noqa: SIM118
_BEST = (
    *_FACTS,
    *_FOUND,
    trials.c.number,
    trials.c.attempt,
    type_coerce(trials.c.candidate, Text).label("candidate"),
    conclusions.c.document,
)
_NAMES = tuple(column.name for column in _BEST)


def _best_of(row: Row[Any]) -> RunBest:
    values = dict(zip(_NAMES, row, strict=True))
    values["candidate"] = _candidate(values["candidate"])
    document = values.pop("document")
    if document is None:
        return RunBest(**{**values, "confirmed": False})
    return RunBest(**{**values, **_concluded(document, values["number"], values["metric"])})


def _concluded(document: dict[str, Any], number: int, metric: str) -> dict[str, object]:
    """The conclusion's numbers of one trial and metric; read as plain JSON, since a page shows hundreds."""
    arms = [arm for arm in document["finalists"] if arm["trial"] == number]
    found = [each for arm in arms for each in arm["changes"]]
    change = next((c for c in found if (c["metric"], c["where"]) == (metric, "confirm")), None)
    return {
        "outcome": Judgement(document["outcome"]),
        "change": None if change is None else Difference(**change),
        "demonstration": document["demonstration"],
        "confirmed": document.get("confirmed") is True and document["winner"] == number,
    }


@lru_cache(maxsize=4096)
def _candidate(text: str) -> Candidate:
    """A candidate from its JSON; nights that chose the same share one."""
    return Candidate(json.loads(text))


_UNMEASURED: dict[str, Any] = {"value": math.nan, "low": math.nan, "high": math.nan, "baseline": None}


_ANY = run_bests.alias()
_FIRST = (
    run_bests.c.metric == select(func.min(_ANY.c.metric)).where(_ANY.c.run_id == runs.c.id).scalar_subquery()
)
"""One row of each run that measured anything."""


def _query(*where: ColumnElement[bool]) -> Select[Any]:
    return (
        select(*_BEST)
        .select_from(runs)
        .join(studies, studies.c.id == runs.c.study_id)
        .join(run_bests, run_bests.c.run_id == runs.c.id)
        .join(trials, trials.c.id == run_bests.c.trial_id)
        .outerjoin(conclusions, conclusions.c.run_id == runs.c.id)
        .where(*where)
    )


def _ended(
    connection: Connection, metric: str, where: Sequence[ColumnElement[bool]], *, absent: bool
) -> list[RunBest]:
    query = _query(run_bests.c.metric == metric, *where)
    found = [_best_of(row) for row in connection.execute(query).all()]
    if not absent:
        return found
    measured = select(_ANY.c.run_id).where(_ANY.c.run_id == runs.c.id, _ANY.c.metric == metric).exists()
    rest = connection.execute(_query(_FIRST, ~measured, *where)).all()
    return found + [replace(_best_of(row), metric=metric, change=None, **_UNMEASURED) for row in rest]


def _running(
    connection: Connection, metric: str, where: Sequence[ColumnElement[bool]], *, absent: bool
) -> list[RunBest]:
    query = select(*_FACTS).select_from(runs).join(studies, studies.c.id == runs.c.study_id)
    query = query.where(runs.c.state == RunState.RUNNING.value, *where)
    found: list[RunBest] = []
    for facts in connection.execute(query).mappings().all():
        measured = of_run(connection, facts["run_id"], sorted({*NAMES, metric}) if absent else [metric])
        here = [best for best in measured if best["metric"] == metric]
        for best in here or [{**best, "metric": metric, **_UNMEASURED} for best in measured[:1]]:
            wanted = select(trials.c.number, trials.c.attempt, trials.c.candidate).where(
                trials.c.id == best["trial_id"]
            )
            trial = connection.execute(wanted).mappings().one()
            found.append(RunBest(**{**facts, **best, **trial, "candidate": Candidate(trial["candidate"])}))
    return found


ARMS = '"compare":{"arms":'
"""What the identity of a comparison has in its text, and no other: quotes of values are escaped there."""
_TUNED = ~type_coerce(studies.c.identity, Text).contains(ARMS)
NEWEST = 50
"""How many runs, the newest first, are looked through for the last night of each place."""


class BestStore(StorePart):
    """The best of each run, and where there are any."""

    def places(self, model: str | None = None) -> tuple[ProfileKey, ...]:
        """Every (model, node, workload) that a study was made for, in order; costs one pass over an index."""
        return self._keys((studies.c.model, studies.c.node, studies.c.workload), model)

    def bests(
        self,
        *,
        model: str,
        metric: str,
        node: str | Collection[str] | None = None,
        workload: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        absent: bool = False,
    ) -> tuple[RunBest, ...]:
        """The best of every run of a model that measured the metric, in `RunBest.order`; running ones too. A
        comparison or an upgrade check is none of them.

        `node` is one node, or several. `since` and `until` bound the end of a run, or the start of one that
        has no end yet. `absent`: also the runs that measured other metrics only, with the value NaN.
        """
        if metric not in NAMES:
            raise BadInput(f"'{metric}' is not a measurement{nearest(metric, NAMES)}")
        where = [*equal((studies.c.model, model), (studies.c.workload, workload)), _TUNED]
        if node is not None:
            where.append(studies.c.node == node if isinstance(node, str) else studies.c.node.in_(node))
        at = func.coalesce(runs.c.ended_at, runs.c.started_at)
        where += [at >= since] if since is not None else []
        where += [at < until] if until is not None else []

        def work(connection: Connection) -> tuple[RunBest, ...]:
            found = _ended(connection, metric, where, absent=absent)
            found += _running(connection, metric, where, absent=absent)
            return tuple(sorted(found, key=lambda best: best.order))

        return self._read(work)

    def last_conclusions(self, node: str | None = None) -> Mapping[tuple[str, str], Conclusion]:
        """(node, workload) → what the newest run of its last night concluded (`newest_runs`). A run that
        measured nothing, or that goes on, is no night; nor is a comparison or an upgrade check.
        """
        query = _query(_FIRST, _TUNED, conclusions.c.document.is_not(None), *equal((studies.c.node, node)))
        query = query.order_by(runs.c.started_at.desc()).limit(NEWEST)

        def work(connection: Connection) -> Mapping[tuple[str, str], Conclusion]:
            rows = connection.execute(query).all()
            documents = {row.run_id: row.document for row in rows}
            newest = newest_runs(sorted(map(_best_of, rows), key=lambda best: best.order))
            last = {(b.node, b.workload): b.run_id for b in sorted(newest, key=lambda best: best.at)}
            return {place: Conclusion.from_json(documents[run_id]) for place, run_id in last.items()}

        return self._read(work)
