"""One trial."""

from typing import Annotated

from fastapi import APIRouter, Path

from tuner.service import shapes
from tuner.service.auth import Reader
from tuner.service.context import Here
from tuner.service.problems import documented

router = APIRouter(prefix="/v1/trials", tags=["trials"])
Key = Annotated[int, Path(ge=1, le=2**53, examples=[1])]


@router.get("/{trial_id}", summary="A trial with its measurements", responses=documented(404))
def show_trial(here: Here, actor: Reader, trial_id: Key) -> shapes.TrialShape:
    return shapes.trial(here.store.trial(trial_id))
