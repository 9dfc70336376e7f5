"""Records to rows and back, with one TypeAdapter for each kind of record.

The record itself (`tuner.records`) defines how a field is written: a measured +inf is null, for example.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError
from sqlalchemy import Connection, Result, RowMapping, Select

from tuner.errors import BadInput

R = TypeVar("R")
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def row_of(record: object, *without: str) -> dict[str, Any]:
    """A record as a row, its profile key as three columns. BadInput for a number that no row can hold."""
    try:
        row = _adapter(type(record)).dump_python(record, exclude=set(without), warnings=False)
    except PydanticSerializationError as error:
        raise BadInput(str(error.__cause__ or error)) from error
    if "key" in row:
        row |= row.pop("key")
    return dict(row)


def record_of(kind: type[R], row: Mapping[str, Any] | RowMapping) -> R:
    """The record of a row; columns that it has no field for are left out."""
    values = dict(row)
    found: R = _adapter(kind).validate_python({**values, "key": values})
    return found


def plain(result: Result[Any]) -> list[dict[str, Any]]:
    """Rows by name, as plain dictionaries: several times quicker to read than SQLAlchemy's mappings."""
    names = tuple(result.keys())
    return [dict(zip(names, row, strict=True)) for row in result.all()]


def records_of(kind: type[R], connection: Connection, query: Select[Any]) -> tuple[R, ...]:
    """The records of a query over their table."""
    return tuple(record_of(kind, row) for row in plain(connection.execute(query)))


def first_of(kind: type[R], connection: Connection, query: Select[Any]) -> R | None:
    """The first record of a query; None where it finds nothing."""
    return next(iter(records_of(kind, connection, query.limit(1))), None)
