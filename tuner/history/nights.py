"""What the runs of many nights found, read back for one metric."""

import json
from collections.abc import Collection, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Text, select, type_coerce

from tuner.conclusions import Difference, Judgement
from tuner.errors import BadInput, nearest
from tuner.history import bests
from tuner.history.base import Part
from tuner.history.entities import RunBest
from tuner.history.tables import conclusions, run_bests, runs, studies, trials
from tuner.measures import NAMES
from tuner.records import Candidate, ProfileKey, RunState

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
    """What a conclusion says of one trial and metric; read as plain JSON, since a page shows hundreds."""
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


def _ended(connection: Connection, metric: str, where: Sequence[ColumnElement[bool]]) -> list[RunBest]:
    query = (
        select(*_BEST)
        .select_from(runs)
        .join(studies, studies.c.id == runs.c.study_id)
        .join(run_bests, run_bests.c.run_id == runs.c.id)
        .join(trials, trials.c.id == run_bests.c.trial_id)
        .outerjoin(conclusions, conclusions.c.run_id == runs.c.id)
        .where(run_bests.c.metric == metric, *where)
    )
    return [_best_of(row) for row in connection.execute(query).all()]


def _running(connection: Connection, metric: str, where: Sequence[ColumnElement[bool]]) -> list[RunBest]:
    query = select(*_FACTS).select_from(runs).join(studies, studies.c.id == runs.c.study_id)
    query = query.where(runs.c.state == RunState.RUNNING.value, *where)
    found: list[RunBest] = []
    for facts in connection.execute(query).mappings().all():
        for best in bests.of_run(connection, facts["run_id"], [metric]):
            wanted = select(trials.c.number, trials.c.candidate).where(trials.c.id == best["trial_id"])
            trial = connection.execute(wanted).mappings().one()
            found.append(RunBest(**{**facts, **best, **trial, "candidate": Candidate(trial["candidate"])}))
    return found


class Nights(Part):
    """The best of each run, and where there are any."""

    def places(self, model: str | None = None) -> tuple[ProfileKey, ...]:
        """Every (model, node, workload) that a study was made for, in order; costs one pass over an index."""
        parts = (studies.c.model, studies.c.node, studies.c.workload)
        query = select(*parts).distinct().order_by(*parts)
        if model is not None:
            query = query.where(studies.c.model == model)

        def work(connection: Connection) -> tuple[ProfileKey, ...]:
            rows = connection.execute(query)
            return tuple(ProfileKey(model=m, target=t, workload=w) for m, t, w in rows)

        return self._read(work)

    def bests(
        self,
        *,
        model: str,
        metric: str,
        node: str | Collection[str] | None = None,
        workload: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> tuple[RunBest, ...]:
        """The best of every run of a model that measured the metric, the oldest first; running ones too.

        `node` is one node, or several.
        """
        if metric not in NAMES:
            raise BadInput(f"'{metric}' is not a measurement{nearest(metric, NAMES)}")
        where: list[ColumnElement[bool]] = [studies.c.model == model]
        if node is not None:
            where.append(studies.c.node == node if isinstance(node, str) else studies.c.node.in_(node))
        where += [studies.c.workload == workload] if workload is not None else []
        where += [runs.c.started_at >= since] if since is not None else []
        where += [runs.c.started_at < until] if until is not None else []

        def work(connection: Connection) -> tuple[RunBest, ...]:
            found = _ended(connection, metric, where) + _running(connection, metric, where)
            return tuple(sorted(found, key=lambda best: (best.started_at, best.run_id)))

        return self._read(work)
