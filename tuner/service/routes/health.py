"""The state of the service: whether it lives and is ready, its metrics, its audit, and its nodes. Nodes are
registered by command line or file, not over HTTP.
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field

from tuner import __version__
from tuner.history.entities import AuditEntry
from tuner.service import schemas
from tuner.service.auth import Admin, Reader, unnamed_database
from tuner.service.context import Here
from tuner.service.problems import RequestBody, documented
from tuner.service.schemas import Cursor, Limit, Page, after, page

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """The service answers."""

    status: str = Field(examples=["ok"])
    version: str = Field(examples=["0.1.0"])


@router.get("/healthz", summary="Does the process answer?")
async def healthz() -> Health:
    return Health(status="ok", version=__version__)


@router.get(
    "/readyz",
    summary="Whether the service can serve: it reaches the database, and the database has this release",
    responses={status: body for status, body in documented(404, 409).items() if status in (404, 409, 503)},
)
def readyz(here: Here) -> Health:
    with unnamed_database():
        here.store.database.check()
    return Health(status="ready", version=__version__)


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **documented()},
)
def metrics(request: Request, actor: Reader) -> Response:
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/audit", tags=["audit"], summary="Every change, the newest first", responses=documented(400))
def list_audit(here: Here, actor: Admin, cursor: Cursor = None, limit: Limit = 100) -> Page[AuditEntry]:
    found = here.store.audit(after=after(cursor, int), limit=limit + 1)
    return page(found, limit, lambda entry: entry, lambda entry: (entry.id,))


nodes_router = APIRouter(prefix="/v1/nodes", tags=["nodes"])
NodeName = Annotated[str, Path(max_length=100, pattern=r"^[^/\x00]+$", examples=["gpu-1"])]


class StateRequest(RequestBody):
    """A node's state as an administrator sets it: free again after a repair, or out of service."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"state": "free", "reason": "fan replaced"}]})

    state: Literal["free", "fault"]
    reason: str = Field(min_length=1, max_length=500)


@nodes_router.get("", summary="Nodes by name, with who holds them", responses=documented())
def list_nodes(here: Here, actor: Reader) -> list[schemas.NodeSchema]:
    holders = {lease.node: lease.holder for lease in here.store.leases(now=here.clock())}
    return [schemas.node(each, holders.get(each.name)) for each in here.store.nodes()]


@nodes_router.get("/{name}", summary="A node", responses=documented(404))
def show_node(here: Here, actor: Reader, name: NodeName) -> schemas.NodeSchema:
    holders = {lease.node: lease.holder for lease in here.store.leases(now=here.clock())}
    return schemas.node(here.store.node(name), holders.get(name))


@nodes_router.put(
    "/{name}/state", summary="Put a node back to work, or out of service", responses=documented(404)
)
def set_node_state(here: Here, actor: Admin, name: NodeName, asked: StateRequest) -> schemas.NodeSchema:
    found = here.store.set_node_state(name, asked.state)
    here.pulls.forget()
    here.audit(actor, "node", name, asked.reason, state=asked.state)
    return schemas.node(found)
