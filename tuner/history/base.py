"""What every part of the Store stands on: the database, and the lease that guards its writes."""

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Connection, Result, select

from tuner.errors import Conflict, NotFound
from tuner.history.database import Database
from tuner.history.entities import Lease
from tuner.history.tables import leases

T = TypeVar("T")


class Part:
    """A part of the Store; `_lease` and `_clock` are set in a fenced one."""

    _database: Database
    _lease: Lease | None = None
    _clock: Callable[[], datetime] | None = None

    def _read(self, work: Callable[[Connection], T]) -> T:
        return self._database.read(work)

    def prove(self) -> None:
        """Raises Conflict when this store is fenced by a lease that was lost or ran out."""
        if self._lease is not None:
            self._write(lambda connection: None)

    def _write(self, work: Callable[[Connection], T]) -> T:
        lease, clock = self._lease, self._clock
        if lease is None or clock is None:
            return self._database.write(work)

        def guarded(connection: Connection) -> T:
            hold(connection, lease, clock())
            return work(connection)

        return self._database.write(guarded)


def plain(result: Result[Any]) -> list[dict[str, Any]]:
    """Rows by name, as plain dictionaries: several times quicker to read than SQLAlchemy's mappings."""
    names = tuple(result.keys())
    return [dict(zip(names, row, strict=True)) for row in result.all()]


def hold(connection: Connection, lease: Lease, now: datetime) -> None:
    """Raises Conflict unless the lease is still the newest of its node and has not run out at `now`.

    The row is locked, so the lease cannot be taken over before the transaction ends.
    """
    row = connection.execute(select(leases).where(leases.c.node == lease.node).with_for_update()).mappings()
    found = row.one_or_none()
    if found is None:
        raise NotFound(f"node '{lease.node}' has no lease")
    if found["fence"] != lease.fence or found["released"]:
        raise Conflict(
            f"the lease on node '{lease.node}' (fence {lease.fence}) is no longer ours:"
            f" '{found['holder']}' has fence {found['fence']}; stop, nothing was written"
        )
    if found["expires_at"] <= now:
        raise Conflict(f"the lease on node '{lease.node}' (fence {lease.fence}) ran out; nothing was written")
