"""Scheduled runs: claims, checks and starts what is due. The caller gives the clock and the start
function.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median
from typing import Literal

from tuner.errors import TunerError, Unavailable
from tuner.fleet.window import Terms, Window, blacked_out, last_due, next_due, terms, window
from tuner.history.entities import Schedule
from tuner.history.store import Store
from tuner.measures import many
from tuner.records import Launch, Run, RunState

Clock = Callable[[], datetime]
Kind = Literal["start", "resume", "missed", "blackout", "overlap", "too short", "failed", "ended"]
POLL_S = 20.0
"""Seconds between two readings of the schedules; a due time wakes the loop earlier."""
RESUMES = 3
"""How often an unfinished run of a dead process is started again within one window."""
ACTOR = "schedule"
CLOSING = "the window closes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """A claimed due time: start the study now and end by `deadline`. That is the end of the window minus the
    time to stop the engine.
    """

    schedule: Schedule
    terms: Terms
    window: Window

    @property
    def deadline(self) -> datetime:
        return self.window.end - timedelta(seconds=self.terms.reserve_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """What happened to a due time, for the log, the audit and notifications."""

    kind: Kind
    schedule: str
    node: str
    sentence: str
    at: datetime


StartRun = Callable[[Firing], Awaitable[Run | None]]
"""Runs a study to its end and returns the run, None when there is nothing to do; it hands the run's id to
`store.scheduled_run` as soon as there is one. Raises TunerError. Cancelled with the message CLOSING when the
window is about to close: it must then have stopped the engine, and given production back, before it returns.
Cancelled with another message when the loop itself ends."""


async def loop(
    store: Store,
    *,
    clock: Clock,
    start_run: StartRun,
    wait: Callable[[float], Awaitable[object]] = asyncio.sleep,
    tell: Callable[[Happening], object] = lambda happening: None,
    resumes: int = RESUMES,
) -> None:
    """Start scheduled runs until cancelled; the current runs are then cancelled and awaited.

    `wait` sleeps for seconds of the given clock; `tell` must not block. An unfinished run of a dead process
    is started again up to `resumes` times within its window; 0 if the caller restarts runs itself.
    """
    keeper = Keeper(store, clock=clock, start_run=start_run, tell=tell, resumes=resumes)
    try:
        while True:
            try:
                pause = await keeper.tick()
            except Unavailable:
                pause = POLL_S  # the database is not available; due times are still due later
            await wait(pause)
    finally:
        await keeper.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTimes:
    """Medians over the launches without a failure: `trial_s` from start to end with the replay, `relaunch_s`
    until the engine was ready (None: not known).
    """

    launches: int
    trial_s: float
    relaunch_s: float | None


RECENT = 40
"""How many of the newest launches count."""


def trial_times(store: Store, node: str, study_id: str | None = None) -> TrialTimes | None:
    """How long a trial takes on a node, by the launches of this study or, without any, of the newest studies
    of the node. None while there is no launch without a failure.
    """
    refs = [study_id] if study_id is not None else []
    refs += [study.id for study in store.studies(node=node)[:5]]
    for ref in refs:
        good = [each for each in store.launches(ref) if each.ended_at is not None and each.verdict is None]
        if good:
            return _medians(good[-RECENT:])
    return None


def _medians(launches: Sequence[Launch]) -> TrialTimes:
    spans = [(each.ended_at - each.started_at).total_seconds() for each in launches if each.ended_at]
    ready = [each.timeline["ready_s"] for each in launches if "ready_s" in each.timeline]
    return TrialTimes(
        launches=len(launches), trial_s=median(spans), relaunch_s=median(ready) if ready else None
    )


def too_short(found: TrialTimes | None, left_s: float, min_trials: int) -> str | None:
    """Why the minimum number of trials does not fit into a window; None when it fits or nothing is known. A
    window without time left holds no run at all.
    """
    if left_s <= 0:
        return "the window ends before production could be restored"
    if found is None or min_trials * found.trial_s <= left_s:
        return None
    relaunch = "" if found.relaunch_s is None else f"{found.relaunch_s:.0f} s of it to relaunch; "
    return (
        f"{left_s / 60:.0f} min are left, but {many(min_trials, 'trial')} would take"
        f" {min_trials * found.trial_s / 60:.0f} min. One trial takes {found.trial_s:.0f} s"
        f" ({relaunch}median of {many(found.launches, 'launch')} on this node)"
    )


def claim(
    store: Store, schedule: Schedule, now: datetime, *, busy: str | None = None
) -> Firing | Happening | None:
    """Claim the newest due time: a Firing to start, or a Happening when it is refused. `busy` is why the node
    is known to be in use.

    None when nothing is due or another process claimed it. Each due time is claimed once.
    """
    if not schedule.enabled or (due := last_due(schedule, now)) is None:
        return None
    firing = Firing(schedule=schedule, terms=terms(schedule.spec), window=window(schedule, due))
    refused = _refusal(store, firing, now, busy)
    if not store.fire_schedule(schedule.name, due):
        return None
    if refused is not None:
        return _happened(firing, *refused, now)
    store.scheduled_run(schedule.name, BEGUN)
    return firing


def begin_now(store: Store, schedule: Schedule, now: datetime) -> Firing | Happening:
    """A Firing whose window begins now, whether something is due or not; a Happening when it is refused."""
    firing = Firing(schedule=schedule, terms=terms(schedule.spec), window=window(schedule, now))
    refused = _refusal(store, firing, now, None)
    return firing if refused is None else _happened(firing, *refused, now)


BEGUN = ""
"""Stands in place of the run's id while a due time is claimed and its run has not begun yet."""


