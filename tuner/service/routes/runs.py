"""Starts, shows and cancels runs. Controllers execute the runs, and continue when the service ends.

The events of a run are server-sent events. They are read from the database, so a client may reconnect. The id
of an event is its place in the order of the run (time, kind, trial). `Last-Event-ID` names the last event
that the client has seen, even if another service sent it.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path as FilePath
from typing import Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import AwareDatetime, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.records import JSON, Run, RunState, Trial, TrialState, digest_of
from tuner.report.words import STOPPED, trial_counts
from tuner.service import schemas
from tuner.service.auth import Actor, Reader, Runner
from tuner.service.context import Here, ServiceContext
from tuner.service.problems import RequestBody, documented, problem
from tuner.service.runner import RunOrder
from tuner.service.schemas import Cursor, Limit, Page, after, page
from tuner.service.study_requests import ComparisonRequest, UpgradeRequest
from tuner.tuning.now import left_of
from tuner.tuning.study import MOST_TRIALS

KEEP_ALIVE_S = 15.0
RETRY_MS = 2000
KINDS = ("started", "finished", "run")
EVENT_ID = re.compile(r"([0-9]{1,19})-([0-2])-([0-9]{1,18})")
EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")

EventPlace = tuple[int, int, int]
"""Microseconds since 1970, index in KINDS, trial id (0: the run)."""


@dataclass(frozen=True, slots=True)
class StreamedEvent:
    """One event of a run."""

    place: EventPlace
    data: JSON

    def text(self) -> str:
        """The event on the wire."""
        stamp, kind, trial = self.place
        body = json.dumps(self.data, separators=(",", ":"), allow_nan=False)
        return f"id: {stamp}-{kind}-{trial}\nevent: {KINDS[kind]}\ndata: {body}\n\n"


def place_of(event_id: str | None) -> EventPlace | None:
    """The place that a Last-Event-ID names. BadInput if it is not an id of this service."""
    if not event_id:
        return None
    found = EVENT_ID.fullmatch(event_id)
    if found is None:
        raise BadInput("Last-Event-ID: not the id of an event of this service")
    stamp, kind, trial = (int(part) for part in found.groups())
    return stamp, kind, trial


def _stamp(at: datetime) -> int:
    return (at - EPOCH) // timedelta(microseconds=1)


def read_events(store: Store, run_id: str) -> tuple[Sequence[StreamedEvent], bool]:
    """All events of a run so far, in order, and whether the run has ended."""
    run = store.run(run_id)
    found: list[StreamedEvent] = []
    for trial in store.trials(run.study_id, run_id=run_id):
        found.append(StreamedEvent((_stamp(trial.started_at), 0, trial.id), _started_event(trial)))
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


def _started_event(trial: Trial) -> JSON:
    return {
        "id": trial.id,
        "number": trial.number,
        "attempt": trial.attempt,
        "origin": trial.origin,
        "candidate": dict(trial.candidate),
        "started_at": trial.started_at.isoformat(),
    }


async def stream(store: Store, run_id: str, after: EventPlace | None, *, poll_s: float) -> AsyncIterator[str]:
    """The events after a place, as they happen. The stream ends with the event of the run's end."""
    yield f"retry: {RETRY_MS}\n\n"
    sent: set[EventPlace] = set()
    pulse: int | None = None
    quiet = 0.0
    while True:
        now = store.change_token()
        if now != pulse:
            pulse = now
            found, over = await to_thread.run_sync(read_events, store, run_id)
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


MOST_STREAMS = 32
"""Event streams that one token may have open."""
router = APIRouter(prefix="/v1/runs", tags=["runs"])
comparisons = APIRouter(tags=["comparisons"])
RunId = Annotated[str, Path(max_length=32, pattern=r"^[0-9a-z]+$", examples=["4f0c1d2e3a5b6c7d"])]


