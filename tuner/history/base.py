"""What every part of the Store builds on: transactions that prove the lease, and records from rows and back.
One TypeAdapter for each kind of record reads and writes it; the record itself (`tuner.records`) defines how a
field is written: a measured +inf is null, for example.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from pydantic_core import PydanticSerializationError
from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Result,
    RowMapping,
    Select,
    Table,
    insert,
    select,
    update,
)

from tuner.conclusions import adapter
from tuner.errors import BadInput, Conflict, NotFound, nearest
from tuner.history.database import Database
from tuner.history.entities import Lease
from tuner.history.tables import leases
from tuner.records import ProfileKey

T = TypeVar("T")


def row_of(record: object, *without: str) -> dict[str, Any]:
    """A record as a row, its profile key as three columns. BadInput for a number that no row can hold."""
    try:
        row = adapter(type(record)).dump_python(record, exclude=set(without), warnings=False)
    except PydanticSerializationError as error:
        raise BadInput(str(error.__cause__ or error)) from error
    if "key" in row:
        row |= row.pop("key")
    return dict(row)


def record_of(kind: type[T], row: Mapping[str, Any] | RowMapping) -> T:
    """The record of a row; columns that it has no field for are left out."""
    values = dict(row)
    found: T = adapter(kind).validate_python({**values, "key": values})
    return found


def plain(result: Result[Any]) -> list[dict[str, Any]]:
    """Rows by name, as plain dictionaries: several times quicker to read than SQLAlchemy's mappings."""
    names = tuple(result.keys())
    return [dict(zip(names, row, strict=True)) for row in result.all()]


def records_of(kind: type[T], connection: Connection, query: Select[Any]) -> tuple[T, ...]:
    """The records of a query over their table."""
    return tuple(record_of(kind, row) for row in plain(connection.execute(query)))


def first_of(kind: type[T], connection: Connection, query: Select[Any]) -> T | None:
    """The first record of a query; None if it finds nothing."""
    return next(iter(records_of(kind, connection, query.limit(1))), None)


class StorePart:
    """A part of the Store; `_lease` and `_clock` are set in a fenced one."""

    _database: Database
    _lease: Lease | None = None
    _clock: Callable[[], datetime] | None = None

    def _read(self, work: Callable[[Connection], T]) -> T:
        return self._database.read(work)

    def _records(self, kind: type[T], query: Select[Any]) -> tuple[T, ...]:
        return self._read(lambda connection: records_of(kind, connection, query))

    def _named(self, kind: type[T], column: Column[str], name: str) -> T:
        """The one record of a name. NotFound gives the nearest name."""

        def work(connection: Connection) -> T:
            found = first_of(kind, connection, select(column.table).where(column == name))
            if found is None:
                names = connection.execute(select(column)).scalars()
                raise NotFound(f"there is no {kind.__name__.lower()} '{name}'{nearest(name, names)}")
            return found

        return self._read(work)

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

    def _change(self, statement: Any) -> int:
        """Runs one statement in a transaction of its own; returns how many rows it changed."""
        return self._write(lambda connection: connection.execute(statement).rowcount)

    def _keys(self, parts: Sequence[Column[str]], model: str | None) -> tuple[ProfileKey, ...]:
        """Every (model, target, workload) in three columns of one table, in order; of all models, or one."""
        query = select(*parts).distinct().order_by(*parts).where(*equal((parts[0], model)))
        rows = self._read(lambda connection: connection.execute(query).all())
        return tuple(ProfileKey(model=row[0], target=row[1], workload=row[2]) for row in rows)

    def _put(self, table: Table, key: str, row: dict[str, Any]) -> None:
        """Writes a row, new or in the place of the one with its key."""

        def work(connection: Connection) -> None:
            change = update(table).where(table.c[key] == row[key]).values(**row)
            if connection.execute(change).rowcount == 0:
                connection.execute(insert(table).values(**row))

        self._write(work)


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
            f"the lease on node '{lease.node}' (fence {lease.fence}) is lost:"
            f" '{found['holder']}' now has it with fence {found['fence']}; nothing was written"
        )
    if found["expires_at"] <= now:
        raise Conflict(f"the lease on node '{lease.node}' (fence {lease.fence}) ran out; nothing was written")


def equal(*pairs: tuple[Column[Any], object]) -> list[ColumnElement[bool]]:
    """A condition for each pair of column and value; a value of None asks nothing."""
    return [column == value for column, value in pairs if value is not None]


def find(kind: type[T], connection: Connection, key: Column[str], ref: str, noun: str) -> T:
    """A record by its key, its name (the newest of that name) or the beginning of its key.

    NotFound names the nearest name; BadInput: more than one key begins so.
    """
    table = key.table
    newest = select(table).order_by(table.c.created_at.desc(), key)
    for condition in (key == ref, table.c.name == ref):
        if (found := first_of(kind, connection, newest.where(condition))) is not None:
            return found
    begins = select(table).where(key.startswith(ref, autoescape=True)).limit(2)
    several = records_of(kind, connection, begins) if ref else ()
    if len(several) > 1:
        raise BadInput(f"'{ref}' is the beginning of more than one {noun}'s {key.name}: give more characters")
    if not several:
        names = connection.execute(select(table.c.name).distinct()).scalars()
        raise NotFound(f"there is no {noun} '{ref}'{nearest(ref, names)}")
    return several[0]
