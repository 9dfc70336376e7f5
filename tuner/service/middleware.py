"""What every request passes: its id, its log line, its count, and pulls that are answered from memory.

The key of a kept answer has the request's query and its headers Authorization and Host. The answer is valid
until the history changes. Then it is computed again, with three reads by index.
"""

import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
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

PULL_PATH = "/v1/profiles/resolve"
KEPT, LONGEST_KEY = 2048, 4096
"""Limits of the answers in memory: their number, and the bytes of a key, because anyone may send a long
query.
"""
PULL_LIFE = timedelta(seconds=60)
"""Seconds that an answer is kept at most, so that a token's last use is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResponse:
    """A pull's response, ready to send."""

    etag: str
    body: bytes
    media: str
    profile_id: int
    version: int

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"etag", self.etag.encode()),
            (b"cache-control", b"no-cache"),
            (b"vary", b"Authorization"),
            (b"x-content-type-options", b"nosniff"),
            (b"x-profile", f"{self.profile_id}; version={self.version}".encode()),
        ]


class Pulls:
    """The answers in memory. `forget` after every change made in this process."""

    def __init__(self, pulse: Callable[[], int], clock: Callable[[], datetime]) -> None:
        self._pulse, self._clock = pulse, clock
        self._kept: dict[bytes, tuple[PullResponse, int, datetime]] = {}

    def pulse(self) -> int:
        return self._pulse()

    def forget(self) -> None:
        self._kept.clear()

    def keep(self, scope: Scope, answer: PullResponse, *, pulse: int, expires_at: datetime | None) -> None:
        """Keeps an answer that was made after `pulse` was read, until the token of the request expires."""
        if len(_key(scope)) > LONGEST_KEY:
            return
        until = self._clock() + PULL_LIFE
        if len(self._kept) >= KEPT:
            self._kept.clear()
        self._kept[_key(scope)] = answer, pulse, min(until, expires_at or until)

    async def answered(self, scope: Scope, receive: Receive, send: Send) -> int | None:
        """Sends the kept answer of a request and returns its status; None if there is no kept answer."""
        if scope["path"] != PULL_PATH or scope["method"] != "GET":
            return None
        kept = self._kept.get(_key(scope))
        if kept is None or kept[1] != self._pulse() or kept[2] <= self._clock():
            return None
        answer = kept[0]
        same = matches(_header(scope, b"if-none-match"), answer.etag.encode())
        status, headers = 304 if same else 200, answer.headers()
        if not same:
            headers.append((b"content-type", answer.media.encode()))
            headers.append((b"content-length", str(len(answer.body)).encode()))
        headers.append((b"x-request-id", scope["request_id"].encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if same else answer.body})
        return status


def matches(given: bytes, etag: bytes) -> bool:
    """Whether an If-None-Match header names the entity tag; `*` names any."""
    if not given:
        return False
    named = [part.strip().removeprefix(b"W/") for part in given.split(b",")]
    return b"*" in named or etag in named


def _header(scope: Scope, name: bytes) -> bytes:
    return b",".join(value for key, value in scope["headers"] if key == name)


def _key(scope: Scope) -> bytes:
    found: bytes = scope["query_string"]
    return b"\0".join((found, _header(scope, b"authorization"), _header(scope, b"host")))


log = logging.getLogger("tuner.http")
LARGEST_BODY, LARGEST_UPLOAD = 1024**2, 16 * 1024**2
"""Bytes of a body. Parsed JSON takes up to thirty times as much memory. Pieces of uploads are not JSON."""
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
            self._count(PULL_PATH, "GET", status, time.perf_counter() - began)
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
    """A redirect within this site. The framework would redirect to any host that the request names."""
    parts = urlsplit(location)
    return f"/{parts.path.lstrip('/')}" + (f"?{parts.query}" if parts.query else "")


def _limited(scope: Scope, receive: Receive) -> Receive:
    """Ends a request whose body is too long. Routes take much smaller bodies. A body sent to the API is read
    only if its sender has a valid token. Without this check, the framework would read the body before it
    checks the token.
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
            raise HTTPException(413, f"a request may have at most {most} bytes")
        return message

    return limited


async def _authenticate(scope: Scope) -> None:
    request = Request(scope)
    try:
        await to_thread.run_sync(authenticated, request, await bearer(request))
    except TunerError as error:
        raise HTTPException(status_of(error), str(error), {"Retry-After": "1"}) from error


def _request_id(scope: Scope) -> str:
    """The caller's own request id if it is a plain word, so that it is in the logs of both sides; otherwise a
    new one.
    """
    for name, value in scope["headers"]:
        if name == b"x-request-id" and GIVEN_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(8)
