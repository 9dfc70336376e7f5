"""Schedules, which start nightly runs. `fleet/` computes their times; this module changes their rows.

A schedule is checked when it is set. At its due time a controller starts, and is watched until it ends.
"""

import asyncio
import pathlib
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Path, Response
from pydantic import ConfigDict, Field, JsonValue

from tuner.errors import BadInput, Conflict, NotFound, nearest
from tuner.fleet.schedule import ACTOR, CLOSING, Firing, nothing_begun
from tuner.fleet.window import Terms, check, terms
from tuner.history.entities import Schedule
from tuner.records import Run, RunState
from tuner.service.auth import Reader, Runner
from tuner.service.context import Here, ServiceContext
from tuner.service.problems import RequestBody, documented
from tuner.service.runner import RunOrder
from tuner.service.study_requests import engines_of, upgrade_words
from tuner.settings import NAME
from tuner.tuning.upgrade import NothingNew, unchecked


def checked(schedule: Schedule, here: ServiceContext) -> Schedule:
    """The schedule as it is stored. BadInput for a cron expression, zone or key that cannot be read. NotFound
    or Conflict if its study or its node is not on this service. The study is given by name or id, never by
    path.
    """
    found = terms(schedule.spec)
    if not re.fullmatch(NAME, found.study):
        raise BadInput(
            f"spec.study: '{found.study}' is not the name or id of a study; HTTP requests cannot give a path"
        )
    here.studies.known(found.study)
    if found.upgrade is not None:
        engines = engines_of(here.settings.home, schedule.node)
        for name in filter(None, (found.upgrade.to, found.upgrade.old)):
            if name not in engines:
                raise NotFound(
                    f"spec.upgrade: no engine '{name}' is registered for this node{nearest(name, engines)}"
                )
    here.store.node(schedule.node)
    check(schedule)
    return schedule


POLL_S = 1.0


def _what(here: ServiceContext, found: Terms) -> tuple[str, pathlib.Path, tuple[str, ...]]:
    """(the study's id, its file, the controller's command unless it tunes). NothingNew if an upgrade check
    has nothing to check. A schedule that was made by command line may name a file.
    """
    if (upgrade := found.upgrade) is None:
        return (*here.studies.find_scheduled(found.study, here.runner.refuse_busy), ())
    files = pathlib.Path(found.study).is_absolute()
    asked = partial(unchecked, new=upgrade.to, old=upgrade.old, configuration=upgrade.alias, files=files)
    study_id, path = here.studies.compared(found.study, asked, here.runner.refuse_busy)
    words = upgrade_words(path, upgrade.to, upgrade.old, upgrade.alias)
    return study_id, path, words if files else (*words, "--registered")


def starter(here: ServiceContext) -> Callable[[Firing], Awaitable[Run | None]]:
    """The function that starts the runs of the schedule loop."""

    def begin(firing: Firing) -> Run | None:
        try:
            study_id, path, words = _what(here, firing.terms)
        except NothingNew:
            nothing_begun(here.store, firing)
            return None
        order = RunOrder(
            study_id=study_id,
            study_file=path,
            trials=firing.terms.trials,
            deadline=firing.deadline,
            actor=f"{ACTOR}:{firing.schedule.name}",
            at=here.clock(),
            words=words,
        )
        run, _ = here.runner.start(order)
        here.store.scheduled_run(firing.schedule.name, run.id)
        return run

    async def start(firing: Firing) -> Run | None:
        run = await to_thread.run_sync(begin, firing)
        if run is None:
            return None
        try:
            return await _ended(here, run)
        except asyncio.CancelledError as end:
            if end.args == (CLOSING,):
                await asyncio.shield(_stopped(here, run))
            raise

    return start


async def _ended(here: ServiceContext, run: Run) -> Run:
    """The run, after it and its controller have ended. The controller restores production at its very end."""
    while True:
        now = await to_thread.run_sync(here.store.run, run.id)
        if now.state is not RunState.RUNNING and not here.runner.alive(now):
            return now
        await asyncio.sleep(POLL_S)


async def _stopped(here: ServiceContext, run: Run) -> Run:
    """Asks the run to stop and waits: the engine is gone, and production has its node, when it has ended."""
    if (await to_thread.run_sync(here.store.run, run.id)).state is RunState.RUNNING:
        await to_thread.run_sync(here.store.cancel_run, run.id)
    return await _ended(here, run)


router = APIRouter(prefix="/v1/schedules", tags=["schedules"])
MOST_SCHEDULES = 20
"""Schedules that one token may have set, because every check of due times reads them all."""
ScheduleName = Annotated[str, Path(max_length=100, pattern=NAME, examples=["nightly"])]


class ScheduleRequest(RequestBody):
    """When which study runs. `spec` holds the study and the window; docs/api.md lists its keys."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "node": "gpu-1",
                    "cron": "0 22 * * *",
                    "timezone": "Europe/Berlin",
                    "spec": {"study": "chat-nightly", "hours": 6},
                }
            ]
        },
    )

    node: str = Field(min_length=1, max_length=100)
    cron: str = Field(min_length=9, max_length=200)
    timezone: str = Field(default="UTC", max_length=100)
    spec: dict[str, JsonValue]
    enabled: bool = True
    reason: str = Field(default="set over HTTP", max_length=500)


@router.get("", summary="Schedules by name", responses=documented())
def list_schedules(here: Here, actor: Reader) -> list[Schedule]:
    return list(here.store.schedules())


@router.get("/{name}", summary="A schedule", responses=documented(404))
def show_schedule(here: Here, actor: Reader, name: ScheduleName) -> Schedule:
    return here.store.schedule(name)


@router.put("/{name}", summary="Make or change a schedule", responses=documented(400, 404, 409))
def put_schedule(here: Here, actor: Runner, name: ScheduleName, asked: ScheduleRequest) -> Schedule:
    known = here.store.schedules()
    before = next((each for each in known if each.name == name), None)
    if before is None and known:
        setters = here.store.actors("schedule", [each.name for each in known])
        if sum(setter == actor.name for setter in setters.values()) >= MOST_SCHEDULES:
            raise Conflict(
                f"{actor.name} already has {MOST_SCHEDULES} schedules, the most allowed; remove one first"
            )
    found = Schedule(
        name=name,
        node=asked.node,
        cron=asked.cron,
        timezone=asked.timezone,
        spec=asked.spec,
        enabled=asked.enabled,
        created_at=before.created_at if before else here.clock(),
        last_due=before.last_due if before else None,
        last_run_id=before.last_run_id if before else None,
    )
    here.store.put_schedule(checked(found, here))
    here.audit(actor, "schedule", name, asked.reason)
    return found


@router.delete("/{name}", status_code=204, summary="Remove a schedule", responses=documented(404))
def remove_schedule(here: Here, actor: Runner, name: ScheduleName) -> Response:
    here.store.remove_schedule(name)
    here.audit(actor, "unschedule", name, "removed over HTTP")
    return Response(status_code=204)
