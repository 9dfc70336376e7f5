"""What the addresses of pages may hold, with its bounds."""

from typing import Annotated

from fastapi import Query

from tuner.errors import BadInput, nearest
from tuner.measures import NAMES

Text = Annotated[str, Query(max_length=200)]
PageNumber = Annotated[int, Query(alias="page", ge=1, le=1_000_000)]


def measurement(name: str) -> str:
    """The name itself. BadInput names the nearest where it is no measurement."""
    if name not in NAMES:
        raise BadInput(f"'{name}' is not a measurement{nearest(name, NAMES)}")
    return name
