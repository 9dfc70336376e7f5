"""Studies, their trials and their front."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from tuner.records import TrialState
from tuner.report.board import board
from tuner.service import schemas
from tuner.service.auth import Reader, Runner
from tuner.service.context import Here
from tuner.service.problems import documented
from tuner.service.schemas import Cursor, Limit, Page, after, page, unpack
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
    state: Annotated[list[TrialState] | None, Query()] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Page[schemas.TrialSchema]:
    place = unpack(cursor, int, int)
    after = (int(place[0]), int(place[1])) if place else None
    found = here.store.trials(here.store.study(ref).id, state or (), after=after, limit=limit + 1)
    return page(found, limit, schemas.trial, lambda trial: (trial.number, trial.attempt))


@router.get("/{ref}/front", summary="The Pareto front beside the baseline", responses=documented(400, 404))
def study_front(here: Here, actor: Reader, ref: StudyRef) -> schemas.FrontSchema:
    """The front of first measurements. `confirmation` has what was measured again beside the baseline.
    `winner` is the trial that the confirmation chose, even if its first measurement is not on the front.
    """
    study = here.store.study(ref)
    found = board(study, here.store.trials(study.id), here.store.conclusions(study.id))
    return schemas.FrontSchema(
        objectives=list(study.objectives),
        baseline=schemas.trial(found.base) if found.base else None,
        front=[schemas.trial(each) for each in found.front],
        winner=found.winner,
        conclusion=schemas.conclusion(found.conclusion),
        confirmation=schemas.conclusion(found.confirmation),
    )


trials = APIRouter(prefix="/v1/trials", tags=["trials"])
TrialId = Annotated[int, Path(ge=1, le=2**53, examples=[1])]


@trials.get("/{trial_id}", summary="A trial with its measurements", responses=documented(404))
def show_trial(here: Here, actor: Reader, trial_id: TrialId) -> schemas.TrialSchema:
    return schemas.trial(here.store.trial(trial_id))
