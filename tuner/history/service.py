"""The service's own rows: traces, nodes with their leases, schedules; API tokens, the audit, and answers
stored for repeated requests.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import Connection, delete, insert, select, update

from tuner.errors import BadInput, Conflict, NotFound, nearest
from tuner.history.base import StorePart, find, hold, record_of, row_of
from tuner.history.entities import SCOPES, AuditEntry, Lease, Schedule, Token, TraceInfo
from tuner.history.tables import answers, audit, leases, nodes, schedules, tokens, traces
from tuner.records import JSON, Node

NodeState = Literal["free", "leased", "draining", "dirty", "fault"]


class NodeStore(StorePart):
    """One holder of a node at a time: the fence number of its leases only grows, so an old lease is
    recognised. Schedules are rows only; `tuner.fleet` computes when they are due.
    """

    def add_trace(
        self, digest: str, name: str, path: str, meta: Mapping[str, JSON], now: datetime
    ) -> TraceInfo:
        """Registers a trace. The same content again moves its name and path and makes it the newest."""
        info = TraceInfo(digest=digest, name=name, path=path, meta=dict(meta), created_at=now)
        self._put(traces, "digest", row_of(info))
        return info

    def trace(self, ref: str) -> TraceInfo:
        """A trace by digest, name (the newest of it; `latest:NAME` too) or the beginning of its digest."""
        name = ref.removeprefix("latest:")
        return self._read(lambda connection: find(TraceInfo, connection, traces.c.digest, name, "trace"))

    def traces(self) -> tuple[TraceInfo, ...]:
        """All traces, the newest first."""
        return self._records(TraceInfo, select(traces).order_by(traces.c.created_at.desc(), traces.c.digest))

    def forget_trace(self, digest: str) -> None:
        """Takes a trace out of the register; studies keep its digest."""
        self._change(delete(traces).where(traces.c.digest == digest))

    def add_node(self, node: Node) -> Node:
        """Registers a node, or updates it."""
        self._put(nodes, "name", row_of(node))
        return node

    def node(self, name: str) -> Node:
        return self._named(Node, nodes.c.name, name)

    def nodes(self) -> tuple[Node, ...]:
        return self._records(Node, select(nodes).order_by(nodes.c.name))

    def set_node_state(self, name: str, state: NodeState) -> Node:
        """Writes a node's state and nothing else of it."""
        node = self.node(name)
        self._change(update(nodes).where(nodes.c.name == name).values(state=state))
        return replace(node, state=state)

    def set_handover(self, name: str, journal: JSON) -> None:
        """Writes what must be undone on a node (None: nothing); it is read again after any crash."""
        if self._change(update(nodes).where(nodes.c.name == name).values(handover=journal)) == 0:
            raise NotFound(f"there is no node '{name}'")

    def handover(self, name: str) -> JSON:
        """What `set_handover` wrote last; None when nothing is to be undone."""
        query = select(nodes.c.handover).where(nodes.c.name == name)
        return self._read(lambda connection: connection.execute(query).scalar_one_or_none())

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
            change = insert(leases) if row is None else update(leases).where(leases.c.node == node)
            connection.execute(change.values(**row_of(lease), released=False))
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
        return self._change(update(leases).where(*ours).values(released=True)) == 1

    def leases(self, *, now: datetime) -> tuple[Lease, ...]:
        """The leases that hold at `now`, by node."""
        query = select(leases).where(leases.c.released.is_(False), leases.c.expires_at > now)
        return self._records(Lease, query.order_by(leases.c.node))

    def put_schedule(self, schedule: Schedule) -> Schedule:
        """Writes a schedule, new or changed."""
        self._put(schedules, "name", row_of(schedule))
        return schedule

    def schedule(self, name: str) -> Schedule:
        return self._named(Schedule, schedules.c.name, name)

    def schedules(self) -> tuple[Schedule, ...]:
        return self._records(Schedule, select(schedules).order_by(schedules.c.name))

    def remove_schedule(self, name: str) -> None:
        if self._change(delete(schedules).where(schedules.c.name == name)) == 0:
            raise NotFound(f"there is no schedule '{name}'")

    def fire_schedule(self, name: str, due: datetime) -> bool:
        """Claims one due time; False when anybody claimed it, or a later one, before."""
        unclaimed = schedules.c.last_due.is_(None) | (schedules.c.last_due < due)
        change = update(schedules).where(schedules.c.name == name, unclaimed).values(last_due=due)
        return self._change(change) == 1

    def scheduled_run(self, name: str, run_id: str | None) -> None:
        """Writes which run the last firing became; None: it became none."""
        self._change(update(schedules).where(schedules.c.name == name).values(last_run_id=run_id))


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
        raise Conflict(f"idempotency key '{key.split()[-1]}' was used for another request: send a new key")
    found: JSON = row["answer"]
    return found
