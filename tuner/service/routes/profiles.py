"""Profiles: listed, shown, compared, and pulled by deploy pipelines."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from tuner.profiles import export, registry
from tuner.records import Profile
from tuner.service import shapes
from tuner.service.auth import Reader
from tuner.service.context import Here
from tuner.service.paging import Cursor, Limit, Page, page, unpack
from tuner.service.problems import documented
from tuner.service.pulls import Answer, matches

router = APIRouter(prefix="/v1/profiles", tags=["profiles"])
Key = Annotated[int, Path(ge=1, le=2**53, examples=[1])]
FormatName = Literal[
    "vllm-yaml", "args", "env", "json", "helm-production-stack", "helm-llm-d", "kserve", "kustomize",
    "configmap", "systemd",
]  # fmt: skip
Format = Annotated[FormatName, Query(description="What the pipeline's chart reads.")]
MEDIA = {"json": "application/json", "args": "text/plain; charset=utf-8", "env": "text/plain; charset=utf-8",
         "systemd": "text/plain; charset=utf-8"}  # fmt: skip
YAML = "application/yaml"
TEXTS: dict[str, Any] = {YAML: {"schema": {}}, "text/plain": {"schema": {"type": "string"}}}
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
) -> Page[shapes.ProfileShape]:
    place = unpack(cursor, int)
    after = int(place[0]) if place else None
    found = here.store.profiles(model=model, after=after, limit=limit + 1)
    return page(found, limit, shapes.profile, lambda profile: (profile.id,))


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
        str | None, Query(min_length=1, max_length=100, description="Asked after the node, if at all.")
    ] = None,
    alias: Annotated[str, Query(min_length=1, max_length=100)] = registry.CHAMPION,
    engine_version: Annotated[str | None, Query(min_length=1, max_length=100)] = None,
    format: Format = "json",
) -> Response:
    """400: the model has several workloads, and none is named. 404: there is none. 409: there is one, but for
    another engine version or another GPU; a near match is never served in silence. Send the ETag back as
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


def _answer(profile: Profile, format: str, etag: str) -> Answer:
    return Answer(
        etag=etag,
        body=export.render(profile, format).encode(),
        media=MEDIA.get(format, YAML),
        profile_id=profile.id,
        version=profile.version,
    )


def _response(request: Request, answer: Answer) -> Response:
    headers = {str(name, "ascii"): str(value, "latin-1") for name, value in answer.headers()}
    given = ",".join(request.headers.getlist("if-none-match"))
    if matches(given.encode("latin-1"), answer.etag.encode()):
        return Response(status_code=304, headers=headers)
    return Response(answer.body, headers={**headers, "content-type": answer.media})


@router.get("/{profile_id}", summary="One version with its evidence", responses=documented(404))
def show_profile(here: Here, actor: Reader, profile_id: Key) -> shapes.ProfileShape:
    return shapes.profile(here.store.profile(profile_id))


@router.get(
    "/{profile_id}/export",
    summary="One version in a format, whatever the aliases say",
    response_class=Response,
    responses={**PULLED, **UNCHANGED, **documented(400, 404)},
)
def export_profile(
    here: Here, actor: Reader, request: Request, profile_id: Key, format: Format = "json"
) -> Response:
    found = here.store.profile(profile_id)
    return _response(request, _answer(found, format, f'"{found.digest[:32]}-{format}"'))


@router.get("/{profile_id}/diff", summary="What differs between two versions", responses=documented(404))
def diff_profiles(
    here: Here, actor: Reader, profile_id: Key, to: Annotated[int, Query(ge=1, le=2**53)]
) -> list[shapes.ChangeShape]:
    changes = registry.diff(here.store.profile(profile_id), here.store.profile(to))
    names = shapes.ChangeShape.model_fields
    return [shapes.ChangeShape(**{name: getattr(each, name) for name in names}) for each in changes]
