"""Who changed what, and why."""

from fastapi import APIRouter

from tuner.service import shapes
from tuner.service.auth import Admin
from tuner.service.context import Here
from tuner.service.paging import Cursor, Limit, Page, page, unpack
from tuner.service.problems import documented

router = APIRouter(prefix="/v1/audit", tags=["audit"])


@router.get("", summary="Every change, the newest first", responses=documented(400))
def list_audit(
    here: Here, actor: Admin, cursor: Cursor = None, limit: Limit = 100
) -> Page[shapes.AuditShape]:
    place = unpack(cursor, int)
    found = here.store.audit(after=int(place[0]) if place else None, limit=limit + 1)
    return page(found, limit, shapes.audit, lambda entry: (entry.id,))
