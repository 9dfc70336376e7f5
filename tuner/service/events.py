"""What happens in a run, as server-sent events: read from the rows, so that a listener may come back.

Each event's id is its place in the order of the run (time, kind, trial); `Last-Event-ID` names the last one
that was seen, whoever sent it.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from anyio import to_thread

from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.records import JSON, RunState, Trial, TrialState
from tuner.service import schemas

KEEP_ALIVE_S = 15.0
RETRY_MS = 2000
KINDS = ("started", "finished", "run")
EVENT_ID = re.compile(r"([0-9]{1,19})-([0-2])-([0-9]{1,18})")
EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")

EventPlace = tuple[int, int, int]
"""Microseconds since 1970, index in KINDS, trial id (0: the run)."""


@dataclass(frozen=True, slots=True)
class StreamedEvent:
    """One thing that happened."""

    place: EventPlace
    data: JSON

    def text(self) -> str:
        """The event on the wire."""
        stamp, kind, trial = self.place
        body = json.dumps(self.data, separators=(",", ":"), allow_nan=False)
        return f"id: {stamp}-{kind}-{trial}\nevent: {KINDS[kind]}\ndata: {body}\n\n"


def place_of(event_id: str | None) -> EventPlace | None:
    """The place that a Last-Event-ID names. BadInput when it is none of ours."""
    if not event_id:
        return None
    found = EVENT_ID.fullmatch(event_id)
    if found is None:
        raise BadInput("Last-Event-ID: not the id of an event of this service")
    stamp, kind, trial = (int(part) for part in found.groups())
    return stamp, kind, trial


def _stamp(at: datetime) -> int:
    return (at - EPOCH) // timedelta(microseconds=1)


def events(store: Store, run_id: str) -> tuple[Sequence[StreamedEvent], bool]:
    """Everything that happened in a run so far, in order, and whether that is all."""
    run = store.run(run_id)
    found: list[StreamedEvent] = []
    for trial in store.trials(run.study_id, run_id=run_id):
        found.append(StreamedEvent((_stamp(trial.started_at), 0, trial.id), _started(trial)))
        if trial.state is not TrialState.RUNNING:
            ended = trial.ended_at or trial.started_at
            data: JSON = schemas.trial(trial).model_dump(mode="json")
            found.append(StreamedEvent((_stamp(ended), 1, trial.id), data))
    over = run.state is not RunState.RUNNING
    if over:
        last = max([_stamp(run.at), *(event.place[0] for event in found)])
        said = store.conclusion(run_id)
        found.append(StreamedEvent((last, 2, 0), schemas.run(run, (), said=said).model_dump(mode="json")))
    return sorted(found, key=lambda event: event.place), over


def _started(trial: Trial) -> JSON:
    return {
        "id": trial.id,
        "number": trial.number,
        "attempt": trial.attempt,
        "origin": trial.origin,
        "candidate": dict(trial.candidate),
        "started_at": trial.started_at.isoformat(),
    }


async def stream(store: Store, run_id: str, after: EventPlace | None, *, poll_s: float) -> AsyncIterator[str]:
    """The events after a place, as they come, until the run's end has been told."""
    yield f"retry: {RETRY_MS}\n\n"
    sent: set[EventPlace] = set()
    pulse: int | None = None
    quiet = 0.0
    while True:
        now = store.change_token()
        if now != pulse:
            pulse = now
            found, over = await to_thread.run_sync(events, store, run_id)
            for event in found:
                if event.place not in sent and (after is None or event.place > after):
                    sent.add(event.place)
                    quiet = 0.0
                    yield event.text()
            if over:
                return
        if quiet >= KEEP_ALIVE_S:
            quiet = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(poll_s)
        quiet += poll_s
