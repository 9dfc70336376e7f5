"""Profiles, which deploy pipelines pull, and aliases. Each move of an alias is an event with its actor and
reason.
"""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException, Path, Query, Request, Response
from pydantic import AfterValidator, ConfigDict, Field

from tuner.errors import BadInput, NotFound
from tuner.history.best_per_night import Change
from tuner.profiles import export, registry
from tuner.records import AliasEvent, Profile, ProfileKey
from tuner.service import schemas
from tuner.service.auth import Promoter, Reader
from tuner.service.context import Here
from tuner.service.middleware import PullResponse, matches
from tuner.service.problems import RequestBody, documented
from tuner.service.schemas import Cursor, Limit, Page, after, page
from tuner.settings import NAME

router = APIRouter(prefix="/v1/profiles", tags=["profiles"])
ProfileId = Annotated[int, Path(ge=1, le=2**53, examples=[1])]


def _known(format: str) -> str:
    try:
        return export.format_of(format).name
    except BadInput as error:
        raise ValueError(str(error)) from None


def _named(schema: dict[str, Any]) -> None:
    schema["enum"] = list(export.FORMATS)


Format = Annotated[
    str,
    AfterValidator(_known),
    Query(description="What the pipeline's chart reads.", json_schema_extra=_named),
]
TEXTS: dict[str, Any] = {export.YAML: {"schema": {}}, "text/plain": {"schema": {"type": "string"}}}
PULLED: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {**TEXTS, "application/json": {"schema": {"type": "object"}}},
        "headers": {"ETag": {"schema": {"type": "string"}}},
    }
}
UNCHANGED: dict[int | str, dict[str, Any]] = {304: {"description": "If-None-Match names the present ETag."}}


