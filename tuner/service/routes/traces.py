"""The known traces, and uploads in pieces, whose digest is checked."""

from tempfile import SpooledTemporaryFile
from typing import IO, Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter, Header, HTTPException, Path, Request, Response
from pydantic import ConfigDict, Field

from tuner.errors import NotFound
from tuner.service import schemas
from tuner.service.auth import Actor, Reader, Runner
from tuner.service.context import Here, ServiceContext
from tuner.service.problems import RequestBody, documented
from tuner.service.uploads import LARGEST, LARGEST_PIECE, Upload, Uploads
from tuner.settings import NAME

IN_MEMORY = 256 * 1024
router = APIRouter(prefix="/v1/traces", tags=["traces"])
UploadId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", examples=["0" * 32])]


class UploadRequest(RequestBody):
    """The file that will be sent. It may have any format that `tuner trace import` recognises."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "chat", "size": 65536, "sha256": "ab" * 32}]}
    )

    name: str = Field(pattern=NAME, max_length=100)
    size: int = Field(ge=1, le=LARGEST, description="Bytes of the file.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="Of the file's bytes.")
    unit: Literal["s", "ms", "us", "ns"] | None = Field(
        default=None, description="Of times that the file gives as numbers without a unit."
    )


@schemas.fields_of(Upload, without=("unit", "owner"))
class UploadSchema(schemas.Schema):
    """An upload that has not ended; the next piece begins at `offset`."""

    largest_piece: int = LARGEST_PIECE


def _uploads(here: ServiceContext) -> Uploads:
    return Uploads(here.settings.home)


def _own(here: ServiceContext, actor: Actor, upload_id: str) -> Uploads:
    """The uploads, after a check that this upload belongs to the token. NotFound if it belongs to another
    token.
    """
    found = _uploads(here)
    if found.upload(upload_id).owner != actor.token:
        raise NotFound(f"this token has no upload '{upload_id}'")
    return found


@router.get("", summary="Known traces, the newest first", responses=documented())
def list_traces(here: Here, actor: Reader) -> list[schemas.TraceSchema]:
    return [schemas.TraceSchema.of(each) for each in here.store.traces()]


@router.post("/uploads", status_code=201, summary="Begin an upload", responses=documented(409))
def begin_upload(here: Here, actor: Runner, asked: UploadRequest) -> UploadSchema:
    return UploadSchema.of(_uploads(here).begin(**asked.model_dump(), owner=actor.token))


@router.get("/uploads/{upload_id}", summary="How far an upload is", responses=documented(404))
def show_upload(here: Here, actor: Reader, upload_id: UploadId) -> UploadSchema:
    return UploadSchema.of(_uploads(here).upload(upload_id))


@router.patch(
    "/uploads/{upload_id}",
    summary="Send the next piece",
    responses=documented(400, 404, 409, 413),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def add_piece(
    here: Here,
    actor: Runner,
    upload_id: UploadId,
    request: Request,
    upload_offset: Annotated[int, Header(ge=0, le=LARGEST, description="Where the piece begins.")],
) -> UploadSchema:
    """The body is the piece itself, at most 8 MiB. If the offset is wrong, the answer is 409 and says where
    the next piece must begin."""
    with SpooledTemporaryFile(max_size=IN_MEMORY) as piece:
        async for part in request.stream():
            piece.write(part)
            if piece.tell() > LARGEST_PIECE:
                raise HTTPException(413, f"a piece may have at most {LARGEST_PIECE} bytes")
        found = await to_thread.run_sync(_add, here, actor, upload_id, upload_offset, piece)
    return UploadSchema.of(found)


def _add(here: ServiceContext, actor: Actor, upload_id: str, offset: int, piece: IO[bytes]) -> Upload:
    return _own(here, actor, upload_id).add(upload_id, offset, piece)


@router.post(
    "/uploads/{upload_id}/finish",
    status_code=201,
    summary="Check the digest and import the trace",
    responses=documented(400, 404, 409),
)
def finish_upload(here: Here, actor: Runner, upload_id: UploadId) -> schemas.TraceSchema:
    upload, taken, path = _own(here, actor, upload_id).finish(upload_id)
    found = here.store.add_trace(taken.digest, upload.name, str(path.resolve()), taken.meta, here.clock())
    here.audit(actor, "trace", taken.digest, f"trace {upload.name} uploaded")
    return schemas.TraceSchema.of(found)


@router.delete(
    "/uploads/{upload_id}", status_code=204, summary="Abandon an upload", responses=documented(404)
)
def abandon_upload(here: Here, actor: Runner, upload_id: UploadId) -> Response:
    _own(here, actor, upload_id).abandon(upload_id)
    return Response(status_code=204)


@router.get("/{ref}", summary="A trace by digest or name", responses=documented(400, 404))
def show_trace(
    here: Here, actor: Reader, ref: Annotated[str, Path(max_length=200, pattern=r"^[^/\x00]+$")]
) -> schemas.TraceSchema:
    return schemas.TraceSchema.of(here.store.trace(ref))
