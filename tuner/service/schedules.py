"""A schedule over HTTP is checked when it is set; at its due time a controller starts, watched to its end."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from anyio import to_thread

from tuner.errors import BadInput, NotFound, nearest
from tuner.fleet.schedule import ACTOR, CLOSING, Firing, nothing_begun
from tuner.fleet.window import Terms, check, terms
from tuner.history.entities import Schedule
from tuner.records import Run, RunState
from tuner.service.comparison_requests import upgrade_words
from tuner.service.context import ServiceContext
from tuner.service.runner import RunOrder
from tuner.service.study_requests import engines_of
from tuner.settings import NAME
from tuner.tuning.upgrade import NothingNew, unchecked


def checked(schedule: Schedule, here: ServiceContext) -> Schedule:
    """The schedule itself. BadInput for a cron, zone or key that the loop could not read; NotFound or
    Conflict when its study or its node is not here. A study is a name or id, never a path.
    """
    found = terms(schedule.spec)
    if not re.fullmatch(NAME, found.study):
        raise BadInput(
            f"spec.study: '{found.study}' is not the name or id of a study; HTTP requests cannot give a path"
        )
    here.studies.known(found.study)
    if found.upgrade is not None:
        engines = engines_of(here.settings.home, schedule.node)
        for name in filter(None, (found.upgrade.to, found.upgrade.old)):
            if name not in engines:
                raise NotFound(
                    f"spec.upgrade: no engine '{name}' is registered for this node{nearest(name, engines)}"
                )
    here.store.node(schedule.node)
    check(schedule)
    return schedule


POLL_S = 1.0


def _what(here: ServiceContext, found: Terms) -> tuple[str, Path, tuple[str, ...]]:
    """(the study's id, its file, the controller's command where that does not tune). NothingNew where a check
    of upgrades has nothing to check. Files are taken where the schedule was made by command line.
    """
    if (upgrade := found.upgrade) is None:
        return (*here.studies.find_scheduled(found.study, here.runner.refuse_busy), ())
    files = Path(found.study).is_absolute()
    asked = partial(unchecked, new=upgrade.to, old=upgrade.old, configuration=upgrade.alias, files=files)
    study_id, path = here.studies.compared(found.study, asked, here.runner.refuse_busy)
    words = upgrade_words(path, upgrade.to, upgrade.old, upgrade.alias)
    return study_id, path, words if files else (*words, "--registered")


def starter(here: ServiceContext) -> Callable[[Firing], Awaitable[Run | None]]:
    """The `start_run` of the schedule loop."""

    def begin(firing: Firing) -> Run | None:
        try:
            study_id, path, words = _what(here, firing.terms)
        except NothingNew:
            nothing_begun(here.store, firing)
            return None
        order = RunOrder(
            study_id=study_id,
            study_file=path,
            trials=firing.terms.trials,
            deadline=firing.deadline,
            actor=f"{ACTOR}:{firing.schedule.name}",
            at=here.clock(),
            words=words,
        )
        run, _ = here.runner.start(order)
        here.store.scheduled_run(firing.schedule.name, run.id)
        return run

    async def start(firing: Firing) -> Run | None:
        run = await to_thread.run_sync(begin, firing)
        if run is None:
            return None
        try:
            return await _ended(here, run)
        except asyncio.CancelledError as end:
            if end.args == (CLOSING,):
                await asyncio.shield(_stopped(here, run))
            raise

    return start


async def _ended(here: ServiceContext, run: Run) -> Run:
    """The run once it has ended and its controller too, which gives production its node back last."""
    while True:
        now = await to_thread.run_sync(here.store.run, run.id)
        if now.state is not RunState.RUNNING and not here.runner.alive(now):
            return now
        await asyncio.sleep(POLL_S)


async def _stopped(here: ServiceContext, run: Run) -> Run:
    """Asks the run to stop and waits: the engine is gone, and production has its node, when it has ended."""
    if (await to_thread.run_sync(here.store.run, run.id)).state is RunState.RUNNING:
        await to_thread.run_sync(here.store.cancel_run, run.id)
    return await _ended(here, run)
