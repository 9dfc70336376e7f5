"""Trials, their measurements, launches, and the folders that they leave on disk."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, Select, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from tuner.errors import BadInput, Conflict, NotFound
from tuner.history.base import StorePart, equal, plain, record_of, records_of, row_of
from tuner.history.studies import find_run
from tuner.history.tables import launches, measurements, profiles, run_bests, runs, studies, trials
from tuner.records import Candidate, Launch, Measurement, RunState, Trial, TrialState

# Ids in one statement: SQLite before 3.32 takes 999 values.
CHUNK = 500
LeftoverKind = Literal["trial", "launch"]

# (state, cause or "") → trials.
Counts = Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCounts:
    """Counts of trials: those up to an id, none of which can change any more, and those after it."""

    upto: int
    settled: Counts
    open: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A folder that a trial or a launch left on disk."""

    kind: LeftoverKind
    id: str
    directory: str
    ended_at: datetime


def _measurements(connection: Connection, ids: Sequence[int]) -> dict[int, list[Measurement]]:
    found: dict[int, list[Measurement]] = {each: [] for each in ids}
    for start in range(0, len(ids), CHUNK):
        some = ids[start : start + CHUNK]
        query = select(measurements).where(measurements.c.trial_id.in_(some)).order_by(measurements.c.id)
        for row in plain(connection.execute(query)):
            found[row["trial_id"]].append(record_of(Measurement, row))
    return found


def load(connection: Connection, query: Select[tuple[object, ...]]) -> tuple[Trial, ...]:
    """The trials of a query over the trials table, with their measurements in the order they were added."""
    rows = plain(connection.execute(query))
    measured = _measurements(connection, [row["id"] for row in rows])
    return tuple(record_of(Trial, {**row, "measurements": measured[row["id"]]}) for row in rows)


def _row(trial: Trial) -> dict[str, object]:
    return row_of(trial, "id", "measurements")


def _one(connection: Connection, trial_id: int) -> Trial:
    found = load(connection, select(trials).where(trials.c.id == trial_id))
    if not found:
        raise NotFound(f"there is no trial with id {trial_id}")
    return found[0]


def _add(connection: Connection, trial_id: int, new: Sequence[Measurement]) -> None:
    if not new:
        return
    named = {each.launch_id for each in new if each.launch_id is not None}
    known = set(connection.execute(select(launches.c.id).where(launches.c.id.in_(named))).scalars())
    if missing := named - known:
        raise NotFound(f"a measurement names launch '{min(missing)}', which was never added")
    connection.execute(insert(measurements), [{**row_of(each), "trial_id": trial_id} for each in new])


