"""Cursor paging: a page says by an opaque word where the next one begins."""

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel, Field

from tuner.errors import BadInput

T = TypeVar("T")
R = TypeVar("R")
LARGEST = 2**31 - 1

Cursor = Annotated[str | None, Query(max_length=400, description="`next` of the page before.")]
Limit = Annotated[int, Query(ge=1, le=500, description="How many to a page.")]


class Page(BaseModel, Generic[T]):
    """Some of many; `next` is null on the last page."""

    items: list[T]
    next: str | None = Field(default=None, examples=["WyJhYmMiXQ"])


def pack(*place: int | str) -> str:
    """A cursor."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def unpack(cursor: str | None, *kinds: type) -> tuple[int | str, ...] | None:
    """What a cursor holds. BadInput unless it is one that `pack` made of these kinds."""
    if cursor is None:
        return None
    try:
        raw = cursor.encode("ascii")
        found = json.loads(base64.b64decode(raw + b"=" * (-len(raw) % 4), altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, RecursionError):
        found = None
    right = isinstance(found, list) and len(found) == len(kinds)
    if not right or any(type(part) is not kind for part, kind in zip(found, kinds, strict=True)):
        raise BadInput("cursor: not one that this service gave out; begin with the first page")
    if any(isinstance(part, int) and abs(part) > LARGEST for part in found):
        raise BadInput("cursor: not one that this service gave out; begin with the first page")
    return tuple(found)


def page(
    found: Sequence[R], limit: int, shape: Callable[[R], T], place: Callable[[R], tuple[int | str, ...]]
) -> Page[T]:
    """A page of what was asked for with one more than `limit`."""
    shown = found[:limit]
    following = pack(*place(shown[-1])) if len(found) > limit else None
    return Page(items=[shape(each) for each in shown], next=following)
