"""What a run does right now, in a file that the service reads: TUNER_HOME/live/RUN.json, renewed each second.

It is for people who watch. The history has what lasts; a run that ended leaves no such file.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter, ValidationError

from tuner.history.store import Store
from tuner.records import Run, RunState, Trial, TrialState
from tuner.replay.plan import Plan
from tuner.replay.prepare import Progress
from tuner.tuning.context import SEARCH, RunEstimate, RunEvent, Tell
from tuner.tuning.study import Clock

EVERY_S = 1.0
MOST_POINTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNow:
    """A run at a moment.

    `phase` is launching, warm-up, priming, window (of `slice`: `done_s` of `total_s` seconds) or another
    word of the tuner. `stage` is the search, the confirmation, a comparison or the attribution.
    `confirming` is (launches done, all) in all but the search. `to_confirm` is how many launches a
    confirmation usually takes, and `held_out_s` how much longer one takes than a trial. `engine` is what
    the engine said of itself in this slice: `at_s` and a list for each name. `left_s`: about how many
    seconds the whole run still takes from `at` on (None: not known).
    """

    run: str
    at: datetime
    phase: str = "starting"
    slice: str = ""
    trial: int | None = None
    done_s: float = 0.0
    total_s: float = 0.0
    confirming: tuple[int, int] | None = None
    stage: str = ""
    to_confirm: int = 0
    held_out_s: float = 0.0
    left_s: float | None = None
    engine: Mapping[str, list[float | None]] = field(default_factory=dict)


_CODEC = TypeAdapter(RunNow)


def path_of(home: Path, run_id: str) -> Path:
    """Where the file of a run is."""
    return home / "live" / f"{run_id}.json"


def read(home: Path, run_id: str) -> RunNow | None:
    """What a run does right now; None if its controller is on another host, or has ended."""
    try:
        return _CODEC.validate_json(path_of(home, run_id).read_bytes())
    except (OSError, ValidationError):
        return None


def write(path: Path, now: RunNow) -> None:
    """Renew the file of a run, whole or not at all. One that cannot be written stops no run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(now), default=lambda at: at.isoformat()))
        partial.replace(path)
    except OSError:
        return


def left_s(run: Run, trials: Sequence[Trial], found: RunNow | None, now: datetime) -> float | None:
    """About how many seconds a whole run still takes, including the confirmation, at most until its
    deadline. Its own process says this in `found`. Otherwise it is computed from the times of its trials
    (None: no trial has ended, or no limit is set).
    """
    if found is not None and found.left_s is not None:
        return max(0.0, found.left_s - (now - found.at).total_seconds())
    ended = [t for t in trials if t.state is not TrialState.ABORTED]
    spans = [(t.ended_at - t.started_at).total_seconds() for t in ended if t.ended_at is not None]
    until = (run.deadline - now).total_seconds() if run.deadline is not None else None
    if not spans or run.trials_limit is None:
        return _time_left_s(0.0, None, until)
    each, done = fmean(spans), len({t.number for t in ended if t.ended_at is not None})
    launch_s = each + (found.held_out_s if found is not None else 0.0)
    if found is not None and found.confirming is not None:
        before, whole = found.confirming
        return _time_left_s(launch_s, max(0, whole - before), until)
    later = launch_s * found.to_confirm if found else 0.0
    return _time_left_s(each, max(0, run.trials_limit - done), until, later_s=later)


def left_of(store: Store, home: Path, run: Run, now: datetime) -> float | None:
    """`left_s` of a run by its id; None unless a process is at work on it."""
    if run.state is not RunState.RUNNING or run.id in store.stopped_runs(now=now):
        return None
    return left_s(run, store.trials(run.study_id, run_id=run.id), read(home, run.id), now)


@dataclass(slots=True, kw_only=True)
class Pace:
    """How far a run is and how long it still takes, by its events.

    The search counts trials; the other stages (the confirmation, a comparison) count launches. `clock` reads
    seconds that only go forward.
    """

    estimate: RunEstimate | None = None
    clock: Callable[[], float] = time.monotonic
    stage: str = SEARCH
    done: int = 0
    total: int | None = None
    begun: float = field(init=False)
    _estimated: float = field(init=False)
    _stage_begun: float = field(init=False)
    _first: int = 0
    _moved: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self._estimated = self._stage_begun = self._moved = self.clock()

    def take(self, event: RunEvent) -> None:
        """Follow an event. Notes move nothing."""
        if event.estimate is not None:
            self.estimate, self._estimated = event.estimate, self.clock()
        if event.kind in ("run", "started", "finished"):
            # A trial that has started is counted by its event, but not done.
            self._move(event.stage, event.done - (event.kind == "started"), event.total)
            if event.kind == "run":  # what an earlier process did says nothing of this one's pace
                self._first = self.done
        elif event.kind == "confirm":
            self._move(event.stage, event.done, event.total)

    def _move(self, stage: str, done: int, total: int | None) -> None:
        now = self.clock()
        if stage != self.stage:
            self.stage, self._first, self._stage_begun, self._moved = stage, done, now, now
        if done != self.done:
            self._moved = now
        self.done, self.total = max(done, 0), None if total is None else max(total, done)

    def left_s(self) -> float | None:
        """About how many seconds the run still takes: this stage by its own pace, the confirmation or search
        that is to come, at most until the deadline. None: not known.
        """
        if self.estimate is None:
            return None
        now, known = self.clock(), self.estimate
        return _time_left_s(
            self._each(known),
            None if self.total is None else self.total - self.done,
            None if known.window_s is None else known.window_s - (now - self._estimated),
            since_s=now - self._moved,
            later_s=known.confirm_s if self.stage == SEARCH else known.search_s,
        )

    def _each(self, known: RunEstimate) -> float:
        """Seconds of a trial or launch: as measured in this stage, else as estimated."""
        count = self.done - self._first
        if count > 0:
            return (self._moved - self._stage_begun) / count
        launch_s = None if self.stage == SEARCH else known.confirm_launch_s
        return known.trial_s if launch_s is None else launch_s


