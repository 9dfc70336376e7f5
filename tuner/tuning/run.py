"""The loop: clear up, suggest, measure, until a reason to stop; then finalists meet the baseline again."""

import asyncio
import os
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from tuner.errors import Aborted, NotFound, StudyFailed
from tuner.history.store import Store
from tuner.records import JSON, Candidate, Run, RunState, Trial, TrialState
from tuner.search.stopping import reason_to_stop
from tuner.search.suggest import Predictor, Suggestion, suggest
from tuner.tuning.confirm import Confirmation, confirm, launches_of
from tuner.tuning.events import Event, Tell, silent
from tuner.tuning.reconcile import locked, reconcile
from tuner.tuning.study import Clock, Prepared
from tuner.tuning.trial import ABORTED_RETRIES, Bench, Work, perform

WATCH_S = 1.0
"""How often a request to cancel, or the end of the window, is looked for during a trial."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop. `trials` bounds this run's trials; `early` lets the stop rule end it before."""

    trials: int | None = None
    deadline: datetime | None = None
    early: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """What others know: seeds (origin, candidate) that are tried first, and a predictor's proposals."""

    seeds: Sequence[tuple[str, Candidate]] = ()
    predictor: Predictor | None = None


NO_HELP = Help()


def propose(prepared: Prepared, trials: Sequence[Trial], help: Help = NO_HELP) -> Suggestion | None:
    """What the search proposes after these trials; a function of them alone."""
    return suggest(
        prepared.space,
        trials,
        seed=prepared.study.seed,
        number=next_number(trials),
        objectives=prepared.study.objectives,
        baseline=prepared.baseline,
        known=prepared.known,
        seeds=help.seeds,
        predictor=help.predictor,
    )


def next_number(trials: Sequence[Trial]) -> int:
    """The number after the last one."""
    return max((t.number for t in trials), default=-1) + 1


class Cut(Exception):
    """The run is to end now: it was cancelled, or its window closed."""

    def __init__(self, reason: str, state: RunState) -> None:
        super().__init__(reason)
        self.state = state


