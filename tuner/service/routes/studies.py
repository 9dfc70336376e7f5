"""Studies, their trials and their front; and what each night found, and why."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import JSONResponse
from pydantic import AwareDatetime

from tuner.errors import BadInput
from tuner.history.best_per_night import Night, rows, trend, without_value
from tuner.records import JSON, TrialState
from tuner.report.board import board
from tuner.report.words import INTERRUPTED, trial_state
from tuner.service import schemas
from tuner.service.auth import Reader, Runner
from tuner.service.context import Here, ServiceContext
from tuner.service.problems import documented
from tuner.service.schemas import Cursor, Limit, Page, after, pack, page, unpack
from tuner.service.study_requests import StudyRequest

router = APIRouter(prefix="/v1/studies", tags=["studies"])
StudyRef = Annotated[
    str,
    Path(
        min_length=1,
        max_length=100,
        pattern=r"^[^/\x00]+$",
        description="An id, a name, or the beginning of an id.",
    ),
]


@router.post(
    "",
    status_code=201,
    summary="Make a study",
    responses={201: {"headers": {"Location": {"schema": {"type": "string"}}}}, **documented(400, 404, 409)},
)
def add_study(here: Here, actor: Runner, asked: StudyRequest, response: Response) -> schemas.StudySchema:
    """The study is checked as by `tuner tune` before its first launch. The engine is the one that is
    registered for the node. A request cannot give a path, a command or an environment.
    """
    found = here.studies.add(asked, actor.name).study
    here.audit(actor, "study", found.id, f"study {found.name} made over HTTP")
    response.headers["Location"] = f"/v1/studies/{found.id}"
    return schemas.study(found)


@router.get("", summary="Studies, the newest first", responses=documented(400))
def list_studies(
    here: Here,
    actor: Reader,
    model: Annotated[str | None, Query(max_length=200)] = None,
    node: Annotated[str | None, Query(max_length=100)] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[schemas.StudySchema]:
    found = here.store.studies(model=model, node=node, after=after(cursor, str), limit=limit + 1)
    return page(found, limit, schemas.study, lambda study: (study.id,))


@router.get("/{ref}", summary="A study", responses=documented(400, 404))
def show_study(here: Here, actor: Reader, ref: StudyRef) -> schemas.StudySchema:
    return schemas.study(here.store.study(ref))


@router.get("/{ref}/trials", summary="The trials of a study, by number", responses=documented(400, 404))
def study_trials(
    here: Here,
    actor: Reader,
    ref: StudyRef,
    state: Annotated[list[TrialState | Literal["interrupted"]] | None, Query()] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Page[schemas.TrialSchema]:
    place = unpack(cursor, int, int)
    after = (int(place[0]), int(place[1])) if place else None
    asked, stopped = {str(each) for each in state or ()}, here.stopped_runs()
    stored = {TrialState(each) for each in asked - {INTERRUPTED}}
    one = (INTERRUPTED in asked) != (TrialState.RUNNING in asked)  # history has one state for both
    stored |= {TrialState.RUNNING} if one else set()
    most = None if one else limit + 1
    found = here.store.trials(here.store.study(ref).id, tuple(stored), after=after, limit=most)
    if one:
        found = tuple(t for t in found if trial_state(t, stopped) in asked)[: limit + 1]
    return page(found, limit, lambda t: schemas.trial(t, stopped), lambda t: (t.number, t.attempt))


@router.get("/{ref}/front", summary="The Pareto front beside the baseline", responses=documented(400, 404))
def study_front(here: Here, actor: Reader, ref: StudyRef) -> schemas.FrontSchema:
    """The front of first measurements, with the keys of `tuner front --json`. `rows` has each trial's first
    and confirmed values side by side. `winner` is the trial that the confirmation chose, even if its first
    measurement is not on the front.
    """
    study = here.store.study(ref)
    found = board(study, here.store.trials(study.id), here.store.conclusions(study.id))
    return schemas.FrontSchema.model_validate({
        "study": found.named,
        "objectives": study.objectives,
        "baseline": schemas.trial(found.base) if found.base else None,
        "front": [schemas.trial(each) for each in found.front],
        "rows": found.rows(),
        **found.found(),
    })  # fmt: skip


trials = APIRouter(prefix="/v1/trials", tags=["trials"])
TrialId = Annotated[int, Path(ge=1, le=2**53, examples=[1])]


@trials.get("/{trial_id}", summary="A trial with its measurements", responses=documented(404))
def show_trial(here: Here, actor: Reader, trial_id: TrialId) -> schemas.TrialSchema:
    return schemas.trial(here.store.trial(trial_id), here.stopped_runs())


history_router = APIRouter(prefix="/v1/history", tags=["history"])
LOOK_BACK = timedelta(days=92)


@history_router.get(
    "",
    summary="What each night found for a model",
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
    limit: Annotated[int, Query(ge=1, le=100, description="Most nodes on a page.")] = 3,
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
        absent=True,
    )
    places: dict[tuple[str, str], list[Night]] = {}
    for night in rows(found):
        places.setdefault((night.best.node, night.best.workload), []).append(night)
    stopped = here.stopped_runs()
    told = [_place(*key, some, stopped) for key, some in sorted(places.items())]
    answer = {"model": model, "metric": metric, "places": told, "without_value": without_value(found)}
    return JSONResponse({**answer, "next": following})


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
