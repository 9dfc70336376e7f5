"""Studies, their runs, and what the runs concluded."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Select,
    Text,
    and_,
    func,
    insert,
    or_,
    select,
    type_coerce,
    update,
)

from tuner.conclusions import Attribution, Conclusion, Judgement, RunCost
from tuner.errors import Conflict, NotFound
from tuner.history import run_best
from tuner.history.base import StorePart, equal, find, first_of, records_of, row_of
from tuner.history.tables import attributions, conclusions, launches, runs, studies, trials
from tuner.records import (
    Launch,
    Run,
    RunState,
    Study,
    TrialState,
    gpus_held,
    repeat_of,
)


def _study(connection: Connection, ref: str) -> Study:
    return find(Study, connection, studies.c.id, ref, "study")


def find_run(connection: Connection, run_id: str) -> Run:
    found = first_of(Run, connection, select(runs).where(runs.c.id == run_id))
    if found is None:
        raise NotFound(f"there is no run '{run_id}'")
    return found


def _update(connection: Connection, run: Run) -> None:
    changed = connection.execute(update(runs).where(runs.c.id == run.id).values(**row_of(run)))
    if changed.rowcount == 0:
        raise NotFound(f"there is no run '{run.id}'")


def _conclude(connection: Connection, conclusion: Conclusion) -> None:
    """Writes a conclusion. Conflict if the run has one already."""
    query = select(conclusions.c.run_id).where(conclusions.c.run_id == conclusion.run_id)
    if connection.execute(query).scalar() is not None:
        raise Conflict(f"run '{conclusion.run_id}' already has a conclusion, which is never changed")
    row = {
        "run_id": conclusion.run_id,
        "study_id": conclusion.study_id,
        "at": conclusion.at,
        "outcome": conclusion.outcome.value,
        "document": conclusion.to_json(),
    }
    connection.execute(insert(conclusions).values(**row))


def _give_up(connection: Connection, run: Run) -> Conclusion | None:
    """The conclusion of a run that has ended. Where the run gave none, writes that nothing was confirmed. A
    confirmation that it began is told, without the last repeat, which may not be whole.
    """
    query = select(conclusions.c.document).where(conclusions.c.run_id == run.id)
    if (found := connection.execute(query).scalar()) is not None:
        return Conclusion.from_json(found)
    complete = select(trials.c.id).where(
        trials.c.run_id == run.id, trials.c.state == TrialState.COMPLETE.value, trials.c.origin != "baseline"
    )
    made = _launches(connection, run)
    repeats = [repeat for each in made if (repeat := repeat_of(each.directory)) is not None]
    study = _study(connection, run.study_id)
    begun = [] if study.compares else repeats
    gpus = (gpus_held(made[0].argv) if made else 1) if study.has_gpus else 0
    done = bool(begun) or connection.execute(complete.limit(1)).first() is not None
    outcome = Judgement.NOT_CONFIRMED if done else Judgement.NOTHING_SERVED
    begins = "Not confirmed" if done else "No candidate completed"
    then = " The next run first finishes the confirmation." if begun else ""
    said = Conclusion(
        run_id=run.id, study_id=run.study_id, at=run.at, outcome=outcome,
        sentence=f"{begins}: {(run.reason or 'the run ended').rstrip('.')}.{then}",
        cost=RunCost.of(made, gpus=gpus), repeats=max(begun, default=1) - 1,
    )  # fmt: skip
    _conclude(connection, said)
    return said


def _launches(connection: Connection, run: Run) -> Sequence[Launch]:
    """The launches of a run's study since it began."""
    ours = launches.c.started_at >= run.started_at
    return records_of(Launch, connection, select(launches).where(launches.c.study_id == run.study_id, ours))


def _in_order(connection: Connection, run: Run) -> Run:
    """The run, ended no earlier than it and its launches did: whoever ends it may have a clock that is behind
    the run's, as on a virtual clock.
    """
    if run.ended_at is None:
        return run
    ended = [each.ended_at for each in _launches(connection, run) if each.ended_at is not None]
    return replace(run, ended_at=max([run.ended_at, run.started_at, *ended]))


def _behind(time: Column[Any], key: Column[Any], after: str) -> ColumnElement[bool]:
    """What comes after one row where the newest come first, and equal times go by their keys."""
    last = select(time).where(key == after).scalar_subquery()
    return (time < last) | ((time == last) & (key > after))