async def tune(
    prepared: Prepared,
    store: Store,
    *,
    home: Path,
    limits: Limits,
    clock: Clock,
    tell: Tell = silent,
    help: Help = NO_HELP,
    work: Work | None = None,
) -> Run:
    """Tune a study until a limit; returns the finished run. A run that was interrupted before is resumed.

    `work` does each launch on another host; None: here. Conflict when another controller holds the study.
    StudyFailed when no candidate can work. Cancelling the task stops the engine, closes the row as ABORTED
    and leaves the run to be resumed.
    """
    bench = Bench(prepared=prepared, store=store, home=home, clock=clock, tell=tell, work=work)
    with locked(home, prepared.study.id):
        _register(bench)
        for trial in reconcile(store, home, held=prepared.study.id, clock=clock):
            tell(Event(kind="note", text=f"trial {trial.number} was interrupted: aborted", trial=trial))
        run = store.open_run(
            prepared.study.id,
            trials_limit=limits.trials,
            deadline=limits.deadline,
            now=clock(),
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        return await _Loop(bench, run, limits, help).to_the_end()


def _register(bench: Bench) -> None:
    prepared, now = bench.prepared, bench.clock()
    bench.store.add_study(prepared.study)
    _register_trace(bench.store, prepared, now)
    try:
        bench.store.node(prepared.node.name)
    except NotFound:
        bench.store.add_node(replace(prepared.node, host=socket.gethostname()))


def _register_trace(store: Store, prepared: Prepared, now: datetime) -> None:
    """A trace that is known keeps its name: a study may have asked for `latest:` of it."""
    trace, path = prepared.trace, prepared.trace_path.resolve()
    try:
        store.trace(trace.digest)
    except NotFound:
        store.add_trace(trace.digest, path.stem, str(path), {**trace.meta, "requests": len(trace)}, now)


class _Loop:
    """One run. Holds no state that the store does not: each step reads the history anew."""

    def __init__(self, bench: Bench, run: Run, limits: Limits, help: Help) -> None:
        self._bench, self._run, self._limits, self._help = bench, run, limits, help

    async def to_the_end(self) -> Run:
        """Search and confirm; the run's row tells how it ended, unless it is to be resumed."""
        self._tell("run", f"run {self._run.id} of study {self._bench.prepared.study.name}")
        try:
            reason = await self._search()
            self._tell("note", f"the search ends: {reason}")
            confirmation = await self._guarded(confirm(self._bench, self._run))
            return self._end(RunState.FINISHED, reason, confirmation)
        except Cut as cut:
            return self._end(cut.state, str(cut), None)
        except asyncio.CancelledError:
            self._bench.store.save_run(replace(self._run, pid=None))
            raise
        except (StudyFailed, Aborted) as error:
            self._end(RunState.FAILED, str(error), None)
            raise

    def _end(self, state: RunState, reason: str, confirmation: Confirmation | None) -> Run:
        summary: dict[str, JSON] = dict(confirmation.summary) if confirmation else {}
        run = replace(
            self._run, state=state, reason=reason, summary=summary, ended_at=self._bench.clock(), pid=None
        )
        if confirmation:
            self._tell("verdict", str(summary.get("sentence", "")))
        return self._bench.store.save_run(run)

    async def _search(self) -> str:
        while True:
            if (cut := self._cut()) is not None:
                raise cut
            trials = self._trials()
            if (reason := self._reason(trials)) is not None:
                return reason
            trial = self._next(trials)
            if trial is None:
                return "nothing is left that is new and may work"
            self._tell("started", trial.origin, trial)
            earlier = [t for t in trials if t.number == trial.number]
            done = await self._guarded(perform(self._bench, trial, earlier))
            self._tell("finished", done.reason or "", done)
            self._check_world([*earlier, done])

    def _trials(self) -> tuple[Trial, ...]:
        return self._bench.store.trials(self._bench.prepared.study.id)

    def _reason(self, trials: Sequence[Trial]) -> str | None:
        if trials and trials[-1].state is TrialState.ABORTED and not self._is_over():
            return None
        return reason_to_stop(
            trials if self._limits.early else [],
            self._bench.prepared.study.objectives,
            done=self._done(trials),
            limit=self._limits.trials,
            now=self._bench.clock(),
            deadline=self._limits.deadline,
            needed_s=self._needed_s(trials),
        )

    def _is_over(self) -> bool:
        return self._limits.deadline is not None and self._bench.clock() >= self._limits.deadline

    def _done(self, trials: Sequence[Trial]) -> int:
        return len(
            {t.number for t in trials if t.run_id == self._run.id and t.state is not TrialState.ABORTED}
        )

    def _needed_s(self, trials: Sequence[Trial]) -> float:
        """Another trial and the confirmation, by the mean of the trials that completed."""
        spans = [
            (t.ended_at - t.started_at).total_seconds()
            for t in trials
            if t.ended_at and t.state is TrialState.COMPLETE
        ]
        return sum(spans) / len(spans) * (1 + launches_of(self._bench.prepared.plan)) if spans else 0.0

    def _next(self, trials: Sequence[Trial]) -> Trial | None:
        """The row of the next attempt: an aborted number again, or a new suggestion."""
        prepared = self._bench.prepared
        last = max(trials, key=lambda t: (t.number, t.attempt), default=None)
        if last is not None and last.state is TrialState.ABORTED:
            return self._start(last.number, last.attempt + 1, last.candidate, last.seed, last.origin)
        number = next_number(trials)
        found = propose(prepared, trials, self._help)
        return self._start(number, 0, found.candidate, found.seed, found.origin) if found else None

    def _start(self, number: int, attempt: int, candidate: Candidate, seed: int, origin: str) -> Trial:
        return self._bench.store.start_trial(
            study_id=self._bench.prepared.study.id,
            run_id=self._run.id,
            candidate=candidate,
            number=number,
            attempt=attempt,
            seed=seed,
            origin=origin,
            now=self._bench.clock(),
            directory=str(self._bench.directory(number, str(attempt))),
        )

    def _check_world(self, attempts: Sequence[Trial]) -> None:
        """End the run when one number was aborted too often: the node, not the candidate, must be mended."""
        if attempts[-1].state is not TrialState.ABORTED:
            return
        ours = [t for t in attempts if t.run_id == self._run.id and t.cause not in ("stopped", "controller")]
        if len(ours) <= ABORTED_RETRIES:
            return
        last = attempts[-1]
        store, node = self._bench.store, self._bench.prepared.node
        store.set_node_state(node.name, "fault")
        raise Aborted(
            f"trial {last.number} was aborted {len(ours)} times, last: {last.reason};"
            f" node {node.name} is flagged",
            cause=last.cause or "aborted",
        )

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
        self._bench.store.prove()
        if self._bench.store.run(self._run.id).cancel_requested:
            return Cut("cancelled on request", RunState.CANCELLED)
        return (
            Cut("its window closed in the middle of a trial", RunState.FINISHED) if self._is_over() else None
        )

    def _tell(self, kind: Any, text: str, trial: Trial | None = None) -> None:
        done = self._done(self._trials())
        self._bench.tell(Event(kind=kind, text=text, done=done, total=self._limits.trials, trial=trial))
