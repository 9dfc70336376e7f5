"""What a controller that died left behind is cleared before anything new starts: processes and rows."""

import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tuner import processes
from tuner.errors import Conflict, Unavailable
from tuner.history.store import Store
from tuner.records import Trial, TrialState
from tuner.tuning.study import Clock

STOP_S = 60.0
"""How long a stop command may take."""


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


def reconcile(
    store: Store, home: Path, *, held: str, clock: Clock, stop_command: Sequence[str] = ()
) -> Sequence[Trial]:
    """Reap engines of dead controllers on this host and mark their trials ABORTED; returns those trials.

    `held` is the study whose lock the caller has, and `stop_command` its engine's: it reaches what no signal
    of ours does. Other studies are cleared only when nobody holds them. BadInput where it cannot be run.
    """
    host = socket.gethostname()
    orphans = store.orphans(host=host)
    aborted: list[Trial] = []
    for study_id in sorted({held, *(t.study_id for t in orphans)}):
        ours = [t for t in orphans if t.study_id == study_id]
        if study_id == held:
            aborted += _clear(store, study_id, ours, clock, stop_command)
            continue
        try:
            with locked(home, study_id):
                aborted += _clear(store, study_id, ours, clock)
        except Conflict:
            continue
    return aborted


def _clear(
    store: Store, study_id: str, orphans: Sequence[Trial], clock: Clock, stop_command: Sequence[str] = ()
) -> list[Trial]:
    for launch in store.launches(study_id):
        if launch.ended_at is None:
            if stop_command:
                processes.run([part.replace("{tag}", launch.id) for part in stop_command], timeout_s=STOP_S)
            processes.reap(launch.id)
            store.finish_launch(replace(launch, ended_at=clock(), verdict="controller: its controller died"))
    return [
        store.finish_trial(
            replace(
                trial,
                state=TrialState.ABORTED,
                cause="controller",
                reason="the controller died in the middle of this trial",
                ended_at=clock(),
            )
        )
        for trial in orphans
    ]
