"""Before a run: hold the study, clear what dead controllers left, and register study, trace and node."""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from tuner import processes
from tuner.adapters import adapter_of
from tuner.engine.gpu import Gpus
from tuner.errors import BadInput, Conflict, NotFound, Unavailable
from tuner.history.store import Store
from tuner.leftovers import sweep_scratch
from tuner.records import Run, RunState, Study, Trial, TrialState
from tuner.traffic import trace_files
from tuner.tuning.context import RunContext
from tuner.tuning.study import Clock, Prepared

Say = Callable[[str], object]


def silent(sentence: str) -> None:
    """Takes a sentence and does nothing with it."""


def lock_path(home: Path, study_id: str) -> Path:
    """The lock of a study on this host; the kernel gives it back however its holder ends."""
    return home / "trials" / study_id[:16] / "lock"


@contextmanager
def locked(home: Path, study_id: str) -> Iterator[None]:
    """Hold a study. Conflict when a living controller on this host tunes it."""
    path = lock_path(home, study_id)
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
    stop = stop_command_of(store.study(study_id)) if stop is None else stop
    for launch in store.launches(study_id):
        if launch.ended_at is None:
            if here:
                processes.reap(launch.id, stop_command=stop)
            store.finish_launch(replace(launch, ended_at=clock(), verdict="controller: its controller died"))
    reason = "the controller died in the middle of this trial"
    return [
        store.finish_trial(
            replace(trial, state=TrialState.ABORTED, cause="controller", reason=reason, ended_at=clock())
        )
        for trial in store.trials(study_id, (TrialState.RUNNING,))
    ]


def gpus_of(prepared: Prepared) -> Gpus:
    """The GPUs that this host's engines run on; none where the engine is simulated or runs on the CPU."""
    if not adapter_of(prepared.facts.kind).uses_gpus(prepared.facts.platform):
        return Gpus(nvml=None)
    return Gpus.open(prepared.file.engine.env, only=prepared.node.gpus)


def register(context: RunContext) -> Study:
    """Keep the study, its trace and its node, unless the history has them."""
    prepared, now = context.prepared, context.clock()
    study = context.store.add_study(prepared.study)
    _register_trace(context, now)
    try:
        context.store.node(prepared.node.name)
    except NotFound:
        context.store.add_node(replace(prepared.node, host=socket.gethostname()))
    return study


def _register_trace(context: RunContext, now: datetime) -> None:
    """A known trace keeps its name: a study may have asked for `latest:` of it. Its file is copied into the
    home, since captures are removed in time.
    """
    trace, name = context.prepared.trace, context.prepared.trace_path.stem
    path = trace_files.keep(trace, context.home, name)
    try:
        context.store.trace(trace.digest)
    except NotFound:
        meta = {**trace.meta, "requests": len(trace)}
        context.store.add_trace(trace.digest, name, str(path.resolve()), meta, now)


def cancelled(store: Store, run_id: str | None, clock: Clock) -> Run | None:
    """The run that this process was started for, ended, where it was cancelled before; None: go on."""
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