class RunRequest(RequestBody):
    """A run of a study within a budget. A value that is left out is taken from the study file."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"study": "chat-nightly", "trials": 20, "hours": 6}]}
    )

    study: str = Field(min_length=1, max_length=100, description="A study's id or name.")
    trials: int | None = Field(default=None, ge=1, le=MOST_TRIALS)
    hours: float | None = Field(default=None, gt=0, le=24 * 14)
    deadline: AwareDatetime | None = Field(default=None, description="End before this time.")
    reason: str = Field(default="asked for over HTTP", max_length=500)


class CancelRequest(RequestBody):
    """The reason for which a run is cancelled."""

    reason: str = Field(default="cancelled over HTTP", max_length=500)


class EventStream(StreamingResponse):
    """Server-sent events. 429 if its `owner` has MOST_STREAMS streams open, because each stream reads its run
    again and again.
    """

    owner = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events. The stream is counted while it is open."""
        request = Request(scope, receive)
        opened: Counter[str] = request.app.state.service.streams
        if opened[self.owner] >= MOST_STREAMS:
            said = f"this token has {MOST_STREAMS} open event streams; close one"
            await problem(request, 429, said, {"Retry-After": "1"})(scope, receive, send)
            return
        opened[self.owner] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            opened[self.owner] -= 1


Key = Annotated[
    str | None, Header(alias="idempotency-key", min_length=1, max_length=200, pattern=r"^[!-~]+$")
]
STARTED: dict[int | str, dict[str, object]] = {
    202: {"headers": {"Location": {"schema": {"type": "string"}}}}, **documented(400, 404, 409)
}  # fmt: skip
AnyRequest = RunRequest | ComparisonRequest | UpgradeRequest


@router.post("", status_code=202, summary="Start a run", responses=STARTED)
def start_run(
    here: Here, actor: Runner, asked: RunRequest, response: Response, key: Key = None
) -> schemas.RunSchema:
    """If a request is repeated with the same `Idempotency-Key`, it gives the same run, even after a crash in
    between."""
    return _started(here, actor, asked, response, key)


@comparisons.post(
    "/v1/comparisons", status_code=202, summary="Compare profiles and engines", responses=STARTED
)
def start_comparison(
    here: Here, actor: Runner, asked: ComparisonRequest, response: Response, key: Key = None
) -> schemas.RunSchema:
    """Starts a run that launches every arm in turns, as `tuner compare` does; its `conclusion` has the
    differences. A request cannot give a path, a command or an interpreter.
    """
    return _started(here, actor, asked, response, key)


@comparisons.post(
    "/v1/upgrade-checks", status_code=202, summary="Check an upgrade of the engine", responses=STARTED
)
def start_upgrade_check(
    here: Here, actor: Runner, asked: UpgradeRequest, response: Response, key: Key = None
) -> schemas.RunSchema:
    """Starts a run of one configuration on two registered engines, as `tuner upgrade-check` does; its
    `summary.upgrade` has the advice. A request cannot give a path, a command or an interpreter.
    """
    return _started(here, actor, asked, response, key)


def _started(
    here: ServiceContext, actor: Actor, asked: AnyRequest, response: Response, key: str | None
) -> schemas.RunSchema:
    found = start(here, actor, asked, key)
    response.headers["Location"] = f"/v1/runs/{found.id}"
    return schemas.run(found, here.stopped_runs())


def _ordered(here: ServiceContext, asked: AnyRequest) -> tuple[str, FilePath, tuple[str, ...]]:
    """(the study's id, its file, the controller's command unless it tunes)."""
    if isinstance(asked, RunRequest):
        return (*here.studies.find(asked.study, here.runner.refuse_busy), ())
    study_id, path = here.studies.compared(asked.study, asked.made, here.runner.refuse_busy)
    return study_id, path, asked.words(path)