def _refusal(store: Store, firing: Firing, now: datetime, busy: str | None) -> tuple[Kind, str] | None:
    schedule, found = firing.schedule, firing.window
    late_s = (now - found.due).total_seconds()
    if now >= firing.deadline:
        return "missed", f"the window from {_at(found.due)} to {_at(found.end)} is over"
    if firing.terms.missed == "skip" and late_s > firing.terms.grace_s:
        return (
            "missed",
            f"it is skipped, because it was due at {_at(found.due)}, {late_s / 60:.0f} min ago",
        )
    if (day := blacked_out(schedule, found)) is not None:
        return "blackout", f"{day} is a blackout date"
    busy = busy or _busy(store, schedule.node, now)
    if busy is not None:
        return "overlap", busy
    last = store.run(schedule.last_run_id).study_id if schedule.last_run_id else None
    known = trial_times(store, schedule.node, last)
    left_s = (firing.deadline - now).total_seconds()
    short = too_short(known, left_s, firing.terms.min_trials)
    return None if short is None else ("too short", short)


def _busy(store: Store, node: str, now: datetime) -> str | None:
    held = next((lease for lease in store.leases(now=now) if lease.node == node), None)
    return None if held is None else f"node {node} is in use by '{held.holder}'"


def unfinished(store: Store, schedule: Schedule, now: datetime) -> Firing | None:
    """The firing whose process died before its run ended, if its window is open and its node is free."""
    if not schedule.enabled or schedule.last_due is None or schedule.last_run_id is None:
        return None
    firing = Firing(schedule=schedule, terms=terms(schedule.spec), window=window(schedule, schedule.last_due))
    if now >= firing.deadline or _busy(store, schedule.node, now) is not None:
        return None
    if schedule.last_run_id == BEGUN:
        return firing
    run = store.run(schedule.last_run_id)
    left = run.state is RunState.RUNNING and not run.cancel_requested
    return firing if left and run.started_at >= schedule.last_due else None


