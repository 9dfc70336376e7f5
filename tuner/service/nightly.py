"""What a schedule's due time starts: a controller, watched to its end, cancelled when its window closes."""

import asyncio
from collections.abc import Awaitable, Callable

from anyio import to_thread

from tuner.fleet.schedule import ACTOR, CLOSING, Firing
from tuner.records import Run, RunState
from tuner.service.context import Service
from tuner.service.runner import Order

POLL_S = 1.0


def starter(here: Service) -> Callable[[Firing], Awaitable[Run | None]]:
    """The `start_run` of the schedule loop."""

    def begin(firing: Firing) -> Run:
        study_id, path = here.studies.find_scheduled(firing.terms.study)
        order = Order(
            study_id=study_id,
            study_file=path,
            trials=firing.terms.trials,
            deadline=firing.deadline,
            actor=f"{ACTOR}:{firing.schedule.name}",
            at=here.clock(),
        )
        run, _ = here.runner.start(order)
        here.store.scheduled_run(firing.schedule.name, run.id)
        return run

    async def start(firing: Firing) -> Run | None:
        run = await to_thread.run_sync(begin, firing)
        try:
            return await _ended(here, run)
        except asyncio.CancelledError as end:
            if end.args == (CLOSING,):
                await asyncio.shield(_stopped(here, run))
            raise

    return start


async def _ended(here: Service, run: Run) -> Run:
    """The run once it has ended and its controller too, which gives production its node back last."""
    while True:
        now = await to_thread.run_sync(here.store.run, run.id)
        if now.state is not RunState.RUNNING and not here.runner.alive(now):
            return now
        await asyncio.sleep(POLL_S)


async def _stopped(here: Service, run: Run) -> Run:
    """Asks the run to stop and waits: the engine is gone, and production has its node, when it has ended."""
    if (await to_thread.run_sync(here.store.run, run.id)).state is RunState.RUNNING:
        await to_thread.run_sync(here.store.cancel_run, run.id)
    return await _ended(here, run)
