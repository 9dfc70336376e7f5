"""A schedule as it may come over HTTP: checked by the fleet's arithmetic, its study one of this service's."""

import re

from tuner.errors import BadInput
from tuner.fleet.window import check, terms
from tuner.history.entities import Schedule
from tuner.service.context import Service
from tuner.settings import NAME


def checked(schedule: Schedule, here: Service) -> Schedule:
    """The schedule itself. BadInput for a cron, zone or key that the loop could not read; NotFound or
    Conflict when its study or its node is not here. A study is a name or id, never a path.
    """
    found = terms(schedule.spec)
    if not re.fullmatch(NAME, found.study):
        raise BadInput(
            f"spec.study: '{found.study}' is not a study's name or id; a path is not taken over HTTP"
        )
    here.studies.known(found.study)
    here.store.node(schedule.node)
    check(schedule)
    return schedule
