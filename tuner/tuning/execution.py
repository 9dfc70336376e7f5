"""One run from its first event to its row's end: what a search and a comparison have in common."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from tuner.conclusions import Conclusion
from tuner.errors import Aborted, StudyFailed, TunerError
from tuner.records import JSON, Run, RunState, Trial
from tuner.tuning.context import EventKind, RunContext, RunEvent, numbers_of
from tuner.tuning.reconcile import fail

# How often a request to cancel, or the end of the window, is looked for during a trial.
WATCH_S = 1.0

T = TypeVar("T")


class Cut(Exception):
    """The run is to end now: it was cancelled, or its window closed."""

    def __init__(self, reason: str, state: RunState) -> None:
        super().__init__(reason)
        self.state = state


class Execution:
    """A run that is carried out. A subclass says what is measured, and what of it is concluded."""

    def __init__(self, context: RunContext, run: Run) -> None:
        self._context, self._run = context, run

    async def work(self) -> tuple[str, str | None]:
        """Measure; (why it ended, why its confirmation was not begun). Raises Cut, StudyFailed, Aborted."""
        raise NotImplementedError

    def conclusion(self, why: str | None) -> Conclusion | None:
        """What was found. `why` says why the run ended early; None: it did not."""
        raise NotImplementedError

    def summary(self, said: Conclusion | None) -> dict[str, JSON]:
        """The run's summary beside its conclusion."""
        raise NotImplementedError

    async def to_the_end(self) -> Run:
        """Work and conclude; the run's row tells how it ended, unless it is to be resumed."""
        self._tell("run", f"run {self._run.id} of study {self._context.prepared.study.name}")
        try:
            return self._end(RunState.FINISHED, *await self.work())
        except Cut as cut:
            return self._end(cut.state, str(cut), str(cut))
        except asyncio.CancelledError:
            self._context.store.save_run(replace(self._run, pid=None))
            raise
        except (StudyFailed, Aborted) as error:
            if error.cause == "budget":
                return self._end(RunState.FINISHED, str(error), str(error))
            self._end(RunState.FAILED, str(error), str(error))
            raise
        except TunerError:  # the database, say: the run can be resumed
            raise
        except Exception as error:
            fail(self._context, self._run, error)
            raise

    def _end(self, state: RunState, reason: str, why: str | None) -> Run:
        """Write how the run ended and what it concluded; `why` it has no confirmation, None where it has."""
        said = self.conclusion(why)
        run = replace(
            self._run, state=state, reason=reason, summary=self.summary(said),
            ended_at=self._context.clock(), pid=None,
        )  # fmt: skip
        if said is not None:
            self._tell("verdict", said.sentence)
        return self._context.store.save_run(run, said)

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work; when the run is cancelled or its window closes meanwhile, stop it and raise Cut."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=WATCH_S)
                if not task.done() and (cut := self._cut()) is not None:
                    raise cut
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _cut(self) -> Cut | None:
        self._context.store.prove()
        if self._context.store.run(self._run.id).cancel_requested:
            return Cut("cancelled on request", RunState.CANCELLED)
        return (
            Cut("its window closed in the middle of a trial", RunState.FINISHED) if self._is_over() else None
        )

    def _is_over(self) -> bool:
        return self._run.deadline is not None and self._context.clock() >= self._run.deadline

    def _trials(self) -> tuple[Trial, ...]:
        return self._context.store.trials(self._context.prepared.study.id)

    def _tell(self, kind: EventKind, text: str, trial: Trial | None = None) -> None:
        done = len(numbers_of(self._trials(), self._run.id))
        event = RunEvent(kind=kind, text=text, done=done, total=self._run.trials_limit, trial=trial)
        self._context.tell(event)
