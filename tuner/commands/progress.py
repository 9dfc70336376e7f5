"""Shows the events of a run: a live line on a terminal, plain lines elsewhere; JSON lines in the log."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tuner.commands.common import escaped, knobs, say, text, wrapped
from tuner.errors import Unavailable, page_of
from tuner.records import Trial
from tuner.report.words import seconds
from tuner.tuning.context import RunEvent, Tell
from tuner.tuning.now import time_left_s

if TYPE_CHECKING:
    from rich.text import Text

SEARCH = "search"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """What is known before the first trial: seconds of a trial and of the confirmation; and the seconds until
    the run's deadline, counted from now.
    """

    trial_s: float
    confirm_s: float = 0.0
    window_s: float | None = None


@dataclass(slots=True, kw_only=True)
class LiveLine:
    """One line for a whole run: its stage, how far it is, the time left, and what goes on now.

    Stages are the search, which counts trials, and those of `confirm` events (the confirmation, and others
    whose text begins with their name), which count launches. Without an estimate no time left is told.
    `clock` reads seconds that only go forward.
    """

    estimate: RunEstimate | None = None
    clock: Callable[[], float] = time.monotonic
    stage: str = SEARCH
    done: int = 0
    total: int | None = None
    detail: str = ""
    begun: float = field(init=False)
    _stage_begun: float = field(init=False)
    _first: int = 0
    _moved: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self._stage_begun = self._moved = self.clock()

    def take(self, event: RunEvent) -> None:
        """Follow an event. Notes move nothing."""
        if event.kind in ("run", "started", "finished"):
            # A trial that has started is counted by its event, but not done.
            self._move(SEARCH, event.done - (event.kind == "started"), event.total)
            if event.kind == "run":  # what an earlier process did says nothing of this one's pace
                self._first = self.done
        elif event.kind == "confirm":
            self._move(event.text.partition(":")[0], event.done, event.total)
        if event.kind not in ("note", "verdict"):
            shown = "" if event.kind == "confirm" else event.text
            self.detail = " ".join(part for part in (_who(event.trial), shown) if part)

    def _move(self, stage: str, done: int, total: int | None) -> None:
        now = self.clock()
        if stage != self.stage:
            self.stage, self._first, self._stage_begun, self._moved = stage, done, now, now
        if done != self.done:
            self._moved = now
        self.done, self.total = max(done, 0), None if total is None else max(total, done)

    def left_s(self) -> float | None:
        """About how many seconds the run still takes: this stage by its own pace, a confirmation that is to
        come, at most until the deadline. None: not known.
        """
        if self.estimate is None:
            return None
        now, known = self.clock(), self.estimate
        return time_left_s(
            self._each(known),
            None if self.total is None else self.total - self.done,
            None if known.window_s is None else known.window_s - (now - self.begun),
            since_s=now - self._moved,
            later_s=known.confirm_s if self.stage == SEARCH else 0.0,
        )

    def _each(self, known: RunEstimate) -> float:
        """Seconds of a trial or launch: as measured in this stage, else as estimated."""
        count = self.done - self._first
        return (self._moved - self._stage_begun) / count if count > 0 else known.trial_s

    def how_far(self) -> str:
        """`search 3/40 trials, about 12 min left`."""
        unit = "trials" if self.stage == SEARCH else "launches"
        count = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        return f"{self.stage} {count} {unit}{_left(self.left_s())}"

    def __rich__(self) -> "Text":
        from rich.text import Text

        spent = seconds(round(self.clock() - self.begun))
        line = Text.assemble((self.how_far(), "bold"), f" · {spent}", (f" · {escaped(self.detail)}", "dim"))
        line.no_wrap, line.overflow = True, "ellipsis"
        return line


def _left(span: float | None) -> str:
    """`, about 15 min left`: in whole minutes from two minutes on."""
    if span is None:
        return ""
    rounded = seconds(round(span / 60) * 60 if span >= 120 else round(span))
    return (
        f", about {rounded.removesuffix(' 0 s').removesuffix(' 0 min')} left"
        if span >= 1
        else ", nearly done"
    )


@contextmanager
def listener(
    home: Path, objectives: tuple[str, ...], *, quiet: bool = False, estimate: RunEstimate | None = None
) -> Iterator[Tell]:
    """A listener that shows events on standard error. All events but phases also go into the log."""
    line = LiveLine(estimate=estimate)
    with log_to(home) as log:
        if not quiet and is_live():
            with _live(log, line, objectives) as tell:
                yield tell
            return

        launching = False

        def lines(event: RunEvent) -> None:
            nonlocal launching
            log(event)
            line.take(event)
            if event.kind in ("started", "confirm"):
                launching = True
            elif not quiet and launching and event.progress is not None:
                launching = False
                say(escaped(f"{_who(event.trial)} the engine is ready, the replay begins"))
            if not quiet and (shown := describe(event, objectives)) is not None:
                far = f" ({line.how_far()})" if event.kind in ("finished", "confirm") else ""
                say(escaped(shown) + far)

        yield lines


def is_live() -> bool:
    """Whether standard error is a terminal that can redraw a line. A CI's log is none, whatever it says."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")


@contextmanager
def _live(log: Tell, line: LiveLine, objectives: tuple[str, ...]) -> Iterator[Tell]:
    """A listener that prints events above one live line."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True, highlight=False)

    def tell(event: RunEvent) -> None:
        log(event)
        line.take(event)
        if (shown := describe(event, objectives)) is not None:
            for part in wrapped(escaped(shown), shutil.get_terminal_size().columns - 1):
                console.print(Text(part), soft_wrap=True)

    with Live(line, console=console, refresh_per_second=4, transient=True):
        yield tell


def _who(trial: Trial | None) -> str:
    if trial is None:
        return ""
    return f"trial {trial.number}" + (f" attempt {trial.attempt}" if trial.attempt else "")


def describe(event: RunEvent, objectives: tuple[str, ...]) -> str | None:
    """An event as one line; None for a phase, which is not printed."""
    if event.kind == "phase":
        return None
    if event.kind == "started" and event.trial is not None:
        return f"{_who(event.trial)} ({event.text}): {knobs(event.trial.candidate)}"
    if event.kind == "finished" and event.trial is not None:
        return f"{_who(event.trial)} {event.trial.state.value}: {_outcome(event.trial, objectives)}"
    return f"{_who(event.trial)} {event.text}".strip()


def _outcome(trial: Trial, objectives: tuple[str, ...]) -> str:
    if trial.reason:
        return trial.reason + page_of(trial.cause)
    values = trial.measurement.values if trial.measurement else {}
    return ", ".join(f"{name} {text(values.get(name))}" for name in objectives)


@contextmanager
def log_to(home: Path) -> Iterator[Callable[[RunEvent], None]]:
    """A listener that writes events into TUNER_HOME/logs/tuner.jsonl. Phases are left out: there are many."""
    path = home / "logs" / "tuner.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror}") from error
    logger = structlog.wrap_logger(
        structlog.WriteLogger(file),
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(sort_keys=True),
        ],
    )

    def write(event: RunEvent) -> None:
        if event.kind == "phase":
            return
        trial = event.trial
        about = {} if trial is None else {
            "study": trial.study_id[:16], "run": trial.run_id, "trial": trial.number,
            "attempt": trial.attempt, "state": trial.state.value, "cause": trial.cause,
        }  # fmt: skip
        about |= {"run": event.run} if event.run else {}
        logger.info(event.text, kind=event.kind, done=event.done, total=event.total, **about)

    with file:
        yield write
