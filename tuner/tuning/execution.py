"""How a run begins and ends: it holds the study, says what is odd about its trace, clears what dead
controllers left, works, and writes its end. A search and a comparison have this in common.
"""

import asyncio
import fcntl
import os
import re
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tuner import processes
from tuner.adapters import adapter_of
from tuner.conclusions import Conclusion
from tuner.engine.gpu import Gpus
from tuner.errors import Aborted, BadInput, Conflict, NotFound, StudyFailed, TunerError, Unavailable
from tuner.history.entities import TraceInfo
from tuner.history.store import Store
from tuner.knobs.catalogue import CATALOGUE
from tuner.leftovers import sweep_scratch
from tuner.measures import many
from tuner.records import JSON, Launch, ProfileKey, Run, RunState, Study, Trial, TrialState, gpus_held
from tuner.replay.plan import PLANS, slice_rows
from tuner.traffic import statistics, trace_files
from tuner.tuning.context import SEARCH, EventKind, RunContext, RunEvent, numbers_of, silent
from tuner.tuning.study import Clock, Prepared

# How the name of a capture ends, under which its trace is registered.
CAPTURE = re.compile(r"-\d{8}T\d{6}Z(\.\d+)?$")

# Fewer requests than this in all searched slices give no percentile: p95 of 20 is the slowest one.
FEW = 20

# How many runs back the one before is looked for.
RUNS = 100


def traffic_notes(prepared: Prepared, store: Store) -> Iterator[str]:
    """Sentences; none if the trace is the one that was tuned on before and `latest:` names one thing."""
    yield from _sources(prepared, store)
    champion = _champions(prepared, store)
    if champion is None or champion.trace_digest == prepared.trace.digest:
        return
    try:
        before, _ = trace_files.find(champion.trace_digest, store.trace(champion.trace_digest).path)
    except TunerError:  # the file may be on another host, or thrown away
        yield (
            "the champion was found on another trace. The file of that trace is not on this host, so the two"
            " traces cannot be compared"
        )
        return
    moved = [each.sentence for each in statistics.compare(before, prepared.trace) if each.moved]
    if not moved:
        yield "the champion was found on another trace, but no number of the traffic has clearly changed"
    for sentence in moved:
        yield f"since the champion's trace, this has changed: {sentence}"


def few_requests(prepared: Prepared) -> str | None:
    """A warning if the searched slices hold fewer than `FEW` requests in all."""
    searched = prepared.study.searched_slices
    count = sum(len(slice_rows(prepared.trace, s)) for s in searched)
    if count >= FEW:
        return None
    lasts = sum(s.duration_s for s in searched) / prepared.file.speed
    longer = tuple(PLANS)[tuple(PLANS).index(prepared.plan.name) + 1 :]
    auto = f" (with `slices: auto`: {' or '.join(f'`plan: {name}`' for name in longer)})" if longer else ""
    return (
        f"WARNING: the searched slices hold {many(count, 'request')} in all ({lasts:.3g} s of replay). That"
        f" is too few to compare configurations, so do not act on these numbers. Take longer slices{auto} or"
        " a higher `speed`"
    )


def _champions(prepared: Prepared, store: Store) -> Study | None:
    """The study that the champion of this model, node and workload comes from."""
    mine = prepared.study
    for target in (mine.node, mine.gpu_class):
        key = ProfileKey(model=mine.model, target=target, workload=mine.workload)
        event = store.alias(key, "champion")
        if event is not None and event.to_version is not None:
            found = store.profile_version(key, event.to_version).study_id
            if found is not None:
                return store.study(found)
    return None


def _sources(prepared: Prepared, store: Store) -> Iterator[str]:
    """Where `latest:NAME` was found, if both kinds have the name or the other kind was used before."""
    ref = prepared.file.trace
    if not ref.startswith("latest:"):
        return
    name, captured = ref.removeprefix("latest:"), prepared.trace_path.suffix != ".parquet"
    found = f"trace {ref} is the {_kind(captured)} {prepared.trace_path.name}"
    if captured and (imported := _known(store, name)) is not None:
        yield (
            f"{found}. An imported trace has the same name: write `trace: {name}` to use it"
            f" ({imported.digest[:12]}, {imported.created_at:%Y-%m-%d})"
        )
    before = _before(prepared.study, ref, store)
    if before is not None and (CAPTURE.search(before.name) is not None) != captured:
        yield f"{found}. The run before this one used the {_kind(not captured)} {before.name}"


