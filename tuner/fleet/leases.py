"""Who has a node: a lease in the database, renewed from a thread, and a lock per GPU that the kernel frees.

The lease holds between machines; whoever lost it cannot write, because each write of a fenced store proves
it. The lock holds between processes of one host, whatever database they use.
"""

import fcntl
import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import psutil

from tuner.errors import Conflict, TunerError, Unavailable
from tuner.history.entities import Lease
from tuner.history.store import Store

Clock = Callable[[], datetime]
LEASE_S = 60.0
"""A controller that is not heard of for so long has lost its node."""
BEATS = 4
"""How often a lease is renewed within its time: it outlives three missed beats."""


@contextmanager
def held(
    store: Store, node: str, *, clock: Clock, ttl_s: float = LEASE_S, gpus: Sequence[str] = ()
) -> Iterator[Store]:
    """Have a node and its GPUs on this host; yields the store whose every write proves the lease.

    Conflict, naming the holder, when somebody else has it. The lease of a process of this host that died is
    taken over at once, anybody else's when it ran out.
    """
    release_dead(store, node, clock)
    lease = store.acquire_lease(node, holder(), now=clock(), ttl_s=ttl_s)
    try:
        with locked_gpus(gpus), Heartbeat(store, lease, clock, ttl_s):
            yield store.fenced(lease, clock)
    finally:
        store.release_lease(lease)


def holder() -> str:
    """This process, so that anybody on this host can tell whether it still lives."""
    return f"{socket.gethostname()} pid {os.getpid()} since {psutil.Process().create_time():.0f}"


def is_dead(holder: str) -> bool:
    """Whether a holder was a process of this host that is gone; False where that cannot be known."""
    host, _, rest = holder.partition(" pid ")
    pid, _, since = rest.partition(" since ")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        process = psutil.Process(int(pid))
        return f"{process.create_time():.0f}" != since or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def release_dead(store: Store, node: str, clock: Clock) -> None:
    """Give back the lease of a process of this host that is gone; others' leases run out by themselves."""
    for lease in store.leases(now=clock()):
        if lease.node == node and is_dead(lease.holder):
            store.release_lease(lease)


class Heartbeat:
    """Renews a lease from a thread of its own until left; a lease that is lost stays lost."""

    def __init__(self, store: Store, lease: Lease, clock: Clock, ttl_s: float) -> None:
        self._store, self._lease, self._clock, self._ttl_s = store, lease, clock, ttl_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._over.wait(self._ttl_s / BEATS):
            try:
                self._store.renew_lease(self._lease, now=self._clock(), ttl_s=self._ttl_s)
            except Unavailable:
                continue
            except TunerError:
                return


@contextmanager
def locked_gpus(uuids: Sequence[str]) -> Iterator[None]:
    """Hold the lock of each GPU on this host, in one order for all. Conflict names the one that is held."""
    descriptors: list[int] = []
    try:
        for uuid in sorted(uuids):
            descriptors.append(_locked(uuid))
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _locked(uuid: str) -> int:
    path = lock_path(uuid)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent.stat().st_uid == os.getuid():
            path.parent.chmod(0o1777)
        before = os.umask(0)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        finally:
            os.umask(before)
    except OSError as error:
        raise Unavailable(f"cannot open the lock {path} of GPU {uuid}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        who = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise Conflict(f"GPU {uuid} is in use by another tuner on this host: {who}") from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, holder().encode(), 0)
    return descriptor


def lock_path(uuid: str) -> Path:
    """The lock file of a GPU, the same for every user and every TUNER_HOME of this host."""
    return Path(tempfile.gettempdir()) / "vllm-tuner-gpus" / (re.sub(r"[^A-Za-z0-9._-]", "_", uuid) + ".lock")
