"""The conclusions of runs: written once, never changed."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, insert, select

from tuner.conclusions import Conclusion, Judgement
from tuner.errors import Conflict
from tuner.history.base import Part
from tuner.history.tables import conclusions, studies, trials
from tuner.records import Run, TrialState


def conclude(connection: Connection, conclusion: Conclusion) -> None:
    """Writes a conclusion. Conflict where the run has one already."""
    query = select(conclusions.c.run_id).where(conclusions.c.run_id == conclusion.run_id)
    if connection.execute(query).scalar() is not None:
        raise Conflict(f"run '{conclusion.run_id}' has its conclusion; it is never changed")
    row = {
        "run_id": conclusion.run_id,
        "study_id": conclusion.study_id,
        "at": conclusion.at,
        "outcome": conclusion.outcome.value,
        "document": conclusion.to_json(),
    }
    connection.execute(insert(conclusions).values(**row))


def give_up(connection: Connection, run: Run) -> Conclusion | None:
    """Writes what a run concludes that ended without a conclusion of its own: nothing was confirmed. Returns
    the run's conclusion.
    """
    query = select(conclusions.c.document).where(conclusions.c.run_id == run.id)
    if (found := connection.execute(query).scalar()) is not None:
        return Conclusion.from_json(found)
    complete = select(trials.c.id).where(
        trials.c.run_id == run.id, trials.c.state == TrialState.COMPLETE.value, trials.c.origin != "baseline"
    )
    done = connection.execute(complete.limit(1)).first() is not None
    outcome = Judgement.NOT_CONFIRMED if done else Judgement.NOTHING_SERVED
    begins = "Not confirmed" if done else "No candidate completed"
    said = Conclusion(
        run_id=run.id, study_id=run.study_id, at=run.ended_at or run.started_at, outcome=outcome,
        sentence=f"{begins}: {(run.reason or 'the run ended').rstrip('.')}.",
    )  # fmt: skip
    conclude(connection, said)
    return said


class Concluded(Part):
    """What runs concluded. A run that has not ended, or that measured nothing, has no conclusion."""

    def add_conclusion(self, conclusion: Conclusion) -> Conclusion:
        """Keeps what a run concluded. Conflict where it has a conclusion already: none is ever changed."""
        self._write(lambda connection: conclude(connection, conclusion))
        return conclusion

    def conclusion(self, run_id: str) -> Conclusion | None:
        """What a run concluded; None while it has not."""
        query = select(conclusions.c.document).where(conclusions.c.run_id == run_id)
        found = self._read(lambda connection: connection.execute(query).scalar())
        return None if found is None else Conclusion.from_json(found)

    def conclusions(
        self,
        study_id: str | None = None,
        *,
        model: str | None = None,
        node: str | None = None,
        workload: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> tuple[Conclusion, ...]:
        """The conclusions of a study, or of all that match, the oldest first; `since` ≤ `at` < `until`."""
        wanted = {"model": model, "node": node, "workload": workload}
        query = _matching({name: value for name, value in wanted.items() if value is not None})
        if study_id is not None:
            query = query.where(conclusions.c.study_id == study_id)
        if since is not None:
            query = query.where(conclusions.c.at >= since)
        if until is not None:
            query = query.where(conclusions.c.at < until)
        rows = self._read(lambda connection: connection.execute(query).scalars().all())
        return tuple(Conclusion.from_json(row) for row in rows)

    def latest_conclusion(self, study_id: str) -> Conclusion | None:
        """What the study's newest run that has ended concluded; None where none has."""
        query = _matching({}).where(conclusions.c.study_id == study_id).order_by(None)
        query = query.order_by(conclusions.c.at.desc(), conclusions.c.run_id.desc()).limit(1)
        found = self._read(lambda connection: connection.execute(query).scalar())
        return None if found is None else Conclusion.from_json(found)


def _matching(wanted: Mapping[str, str]) -> Select[tuple[Any]]:
    """Documents of conclusions, the oldest first, of the studies with these facts."""
    query = select(conclusions.c.document).order_by(conclusions.c.at, conclusions.c.run_id)
    if not wanted:
        return query
    query = query.join(studies, studies.c.id == conclusions.c.study_id)
    return query.where(*(studies.c[name] == value for name, value in wanted.items()))
