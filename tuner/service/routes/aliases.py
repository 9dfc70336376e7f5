"""Aliases: moved by compare-and-set, rolled back, frozen. Every move is an event with actor and reason."""

import re
from typing import Annotated

from fastapi import APIRouter, Depends, Header, HTTPException, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from tuner.errors import BadInput, NotFound
from tuner.profiles import registry
from tuner.records import AliasEvent, ProfileKey
from tuner.service import shapes
from tuner.service.auth import Promoter, Reader
from tuner.service.context import Here
from tuner.service.problems import documented
from tuner.settings import NAME

router = APIRouter(prefix="/v1/aliases", tags=["aliases"])
Alias = Annotated[str, Path(max_length=100, pattern=NAME, examples=["champion"])]
IfMatch = Annotated[
    str | None,
    Header(max_length=100, description='The generation that you saw, as its ETag: "3"; "0": never set.'),
]
ETAG = {"headers": {"ETag": {"schema": {"type": "string"}, "example": '"3"'}}}
GENERATION = re.compile(r'"([0-9]{1,9})"')


def _key(
    here: Here,
    model: Annotated[str, Query(min_length=1, max_length=200, examples=["Qwen/Qwen2.5-7B-Instruct"])],
    target: Annotated[str, Query(min_length=1, max_length=100, description="A node or a GPU class.")],
    workload: Annotated[
        str | None, Query(min_length=1, max_length=100, description="May be left out when there is only one.")
    ] = None,
) -> ProfileKey:
    chosen = workload or registry.only_workload(here.store, model, asked_by="workload")
    return ProfileKey(model=model, target=target, workload=chosen)


Key = Annotated[ProfileKey, Depends(_key)]


class Move(BaseModel):
    """Where an alias is to go, and why. `force` passes over the gates and needs scope admin."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"version": 2, "reason": "confirmed twice"}]}
    )

    version: int = Field(ge=1, le=2**31 - 1)
    reason: str = Field(min_length=1, max_length=500)
    force: bool = False
    engine_version: str | None = Field(
        default=None, max_length=100, description="The engine that is to run it: a gate."
    )


class Why(BaseModel):
    """The reason that the event keeps."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"reason": "errors in prod"}]})

    reason: str = Field(min_length=1, max_length=500)


class Freeze(Why):
    """Whether an alias may move."""

    frozen: bool = True


@router.get("", summary="Every alias that is set", responses=documented())
def list_aliases(
    here: Here, actor: Reader, model: Annotated[str | None, Query(max_length=200)] = None
) -> list[shapes.AliasShape]:
    return [shapes.alias(each) for each in here.store.aliases() if model in (None, each.key.model)]


@router.get("/{alias}", summary="Where an alias stands", responses={200: ETAG, **documented(400, 404)})
def show_alias(here: Here, actor: Reader, alias: Alias, key: Key, response: Response) -> shapes.AliasShape:
    found = here.store.alias(key, alias)
    if found is None:
        raise NotFound(f"{key.model} on {key.target} for {key.workload} has no alias '{alias}'")
    return _shown(found, response)


@router.get(
    "/{alias}/events", summary="Every move of an alias, the oldest first", responses=documented(400, 404)
)
def alias_events(here: Here, actor: Reader, alias: Alias, key: Key) -> list[shapes.AliasShape]:
    return [shapes.alias(each) for each in here.store.alias_events(key, alias=alias)]


def _shown(event: AliasEvent, response: Response) -> shapes.AliasShape:
    response.headers["ETag"] = f'"{event.generation}"'
    return shapes.alias(event)


def _expected(here: Here, key: ProfileKey, alias: str, given: str | None) -> int | None:
    """The generation that If-Match names. 412 when the alias is at another one."""
    if given is None:
        return None
    found = GENERATION.fullmatch(given.strip())
    if found is None:
        raise BadInput('If-Match: give the ETag of the alias, such as "3"')
    seen, event = int(found[1]), here.store.alias(key, alias)
    now = event.generation if event else 0
    if seen != now:
        raise HTTPException(412, f"alias '{alias}' is at generation {now}, not {seen}: somebody moved it")
    return seen


@router.put(
    "/{alias}",
    summary="Move an alias to a version",
    responses={200: ETAG, **documented(400, 404, 409, 412, 428)},
)
def move_alias(
    here: Here,
    actor: Promoter,
    alias: Alias,
    key: Key,
    move: Move,
    response: Response,
    if_match: IfMatch = None,
) -> shapes.AliasShape:
    """The version must be confirmed, keep the SLO, have been judged where it turns a knob that changes the
    output, and be younger than 30 days; 409 names what fails. The reason says what was not judged.
    """
    if if_match is None:
        raise HTTPException(428, 'If-Match is needed: the ETag of the alias as you saw it, or "0"')
    if move.force and not actor.may("admin"):
        raise HTTPException(403, "force needs scope 'admin'")
    expected = _expected(here, key, alias, if_match)
    profile = here.store.profile_version(key, move.version)
    standing = here.store.alias(key, alias)
    if standing is not None and standing.to_version == move.version:
        return _shown(standing, response)
    gates = registry.NO_GATES if move.force else registry.Gates(engine_version=move.engine_version)
    event = registry.promote(
        here.store, profile, alias, gates=gates, expected=expected, actor=actor.name, reason=move.reason,
        now=here.clock(),
    )  # fmt: skip
    here.pulls.forget()
    here.audit(actor, "promote", _words(key, alias), move.reason, version=move.version, force=move.force)
    here.tell(event)
    return _shown(event, response)


@router.post(
    "/{alias}/rollback",
    summary="Move an alias back to the version before",
    responses={200: ETAG, **documented(400, 404, 409, 412)},
)
def rollback_alias(
    here: Here,
    actor: Promoter,
    alias: Alias,
    key: Key,
    why: Why,
    response: Response,
    if_match: IfMatch = None,
) -> shapes.AliasShape:
    expected = _expected(here, key, alias, if_match)
    event = registry.rollback(
        here.store, key, alias, actor=actor.name, reason=why.reason, now=here.clock(), expected=expected
    )
    here.pulls.forget()
    here.audit(actor, "rollback", _words(key, alias), why.reason, version=event.to_version)
    here.tell(event)
    return _shown(event, response)


@router.post(
    "/{alias}/freeze",
    summary="Forbid an alias to move, or allow it again",
    responses={200: ETAG, **documented(400, 404, 409)},
)
def freeze_alias(
    here: Here, actor: Promoter, alias: Alias, key: Key, asked: Freeze, response: Response
) -> shapes.AliasShape:
    event = here.store.freeze_alias(
        key, alias, asked.frozen, actor=actor.name, reason=asked.reason, now=here.clock()
    )
    here.pulls.forget()
    here.audit(actor, "freeze" if asked.frozen else "unfreeze", _words(key, alias), asked.reason)
    return _shown(event, response)


def _words(key: ProfileKey, alias: str) -> str:
    return f"{alias} of {key.model} on {key.target} for {key.workload}"
