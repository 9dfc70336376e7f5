"""The visitors of pages: the session's id is in an HttpOnly cookie, and every form has a CSRF token."""

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated
from urllib.parse import parse_qs, quote

from fastapi import Depends, Request

from tuner.errors import BadInput, TunerError
from tuner.service.auth import Actor, client_of, same_site
from tuner.service.context import ServiceContext, service_of

COOKIE = "tuner_session"
OVER = "Your session is over: it has ended, or its token has expired or was revoked."
LARGEST_FORM = 64 * 1024
_PROCESS = secrets.token_hex(32)


class Away(Exception):
    """The visitor must log in first. `reason` says why, and `target` is the page that they asked for."""

    def __init__(self, reason: str, target: str) -> None:
        super().__init__(reason)
        self.reason, self.target = reason, target


class NotAllowed(TunerError):
    """A page or form that this visitor may not use."""

    def __init__(self, sentence: str, status: int = 403) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """A visitor of the pages of one service. Forms of this visitor must contain `csrf`."""

    service: ServiceContext
    actor: Actor
    csrf: str
    target: str
    open: bool

    def needs(self, scope: str) -> None:
        """Raises NotAllowed if the visitor's token does not have the scope."""
        if not self.actor.may(scope):
            has = ", ".join(sorted(self.actor.scopes))
            raise NotAllowed(f"This needs a token with scope '{scope}'; yours has {has}.")


def csrf_of(word: str) -> str:
    """The CSRF token of a session. Only those who can read the cookie or our pages can know it."""
    return hmac.new((word or _PROCESS).encode(), b"tuner pages", "sha256").hexdigest()[:40]


def visitor(request: Request) -> Visitor:
    """The visitor of a page. Raises Away if no session has a valid token, and NotAllowed without the scope
    read.
    """
    service = service_of(request)
    word = request.cookies.get(COOKIE, "")
    target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    if word:
        token = service.sessions.token(word)
        actor = service.guard.identify(token) if token is not None else None
    else:
        actor = service.guard.anonymous(request)
    if actor is None:
        raise Away(OVER if word else "", target if request.method == "GET" else "/")
    actor = replace(actor, client=client_of(request))
    found = Visitor(service=service, actor=actor, csrf=csrf_of(word), target=target, open=not word)
    found.needs("read")
    return found


Looks = Annotated[Visitor, Depends(visitor)]


async def form(request: Request) -> dict[str, str]:
    """The fields of a urlencoded form. NotAllowed if it comes from another site or is too large."""
    if not same_site(request):
        raise NotAllowed("This form was sent from another site.")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_FORM:
            raise NotAllowed("This form is too large.", 413)
    fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[0] for name, values in fields.items()}


async def signed_form(request: Request, looks: Looks) -> dict[str, str]:
    """A form with the right CSRF token."""
    fields = await form(request)
    if not hmac.compare_digest(fields.get("csrf", "").encode(), looks.csrf.encode()):
        raise NotAllowed("This form is out of date: go back, load the page again, and send it once more.")
    if wait_s := looks.service.changes.wait_s(looks.actor.id):
        raise NotAllowed(f"You made too many changes within a minute. Try again in {wait_s} s.", 429)
    return fields


def reason_of(fields: Mapping[str, str]) -> str:
    """The reason for a change, from a form. BadInput if it is empty."""
    reason = fields.get("reason", "").strip()
    if not reason:
        raise BadInput("Say why: the reason is kept with the event.")
    if len(reason) > 500:
        raise BadInput("The reason is longer than 500 characters.")
    return reason


Form = Annotated[dict[str, str], Depends(form)]
SignedForm = Annotated[dict[str, str], Depends(signed_form)]


def local(target: str) -> str:
    """A path on this site; `/` for anything else."""
    safe = target.startswith("/") and not target.startswith("//") and "\\" not in target
    return target if safe and target.isprintable() else "/"


def login_url(target: str, reason: str) -> str:
    """The address of the login, which leads back to `target`."""
    why = "&expired=1" if reason else ""
    return f"/login?next={quote(target, safe='')}{why}"
