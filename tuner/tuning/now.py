"""What a run does right now, in a file that the service reads: TUNER_HOME/live/RUN.json, renewed each second.

It is for people who watch. The history has what lasts; a run that ended leaves no such file.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tuner.replay.plan import Plan
from tuner.replay.prepare import Progress
from tuner.tuning.context import RunEvent, Tell
from tuner.tuning.study import Clock

EVERY_S = 1.0
MOST_POINTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNow:
    """A run at a moment.

    `phase` is launching, warm-up, priming, window (of `slice`: `done_s` of `total_s` seconds) or another word
    of the tuner. `confirming` is (launches done, all) while finalists are measured again; `stage` names the
    confirmation, or what follows it. `to_confirm` is how many launches that usually takes. `engine` is what
    the engine said of itself in this slice: `at_s` and a list for each name.
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
    engine: Mapping[str, list[float | None]] = field(default_factory=dict)


_CODEC = TypeAdapter(RunNow)


def path_of(home: Path, run_id: str) -> Path:
    """Where the file of a run is."""
    return home / "live" / f"{run_id}.json"


def read(home: Path, run_id: str) -> RunNow | None:
    """What a run does right now; None where its controller is on another host, or has ended."""
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


def time_left_s(
    each_s: float, left: int | None, until_s: float | None, *, since_s: float = 0.0, later_s: float = 0.0
) -> float | None:
    """About how many seconds a run still takes: `left` trials or launches of `each_s` seconds, the first of
    which began `since_s` ago, then what comes `later_s`; never more than `until_s`. None: not known.
    """
    ends = [] if until_s is None else [until_s]
    if left is not None:
        ends.append(max(0.0, each_s * left - min(each_s, max(0.0, since_s))) + later_s)
    return max(0.0, min(ends)) if ends else None


def told_live(home: Path, run_id: str, plan: Plan, tell: Tell, clock: Clock) -> Tell:
    """A listener that passes events on and keeps the run's file up to date."""
    held = _Held(path_of(home, run_id), RunNow(run=run_id, at=clock(), to_confirm=_launches(plan)))

    def told(event: RunEvent) -> None:
        held.take(event, clock)
        tell(event)

    return told


def _launches(plan: Plan) -> int:
    """The launches of a confirmation: each finalist and the baseline, as often as the plan repeats them."""
    return plan.repeats * (1 + plan.finalists)


class _Held:
    """The state of one run and its file."""

    def __init__(self, path: Path, now: RunNow) -> None:
        self.path, self.now, self._written = path, now, -EVERY_S

    def take(self, event: RunEvent, clock: Clock) -> None:
        before, number = self.now, event.trial.number if event.trial else self.now.trial
        if event.kind == "confirm":
            stage = event.text.partition(":")[0]
            self.now = replace(before, confirming=(event.done, event.total or event.done), stage=stage)
        elif event.kind == "started":
            self.now = replace(before, phase="launching", trial=number, slice="", engine={}, confirming=None)
        elif event.kind == "phase":
            self.now = _moved(before, event, number)
        fresh = self.now.phase != before.phase or event.kind != "phase"
        if fresh or time.monotonic() - self._written >= EVERY_S:
            self._written = time.monotonic()
            self.now = replace(self.now, at=clock())
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
