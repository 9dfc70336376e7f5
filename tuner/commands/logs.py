"""Structured logs: one JSON object a line in TUNER_HOME/logs/tuner.jsonl."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from tuner.errors import Unavailable
from tuner.tuning.events import Event


@contextmanager
def log_to(home: Path) -> Iterator[Callable[[Event], None]]:
    """A function that writes an event; phases are left out, they are many."""
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

    def write(event: Event) -> None:
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
