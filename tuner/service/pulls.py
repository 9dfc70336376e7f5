"""Pulls answered from memory: whoever asks again gets the same bytes, for as long as they are right.

An answer is kept under the request's query and its Authorization header, and holds until the history's
pulse changes; then it is made anew, which costs three indexed reads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from starlette.types import Receive, Scope, Send

PATH = "/v1/profiles/resolve"
KEPT, LONGEST_KEY = 2048, 4096
"""Answers in memory, and the bytes of a request that an answer is kept under: anyone may add a long query."""
LIFE = timedelta(seconds=60)
"""How long at most, so that a token's last use is written."""


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
        """Keeps an answer that was made after `pulse` was read, until the asker's token expires."""
        if len(_key(scope)) > LONGEST_KEY:
            return
        until = self._clock() + LIFE
        if len(self._kept) >= KEPT:
            self._kept.clear()
        self._kept[_key(scope)] = answer, pulse, min(until, expires_at or until)

    async def answered(self, scope: Scope, receive: Receive, send: Send) -> int | None:
        """Sends what is kept for a request and returns its status; None when nothing is."""
        if scope["path"] != PATH or scope["method"] != "GET":
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
