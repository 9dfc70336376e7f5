"""What each night found, and why."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import AwareDatetime

from tuner.errors import BadInput
from tuner.history.best_per_night import Night, rows, trend
from tuner.records import JSON
from tuner.service import schemas
from tuner.service.auth import Reader
from tuner.service.context import Here, ServiceContext
from tuner.service.problems import documented
from tuner.service.schemas import Cursor, after, pack

router = APIRouter(prefix="/v1/history", tags=["history"])
LOOK_BACK = timedelta(days=92)


@router.get(
    "",
    summary="What each night found of a model",
    response_model=schemas.HistorySchema,
    responses=documented(400),
)
def show_history(
    here: Here,
    actor: Reader,
    model: Annotated[str, Query(min_length=1, max_length=200, examples=["Qwen/Qwen2.5-7B-Instruct"])],
    node: Annotated[str | None, Query(max_length=100)] = None,
    workload: Annotated[str | None, Query(max_length=100)] = None,
    metric: Annotated[str, Query(max_length=60, description="Which measurement to show.")] = "goodput_rps",
    since: Annotated[
        AwareDatetime | None, Query(description="By the end of a run; 92 days back when left out.")
    ] = None,
    until: AwareDatetime | None = None,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=100, description="How many nodes to a page.")] = 3,
) -> JSONResponse:
    """For each node and workload, what the newest run of each night found: the winner's value, or the
    baseline's if it stays; the change from the baseline; what has changed since the night before (knobs,
    engine, traffic, GPU); how sure this is; and whether it is a regression. `other_runs` has the same for
    the other runs of these nights.
    """
    try:
        begin = since or (until or here.clock()) - LOOK_BACK
    except OverflowError:
        raise BadInput(f"until: {until} is too early") from None
    some, following = _nodes(here, model, node, cursor, limit)
    found = here.store.bests(
        model=model,
        metric=metric,
        node=some,
        workload=workload,
        since=begin,
        until=until,
        compared=False,
        absent=True,
    )
    places: dict[tuple[str, str], list[Night]] = {}
    for night in rows(found):
        places.setdefault((night.best.node, night.best.workload), []).append(night)
    stopped = here.stopped_runs()
    told = [_place(*key, some, stopped) for key, some in sorted(places.items())]
    return JSONResponse({"model": model, "metric": metric, "places": told, "next": following})


def _nodes(
    here: ServiceContext, model: str, node: str | None, cursor: str | None, limit: int
) -> tuple[Sequence[str], str | None]:
    """The nodes of one page, and the cursor of the next one."""
    last = after(cursor, str)
    if node is not None:
        return [node], None
    known = sorted({key.target for key in here.store.places(model)})
    left = [each for each in known if last is None or each > last]
    return left[:limit], pack(left[limit - 1]) if len(left) > limit else None


def _place(node: str, workload: str, found: Sequence[Night], stopped: frozenset[str]) -> dict[str, JSON]:
    newest = [night for night in found if night.newest]
    told: list[JSON] = [schemas.night(night, stopped) for night in newest]
    others: list[JSON] = [schemas.night(night, stopped) for night in found if not night.newest]
    return {"node": node, "workload": workload, "change_per_night": trend(newest), "nights": told,
            "other_runs": others}  # fmt: skip
