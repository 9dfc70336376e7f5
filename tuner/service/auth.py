"""Who asks: bearer tokens with scopes. Without any token the service trusts the loopback it is bound to."""

import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from ipaddress import IPv6Address, ip_address
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
    """What a database's error says goes to the log: who has no token must not read its name and address."""
    try:
        yield
    except TunerError as error:
        log.error("database: %s", error)
        raise type(error)(AWAY) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who asks, and what they may. The audit keeps `name`, the `token` (its id: several tokens may have one
    name), and the address `client` that asked.
    """

    name: str
    scopes: frozenset[str]
    token: str = ""
    expires_at: datetime | None = None
    client: str = ""

    @property
    def id(self) -> str:
        """Whose bounds and idempotency keys count: the token's, or those of everybody on an open service."""
        return self.token or self.name

    def may(self, scope: str) -> bool:
        return scope in self.scopes


LOCAL = Actor(name="local", scopes=frozenset(SCOPES))


def actor_of(token: Token) -> Actor:
    allowed = frozenset().union(*(INCLUDES[scope] for scope in token.scopes))
    return Actor(name=f"token:{token.name}", scopes=allowed, token=token.id, expires_at=token.expires_at)


class Guard:
    """Tells who a token text belongs to. Answers are kept until the history changes, or a minute."""

    def __init__(self, store: Store, clock: Callable[[], datetime], *, loopback: bool) -> None:
        self._store, self._clock, self._loopback = store, clock, loopback
        self._known: dict[bytes, tuple[Token | None, int, datetime]] = {}
        self._open: tuple[int, bool] | None = None

    def identify(self, text: str) -> Actor | None:
        """Whom a token text belongs to while it is valid; the comparison is constant in time."""
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
        """Whether no token was ever made and the service is bound to loopback, so that whoever is on this
        host is trusted: not the clients of a proxy here, nor a page that sends forms to another site or
        gives its own name our address (the Host header).
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
        """Who asks without a token: `local` while the service is open, else nobody."""
        return LOCAL if self.is_open(request) else None


def client_of(request: Request) -> str:
    """The address that a request comes from: a proxy's client where the proxy is on this host. Empty where
    a proxy names none.
    """
    said = request.client.host if request.client else ""
    try:
        address = ip_address(said)
    except ValueError:
        return said if _PLAIN.fullmatch(said) else ""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def same_site(request: Request) -> bool:
    """Whether the browser says that a request comes from our own pages (or does not say)."""
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
    """Who sent a request with these credentials. 401 without a valid token."""
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
    """A route's dependency: the actor, who must have the scope. 401 without a valid token, 403 without it."""

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
