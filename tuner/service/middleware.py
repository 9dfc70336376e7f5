"""What lies around every request: its id, its log line, its count, and pulls answered from memory."""

import logging
import re
import secrets
import time
from urllib.parse import urlsplit

from anyio import to_thread
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tuner.errors import TunerError
from tuner.service.auth import authenticated, bearer, client_of
from tuner.service.problems import status_of
from tuner.service.pulls import PATH, Pulls

log = logging.getLogger("tuner.http")
LARGEST_BODY, LARGEST_UPLOAD = 1024**2, 16 * 1024**2
"""Bytes of a body: JSON takes up to thirty times as much once it is read. Pieces of uploads are not JSON."""
GIVEN_ID = re.compile(rb"[A-Za-z0-9._-]{8,64}")
SAFE = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class RequestMiddleware:
    """An ASGI layer over the whole app."""

    def __init__(self, app: ASGIApp, *, pulls: Pulls, registry: CollectorRegistry) -> None:
        self._app, self._pulls = app, pulls
        self._requests = Counter(
            "tuner_http_requests_total",
            "Answered requests.",
            ("route", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "tuner_http_request_seconds", "Time to the last byte.", ("route",), registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["request_id"] = _request_id(scope)
        began = time.perf_counter()
        receive = _limited(scope, receive)
        if (status := await self._pulls.answered(scope, receive, send)) is not None:
            self._count(PATH, "GET", status, time.perf_counter() - began)
            return
        statuses: list[int] = []

        async def wrapped(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = scope["request_id"]
                for name, value in SAFE.items():
                    headers.setdefault(name, value)
                if "location" in headers:
                    headers["location"] = _here(headers["location"])
            await send(message)

        try:
            await self._app(scope, receive, wrapped)
        finally:
            taken = time.perf_counter() - began
            path = getattr(scope.get("route"), "path", "other")
            status = statuses[0] if statuses else 500
            self._count(path, scope["method"], status, taken)
            facts = {"request_id": scope["request_id"], "method": scope["method"], "route": path}
            facts["client"] = client_of(Request(scope))
            log.info("request", extra={**facts, "status": status, "ms": round(taken * 1000, 2)})

    def _count(self, path: str, method: str, status: int, taken: float) -> None:
        known = method if method in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD") else "other"
        self._requests.labels(path, known, status).inc()
        self._seconds.labels(path).observe(taken)


def _here(location: str) -> str:
    """A redirect within this site: the framework makes one to whatever name a request gave as its host."""
    parts = urlsplit(location)
    return f"/{parts.path.lstrip('/')}" + (f"?{parts.query}" if parts.query else "")


def _limited(scope: Scope, receive: Receive) -> Receive:
    """Ends a request whose body goes on and on; what routes take is far below the limit. A body sent to the
    API is read only from who has a valid token: a route would read it before it asks for one.
    """
    taken, most = 0, LARGEST_UPLOAD if scope["method"] == "PATCH" else LARGEST_BODY
    known = scope["method"] in ("GET", "HEAD") or not scope["path"].startswith("/v1/")

    async def limited() -> Message:
        nonlocal taken, known
        if not known:
            await _authenticate(scope)
            known = True
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > most:
            raise HTTPException(413, f"a request has at most {most} bytes")
        return message

    return limited


async def _authenticate(scope: Scope) -> None:
    request = Request(scope)
    try:
        await to_thread.run_sync(authenticated, request, await bearer(request))
    except TunerError as error:
        raise HTTPException(status_of(error), str(error), {"Retry-After": "1"}) from error


def _request_id(scope: Scope) -> str:
    """The caller's own id where it is a plain word, so that logs of both sides meet; else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and GIVEN_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(8)
