"""Authentication: bearer tokens with scopes, and sessions of the pages.

If no token was ever made, the service trusts the clients on its loopback address. When the service restarts,
it forgets sessions, and how often an address tried a wrong token.
"""

import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from ipaddress import IPv6Address, ip_address
from threading import Lock
from typing import Annotated

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from tuner.errors import TunerError
from tuner.history.entities import SCOPES, Token
from tuner.history.store import Store

INCLUDES = {"read": {"read"}, "run": {"read", "run"}, "promote": {"read", "promote"}, "admin": set(SCOPES)}
"""What each scope of a token allows."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
PROXY_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
AWAY = "the database cannot be used now; the service's log says why"
log = logging.getLogger("tuner.service")
_PLAIN = re.compile(r"[\w.:%-]{1,64}", re.ASCII)
RECHECK = timedelta(seconds=60)
KEPT = 1024

bearer = HTTPBearer(auto_error=False, description="A token of `tuner token create`.")


@contextmanager
def unnamed_database() -> Iterator[None]:
    """The error to show if the database fails. The database's own message goes to the log, because it can
    contain the database's name and address.
    """
    try:
        yield
    except TunerError as error:
        log.error("database: %s", error)
        raise type(error)(AWAY) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who sends a request, and what they may do. The audit keeps `name`, the `token` (its id, because several
    tokens may have one name), and the address `client`.
    """

    name: str
    scopes: frozenset[str]
    token: str = ""
    expires_at: datetime | None = None
    client: str = ""

    @property
    def id(self) -> str:
        """The owner of limits and idempotency keys: the token, or all clients together if the service is
        open.
        """
        return self.token or self.name

    def may(self, scope: str) -> bool:
        return scope in self.scopes


LOCAL = Actor(name="local", scopes=frozenset(SCOPES))


def actor_of(token: Token) -> Actor:
    allowed = frozenset().union(*(INCLUDES[scope] for scope in token.scopes))
    return Actor(name=f"token:{token.name}", scopes=allowed, token=token.id, expires_at=token.expires_at)


class Guard:
    """Finds the owner of a token. Answers are kept until the history changes, but at most a minute."""

    def __init__(self, store: Store, clock: Callable[[], datetime], *, loopback: bool) -> None:
        self._store, self._clock, self._loopback = store, clock, loopback
        self._known: dict[bytes, tuple[Token | None, int, datetime]] = {}
        self._open: tuple[int, bool] | None = None

    def identify(self, text: str) -> Actor | None:
        """Who a token belongs to, while the token is valid. The comparison takes constant time."""
        now = self._clock()
        with unnamed_database():
            pulse = self._store.change_token()
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        kept = self._known.get(key)
        if kept is None or kept[1] != pulse or now - kept[2] >= RECHECK:
            with unnamed_database():
                token = self._store.verify_token(text, now=now)
            if len(self._known) >= KEPT:
                self._known.clear()
            kept = self._known[key] = (token, pulse, now)
        found = kept[0]
        return actor_of(found) if found is not None and found.valid(now) else None

    def is_open(self, request: Request) -> bool:
        """Whether a request is allowed without a token. This needs four things: no token was ever made; the
        service is bound to loopback; the request does not come through a proxy and names a loopback address
        as its host; and a request that changes something does not come from another site.
        """
        given = request.headers
        proxied = any(name in given for name in PROXY_HEADERS)
        if not self._loopback or proxied or _hostname(given.get("host", "")) not in LOOPBACK:
            return False
        if request.method not in ("GET", "HEAD") and not same_site(request):
            return False
        with unnamed_database():
            pulse = self._store.change_token()
            if self._open is None or self._open[0] != pulse:
                self._open = (pulse, not self._store.tokens())
        return self._open[1]

    def anonymous(self, request: Request) -> Actor | None:
        """Who sends a request without a token: `local` while the service is open, otherwise nobody."""
        return LOCAL if self.is_open(request) else None


def client_of(request: Request) -> str:
    """The address that a request comes from. If a proxy on this host sent it, this is the address of the
    proxy's client; empty if the proxy does not name it.
    """
    said = request.client.host if request.client else ""
    try:
        address = ip_address(said)
    except ValueError:
        return said if _PLAIN.fullmatch(said) else ""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def same_site(request: Request) -> bool:
    """Whether the browser says that the request comes from our own pages, or says nothing."""
    given = request.headers
    if given.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return False
    origin = given.get("origin")
    return origin is None or origin.partition("://")[2] == given.get("host", "")


