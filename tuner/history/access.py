"""API tokens, the audit, and answers stored for repeated requests."""

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, insert, select, update

from tuner.errors import BadInput, Conflict, NotFound, nearest
from tuner.history.base import StorePart, record_of, row_of
from tuner.history.entities import SCOPES, AuditEntry, Token
from tuner.history.tables import answers, audit, tokens
from tuner.records import JSON

PREFIX = "tuner"

# A token's last use is written at most so often: reads of the API stay reads of the database.
USE_RESOLUTION = timedelta(minutes=1)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class AccessStore(StorePart):
    """Only hashes of tokens are stored; rows of the audit are never changed."""

    def create_token(
        self, name: str, scopes: Sequence[str], *, now: datetime, expires_at: datetime | None = None
    ) -> tuple[Token, str]:
        """A token and its text, which is shown once and stored nowhere."""
        for scope in scopes:
            if scope not in SCOPES:
                raise BadInput(f"'{scope}' is not a scope{nearest(scope, SCOPES)}: {', '.join(SCOPES)}")
        if not scopes:
            raise BadInput(f"a token needs a scope: {', '.join(SCOPES)}")
        token = Token(
            id=secrets.token_hex(6), name=name, scopes=tuple(scopes), created_at=now, expires_at=expires_at
        )
        secret = secrets.token_urlsafe(32)
        self._change(insert(tokens).values(**row_of(token), secret_hash=_hash(secret)))
        return token, f"{PREFIX}_{token.id}_{secret}"

    def verify_token(self, text: str, *, now: datetime) -> Token | None:
        """The token of a text; None if it is not valid. Its last use is stored, once a minute at most."""
        head, _, rest = text.partition("_")
        token_id, _, secret = rest.partition("_")
        query = select(tokens).where(tokens.c.id == token_id)
        row = self._read(lambda connection: connection.execute(query).mappings().one_or_none())
        # Compared even when there is no such id, so that the time taken does not give away which ids exist.
        kept = row["secret_hash"] if row is not None else _hash("")
        right = hmac.compare_digest(_hash(secret), kept)
        if row is None or not right or head != PREFIX:
            return None
        token = record_of(Token, row)
        if not token.valid(now):
            return None
        if token.last_used_at is None or now - token.last_used_at >= USE_RESOLUTION:
            self._change(update(tokens).where(tokens.c.id == token.id).values(last_used_at=now))
            return replace(token, last_used_at=now)
        return token

    def revoke_token(self, token_id: str, *, now: datetime) -> None:
        """Makes a token invalid from now on; this cannot be undone."""
        change = update(tokens).where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
        if self._change(change.values(revoked_at=now)) == 0:
            raise NotFound(f"there is no token '{token_id}' that could be revoked")

    def tokens(self) -> tuple[Token, ...]:
        return self._records(Token, select(tokens).order_by(tokens.c.created_at, tokens.c.id))

    def add_audit(
        self,
        *,
        actor: str,
        action: str,
        target: str,
        reason: str,
        now: datetime,
        detail: Mapping[str, JSON] | None = None,
    ) -> None:
        row = {"at": now, "actor": actor, "action": action, "target": target, "reason": reason}
        self._change(insert(audit).values(**row, detail=dict(detail or {})))

    def audit(self, *, after: int | None = None, limit: int = 100) -> tuple[AuditEntry, ...]:
        """The newest first; `after` is the id of the last one of the page before."""
        query = select(audit).order_by(audit.c.id.desc()).limit(limit)
        return self._records(AuditEntry, query if after is None else query.where(audit.c.id < after))

    def actors(self, action: str, targets: Sequence[str], *, first: bool = False) -> Mapping[str, str]:
        """Who did something last, or first, to each of the targets to which it was done."""
        ours = (audit.c.action == action, audit.c.target.in_(targets))
        order = audit.c.id.desc() if first else audit.c.id
        query = select(audit.c.target, audit.c.actor).where(*ours).order_by(order)
        return {row[0]: row[1] for row in self._read(lambda connection: connection.execute(query).all())}

    def answer(self, key: str, request_digest: str) -> JSON:
        """What was answered to a request with this idempotency key; None when it is new. The caller puts into
        the key whose it is.

        Raises Conflict when the key came with another request before.
        """
        return self._read(lambda connection: _answer(connection, key, request_digest))

    def keep_answer(self, key: str, request_digest: str, answer: JSON, *, now: datetime) -> JSON:
        """Stores an answer; if one is stored already, returns that one."""

        def work(connection: Connection) -> JSON:
            if (found := _answer(connection, key, request_digest)) is not None:
                return found
            row = {"key": key, "request_digest": request_digest, "answer": answer, "at": now}
            connection.execute(insert(answers).values(**row))
            return answer

        return self._write(work)

    def forget_answers(self, before: datetime) -> int:
        """Deletes answers to requests older than a moment; returns how many."""
        return self._change(delete(answers).where(answers.c.at < before))


def _answer(connection: Connection, key: str, request_digest: str) -> JSON:
    row = connection.execute(select(answers).where(answers.c.key == key)).mappings().one_or_none()
    if row is None:
        return None
    if row["request_digest"] != request_digest:
        raise Conflict(f"idempotency key '{key.split()[-1]}' was used for another request")
    found: JSON = row["answer"]
    return found