class TrialStore(StorePart):
    """A trial's row exists, RUNNING, before its engine does; it is finished once."""

    def start_trial(
        self,
        *,
        study_id: str,
        run_id: str,
        candidate: Candidate,
        number: int,
        attempt: int,
        seed: int,
        origin: str,
        now: datetime,
        directory: str | None,
    ) -> Trial:
        """Writes a RUNNING trial. Raises Conflict when this attempt of this number is there already."""
        trial = Trial(
            id=0,
            study_id=study_id,
            run_id=run_id,
            number=number,
            attempt=attempt,
            candidate=candidate,
            origin=origin,
            seed=seed,
            started_at=now,
            directory=directory,
        )

        def work(connection: Connection) -> Trial:
            run = find_run(connection, run_id)
            if run.study_id != study_id or run.state != RunState.RUNNING:
                raise Conflict(
                    f"run '{run_id}' is {run.state} in study {run.study_id[:12]}: no trial can start"
                )
            place = (trials.c.study_id == study_id, trials.c.number == number, trials.c.attempt == attempt)
            if connection.execute(select(trials.c.id).where(*place)).first() is not None:
                raise Conflict(f"attempt {attempt} of trial {number} is in the history already")
            key = connection.execute(insert(trials).values(**_row(trial))).inserted_primary_key
            if key is None:
                raise Conflict(f"trial {number} was not written")
            return _one(connection, key[0])

        return self._write(work)

    def finish_trial(self, trial: Trial) -> Trial:
        """Writes how a RUNNING trial ended, and those of its measurements that are not stored yet.

        Raises Conflict when it is not RUNNING any more: nothing is written then.
        """
        if trial.state == TrialState.RUNNING:
            raise BadInput(f"the record that should finish trial {trial.number} still says RUNNING")

        def work(connection: Connection) -> Trial:
            old = _one(connection, trial.id)
            if old.state != TrialState.RUNNING:
                raise Conflict(f"trial {old.number} (attempt {old.attempt}) has already ended as {old.state}")
            row = _row(trial)
            connection.execute(update(trials).where(trials.c.id == trial.id).values(**row))
            _add(connection, trial.id, [each for each in trial.measurements if each not in old.measurements])
            return _one(connection, trial.id)

        return self._write(work)

    def add_measurement(self, trial_id: int, measurement: Measurement) -> Trial:
        """Adds a measurement to a trial in any state (repeats, extensions, confirmation)."""

        def work(connection: Connection) -> Trial:
            _one(connection, trial_id)
            _add(connection, trial_id, [measurement])
            return _one(connection, trial_id)

        return self._write(work)

    def trial(self, trial_id: int) -> Trial:
        return self._database.read_once(("trial", trial_id), lambda connection: _one(connection, trial_id))

    def trials(
        self,
        study_id: str,
        states: Sequence[TrialState] = (),
        *,
        run_id: str | None = None,
        after: tuple[int, int] | None = None,
        limit: int | None = None,
    ) -> tuple[Trial, ...]:
        """Trials of a study by (number, attempt), in some states or all; `after` pages on from one."""

        def work(connection: Connection) -> tuple[Trial, ...]:
            query = select(trials).where(trials.c.study_id == study_id, *equal((trials.c.run_id, run_id)))
            query = query.order_by(trials.c.number, trials.c.attempt).limit(limit)
            if states:
                query = query.where(trials.c.state.in_([state.value for state in states]))
            if after is not None:
                number, attempt = after
                later = (trials.c.number == number) & (trials.c.attempt > attempt)
                query = query.where(later | (trials.c.number > number)).where(trials.c.number >= number)
            return load(connection, query)

        return self._database.read_once(("trials", study_id, tuple(states), run_id, after, limit), work)

    def orphans(self, *, host: str | None = None, node: str | None = None) -> tuple[Trial, ...]:
        """RUNNING trials, of the runs of one host, of one node, or of all: after a crash they will never
        finish.
        """
        query = select(trials).where(trials.c.state == TrialState.RUNNING.value).order_by(trials.c.id)
        if host is not None:
            query = query.where(trials.c.run_id.in_(select(runs.c.id).where(runs.c.host == host)))
        if node is not None:
            query = query.where(trials.c.study_id.in_(_on(node)))
        return self._read(lambda connection: load(connection, query))

    def add_launch(self, launch: Launch) -> Launch:
        def work(connection: Connection) -> Launch:
            try:
                connection.execute(insert(launches).values(**row_of(launch)))
            except IntegrityError as error:
                raise Conflict(
                    f"launch '{launch.id}' is already in the history, or its study is not in the history"
                ) from error
            return launch

        return self._write(work)

    def finish_launch(self, launch: Launch) -> Launch:
        """Writes a launch as it ended."""
        if self._change(update(launches).where(launches.c.id == launch.id).values(**row_of(launch))) == 0:
            raise NotFound(f"there is no launch '{launch.id}'")
        return launch

    def launches(self, study_id: str) -> tuple[Launch, ...]:
        def work(connection: Connection) -> tuple[Launch, ...]:
            query = select(launches).where(launches.c.study_id == study_id)
            return records_of(Launch, connection, query.order_by(launches.c.started_at, launches.c.id))

        return self._database.read_once(("launches", study_id), work)

    def open_launches(self, *, node: str | None = None) -> tuple[Launch, ...]:
        """Launches of which no end is known, of the studies of one node or of all, the oldest first."""
        query = select(launches).where(launches.c.ended_at.is_(None))
        if node is not None:
            query = query.where(launches.c.study_id.in_(_on(node)))
        query = query.order_by(launches.c.started_at, launches.c.id)
        return self._records(Launch, query)

    def known_launches(self, ids: Collection[str]) -> set[str]:
        """Which of these are launches of this history."""
        query = select(launches.c.id).where(launches.c.id.in_(ids))
        return self._read(lambda c: set(c.execute(query).scalars()))

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

    def leftovers(self, before: datetime) -> tuple[Leftover, ...]:
        """Folders of what ended before a moment, the oldest first; not a run's best or a profile."""
        published = select(profiles.c.trial_id).where(profiles.c.trial_id.is_not(None))
        kept = trials.c.id.in_(published) | trials.c.id.in_(select(run_bests.c.trial_id))
        old_trials = (
            select(trials.c.id, trials.c.directory, trials.c.ended_at)
            .where(trials.c.directory.is_not(None), trials.c.ended_at < before)
            .where(trials.c.state != TrialState.RUNNING.value)
            .where(~kept)
        )
        spared = select(trials.c.directory).where(kept, trials.c.directory.is_not(None))
        old_launches = (
            select(launches.c.id, launches.c.directory, launches.c.ended_at)
            .where(launches.c.directory.is_not(None), launches.c.ended_at < before)
            .where(launches.c.directory.not_in(spared))
        )

        queries: tuple[tuple[LeftoverKind, Select[Any]], ...] = (
            ("trial", old_trials),
            ("launch", old_launches),
        )

        def work(connection: Connection) -> tuple[Leftover, ...]:
            found = [
                Leftover(kind=kind, id=str(row.id), directory=row.directory, ended_at=row.ended_at)
                for kind, query in queries
                for row in connection.execute(query)
            ]
            return tuple(sorted(found, key=lambda each: (each.ended_at, each.kind, each.id)))

        return self._read(work)

    def forget(self, gone: Sequence[Leftover]) -> None:
        """Writes that some folders are no longer there."""
        for start in range(0, len(gone), CHUNK):
            some = gone[start : start + CHUNK]
            for table, kind, of in ((trials, "trial", int), (launches, "launch", str)):
                ids = [of(each.id) for each in some if each.kind == kind]
                self._change(update(table).where(table.c.id.in_(ids)).values(directory=None))


def _on(node: str) -> Select[tuple[str]]:
    return select(studies.c.id).where(studies.c.node == node)