def _hostname(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def authenticated(request: Request, given: HTTPAuthorizationCredentials | None) -> Actor:
    """Who sent a request with these credentials. 401 if the token is not valid."""
    guard: Guard = request.app.state.service.guard
    if given is not None:
        actor = guard.identify(given.credentials)
        if actor is None:
            request.app.state.service.refused(client_of(request), request.url.path)
    elif "authorization" in request.headers:
        actor = None
    else:
        actor = guard.anonymous(request)
    if actor is None:
        raise HTTPException(
            401,
            "a valid token is needed: Authorization: Bearer … ('tuner token create' makes one)",
            {"WWW-Authenticate": "Bearer"},
        )
    return replace(actor, client=client_of(request))


class Requires:
    """A dependency of a route: the actor, who must have the scope. 401 without a valid token, 403 without the
    scope.
    """

    def __init__(self, scope: str) -> None:
        self.scope = scope

    def __call__(
        self, request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
    ) -> Actor:
        actor = authenticated(request, given)
        if not actor.may(self.scope):
            raise HTTPException(403, f"this needs scope '{self.scope}'; the token has {_said(actor)}")
        if request.method != "GET" and (wait_s := request.app.state.service.changes.wait_s(actor.id)):
            raise HTTPException(
                429, f"this token made too many changes within a minute; try again in {wait_s} s",
                {"Retry-After": str(wait_s)},
            )  # fmt: skip
        return actor


def _said(actor: Actor) -> str:
    return ", ".join(scope for scope in SCOPES if scope in actor.scopes)


Reader = Annotated[Actor, Depends(Requires("read"))]
Runner = Annotated[Actor, Depends(Requires("run"))]
Promoter = Annotated[Actor, Depends(Requires("promote"))]
Admin = Annotated[Actor, Depends(Requires("admin"))]


LIFE, IDLE = timedelta(hours=12), timedelta(hours=2)
"""How long a session lasts, and how long unused."""
MOST_SESSIONS, MOST_ADDRESSES = 4096, 10_000


@dataclass(slots=True)
class _Session:
    token: str
    began: datetime
    used: datetime

    def over(self, now: datetime) -> bool:
        return now - self.began >= LIFE or now - self.used >= IDLE


class Sessions:
    """Random session ids that stand for tokens. The ids are kept only as hashes, and the tokens only in
    memory.
    """

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock, self._lock = clock, Lock()
        self._kept: dict[bytes, _Session] = {}

    def begin(self, token: str) -> str:
        """A new session's id. If there are too many sessions, the oldest one ends."""
        word, now = secrets.token_urlsafe(32), self._clock()
        with self._lock:
            self._kept = {key: each for key, each in self._kept.items() if not each.over(now)}
            while len(self._kept) >= MOST_SESSIONS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[_key(word)] = _Session(token, now, now)
        return word

    def token(self, word: str) -> str | None:
        """The token of a session that has not ended. The session's last use is set to now."""
        key, now = _key(word), self._clock()
        with self._lock:
            found = self._kept.get(key)
            if found is None or found.over(now):
                self._kept.pop(key, None)
                return None
            found.used = now
            return found.token

    def end(self, word: str) -> None:
        """Ends a session at once, for every browser that has its id."""
        with self._lock:
            self._kept.pop(_key(word), None)


class Attempts:
    """Counts failed logins by client address: at most `most` within `span`."""

    def __init__(self, clock: Callable[[], datetime], *, most: int, span: timedelta) -> None:
        self._clock, self._most, self._span, self._lock = clock, most, span, Lock()
        self._failed: dict[str, list[datetime]] = {}

    def wait_s(self, client: str) -> int:
        """Seconds until this address may try again; 0: now."""
        now = self._clock()
        with self._lock:
            failed = [at for at in self._failed.get(_network(client), []) if now - at < self._span]
        if len(failed) < self._most:
            return 0
        return max(1, round((failed[-self._most] + self._span - now).total_seconds()))

    def failed(self, client: str) -> None:
        """Counts a failed login. If there are too many addresses, the oldest one is forgotten."""
        network = _network(client)
        with self._lock:
            before = self._failed.pop(network, [])
            while len(self._failed) >= MOST_ADDRESSES:
                self._failed.pop(next(iter(self._failed)))
            self._failed[network] = [*before, self._clock()][-self._most :]


def _key(word: str) -> bytes:
    return hashlib.sha256(word.encode("utf-8", "surrogatepass")).digest()


def _network(client: str) -> str:
    """The network of an address. For IPv6 this is the first 64 bits, because one host can choose any address
    within them.
    """
    try:
        address = ip_address(client)
    except ValueError:
        return client
    return str(int(address) >> 64) if isinstance(address, IPv6Address) else client
