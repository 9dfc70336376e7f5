"""Rows of the service: leases, schedules, tokens, audit, and answers kept for repeated requests."""

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, insert, select, update

from tuner.errors import BadInput, Conflict, NotFound, nearest
from tuner.history.base import Part, hold
from tuner.history.codec import lease_of, schedule_of, schedule_row, token_of
from tuner.history.entities import SCOPES, AuditEntry, Lease, Schedule, Token
from tuner.history.tables import answers, audit, leases, schedules, tokens
from tuner.records import JSON

PREFIX = "tuner"
USE_RESOLUTION = timedelta(minutes=1)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Leases(Part):
    """One holder per node at a time. A fence only grows, so whoever lost the lease can be told apart."""

    def acquire_lease(self, node: str, holder: str, *, now: datetime, ttl_s: float) -> Lease:
        """Takes a node that is free or whose lease ran out. Raises Conflict naming the holder otherwise."""
        expires = now + timedelta(seconds=ttl_s)

        def work(connection: Connection) -> Lease:
            query = select(leases).where(leases.c.node == node).with_for_update()
            row = connection.execute(query).mappings().one_or_none()
            if row is not None and not row["released"] and row["expires_at"] > now:
                until = f"{row['expires_at']:%Y-%m-%d %H:%M:%S} UTC"
                raise Conflict(f"node '{node}' is leased to '{row['holder']}' until {until}")
            fence = 1 if row is None else int(row["fence"]) + 1
            lease = Lease(node=node, holder=holder, fence=fence, acquired_at=now, expires_at=expires)
            values = {name: getattr(lease, name) for name in Lease.__dataclass_fields__}
            if row is None:
                connection.execute(insert(leases).values(**values, released=False))
            else:
                change = update(leases).where(leases.c.node == node)
                connection.execute(change.values(**values, released=False))
            return lease

        return self._write(work)

    def renew_lease(self, lease: Lease, *, now: datetime, ttl_s: float) -> Lease:
        """The heartbeat. Raises Conflict when the lease was lost or had already run out."""
        longer = replace(lease, expires_at=now + timedelta(seconds=ttl_s))

        def work(connection: Connection) -> Lease:
            hold(connection, lease, now)
            change = update(leases).where(leases.c.node == lease.node)
            connection.execute(change.values(expires_at=longer.expires_at))
            return longer

        return self._write(work)

    def release_lease(self, lease: Lease) -> bool:
        """Gives a node back; False when it was no longer ours (then nothing is changed)."""
        ours = (leases.c.node == lease.node, leases.c.fence == lease.fence, leases.c.released.is_(False))

        def work(connection: Connection) -> bool:
            return connection.execute(update(leases).where(*ours).values(released=True)).rowcount == 1

        return self._write(work)

    def leases(self, *, now: datetime) -> tuple[Lease, ...]:
        """The leases that hold at `now`, by node."""
        query = select(leases).where(leases.c.released.is_(False), leases.c.expires_at > now)
        query = query.order_by(leases.c.node)
        return self._read(lambda c: tuple(lease_of(row) for row in c.execute(query).mappings()))


class Schedules(Part):
    """Rows only; when they are due is the fleet's arithmetic."""

    def put_schedule(self, schedule: Schedule) -> Schedule:
        """Writes a schedule, new or changed."""
        row = schedule_row(schedule)

        def work(connection: Connection) -> Schedule:
            change = update(schedules).where(schedules.c.name == schedule.name).values(**row)
            if connection.execute(change).rowcount == 0:
                connection.execute(insert(schedules).values(**row))
            return schedule

        return self._write(work)

    def schedule(self, name: str) -> Schedule:
        def work(connection: Connection) -> Schedule:
            query = select(schedules).where(schedules.c.name == name)
            row = connection.execute(query).mappings().one_or_none()
            if row is None:
                names = connection.execute(select(schedules.c.name)).scalars()
                raise NotFound(f"there is no schedule '{name}'{nearest(name, names)}")
            return schedule_of(row)

        return self._read(work)

    def schedules(self) -> tuple[Schedule, ...]:
        query = select(schedules).order_by(schedules.c.name)
        return self._read(lambda c: tuple(schedule_of(row) for row in c.execute(query).mappings()))

    def remove_schedule(self, name: str) -> None:
        def work(connection: Connection) -> None:
            if connection.execute(delete(schedules).where(schedules.c.name == name)).rowcount == 0:
                raise NotFound(f"there is no schedule '{name}'")

        self._write(work)

    def fire_schedule(self, name: str, due: datetime) -> bool:
        """Claims one due time; False when it, or a later one, was claimed before (by anybody)."""
        open_ = schedules.c.last_due.is_(None) | (schedules.c.last_due < due)
        change = update(schedules).where(schedules.c.name == name, open_).values(last_due=due)
        return self._write(lambda connection: connection.execute(change).rowcount == 1)

    def scheduled_run(self, name: str, run_id: str) -> None:
        """Writes which run the last firing became."""
        change = update(schedules).where(schedules.c.name == name).values(last_run_id=run_id)
        self._write(lambda connection: connection.execute(change).rowcount)