class StudyStore(StorePart):
    """Studies and conclusions never change. A run is RUNNING until it is saved in another state."""

    def add_study(self, study: Study) -> Study:
        """Keeps a study; one with the same id that is there already is given back unchanged."""

        def work(connection: Connection) -> Study:
            found = first_of(Study, connection, select(studies).where(studies.c.id == study.id))
            if found is None:
                connection.execute(insert(studies).values(**row_of(study)))
            return found or study

        return self._write(work)

    def study(self, ref: str) -> Study:
        """A study by its id, its name (the newest of that name) or the beginning of its id."""
        return self._read(lambda connection: _study(connection, ref))

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
        query = select(studies).where(*_facts(model, node, workload))
        if after is not None:
            query = query.where(_behind(studies.c.created_at, studies.c.id, after))
        return self._records(Study, query.order_by(studies.c.created_at.desc(), studies.c.id).limit(limit))

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

        An unfinished run that was asked to cancel is closed as CANCELLED and not resumed. The caller must
        know whether the old controller still lives (`pid`, `host`, lease).
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
            _study(connection, study_id)
            where = (runs.c.study_id == study_id, runs.c.state == RunState.RUNNING.value)
            old = first_of(Run, connection, select(runs).where(*where))
            if old is not None:
                if not old.cancel_requested:
                    again = replace(old, trials_limit=trials_limit, deadline=deadline, pid=pid, host=host)
                    _update(connection, again)
                    return again
                reason = "cancelled; its controller was gone"
                ended = replace(old, state=RunState.CANCELLED, ended_at=now, reason=reason)
                given_up = _in_order(connection, ended)
                _update(connection, given_up)
                run_best.write(connection, old.id, _give_up(connection, given_up))
            connection.execute(insert(runs).values(**row_of(fresh)))
            return fresh

        return self._write(work)

    def save_run(self, run: Run, conclusion: Conclusion | None = None) -> Run:
        """Writes a run as it is now, with its conclusion; a request to cancel that came in is preserved.

        A run that ends without a conclusion gets one which says that nothing was confirmed. Raises Conflict
        when the run had ended differently before, or has a conclusion already.
        """

        def work(connection: Connection) -> Run:
            old = find_run(connection, run.id)
            if old.state != RunState.RUNNING and old.state != run.state:
                raise Conflict(f"run '{run.id}' has ended as {old.state}; it cannot become {run.state}")
            kept = _in_order(
                connection, replace(run, cancel_requested=run.cancel_requested or old.cancel_requested)
            )
            _update(connection, kept)
            if conclusion is not None:
                _conclude(connection, conclusion)
            if kept.state != RunState.RUNNING:
                run_best.write(connection, kept.id, _give_up(connection, kept))
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
        query = select(runs).where(*equal((runs.c.study_id, study_id), (runs.c.state, state)))
        if after is not None:
            query = query.where(_behind(runs.c.started_at, runs.c.id, after))
        return self._records(Run, query.order_by(runs.c.started_at.desc(), runs.c.id).limit(limit))

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

    def conclusion(self, run_id: str) -> Conclusion | None:
        """What a run concluded; None while it has not."""
        query = select(conclusions.c.document).where(conclusions.c.run_id == run_id)
        found = self._read(lambda connection: connection.execute(query).scalar())
        return None if found is None else Conclusion.from_json(found)

    def conclusions(self, study_id: str | None = None) -> tuple[Conclusion, ...]:
        """The conclusions of a study, or of all, the oldest first."""
        query = select(conclusions.c.document).where(*equal((conclusions.c.study_id, study_id)))
        query = query.order_by(conclusions.c.at, conclusions.c.run_id)
        rows = self._read(lambda connection: connection.execute(query).scalars().all())
        return tuple(Conclusion.from_json(row) for row in rows)

    def add_attribution(self, found: Attribution) -> Attribution:
        """Keeps which knobs of a run's winner pay. Conflict if the run has that already."""

        def work(connection: Connection) -> Attribution:
            query = select(attributions.c.run_id).where(attributions.c.run_id == found.run_id)
            if connection.execute(query).first() is not None:
                raise Conflict(f"run '{found.run_id}' already has an attribution, which is never changed")
            row = {"run_id": found.run_id, "study_id": found.study_id, "at": found.at}
            connection.execute(insert(attributions).values(**row, document=found.to_json()))
            return found

        return self._write(work)

    def attribution(self, run_id: str) -> Attribution | None:
        """Which knobs of a run's winner pay; None if nobody asked."""
        query = select(attributions.c.document).where(attributions.c.run_id == run_id)
        found = self._read(lambda connection: connection.execute(query).scalar())
        return None if found is None else Attribution.from_json(found)

    def run_counts(self) -> Mapping[str, int]:
        """Runs by state."""
        query = select(runs.c.state, func.count()).group_by(runs.c.state)
        return self._read(lambda c: {state: count for state, count in c.execute(query).all()})

    def last_success(self) -> Mapping[str, datetime]:
        """Node → when a run last ended there with a conclusion that a pipeline can use: a winner, or today's
        configuration that stays, measured while it served.
        """
        ended = select(studies.c.node, func.max(runs.c.ended_at)).join(runs, runs.c.study_id == studies.c.id)
        ended = ended.join(conclusions, conclusions.c.run_id == runs.c.id).where(_USABLE)
        return self._read(lambda c: _by_node(c, ended.group_by(studies.c.node)))

    def last_end(self) -> Mapping[str, datetime]:
        """Node → when a run last ended there, however it did; one that was cancelled is no night."""
        ended = select(studies.c.node, func.max(runs.c.ended_at)).join(runs, runs.c.study_id == studies.c.id)
        ended = ended.where(runs.c.state.in_([RunState.FINISHED.value, RunState.FAILED.value]))
        return self._read(lambda c: _by_node(c, ended.group_by(studies.c.node)))


def _by_node(connection: Connection, query: Select[Any]) -> dict[str, datetime]:
    return {node: at for node, at in connection.execute(query).all() if at is not None}


_DOCUMENT = type_coerce(conclusions.c.document, Text)
# Canonical JSON; a quote within a string is escaped, so that only the key itself is found.
_WINNER = ~_DOCUMENT.contains('"winner":null', autoescape=True)
_SERVED = ~_DOCUMENT.contains('"baseline":null', autoescape=True)
_USABLE = or_(
    conclusions.c.outcome.in_([Judgement.CLEAR_WINNER.value, Judgement.TRADE_OFF.value]),
    and_(conclusions.c.outcome.in_([Judgement.BASELINE_FAILED.value, Judgement.SLO_MISSED.value]), _WINNER),
    and_(
        conclusions.c.outcome.in_([Judgement.BASELINE_STAYS.value, Judgement.NO_CLEAR_WINNER.value]), _SERVED
    ),
)


def _facts(model: str | None, node: str | None, workload: str | None) -> list[ColumnElement[bool]]:
    return equal((studies.c.model, model), (studies.c.node, node), (studies.c.workload, workload))
