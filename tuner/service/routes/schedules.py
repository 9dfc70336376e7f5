"""Schedules: nightly runs. Their arithmetic is in `fleet/`; these are the rows."""

from typing import Annotated

from fastapi import APIRouter, Path, Response
from pydantic import ConfigDict, Field, JsonValue

from tuner.errors import Conflict
from tuner.history.entities import Schedule
from tuner.service.auth import Reader, Runner
from tuner.service.context import Here
from tuner.service.problems import RequestBody, documented
from tuner.service.schedules import checked
from tuner.settings import NAME

router = APIRouter(prefix="/v1/schedules", tags=["schedules"])
MOST_SCHEDULES = 20
"""Schedules that one token may have set: every look at the time reads them all."""
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
            raise Conflict(f"{MOST_SCHEDULES} schedules of {actor.name} are set; remove one first")
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
