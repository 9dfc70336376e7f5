"""Nodes: what is known of the machines. They are registered by command line or file, not over HTTP."""

from typing import Annotated, Literal

from fastapi import APIRouter, Path
from pydantic import ConfigDict, Field

from tuner.service import schemas
from tuner.service.auth import Admin, Reader
from tuner.service.context import Here
from tuner.service.problems import RequestBody, documented

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])
NodeName = Annotated[str, Path(max_length=100, pattern=r"^[^/\x00]+$", examples=["gpu-1"])]


class StateRequest(RequestBody):
    """A node's state as an administrator sets it: free again after it was mended, or out of service."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"state": "free", "reason": "fan replaced"}]})

    state: Literal["free", "fault"]
    reason: str = Field(min_length=1, max_length=500)


@router.get("", summary="Nodes by name, with who holds them", responses=documented())
def list_nodes(here: Here, actor: Reader) -> list[schemas.NodeSchema]:
    holders = {lease.node: lease.holder for lease in here.store.leases(now=here.clock())}
    return [schemas.node(each, holders.get(each.name)) for each in here.store.nodes()]


@router.get("/{name}", summary="A node", responses=documented(404))
def show_node(here: Here, actor: Reader, name: NodeName) -> schemas.NodeSchema:
    holders = {lease.node: lease.holder for lease in here.store.leases(now=here.clock())}
    return schemas.node(here.store.node(name), holders.get(name))


@router.put("/{name}/state", summary="Put a node back to work, or out of service", responses=documented(404))
def set_node_state(here: Here, actor: Admin, name: NodeName, asked: StateRequest) -> schemas.NodeSchema:
    found = here.store.set_node_state(name, asked.state)
    here.pulls.forget()
    here.audit(actor, "node", name, asked.reason, state=asked.state)
    return schemas.node(found)
