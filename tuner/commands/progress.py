"""Shows the events of a run: a live line on a terminal, plain lines elsewhere; JSON lines in the log."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tuner.commands.common import escaped, say, text, wrapped
from tuner.errors import Unavailable, page_of
from tuner.records import Trial
from tuner.report.words import knobs, seconds, time_left
from tuner.tuning.context import SEARCH, RunEvent, Tell
from tuner.tuning.now import Pace

if TYPE_CHECKING:
    from rich.text import Text


@dataclass(slots=True, kw_only=True)
class LiveLine(Pace):
    """One line for a whole run: its stage, how far it is, the time left, and what goes on now. Without an
    estimate it shows no time left.
    """

    detail: str = ""

    def take(self, event: RunEvent) -> None:
        """Follow an event. Notes move nothing."""
        Pace.take(self, event)
        if event.kind not in ("note", "verdict"):
            shown = "" if event.kind == "confirm" else event.text
            self.detail = " ".join(part for part in (_who(event.trial), shown) if part)

    def how_far(self) -> str:
        """`search 3/40 trials, about 12 min left`."""
        if self.total == 0:
            return f"to confirm{time_left(self.left_s())}"
        unit = "trials" if self.stage == SEARCH else "launches"
        count = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        return f"{self.stage} {count} {unit}{time_left(self.left_s())}"

    def __rich__(self) -> "Text":
        from rich.text import Text

        spent = seconds(round(self.clock() - self.begun))
        line = Text.assemble((self.how_far(), "bold"), f" · {spent}", (f" · {escaped(self.detail)}", "dim"))
        line.no_wrap, line.overflow = True, "ellipsis"
        return line


@contextmanager
def listener(home: Path, objectives: tuple[str, ...], *, quiet: bool = False) -> Iterator[Tell]:
    """A listener that shows events on standard error. All events but phases also go into the log."""
    line = LiveLine()
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
    return f"trial {trial.label}"


def describe(event: RunEvent, objectives: tuple[str, ...]) -> str | None:
    """An event as one line; None for what is not printed: a phase, and the verdict, since the command that
    shows the run's end prints it.
    """
    if event.kind in ("phase", "verdict"):
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
