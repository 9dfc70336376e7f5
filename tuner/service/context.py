"""What every route needs: the store, the clock, who may ask, and what starts runs."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from fastapi import Depends, Request

from tuner.fleet import notify
from tuner.history.store import Store
from tuner.records import JSON, AliasEvent
from tuner.service.auth import Actor, Guard
from tuner.service.pulls import Pulls
from tuner.service.runner import Controllers
from tuner.service.sessions import Attempts, Sessions
from tuner.service.study_requests import StudyFiles
from tuner.settings import Settings

log = logging.getLogger("tuner.service")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceContext:
    """The running service."""

    store: Store
    settings: Settings
    clock: Callable[[], datetime]
    runner: Controllers
    guard: Guard
    pulls: Pulls
    sessions: Sessions
    logins: Attempts
    refusals: Attempts
    poll_s: float = 0.5

    @property
    def studies(self) -> StudyFiles:
        """The studies that can be run here."""
        return StudyFiles(self.store, self.settings, self.clock)

    def audit(self, actor: Actor, action: str, target: str, reason: str, **detail: JSON) -> None:
        """One row per change, with the address that it came from."""
        if actor.client:
            detail["client"] = actor.client
        self.store.add_audit(
            actor=actor.name, action=action, target=target, reason=reason, now=self.clock(), detail=detail
        )

    def login_failed(self, client: str) -> None:
        """A token that opens nothing was tried on the login page: counted, logged, in the audit."""
        self.logins.failed(client)
        self._wrong_token(client, "/login")

    def refused(self, client: str, path: str) -> None:
        """A token that opens nothing was sent to the API: noted once an hour for each address."""
        if not self.refusals.wait_s(client):
            self.refusals.failed(client)
            self._wrong_token(client, path)

    def _wrong_token(self, client: str, path: str) -> None:
        log.warning("a token that is not valid was tried", extra={"client": client, "path": path})
        nobody = Actor(name="nobody", scopes=frozenset(), client=client)
        self.audit(nobody, "login.failed", path, "the token has expired, was revoked, or is not known")

    def tell(self, event: AliasEvent) -> None:
        """Notify of an alias that moved, without waiting for it."""
        notify.in_background(self.settings.home, notify.moved(event), log.warning)


def service_of(request: Request) -> ServiceContext:
    found: ServiceContext = request.app.state.service
    return found


Here = Annotated[ServiceContext, Depends(service_of)]
