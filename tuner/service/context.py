"""What every route needs: the store, the clock, the guard of tokens, and the part that starts runs."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated
from urllib.parse import quote

from fastapi import Depends, Request

from tuner.fleet import notify
from tuner.history.store import Store
from tuner.profiles import registry
from tuner.records import JSON, AliasEvent, Profile, ProfileKey
from tuner.service.auth import Actor, Attempts, Guard, Sessions, unnamed_database
from tuner.service.middleware import Pulls
from tuner.service.runner import Controllers
from tuner.service.study_requests import StudyFiles
from tuner.settings import Settings

log = logging.getLogger("tuner.service")
LONGEST_PATH = 200
"""The audit and the log keep so many characters of a refused request's path."""


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
    audited: Attempts
    changes: Attempts
    streams: Counter[str] = field(default_factory=Counter)
    """Open event streams of each token."""
    poll_s: float = 0.5

    @property
    def studies(self) -> StudyFiles:
        """The studies that can be run here."""
        return StudyFiles(self.store, self.settings, self.clock)

    def stopped_runs(self) -> frozenset[str]:
        """The ids of the runs that have not ended, but whose process is gone; see `Store.stopped_runs`."""
        return self.store.stopped_runs(now=self.clock())

    def audit(self, actor: Actor, action: str, target: str, reason: str, **detail: JSON) -> None:
        """Adds one row for a change, with the token and the client's address; `changes` counts the rows."""
        self.changes.failed(actor.id)
        detail |= {name: found for name in ("token", "client") if (found := getattr(actor, name))}
        self.store.add_audit(
            actor=actor.name, action=action, target=target, reason=reason, now=self.clock(), detail=detail
        )

    def promote(
        self,
        actor: Actor,
        profile: Profile,
        alias: str,
        *,
        reason: str,
        force: bool,
        expected: int | None,
        engine_version: str | None = None,
    ) -> AliasEvent:
        """Moves an alias to a version. `force` ignores the gates. Conflict names each gate that failed."""
        gates = registry.NO_GATES if force else registry.Gates(engine_version=engine_version)
        event = registry.promote(
            self.store, profile, alias, gates=gates, expected=expected, actor=actor.name, reason=reason,
            now=self.clock(),
        )  # fmt: skip
        self._moved(actor, "promote", event, reason, version=profile.version, force=force)
        return event

    def rollback(
        self, actor: Actor, key: ProfileKey, alias: str, *, reason: str, expected: int | None
    ) -> AliasEvent:
        """Moves an alias back to the version before."""
        event = registry.rollback(
            self.store, key, alias, actor=actor.name, reason=reason, now=self.clock(), expected=expected
        )
        self._moved(actor, "rollback", event, reason, version=event.to_version)
        return event

    def freeze(self, actor: Actor, key: ProfileKey, alias: str, frozen: bool, reason: str) -> AliasEvent:
        """Forbids an alias to move, or allows it again."""
        event = self.store.freeze_alias(key, alias, frozen, actor=actor.name, reason=reason, now=self.clock())
        self._moved(actor, "freeze" if frozen else "unfreeze", event, reason)
        return event

    def _moved(self, actor: Actor, action: str, event: AliasEvent, reason: str, **detail: JSON) -> None:
        """After a move: forgets kept pulls, writes the audit, and sends notifications."""
        self.pulls.forget()
        of = f"{event.alias} of {event.key.model} on {event.key.target} for {event.key.workload}"
        self.audit(actor, action, of, reason, **detail)
        if action in ("promote", "rollback"):
            notify.in_background(self.settings.home, notify.moved(event), log.warning)

    def login_failed(self, client: str) -> None:
        """A token that is not valid was tried on the login page. This is counted, logged and written into the
        audit.
        """
        self.logins.failed(client)
        self._wrong_token(client, "/login")

    def refused(self, client: str, path: str) -> None:
        """A token that is not valid was sent to the API. This is recorded once an hour for each address."""
        if not self.refusals.wait_s(client):
            self.refusals.failed(client)
            self._wrong_token(client, path)

    def _wrong_token(self, client: str, path: str) -> None:
        path = quote(path)[:LONGEST_PATH]
        log.warning("a token that is not valid was tried", extra={"client": client, "path": path})
        if self.audited.wait_s(""):
            return
        self.audited.failed("")
        nobody = Actor(name="nobody", scopes=frozenset(), client=client)
        with unnamed_database():
            self.audit(nobody, "login.failed", path, "the token has expired, was revoked, or is not known")


def service_of(request: Request) -> ServiceContext:
    found: ServiceContext = request.app.state.service
    return found


Here = Annotated[ServiceContext, Depends(service_of)]