def _at(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _happened(firing: Firing, kind: Kind, sentence: str, now: datetime) -> Happening:
    return Happening(
        kind=kind, schedule=firing.schedule.name, node=firing.schedule.node, sentence=sentence, at=now
    )


class Keeper:
    """The state of a loop: the runs that it started, one per node."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        start_run: StartRun,
        tell: Callable[[Happening], object],
        resumes: int,
    ) -> None:
        self._resumes = resumes
        self._store, self._clock, self._start_run, self._tell = store, clock, start_run, tell
        self._tasks: dict[str, tuple[Firing, asyncio.Task[Run | None]]] = {}
        self._starts: dict[tuple[str, datetime], int] = {}
        self._fresh: dict[tuple[str, datetime], int] = {}
        self._broken: dict[str, str] = {}

    async def tick(self) -> float:
        """Check all schedules once. Returns the seconds until the next check."""
        await asyncio.sleep(0)
        now = self._clock()
        for node in list(self._tasks):
            await self._look_after(node, now)
        schedules = await asyncio.to_thread(self._store.schedules)
        for schedule in schedules:
            await self._consider(schedule, now)
        return await asyncio.to_thread(self._pause_s, schedules, now)

    async def _look_after(self, node: str, now: datetime) -> None:
        """Report a run that ended; stop one whose window is about to close."""
        firing, task = self._tasks[node]
        if not task.done():
            if now < firing.window.end - timedelta(seconds=firing.terms.reserve_s / 2):
                return
            task.cancel(CLOSING)
        await asyncio.gather(task, return_exceptions=True)
        del self._tasks[node]
        await self._report(_ending(firing, task, self._clock()))

    async def _consider(self, schedule: Schedule, now: datetime) -> None:
        busy = schedule.node in self._tasks
        try:
            found = await asyncio.to_thread(self._claim, schedule, now, busy)
        except TunerError as error:
            if self._broken.get(schedule.name) == str(error):
                return
            self._broken[schedule.name] = str(error)
            found = Happening(
                kind="failed", schedule=schedule.name, node=schedule.node, sentence=str(error), at=now
            )
        if isinstance(found, Happening):
            await self._report(found)
        elif found is not None:
            key = (schedule.name, found.window.due)
            self._starts[key] = self._starts.get(key, 0) + 1
            fresh = schedule.last_due is None or schedule.last_due < found.window.due
            self._fresh[key] = self._fresh.get(key, 0) + fresh
            kind: Kind = "start" if fresh else "resume"
            self._tasks[schedule.node] = (found, asyncio.ensure_future(self._start_run(found)))
            await self._report(_happened(found, kind, f"until {_at(found.window.end)}", now))

    def _claim(self, schedule: Schedule, now: datetime, busy: bool) -> Firing | Happening | None:
        reason = f"node {schedule.node} is in use by another schedule" if busy else None
        found = claim(self._store, schedule, now, busy=reason)
        if found is not None or busy:
            return found
        left = unfinished(self._store, schedule, now)
        if left is None:
            return None
        key = (schedule.name, left.window.due)
        started = self._starts.get(key, 0)
        own_failure = started > 0 and schedule.last_run_id == BEGUN
        return None if own_failure or started - self._fresh.get(key, 0) >= self._resumes else left

    def _pause_s(self, schedules: Sequence[Schedule], now: datetime) -> float:
        ends = [firing.window.end for firing, _ in self._tasks.values()]
        ahead = [due for each in schedules if each.enabled and (due := next_due(each, now)) is not None]
        return min([POLL_S, *((moment - now).total_seconds() for moment in (*ends, *ahead) if moment > now)])

    async def _report(self, happening: Happening) -> None:
        await asyncio.to_thread(record, self._store, happening)
        self._tell(happening)

    async def close(self) -> None:
        """Stop all runs and wait until they have stopped."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def record(store: Store, happening: Happening) -> None:
    """Write what happened to a due time into the audit."""
    store.add_audit(
        actor=ACTOR,
        action=f"schedule.{happening.kind.replace(' ', '_')}",
        target=happening.schedule,
        reason=happening.sentence,
        now=happening.at,
        detail={"node": happening.node},
    )


def _ending(firing: Firing, task: "asyncio.Task[Run | None]", now: datetime) -> Happening:
    if task.cancelled():
        return failed(firing, "it was stopped at the end of its window", now)
    error = task.exception()
    if error is not None:
        name = "" if isinstance(error, TunerError) else f"{type(error).__name__}: "
        return failed(firing, f"{name}{error}", now)
    return ended(firing, task.result(), now)


def nothing_begun(store: Store, firing: Firing) -> None:
    """Write that a claimed due time needs no run, so that no process begins it again."""
    store.scheduled_run(firing.schedule.name, firing.schedule.last_run_id or None)


def failed(firing: Firing, sentence: str, now: datetime) -> Happening:
    """A firing without a successful run."""
    return _happened(firing, "failed", sentence, now)


def ended(firing: Firing, run: Run | None, now: datetime) -> Happening:
    """How a firing's run ended; None: there was nothing to do."""
    if run is None:
        return _happened(firing, "ended", "there is no new version of the engine", now)
    kind: Kind = "failed" if run.state is RunState.FAILED else "ended"
    return _happened(firing, kind, f"{run.state.value}: {run.reason or 'no reason given'}", now)
