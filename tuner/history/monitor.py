"""What a service that watches asks often: whether anything changed, and counts that do not read all rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, Text, and_, func, or_, select, type_coerce

from tuner.conclusions import Judgement
from tuner.history.base import Part
from tuner.history.tables import conclusions, runs, studies, trials
from tuner.records import RunState, TrialState

Counts = Mapping[tuple[str, str], int]
"""(state, cause or "") → trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCounts:
    """Counts of trials: those up to an id, none of which can change any more, and those after it."""

    upto: int
    settled: Counts
    open: Counts


class Monitor(Part):
    """Cheap questions about a history that others write to."""

    def pulse(self) -> int:
        """A number that is another one once somebody has written; the same one says nothing has changed."""
        return self._database.pulse()

    def trial_counts(self, after: int = 0) -> TrialCounts:
        """Trials with an id above `after`, by state and cause."""
        first_open = select(func.min(trials.c.id)).where(trials.c.state == TrialState.RUNNING.value)
        newest = select(func.max(trials.c.id))
        cause = func.coalesce(trials.c.cause, "")
        query = select(trials.c.state, cause, func.count()).group_by(trials.c.state, cause)

        def work(connection: Connection) -> TrialCounts:
            last = connection.execute(newest).scalar() or 0
            running = connection.execute(first_open).scalar()
            upto = last if running is None else min(last, running - 1)
            settled = connection.execute(query.where(trials.c.id > after, trials.c.id <= upto)).all()
            open_ = connection.execute(query.where(trials.c.id > max(after, upto))).all()
            return TrialCounts(
                upto=max(after, upto),
                settled={(state, why): count for state, why, count in settled},
                open={(state, why): count for state, why, count in open_},
            )

        return self._read(work)

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