def _before(mine: Study, ref: str, store: Store) -> TraceInfo | None:
    """The trace of the last run for the same model, node and workload whose study names it alike."""
    for run in store.runs(limit=RUNS):
        study = store.study(run.study_id)
        same = (study.model, study.node, study.workload) == (mine.model, mine.node, mine.workload)
        if run.ended_at is not None and same and study.spec.get("trace") == ref:
            return _known(store, study.trace_digest)
    return None


def _kind(captured: bool) -> str:
    return "capture" if captured else "import"


def _known(store: Store, ref: str) -> TraceInfo | None:
    try:
        return store.trace(ref)
    except NotFound:
        return None


PREFIX = ("enable_prefix_caching", "prefix_caching_hash_algo")


def unjudged(prepared: Prepared) -> dict[str, str]:
    """Knob → why its effect does not show in this study. Of knobs that are turned only."""
    trace = prepared.trace
    found: dict[str, str] = {}
    for name, levels in prepared.space.levels.items():
        if CATALOGUE[name].needs_raw:
            found[name] = "its effect depends on what the texts say, and this study sends made-up tokens"
        elif name == "scheduling_policy" and "priority" in levels and len(np.unique(trace.priority)) < 2:
            found[name] = "every request of the trace has the same priority"
        elif name in PREFIX and not len(trace.blocks) and not (trace.parent >= 0).any():
            found[name] = "no prompts of the trace share a prefix"
    return found


Say = Callable[[str], object]


