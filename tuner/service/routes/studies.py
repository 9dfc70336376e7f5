"""Studies, their trials and their front."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from tuner.records import TrialState
from tuner.report.board import board
from tuner.service import shapes
from tuner.service.auth import Reader, Runner
from tuner.service.context import Here
from tuner.service.paging import Cursor, Limit, Page, page, unpack
from tuner.service.problems import documented
from tuner.service.specs import StudyRequest

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
def add_study(here: Here, actor: Runner, asked: StudyRequest, response: Response) -> shapes.StudyShape:
    """Checked as `tuner tune` would before its first launch. The engine is the one registered for the node;
    no path, command or environment is taken.
    """
    found = here.studies.add(asked).study
    here.audit(actor, "study", found.id, f"study {found.name} made over HTTP")
    response.headers["Location"] = f"/v1/studies/{found.id}"
    return shapes.study(found)


@router.get("", summary="Studies, the newest first", responses=documented(400))
def list_studies(
    here: Here,
    actor: Reader,
    model: Annotated[str | None, Query(max_length=200)] = None,
    node: Annotated[str | None, Query(max_length=100)] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[shapes.StudyShape]:
    place = unpack(cursor, str)
    after = str(place[0]) if place else None
    found = here.store.studies(model=model, node=node, after=after, limit=limit + 1)
    return page(found, limit, shapes.study, lambda study: (study.id,))


@router.get("/{ref}", summary="A study", responses=documented(400, 404))
def show_study(here: Here, actor: Reader, ref: StudyRef) -> shapes.StudyShape:
    return shapes.study(here.store.study(ref))


@router.get("/{ref}/trials", summary="The trials of a study, by number", responses=documented(400, 404))
def study_trials(
    here: Here,
    actor: Reader,
    ref: StudyRef,
    state: Annotated[list[TrialState] | None, Query()] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Page[shapes.TrialShape]:
    place = unpack(cursor, int, int)
    after = (int(place[0]), int(place[1])) if place else None
    found = here.store.trials(here.store.study(ref).id, state or (), after=after, limit=limit + 1)
    return page(found, limit, shapes.trial, lambda trial: (trial.number, trial.attempt))


@router.get("/{ref}/front", summary="The Pareto front beside the baseline", responses=documented(400, 404))
def study_front(here: Here, actor: Reader, ref: StudyRef) -> shapes.FrontShape:
    """First measurements; `confirmation` holds what was measured again beside the baseline, and `winner` is
    the trial that it chose, whether or not its first measurement is on the front.
    """
    study = here.store.study(ref)
    found = board(study, here.store.trials(study.id), here.store.conclusions(study.id))
    return shapes.FrontShape(
        objectives=list(study.objectives),
        baseline=shapes.trial(found.base) if found.base else None,
        front=[shapes.trial(each) for each in found.front],
        winner=found.winner,
        conclusion=shapes.conclusion(found.conclusion),
        confirmation=shapes.conclusion(found.confirmation),
    )
