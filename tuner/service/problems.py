"""Every refusal is an `application/problem+json` (RFC 9457) with one sentence in `detail`."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tuner import masking
from tuner.errors import BadInput, Conflict, NotFound, TunerError, Unavailable
from tuner.knobs.space import LARGEST_NUMBER

MEDIA = "application/problem+json"
STATUS: Mapping[type[TunerError], int] = {BadInput: 400, NotFound: 404, Conflict: 409, Unavailable: 503}
LONGEST_TEXT, MOST_KEYS = 16 * 1024, 200
"""What a request may hold."""
MOST_ERRORS, LONGEST_DETAIL = 20, 2000
"""Limits of the answer to a wrong request, because a request of 1 MiB can have 200,000 errors."""
log = logging.getLogger("tuner.service")


class ProblemDetails(BaseModel):
    """Why a request was refused."""

    type: str = "about:blank"
    title: str = Field(examples=["Not Found"])
    status: int = Field(examples=[404])
    detail: str = Field(examples=["there is no run '0a1b'"])
    request_id: str = Field(examples=["6f1c0d2e9b7a4c58"])
    errors: list[dict[str, Any]] | None = Field(default=None, description="Which part of the request.")


class RequestBody(BaseModel):
    """The base of every JSON body. Values are checked before fields. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _plain_values(cls, value: Any) -> Any:
        """The body as it was sent.

        ValueError if a text is too long or holds half of a surrogate pair (no answer could show it), if a
        number is too large to compute with, or if an object has so many keys that it would take long to
        collect their errors.
        """
        left = [value]
        while left:
            here = left.pop()
            if isinstance(here, Mapping):
                if len(here) > MOST_KEYS:
                    raise ValueError(f"an object has {len(here):,} keys; at most {MOST_KEYS} are taken")
                left += [*here, *here.values()]
            elif isinstance(here, list):
                left += here
            elif isinstance(here, str):
                _check_text(here)
            elif isinstance(here, int | float) and not abs(here) < LARGEST_NUMBER:
                raise ValueError(f"a number below {LARGEST_NUMBER:g} is expected")
        return value


def _check_text(text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"a text has {len(text):,} characters; at most {LONGEST_TEXT:,} are taken")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a text is not Unicode: it holds half of a surrogate pair") from None


def problem(
    request: Request, status: int, detail: str, headers: Mapping[str, str] | None = None, **more: object
) -> JSONResponse:
    """The response of a refusal."""
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": _shown(request, detail),
        "request_id": str(request.scope.get("request_id", "")),
        **masking.tree(more),
    }
    return JSONResponse(body, status, dict(headers or {}), media_type=MEDIA)


def _shown(request: Request, detail: str) -> str:
    """A sentence without secrets and without paths of this host, cut to a length that people read. Secrets
    are masked before the cut, because half of a secret would not be recognised.
    """
    home = str(request.app.state.service.settings.home)
    plain = masking.text(detail[: 2 * LONGEST_DETAIL]).replace(home, "TUNER_HOME")
    return plain if len(plain) <= LONGEST_DETAIL else f"{plain[:LONGEST_DETAIL]}…"


def status_of(error: TunerError) -> int:
    """The HTTP status of the tuner's own errors. An engine that failed is a conflict."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 409)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, TunerError):
        status = status_of(error)
        return problem(request, status, str(error), {"Retry-After": "1"} if status == 503 else None)
    if isinstance(error, ClientDisconnect):
        return problem(request, 400, "the connection ended in the middle of the request")
    if isinstance(error, HTTPException):
        return problem(request, error.status_code, str(error.detail), error.headers)
    if isinstance(error, RequestValidationError):
        plain = [
            {
                "at": [_shown(request, str(part)) for part in each["loc"]],
                "problem": _shown(request, each["msg"]),
            }
            for each in error.errors()[:MOST_ERRORS]
        ]
        first = plain[0] if plain else {"at": [], "problem": "not valid"}
        said = f"{'.'.join(first['at'])}: {first['problem']}"
        return problem(request, 422, said, errors=jsonable_encoder(plain))
    log.error("internal error", exc_info=error, extra={"request_id": request.scope.get("request_id")})
    return problem(request, 500, "internal error; the service's log has it under this request_id")


def install(app: FastAPI) -> None:
    for kind in (TunerError, ClientDisconnect, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _refused)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route for OpenAPI: those of every route, and its own."""
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted({400, 401, 403, 413, 422, 429, 503, *statuses})
    }
