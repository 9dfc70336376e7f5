"""Traces and nodes."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Literal

from sqlalchemy import Connection, insert, select, update

from tuner.errors import BadInput, NotFound, nearest
from tuner.history.base import Part
from tuner.history.codec import node_of, node_row, trace_of
from tuner.history.entities import TraceInfo
from tuner.history.tables import nodes, traces
from tuner.records import JSON, Node

NodeState = Literal["free", "leased", "draining", "dirty", "fault"]


def _trace(connection: Connection, ref: str) -> TraceInfo:
    ref = ref.removeprefix("latest:")
    newest = traces.c.created_at.desc(), traces.c.digest
    for matching in (traces.c.digest == ref, traces.c.name == ref):
        row = connection.execute(select(traces).where(matching).order_by(*newest)).mappings().first()
        if row is not None:
            return trace_of(row)
    begins = select(traces).where(traces.c.digest.startswith(ref, autoescape=True)).limit(2)
    found = connection.execute(begins).mappings().all() if ref else []
    if len(found) > 1:
        raise BadInput(f"'{ref}' begins the digest of more than one trace: give more of it")
    if not found:
        names = connection.execute(select(traces.c.name).distinct()).scalars()
        raise NotFound(f"there is no trace '{ref}'{nearest(ref, names)}")
    return trace_of(found[0])


class Catalog(Part):
    """Traces by digest and name, nodes by name."""

    def add_trace(
        self, digest: str, name: str, path: str, meta: Mapping[str, JSON], now: datetime
    ) -> TraceInfo:
        """Registers a trace. The same content again moves its name and path and makes it the newest."""
        info = TraceInfo(digest=digest, name=name, path=path, meta=dict(meta), created_at=now)
        row = {"name": name, "path": path, "meta": dict(meta), "created_at": now}

        def work(connection: Connection) -> TraceInfo:
            change = update(traces).where(traces.c.digest == digest).values(**row)
            if connection.execute(change).rowcount == 0:
                connection.execute(insert(traces).values(digest=digest, **row))
            return info

        return self._write(work)

    def trace(self, ref: str) -> TraceInfo:
        """A trace by digest, name (the newest of it; `latest:NAME` too) or the beginning of its digest."""
        return self._read(lambda connection: _trace(connection, ref))

    def traces(self) -> tuple[TraceInfo, ...]:
        """All traces, the newest first."""
        query = select(traces).order_by(traces.c.created_at.desc(), traces.c.digest)
        return self._read(lambda c: tuple(trace_of(row) for row in c.execute(query).mappings()))

    def add_node(self, node: Node) -> Node:
        """Registers a node, or writes what is now known of it."""

        def work(connection: Connection) -> Node:
            change = update(nodes).where(nodes.c.name == node.name).values(**node_row(node))
            if connection.execute(change).rowcount == 0:
                connection.execute(insert(nodes).values(**node_row(node)))
            return node

        return self._write(work)

    def node(self, name: str) -> Node:
        def work(connection: Connection) -> Node:
            row = connection.execute(select(nodes).where(nodes.c.name == name)).mappings().one_or_none()
            if row is None:
                names = connection.execute(select(nodes.c.name)).scalars()
                raise NotFound(f"there is no node '{name}'{nearest(name, names)}")
            return node_of(row)

        return self._read(work)

    def nodes(self) -> tuple[Node, ...]:
        query = select(nodes).order_by(nodes.c.name)
        return self._read(lambda c: tuple(node_of(row) for row in c.execute(query).mappings()))

    def set_node_state(self, name: str, state: NodeState) -> Node:
        """Writes a node's state and nothing else of it."""
        node = self.node(name)

        def work(connection: Connection) -> Node:
            connection.execute(update(nodes).where(nodes.c.name == name).values(state=state))
            return replace(node, state=state)

        return self._write(work)

    def set_handover(self, name: str, journal: JSON) -> None:
        """Writes what must be undone on a node (None: nothing), to be read again after any death."""

        def work(connection: Connection) -> None:
            change = update(nodes).where(nodes.c.name == name).values(handover=journal)
            if connection.execute(change).rowcount == 0:
                raise NotFound(f"there is no node '{name}'")

        self._write(work)

    def handover(self, name: str) -> JSON:
        """What `set_handover` wrote last; None when nothing is to be undone."""
        query = select(nodes.c.handover).where(nodes.c.name == name)
        return self._read(lambda connection: connection.execute(query).scalar_one_or_none())