class Tokens(Part):
    """API tokens; only hashes are kept."""

    def create_token(
        self, name: str, scopes: Sequence[str], *, now: datetime, expires_at: datetime | None = None
    ) -> tuple[Token, str]:
        """A token and its text, which is nowhere else and shown once."""
        for scope in scopes:
            if scope not in SCOPES:
                raise BadInput(f"'{scope}' is not a scope{nearest(scope, SCOPES)}: {', '.join(SCOPES)}")
        if not scopes:
            raise BadInput(f"a token needs a scope: {', '.join(SCOPES)}")
        token = Token(
            id=secrets.token_hex(6), name=name, scopes=tuple(scopes), created_at=now, expires_at=expires_at
        )
        secret = secrets.token_urlsafe(32)
        row = {field: getattr(token, field) for field in Token.__dataclass_fields__}
        row |= {"scopes": list(scopes), "secret_hash": _hash(secret)}
        self._write(lambda connection: connection.execute(insert(tokens).values(**row)).rowcount)
        return token, f"{PREFIX}_{token.id}_{secret}"

    def verify_token(self, text: str, *, now: datetime) -> Token | None:
        """The token that a text belongs to, while it is valid; its last use is written to the minute."""
        head, _, rest = text.partition("_")
        token_id, _, secret = rest.partition("_")
        query = select(tokens).where(tokens.c.id == token_id)
        row = self._read(lambda connection: connection.execute(query).mappings().one_or_none())
        # Compared even when there is no such id, so that the time taken tells nothing.
        kept = row["secret_hash"] if row is not None else _hash("")
        right = hmac.compare_digest(_hash(secret), kept)
        if row is None or not right or head != PREFIX:
            return None
        token = token_of(row)
        if not token.valid(now):
            return None
        if token.last_used_at is None or now - token.last_used_at >= USE_RESOLUTION:
            used = update(tokens).where(tokens.c.id == token.id).values(last_used_at=now)
            self._write(lambda connection: connection.execute(used).rowcount)
            return replace(token, last_used_at=now)
        return token

    def revoke_token(self, token_id: str, *, now: datetime) -> None:
        """Makes a token worthless from now on; once revoked it stays so."""
        change = update(tokens).where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None))

        def work(connection: Connection) -> None:
            if connection.execute(change.values(revoked_at=now)).rowcount == 0:
                raise NotFound(f"there is no token '{token_id}' that could be revoked")

        self._write(work)

    def tokens(self) -> tuple[Token, ...]:
        query = select(tokens).order_by(tokens.c.created_at, tokens.c.id)
        return self._read(lambda c: tuple(token_of(row) for row in c.execute(query).mappings()))


class Audit(Part):
    """Rows are only ever added."""

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
        query = insert(audit).values(**row, detail=dict(detail or {}))
        self._write(lambda connection: connection.execute(query).rowcount)

    def audit(self, *, after: int | None = None, limit: int = 100) -> tuple[AuditEntry, ...]:
        """The newest first; `after` is the id of the last one of the page before."""
        query = select(audit).order_by(audit.c.id.desc()).limit(limit)
        if after is not None:
            query = query.where(audit.c.id < after)
        return self._read(lambda c: tuple(AuditEntry(**row) for row in c.execute(query).mappings()))

    def answer(self, key: str, request_digest: str) -> JSON:
        """What was answered to a request with this idempotency key; None when it is new.

        Raises Conflict when the key came with another request before.
        """

        def work(connection: Connection) -> JSON:
            row = connection.execute(select(answers).where(answers.c.key == key)).mappings().one_or_none()
            if row is None:
                return None
            if row["request_digest"] != request_digest:
                raise Conflict(f"idempotency key '{key}' was used for another request")
            found: JSON = row["answer"]
            return found

        return self._read(work)

    def keep_answer(self, key: str, request_digest: str, answer: JSON, *, now: datetime) -> JSON:
        """Keeps an answer; the one that was kept first stands and is given back."""

        def work(connection: Connection) -> JSON:
            row = connection.execute(select(answers).where(answers.c.key == key)).mappings().one_or_none()
            if row is not None:
                if row["request_digest"] != request_digest:
                    raise Conflict(f"idempotency key '{key}' was used for another request")
                found: JSON = row["answer"]
                return found
            row_values = {"key": key, "request_digest": request_digest, "answer": answer, "at": now}
            connection.execute(insert(answers).values(**row_values))
            return answer

        return self._write(work)