def _time_left_s(
    each_s: float, left: int | None, until_s: float | None, *, since_s: float = 0.0, later_s: float = 0.0
) -> float | None:
    """About how many seconds a run still takes: `left` trials or launches of `each_s` seconds, the first of
    which began `since_s` ago, then what comes `later_s`; never more than `until_s`. None: not known.
    """
    ends = [] if until_s is None else [until_s]
    if left is not None and later_s < math.inf:
        ends.append(max(0.0, each_s * left - min(each_s, max(0.0, since_s))) + later_s)
    return max(0.0, min(ends)) if ends else None


def told_live(
    home: Path,
    run_id: str,
    plan: Plan,
    tell: Tell,
    clock: Clock,
    estimate: Callable[[], RunEstimate | None] = lambda: None,
    *,
    seconds: Callable[[], float] = time.monotonic,
    held_out_s: float = 0.0,
) -> Tell:
    """A listener that passes events on and keeps the run's file up to date. Each trial renews the `estimate`,
    so that the file and all who listen know the same.
    """
    begun = RunNow(run=run_id, at=clock(), to_confirm=_launches(plan), held_out_s=held_out_s)
    held = _Held(path_of(home, run_id), begun, Pace(clock=seconds))

    def told(event: RunEvent) -> None:
        if event.kind in ("run", "started", "finished"):
            event = replace(event, estimate=estimate())
        held.take(event, clock)
        tell(event)

    return told


def _launches(plan: Plan) -> int:
    """The launches of a confirmation: each finalist and the baseline, as often as the plan repeats them."""
    return plan.repeats * (1 + plan.finalists)


class _Held:
    """The state of one run and its file."""

    def __init__(self, path: Path, now: RunNow, pace: Pace) -> None:
        self.path, self.now, self._written, self._pace = path, now, -EVERY_S, pace

    def take(self, event: RunEvent, clock: Clock) -> None:
        before, number = self.now, event.trial.number if event.trial else self.now.trial
        self._pace.take(event)
        if event.kind == "confirm":
            counted: tuple[int, int] | None = (event.done, event.total or event.done)
            self.now = replace(before, confirming=counted, stage=event.stage)
        elif event.kind == "started":
            counted = None if event.stage == SEARCH else (event.done - 1, event.total or event.done)
            self.now = replace(before, phase="launching", trial=number, slice="", engine={},
                               confirming=counted, stage=event.stage)  # fmt: skip
        elif event.kind == "phase":
            self.now = _moved(before, event, number)
        fresh = self.now.phase != before.phase or event.kind != "phase"
        if fresh or time.monotonic() - self._written >= EVERY_S:
            self._written = time.monotonic()
            self.now = replace(self.now, at=clock(), left_s=self._pace.left_s())
            write(self.path, self.now)


def _moved(before: RunNow, event: RunEvent, number: int | None) -> RunNow:
    progress = event.progress
    if progress is None:
        return replace(before, phase=event.text, trial=number, slice="", done_s=0.0, total_s=0.0)
    same = (before.trial, before.slice) == (number, progress.slice) and before.done_s <= progress.done_s
    return replace(
        before,
        phase=progress.phase,
        slice=progress.slice,
        trial=number,
        done_s=max(0.0, progress.done_s),
        total_s=progress.total_s,
        engine=_longer(before.engine if same else {}, progress),
    )


def _longer(before: Mapping[str, list[float | None]], progress: Progress) -> Mapping[str, list[float | None]]:
    at = before.get("at_s", [])
    if not progress.engine or (at and progress.done_s - (at[-1] or 0.0) < EVERY_S):
        return before
    names = {*before, *progress.engine} - {"at_s"}
    rows = {name: [*before.get(name, [None] * len(at)), progress.engine.get(name)] for name in sorted(names)}
    return {name: row[-MOST_POINTS:] for name, row in {"at_s": [*at, progress.done_s], **rows}.items()}