@contextmanager
def locked(home: Path, study_id: str) -> Iterator[None]:
    """Hold a study; the kernel gives the lock back however its holder ends. Conflict when a living controller
    on this host tunes it.
    """
    path = home / "trials" / study_id[:16] / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise Conflict(
                f"study {study_id[:16]} is being tuned by process {holder} on this host"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def stop_command_of(study: Study) -> tuple[str, ...]:
    """The command that ends a study's engines in their containers, from its file; empty without one."""
    engine = study.spec.get("engine")
    words = engine.get("stop_command") if isinstance(engine, dict) else None
    return tuple(str(word) for word in words) if isinstance(words, list) else ()


def reconcile(
    store: Store,
    home: Path,
    *,
    node: str,
    clock: Clock,
    say: Say = silent,
    own: Prepared | None = None,
    here: bool = True,
) -> Sequence[Trial]:
    """End the engines that dead controllers left and mark their trials ABORTED; returns those of `node`.

    The caller has the node's lease, so open rows of that node belong to dead controllers, whichever host
    wrote them. Engines that this host started for other nodes are ended too, unless a controller holds the
    node or the study. If a stop command cannot be started, that is reported and its engines stay open; for
    `own` study (as its file is now) it is BadInput. Without `here` the engines run on another host: rows are
    closed, nothing is ended.
    """
    host = socket.gethostname()
    if here:
        sweep_scratch()
    aborted, stops = list[Trial](), {} if own is None else {own.study.id: own.file.engine.stop_command}
    ours = {t.study_id for t in store.orphans(node=node)}
    ours |= {each.study_id for each in store.open_launches(node=node)}
    for study_id in sorted(ours):
        try:
            aborted += _clear(store, study_id, clock, stops.get(study_id), here=here)
        except BadInput as error:
            if study_id in stops:
                raise
            say(str(error))
    others = {t.study_id for t in store.orphans(host=host)}
    left = {each.study_id for each in store.open_launches()}
    others |= {study_id for study_id in left if any(run.host == host for run in store.runs(study_id)[:1])}
    leased = {lease.node for lease in store.leases(now=clock())}
    for study_id in sorted(others):
        if store.study(study_id).node in {node, *leased}:
            continue
        with suppress(Conflict), locked(home, study_id):
            try:
                _clear(store, study_id, clock)
            except BadInput as error:
                say(str(error))
    return aborted


def _clear(
    store: Store, study_id: str, clock: Clock, stop: Sequence[str] | None = None, *, here: bool = True
) -> list[Trial]:
    """End what is open of a study. BadInput if its stop command cannot be started."""
    study = store.study(study_id)
    stop = stop_command_of(study) if stop is None else stop
    own: Launch | None = None
    for launch in store.launches(study_id):
        if launch.ended_at is None:
            killed = processes.reap(launch.id, stop_command=stop) if here else 0
            ended = clock() if killed or not here else _last_written(launch, clock())
            launch = replace(launch, ended_at=ended, verdict="controller: its controller died")
            store.finish_launch(launch)
            own = launch
    reason = "the controller died in the middle of this trial"
    aborted = []
    for trial in store.trials(study_id, (TrialState.RUNNING,)):
        trial = replace(trial, state=TrialState.ABORTED, cause="controller", reason=reason, ended_at=clock())
        if here and own is not None and own.ended_at is not None:
            gpus = 1 if study.gpu_class == "cpu" else gpus_held(own.argv)
            # An engine that screens was there before this trial.
            held = (own.ended_at - max(own.started_at, trial.started_at)).total_seconds()
            trial = replace(
                trial, ended_at=max(own.ended_at, trial.started_at), gpu_seconds=max(0.0, held) * gpus
            )
        aborted.append(store.finish_trial(trial))
    return aborted


def _last_written(launch: Launch, now: datetime) -> datetime:
    """When an engine that is gone wrote a file for the last time; `now` where it left none here."""
    folder = Path(launch.directory) if launch.directory else None
    if folder is None or not folder.is_dir():
        return now
    written = [datetime.fromtimestamp(each.stat().st_mtime, UTC) for each in folder.iterdir()]
    return max(launch.started_at, min(now, max(written, default=now)))


def gpus_of(prepared: Prepared) -> Gpus:
    """The GPUs that this host's engines run on; none if the engine is simulated or runs on the CPU."""
    if not adapter_of(prepared.facts.kind).uses_gpus(prepared.facts.platform):
        return Gpus(nvml=None)
    return Gpus.open(prepared.file.engine.env, only=prepared.node.gpus)


def register(context: RunContext) -> Study:
    """Keep the study, its trace and its node, unless the history has them."""
    prepared, now = context.prepared, context.clock()
    study, trace, name = context.store.add_study(prepared.study), prepared.trace, prepared.trace_path.stem
    # A known trace keeps its name: a study may have asked for `latest:` of it. Its file is copied into the
    # home, since captures are removed in time.
    path = trace_files.keep(trace, context.home, name)
    try:
        context.store.trace(trace.digest)
    except NotFound:
        meta = {**trace.meta, "requests": len(trace)}
        context.store.add_trace(trace.digest, name, str(path.resolve()), meta, now)
    try:
        context.store.node(prepared.node.name)
    except NotFound:
        context.store.add_node(replace(prepared.node, host=socket.gethostname()))
    return study


def cancelled(store: Store, run_id: str | None, clock: Clock) -> Run | None:
    """The run that this process was started for, ended, if it was cancelled before; None: go on."""
    run = None if run_id is None else store.run(run_id)
    if run is None or (run.state is RunState.RUNNING and not run.cancel_requested):
        return None
    ended = replace(run, state=RunState.CANCELLED, reason="cancelled before it began", ended_at=clock())
    return run if run.state is not RunState.RUNNING else store.save_run(ended)


def fail(context: RunContext, run: Run, error: Exception) -> None:
    """End a run that a fault in the tuner broke: resuming it would end the same way."""
    reason = f"unexpected: {type(error).__name__}: {error}"
    ended = replace(run, state=RunState.FAILED, reason=reason, ended_at=context.clock(), pid=None)
    context.store.save_run(ended)


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
        """Work and conclude. The run's row says how it ended; a run that can be resumed stays RUNNING."""
        named, kept = self._context.prepared.study.name, self._context.store.study(self._run.study_id).name
        same = f" ({named} is the same study)" if named != kept else ""
        self._tell("run", f"run {self._run.id} of study {kept}{same}")
        if (few := few_requests(self._context.prepared)) is not None:
            self._tell("note", few)
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
        """Write how the run ended and what it concluded; `why` it has no confirmation, None if it has."""
        said = self.conclusion(why)
        kept = self._context.store.study(self._run.study_id).spec
        now = self._context.prepared.study.spec
        changed = {name: value for name, value in now.items() if value != kept.get(name)}
        run = replace(
            self._run, state=state, reason=reason, summary={**self.summary(said), "study_file": changed},
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
        stage, total = self._stage
        self._context.tell(RunEvent(kind=kind, text=text, stage=stage, done=done, total=total, trial=trial))

    @property
    def _stage(self) -> tuple[str, int | None]:
        """(the stage of the run's own trials, how many they are at most)."""
        return SEARCH, self._run.trials_limit
