"""The events of a run: a progress bar on a terminal, lines elsewhere, JSON lines in
TUNER_HOME/logs/tuner.jsonl.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tuner.commands.common import knobs, say, text
from tuner.errors import Unavailable
from tuner.records import Trial
from tuner.tuning.context import RunEvent, Tell


@contextmanager
def listener(home: Path, objectives: tuple[str, ...], *, quiet: bool = False) -> Iterator[Tell]:
    """A listener that shows events on standard error. All events but phases also go into the log."""
    with log_to(home) as log:
        if quiet or not sys.stderr.isatty():

            def lines(event: RunEvent) -> None:
                log(event)
                if not quiet and (line := describe(event, objectives)) is not None:
                    say(line)

            yield lines
            return
        with _bar(log, objectives) as tell:
            yield tell


@contextmanager
def _bar(log: Tell, objectives: tuple[str, ...]) -> Iterator[Tell]:
    """A listener that draws a progress bar."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("trials"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[phase]}"), console=Console(stderr=True),
    )  # fmt: skip
    with bar:
        task = bar.add_task("tuning", total=None, phase="")

        def tell(event: RunEvent) -> None:
            log(event)
            phase = f"{_who(event.trial)} {event.text}".strip()
            if event.kind == "phase":
                bar.update(task, phase=phase)
                return
            bar.update(task, total=event.total, completed=event.done, phase=phase)
            if (line := describe(event, objectives)) is not None:
                bar.console.print(escape(line), highlight=False, soft_wrap=True)

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
        return trial.reason
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