@router.get("", summary="Profile versions, the newest first", responses=documented(400))
def list_profiles(
    here: Here,
    actor: Reader,
    model: Annotated[str | None, Query(max_length=200)] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[schemas.ProfileSchema]:
    found = here.store.profiles(model=model, after=after(cursor, int), limit=limit + 1)
    return page(found, limit, schemas.profile, lambda profile: (profile.id,))


@router.get(
    "/resolve",
    summary="Pull the profile that an alias names",
    response_class=Response,
    responses={**PULLED, **UNCHANGED, **documented(400, 404, 409)},
)
def resolve_profile(
    here: Here,
    actor: Reader,
    request: Request,
    model: Annotated[str, Query(min_length=1, max_length=200, examples=["Qwen/Qwen2.5-7B-Instruct"])],
    workload: Annotated[
        str | None, Query(min_length=1, max_length=100, description="May be left out when there is only one.")
    ] = None,
    node: Annotated[str | None, Query(min_length=1, max_length=100)] = None,
    gpu_class: Annotated[
        str | None,
        Query(min_length=1, max_length=100, description="Used if the node has no profile of its own."),
    ] = None,
    alias: Annotated[str, Query(min_length=1, max_length=100)] = registry.CHAMPION,
    engine_version: Annotated[str | None, Query(min_length=1, max_length=100)] = None,
    format: Format = "json",
) -> Response:
    """400: the model has several workloads, and none is named. 404: there is no profile. 409: there is a
    profile, but for another engine version or another GPU. Send the ETag back as
    `If-None-Match` to get 304 while nothing has changed.
    """
    pulse = here.pulls.pulse()
    found = registry.resolve(
        here.store,
        model=model,
        workload=workload or registry.only_workload(here.store, model, asked_by="workload"),
        node=node,
        gpu_class=gpu_class,
        alias=alias,
        engine_version=engine_version,
    )
    answer = _answer(found.profile, format, found.etag(format))
    here.pulls.keep(request.scope, answer, pulse=pulse, expires_at=actor.expires_at)
    return _response(request, answer)


def _answer(profile: Profile, format: str, etag: str) -> PullResponse:
    return PullResponse(
        etag=etag,
        body=export.render(profile, format).encode(),
        media=export.format_of(format).media,
        profile_id=profile.id,
        version=profile.version,
    )


def _response(request: Request, answer: PullResponse) -> Response:
    headers = {str(name, "ascii"): str(value, "latin-1") for name, value in answer.headers()}
    given = ",".join(request.headers.getlist("if-none-match"))
    if matches(given.encode("latin-1"), answer.etag.encode()):
        return Response(status_code=304, headers=headers)
    return Response(answer.body, headers={**headers, "content-type": answer.media})


@router.get("/{profile_id}", summary="One version with its evidence", responses=documented(404))
def show_profile(here: Here, actor: Reader, profile_id: ProfileId) -> schemas.ProfileSchema:
    return schemas.profile(here.store.profile(profile_id))


@router.get(
    "/{profile_id}/export",
    summary="One version in a format, independent of aliases",
    response_class=Response,
    responses={**PULLED, **UNCHANGED, **documented(400, 404)},
)
def export_profile(
    here: Here, actor: Reader, request: Request, profile_id: ProfileId, format: Format = "json"
) -> Response:
    found = here.store.profile(profile_id)
    return _response(request, _answer(found, format, f'"{found.digest[:32]}-{format}"'))


@router.get("/{profile_id}/diff", summary="What differs between two versions", responses=documented(404))
def diff_profiles(
    here: Here, actor: Reader, profile_id: ProfileId, to: Annotated[int, Query(ge=1, le=2**53)]
) -> list[Change]:
    return list(registry.diff(here.store.profile(profile_id), here.store.profile(to)))


aliases = APIRouter(prefix="/v1/aliases", tags=["aliases"])
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


AliasKey = Annotated[ProfileKey, Depends(_key)]


class Move(RequestBody):
    """The new version of an alias, and the reason. `force` ignores the gates and needs scope admin."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"version": 2, "reason": "confirmed twice"}]})

    version: int = Field(ge=1, le=2**31 - 1)
    reason: str = Field(min_length=1, max_length=500)
    force: bool = False
    engine_version: str | None = Field(
        default=None, max_length=100, description="The engine version that will run it; it must match."
    )


class Why(RequestBody):
    """The reason that the event keeps."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"reason": "errors in prod"}]})

    reason: str = Field(min_length=1, max_length=500)


class Freeze(Why):
    """Whether an alias may move."""

    frozen: bool = True


@aliases.get("", summary="Every alias that is set", responses=documented())
def list_aliases(
    here: Here, actor: Reader, model: Annotated[str | None, Query(max_length=200)] = None
) -> list[schemas.AliasSchema]:
    return [schemas.alias(each) for each in here.store.aliases() if model in (None, each.key.model)]


@aliases.get(
    "/{alias}", summary="The version that an alias points to", responses={200: ETAG, **documented(400, 404)}
)
def show_alias(
    here: Here, actor: Reader, alias: Alias, key: AliasKey, response: Response
) -> schemas.AliasSchema:
    found = here.store.alias(key, alias)
    if found is None:
        raise NotFound(f"{key.model} on {key.target} for {key.workload} has no alias '{alias}'")
    return _shown(found, response)


@aliases.get(
    "/{alias}/events", summary="Every move of an alias, the oldest first", responses=documented(400, 404)
)
def alias_events(here: Here, actor: Reader, alias: Alias, key: AliasKey) -> list[schemas.AliasSchema]:
    return [schemas.alias(each) for each in here.store.alias_events(key, alias=alias)]


def _shown(event: AliasEvent, response: Response) -> schemas.AliasSchema:
    response.headers["ETag"] = f'"{event.generation}"'
    return schemas.alias(event)


def _expected(here: Here, key: ProfileKey, alias: str, given: str | None) -> int | None:
    """The generation that If-Match names. 412 if the alias has another generation."""
    if given is None:
        return None
    found = GENERATION.fullmatch(given.strip())
    if found is None:
        raise BadInput('If-Match: give the ETag of the alias, such as "3"')
    seen, event = int(found[1]), here.store.alias(key, alias)
    now = event.generation if event else 0
    if seen != now:
        raise HTTPException(412, f"alias '{alias}' is at generation {now}, not {seen}: somebody has moved it")
    return seen


@aliases.put(
    "/{alias}",
    summary="Move an alias to a version",
    responses={200: ETAG, **documented(400, 404, 409, 412, 428)},
)
def move_alias(
    here: Here,
    actor: Promoter,
    alias: Alias,
    key: AliasKey,
    move: Move,
    response: Response,
    if_match: IfMatch = None,
) -> schemas.AliasSchema:
    """The version must be confirmed, keep the SLO and be younger than 30 days. If it changes a knob that
    changes the output, its answers must have been judged. 409 names each gate that fails. The reason of the
    move says what was not judged.
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
    event = here.promote(
        actor, profile, alias, reason=move.reason, force=move.force, expected=expected,
        engine_version=move.engine_version,
    )  # fmt: skip
    return _shown(event, response)


@aliases.post(
    "/{alias}/rollback",
    summary="Move an alias back to the version before",
    responses={200: ETAG, **documented(400, 404, 409, 412)},
)
def rollback_alias(
    here: Here,
    actor: Promoter,
    alias: Alias,
    key: AliasKey,
    why: Why,
    response: Response,
    if_match: IfMatch = None,
) -> schemas.AliasSchema:
    expected = _expected(here, key, alias, if_match)
    event = here.rollback(actor, key, alias, reason=why.reason, expected=expected)
    return _shown(event, response)


@aliases.post(
    "/{alias}/freeze",
    summary="Forbid an alias to move, or allow it again",
    responses={200: ETAG, **documented(400, 404, 409)},
)
def freeze_alias(
    here: Here, actor: Promoter, alias: Alias, key: AliasKey, asked: Freeze, response: Response
) -> schemas.AliasSchema:
    event = here.freeze(actor, key, alias, asked.frozen, asked.reason)
    return _shown(event, response)
