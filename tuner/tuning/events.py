"""What a run tells while it goes on, for progress bars, server-sent events and logs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tuner.records import Trial

EventKind = Literal["run", "started", "phase", "finished", "confirm", "verdict", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of news of a run. `done` of `total` trials; `trial` is the row that the news is about, which
    an earlier run may have begun.
    """

    kind: EventKind
    text: str
    done: int = 0
    total: int | None = None
    trial: Trial | None = None
    run: str | None = None


Tell = Callable[[Event], None]


def silent(event: Event) -> None:
    """A listener that does not listen."""
