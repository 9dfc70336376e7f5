"""What a controller that died left behind is cleared before anything new starts: processes and rows."""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tuner import processes
from tuner.errors import BadInput, Conflict, Unavailable
from tuner.history.store import Store
from tuner.leftovers import sweep_scratch
from tuner.records import Study, Trial, TrialState
from tuner.tuning.study import Clock, Prepared

Say = Callable[[str], object]


def silent(sentence: str) -> None:
    """Says nothing."""


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
    """What ends a study's engines behind a container's door, as its file said; empty where nothing does."""
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
    """Reap the engines that dead controllers left and mark their trials ABORTED; returns those of `node`.

    The caller has the node's lease, so that whatever is open there is nobody's, whichever host wrote it. What
    this host began for other nodes is cleared too where nobody has the node or the study. A stop command that
    cannot be started is said and what it was to stop stays open; that of `own` study (as its file has it now)
    is BadInput. Without `here` engines run on another host: rows are closed, nothing is reaped.
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
    """End what is open of a study. BadInput where its stop command cannot be started."""
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
