"""What may be thrown away: folders of trials and launches that ended long ago, and old answers. No row of a
trial, a measurement or a profile is ever deleted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from sqlalchemy import Connection, Table, delete, select, update

from tuner.history.base import Part
from tuner.history.tables import answers, launches, profiles, run_bests, traces, trials
from tuner.records import TrialState

CHUNK = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A folder that a trial or a launch left behind."""

    kind: Literal["trial", "launch"]
    id: str
    directory: str
    ended_at: datetime


class Care(Part):
    """Retention. Deleting files is the caller's; the rows only forget where they lay."""

    def leftovers(self, before: datetime) -> tuple[Leftover, ...]:
        """Folders of what ended before a moment, the oldest first; not a run's best or a profile."""
        kept = select(profiles.c.trial_id).where(profiles.c.trial_id.is_not(None))
        old_trials = (
            select(trials.c.id, trials.c.directory, trials.c.ended_at)
            .where(trials.c.directory.is_not(None), trials.c.ended_at < before)
            .where(trials.c.state != TrialState.RUNNING.value)
            .where(trials.c.id.not_in(kept), trials.c.id.not_in(select(run_bests.c.trial_id)))
        )
        spared = select(trials.c.directory).where(
            trials.c.id.in_(kept) | trials.c.id.in_(select(run_bests.c.trial_id)),
            trials.c.directory.is_not(None),
        )
        old_launches = (
            select(launches.c.id, launches.c.directory, launches.c.ended_at)
            .where(launches.c.directory.is_not(None), launches.c.ended_at < before)
            .where(launches.c.directory.not_in(spared))
        )

        def work(connection: Connection) -> tuple[Leftover, ...]:
            found = [
                Leftover(kind="trial", id=str(row.id), directory=row.directory, ended_at=row.ended_at)
                for row in connection.execute(old_trials)
            ]
            found += [
                Leftover(kind="launch", id=row.id, directory=row.directory, ended_at=row.ended_at)
                for row in connection.execute(old_launches)
            ]
            return tuple(sorted(found, key=lambda each: (each.ended_at, each.kind, each.id)))

        return self._read(work)

    def forget(self, gone: Sequence[Leftover]) -> None:
        """Writes that some folders are no longer there."""
        for start in range(0, len(gone), CHUNK):
            some = gone[start : start + CHUNK]
            of_trials = [int(each.id) for each in some if each.kind == "trial"]
            of_launches = [each.id for each in some if each.kind == "launch"]
            self._forget_directory(trials, of_trials)
            self._forget_directory(launches, of_launches)

    def _forget_directory(self, table: Table, ids: Sequence[int | str]) -> None:
        change = update(table).where(table.c.id.in_(ids)).values(directory=None)
        self._write(lambda connection: connection.execute(change).rowcount)

    def forget_trace(self, digest: str) -> None:
        """Takes a trace out of the register; studies keep its digest."""
        query = delete(traces).where(traces.c.digest == digest)
        self._write(lambda connection: connection.execute(query).rowcount)

    def forget_answers(self, before: datetime) -> int:
        """Deletes answers to requests older than a moment; returns how many."""
        query = delete(answers).where(answers.c.at < before)
        return self._write(lambda connection: connection.execute(query).rowcount)
