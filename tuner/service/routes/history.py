"""What was best on which night, and why."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import AwareDatetime

from tuner.history.queries import Night, nights, trend
from tuner.service import shapes
from tuner.service.auth import Reader
from tuner.service.context import Here
from tuner.service.problems import documented

router = APIRouter(prefix="/v1/history", tags=["history"])
LOOK_BACK = timedelta(days=92)


@router.get("", summary="The best per night of a model", responses=documented(400))
def show_history(
    here: Here,
    actor: Reader,
    model: Annotated[str, Query(min_length=1, max_length=200, examples=["Qwen/Qwen2.5-7B-Instruct"])],
    node: Annotated[str | None, Query(max_length=100)] = None,
    workload: Annotated[str | None, Query(max_length=100)] = None,
    metric: Annotated[str, Query(max_length=60, description="What best means.")] = "goodput_rps",
    since: Annotated[AwareDatetime | None, Query(description="92 days back when left out.")] = None,
    until: AwareDatetime | None = None,
) -> shapes.HistoryShape:
    """By node and workload: each night's best, its gain over that night's baseline, what had changed since
    the night before (knobs, engine, traffic, GPU), how sure it is, and whether it is a regression.
    """
    begin = since or (until or here.clock()) - LOOK_BACK
    found = here.store.bests(
        model=model, metric=metric, node=node, workload=workload, since=begin, until=until
    )
    places: dict[tuple[str, str], list[Night]] = {}
    for night in nights(found):
        places.setdefault((night.best.node, night.best.workload), []).append(night)
    return shapes.HistoryShape(
        model=model, metric=metric, places=[_place(*key, some) for key, some in sorted(places.items())]
    )


def _place(node: str, workload: str, found: Sequence[Night]) -> shapes.PlaceShape:
    return shapes.PlaceShape(
        node=node, workload=workload, trend=trend(found), nights=[shapes.night(night) for night in found]
    )