def start(here: ServiceContext, actor: Actor, asked: AnyRequest, key: str | None) -> Run:
    """The run of a request. If a request of the same token with the same key has already started a run, this
    is that run.
    """
    digest = digest_of(asked.model_dump(mode="json"))
    key = None if key is None else f"{actor.id} {key}"
    if key is not None and isinstance(kept := here.store.answer(key, digest), str):
        return here.store.run(kept)
    now = here.clock()
    deadline = _deadline(asked, now)
    study_id, path, words = _ordered(here, asked)
    trials = asked.trials if isinstance(asked, RunRequest) else None
    order = RunOrder(
        study_id=study_id, study_file=path, trials=trials, deadline=deadline, actor=actor.name, at=now,
        key=None if key is None else f"{key} {digest}", words=words,
    )  # fmt: skip
    run, fresh = here.runner.start(order)
    if fresh:
        here.audit(actor, "run", run.id, asked.reason, study=study_id)
    if key is None:
        return run
    first = here.store.keep_answer(key, digest, run.id, now=here.clock())
    return here.store.run(first) if isinstance(first, str) else run


def _deadline(asked: AnyRequest, now: datetime) -> datetime | None:
    ends = [now + timedelta(hours=asked.hours)] if asked.hours else []
    ends += [asked.deadline] if asked.deadline else []
    if ends and min(ends) <= now:
        raise BadInput(f"deadline: {min(ends).isoformat()} has passed")
    return min(ends, default=None)


@router.get("", summary="Runs, the newest first", responses=documented(400, 404))
def list_runs(
    here: Here,
    actor: Reader,
    study: Annotated[
        str | None, Query(max_length=100, description="Only of this study (id or name).")
    ] = None,
    state: RunState | Literal["stopped"] | None = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[schemas.RunSchema]:
    study_id, stopped = here.store.study(study).id if study else None, here.stopped_runs()
    begin = after(cursor, str)
    if state in (RunState.RUNNING, STOPPED):  # history has one state for both
        unended = here.store.runs(study_id, state=RunState.RUNNING, after=begin)
        found = tuple(run for run in unended if (run.id in stopped) == (state == STOPPED))[: limit + 1]
    else:
        found = here.store.runs(
            study_id, state=RunState(state) if state else None, after=begin, limit=limit + 1
        )

    def row(run: Run) -> schemas.RunSchema:
        if run.state is not RunState.RUNNING:
            return schemas.run(run, stopped)
        return schemas.run(run, stopped, _counted(here, run), None, _left(here, run))

    return page(found, limit, row, lambda run: (run.id,))


def _counted(here: ServiceContext, run: Run) -> dict[str, int]:
    trials, stopped = here.store.trials(run.study_id, run_id=run.id), here.stopped_runs()
    return trial_counts(trials, stopped)


def _left(here: ServiceContext, run: Run) -> float | None:
    return left_of(here.store, here.settings.home, run, here.clock())


@router.get("/{run_id}", summary="A run", responses=documented(404))
def show_run(here: Here, actor: Reader, run_id: RunId) -> schemas.RunSchema:
    found = here.store.run(run_id)
    said = here.store.conclusion(run_id)
    return schemas.run(found, here.stopped_runs(), _counted(here, found), said, _left(here, found))


@router.post("/{run_id}/cancel", status_code=202, summary="Ask a run to stop", responses=documented(404, 409))
def cancel_run(
    here: Here, actor: Runner, run_id: RunId, asked: CancelRequest | None = None
) -> schemas.RunSchema:
    """Stops the engine of the run and aborts its trial; finished measurements are kept. If the controller of
    the run is gone, the run has ended when this answers.
    """
    found = here.runner.cancel(run_id)
    here.audit(actor, "cancel", run_id, asked.reason if asked else "cancelled over HTTP")
    return schemas.run(found, here.stopped_runs())


@router.get(
    "/{run_id}/events",
    summary="What happens in a run, live",
    response_class=EventStream,
    responses={
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
        **documented(400, 404, 429),
    },
)
def run_events(
    here: Here,
    actor: Reader,
    run_id: RunId,
    last_event_id: Annotated[str | None, Header(max_length=100)] = None,
) -> EventStream:
    """Server-sent events `started`, `finished` (trials) and `run` (its end, the last one). The stream begins
    with all events so far, or with those after `Last-Event-ID`.
    """
    here.store.run(run_id)
    after = place_of(last_event_id)
    told = stream(here.store, run_id, after, poll_s=here.poll_s)
    found = EventStream(told, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    found.owner = actor.id
    return found
