"""Studies and runs."""

import secrets
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Select, insert, select, update

from tuner.conclusions import Conclusion
from tuner.errors import BadInput, Conflict, NotFound, nearest
from tuner.history import bests
from tuner.history.base import Part
from tuner.history.codec import run_of, run_row, study_of, study_row
from tuner.history.concluded import conclude, give_up
from tuner.history.tables import runs, studies
from tuner.records import Run, RunState, Study


def _find_study(connection: Connection, ref: str) -> Study:
    by_id = connection.execute(select(studies).where(studies.c.id == ref)).mappings().one_or_none()
    if by_id is not None:
        return study_of(by_id)
    newest = studies.c.created_at.desc(), studies.c.id
    named = connection.execute(select(studies).where(studies.c.name == ref).order_by(*newest)).mappings()
    if (first := named.first()) is not None:
        return study_of(first)
    begins = select(studies).where(studies.c.id.startswith(ref, autoescape=True)).limit(2)
    found = connection.execute(begins).mappings().all() if ref else []
    if len(found) > 1:
        raise BadInput(f"'{ref}' begins the id of more than one study: give more of it")
    if not found:
        names = connection.execute(select(studies.c.name).distinct()).scalars()
        raise NotFound(f"there is no study '{ref}'{nearest(ref, names)}")
    return study_of(found[0])


def find_run(connection: Connection, run_id: str) -> Run:
    row = connection.execute(select(runs).where(runs.c.id == run_id)).mappings().one_or_none()
    if row is None:
        raise NotFound(f"there is no run '{run_id}'")
    return run_of(row)


def _update(connection: Connection, run: Run) -> None:
    changed = connection.execute(update(runs).where(runs.c.id == run.id).values(**run_row(run)))
    if changed.rowcount == 0:
        raise NotFound(f"there is no run '{run.id}'")


def _behind(time: Column[Any], key: Column[Any], after: str) -> ColumnElement[bool]:
    """What comes after one row where the newest come first, and equal times go by their keys."""
    last = select(time).where(key == after).scalar_subquery()
    return (time < last) | ((time == last) & (key > after))


class Studies(Part):
    """Studies are immutable; a run is RUNNING until it is saved in another state."""

    def add_study(self, study: Study) -> Study:
        """Keeps a study; one with the same id that is there already is given back unchanged."""

        def work(connection: Connection) -> Study:
            row = connection.execute(select(studies).where(studies.c.id == study.id)).mappings().one_or_none()
            if row is not None:
                return study_of(row)
            connection.execute(insert(studies).values(**study_row(study)))
            return study

        return self._write(work)

    def study(self, ref: str) -> Study:
        """A study by its id, its name (the newest of that name) or the beginning of its id."""
        return self._read(lambda connection: _find_study(connection, ref))

    def studies(
        self,
        *,
        model: str | None = None,
        node: str | None = None,
        workload: str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> tuple[Study, ...]:
        """All studies, the newest first; `after` is the id of the last one of the page before."""
        query = select(studies).order_by(studies.c.created_at.desc(), studies.c.id)
        if model is not None:
            query = query.where(studies.c.model == model)
        if node is not None:
            query = query.where(studies.c.node == node)
        if workload is not None:
            query = query.where(studies.c.workload == workload)
        if after is not None:
            query = query.where(_behind(studies.c.created_at, studies.c.id, after))
        if limit is not None:
            query = query.limit(limit)
        return self._read(lambda c: tuple(study_of(row) for row in c.execute(query).mappings()))

    def open_run(
        self,
        study_id: str,
        *,
        trials_limit: int | None,
        deadline: datetime | None,
        now: datetime,
        pid: int | None,
        host: str,
    ) -> Run:
        """Resumes the study's unfinished run under the new budget, or starts a run.

        An unfinished run that was asked to cancel is closed as CANCELLED and not resumed. Whether its old
        controller still lives is the caller's to know (`pid`, `host`, lease).
        """
        fresh = Run(
            id=secrets.token_hex(8),
            study_id=study_id,
            state=RunState.RUNNING,
            started_at=now,
            trials_limit=trials_limit,
            deadline=deadline,
            pid=pid,
            host=host,
        )

        def work(connection: Connection) -> Run:
            _find_study(connection, study_id)
            where = (runs.c.study_id == study_id, runs.c.state == RunState.RUNNING.value)
            row = connection.execute(select(runs).where(*where)).mappings().one_or_none()
            if row is not None:
                old = run_of(row)
                if not old.cancel_requested:
                    again = replace(old, trials_limit=trials_limit, deadline=deadline, pid=pid, host=host)
                    _update(connection, again)
                    return again
                reason = "cancelled; its controller was gone"
                given_up = replace(old, state=RunState.CANCELLED, ended_at=now, reason=reason)
                _update(connection, given_up)
                bests.write(connection, old.id, give_up(connection, given_up))
            connection.execute(insert(runs).values(**run_row(fresh)))
            return fresh

        return self._write(work)

    def save_run(self, run: Run, conclusion: Conclusion | None = None) -> Run:
        """Writes a run as it now is, with what it concluded; a request to cancel that came in is kept.

        A run that ends without a conclusion gets one which says that nothing was confirmed.

        Raises Conflict when the run had ended already and this would change how, or has a conclusion.
        """

        def work(connection: Connection) -> Run:
            old = find_run(connection, run.id)
            if old.state != RunState.RUNNING and old.state != run.state:
                raise Conflict(f"run '{run.id}' has ended as {old.state}; it cannot become {run.state}")
            kept = replace(run, cancel_requested=run.cancel_requested or old.cancel_requested)
            _update(connection, kept)
            if conclusion is not None:
                conclude(connection, conclusion)
            if kept.state != RunState.RUNNING:
                bests.write(connection, kept.id, give_up(connection, kept))
            return kept

        return self._write(work)

    def run(self, run_id: str) -> Run:
        return self._read(lambda connection: find_run(connection, run_id))

    def runs(
        self,
        study_id: str | None = None,
        *,
        state: RunState | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> tuple[Run, ...]:
        """Runs of a study, or all; the newest first; `after` is the id of the last one of the page before."""
        query: Select[tuple[object, ...]] = select(runs).order_by(runs.c.started_at.desc(), runs.c.id)
        if study_id is not None:
            query = query.where(runs.c.study_id == study_id)
        if state is not None:
            query = query.where(runs.c.state == state.value)
        if after is not None:
            query = query.where(_behind(runs.c.started_at, runs.c.id, after))
        if limit is not None:
            query = query.limit(limit)
        return self._read(lambda c: tuple(run_of(row) for row in c.execute(query).mappings()))

    def cancel_run(self, run_id: str) -> Run:
        """Asks a running run to stop. Raises Conflict when it has ended."""

        def work(connection: Connection) -> Run:
            run = find_run(connection, run_id)
            if run.state != RunState.RUNNING:
                raise Conflict(f"run '{run_id}' has already ended as {run.state}")
            asked = replace(run, cancel_requested=True)
            _update(connection, asked)
            return asked

        return self._write(work)
