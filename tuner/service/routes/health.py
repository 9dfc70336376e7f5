"""Whether the service lives and is ready, what it counts, and who changed what."""

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field

from tuner import __version__
from tuner.history.entities import AuditEntry
from tuner.service.auth import Admin, Reader, unnamed_database
from tuner.service.context import Here
from tuner.service.problems import documented
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
