"""Traces, nodes with their leases, and schedules."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import Connection, delete, insert, select, update

from tuner.errors import Conflict, NotFound
from tuner.history.base import StorePart, find, hold, row_of
from tuner.history.entities import Lease, Schedule, TraceInfo
from tuner.history.tables import leases, nodes, schedules, traces
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
