"""Nodes: what a host is, which nodes a selector means, and who holds a node.

A lease in the database, renewed from a thread, holds a node against other machines: each write of a fenced
store proves the lease, so a controller that lost it cannot write. A file lock per GPU holds the GPU against
other processes of the host, whatever database they use; the kernel frees it when the process ends.
"""

import fcntl
import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from tuner.engine.gpu import Gpus
from tuner.errors import BadInput, Conflict, NotFound, TunerError, Unavailable, nearest
from tuner.history.entities import Lease
from tuner.history.store import Store
from tuner.records import Node
from tuner.tuning.survey import EngineFile, Surveyed, survey

Clock = Callable[[], datetime]
LEASE_S = 60.0
"""Seconds without a renewal after which a controller has lost its node."""
BEATS = 4
"""Renewals within the time of a lease: a lease survives three missed renewals."""
NAMES = ("name", "gpu", "class", "host")
"""Keys of a selector beside the labels."""


def fingerprint(
    name: str, engine: EngineFile, *, base: Path, labels: Mapping[str, str] | None = None
) -> Surveyed:
    """This host as a node of that name, by the engine's interpreter and the GPU driver. No engine
    is started.
    """
    found = survey(engine, base=base, name=name)
    gpus = Gpus.open()
    node = replace(
        found.node,
        name=name,
        host=socket.gethostname(),
        driver=gpus.driver,
        labels=dict(labels or {}),
    )
    return replace(found, node=node)


def register(store: Store, node: Node) -> Node:
    """Store what is known of a node now; its state stays. BadInput when its GPU class is another
    than before.
    """
    known = {each.name: each for each in store.nodes()}.get(node.name)
    if known is None:
        return store.add_node(node)
    if known.gpu_class != node.gpu_class:
        raise BadInput(
            f"node {node.name} was registered with {known.gpu_class}, but now it has {node.gpu_class}:"
            " register the new machine under another name"
        )
    return store.add_node(replace(node, labels={**known.labels, **node.labels}, state=known.state))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """`key=value` pairs that must all match; without pairs, every node matches."""

    pairs: tuple[tuple[str, str], ...] = ()

    def matches(self, facts: Mapping[str, str]) -> bool:
        """Whether a node with these facts and labels is selected. For gpu and class, one whole word is
        enough.
        """
        return all(_holds(key, value, facts) for key, value in self.pairs)

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in self.pairs) or "all"


def _holds(key: str, value: str, facts: Mapping[str, str]) -> bool:
    found = facts.get(key, "").lower()
    if key in ("gpu", "class"):
        return re.search(rf"(^|-){re.escape(value.lower())}(-|x\d|$)", found) is not None
    return found == value.lower()


def selector(texts: Sequence[str]) -> Selector:
    """`gpu=a100,zone=eu` → Selector. Several texts must all match. `all` selects every node."""
    pairs: list[tuple[str, str]] = []
    for text in texts:
        for part in (p.strip() for p in text.split(",")):
            if part in ("", "all"):
                continue
            key, sign, value = part.partition("=")
            if not sign or not key.strip() or not value.strip():
                raise BadInput(f"--nodes {text}: '{part}' is not KEY=VALUE, such as gpu=a100 or name=node-3")
            pairs.append((key.strip(), value.strip()))
    return Selector(pairs=tuple(pairs))


def chosen(all_facts: Mapping[str, Mapping[str, str]], wanted: Selector) -> tuple[str, ...]:
    """The sorted names of the selected nodes. NotFound and BadInput list what there is."""
    found = sorted(name for name, facts in all_facts.items() if wanted.matches(facts))
    if found:
        return tuple(found)
    keys = sorted({key for facts in all_facts.values() for key in facts} | set(NAMES))
    for key, _ in wanted.pairs:
        if key not in keys:
            raise BadInput(f"--nodes {wanted}: no node has a label '{key}'{nearest(key, keys)}")
    shown = {
        name: " ".join(f"{key}={value}" for key, value in sorted(facts.items()) if key != "name" and value)
        for name, facts in sorted(all_facts.items())
    }
    there = "; ".join(f"{name} ({brief})" for name, brief in shown.items())
    there = f"they are {there}" if there else "it has none with GPUs"
    raise NotFound(f"--nodes {wanted} selects none of the cluster's nodes; {there}")


@contextmanager
def held(
    store: Store, node: str, *, clock: Clock, ttl_s: float = LEASE_S, gpus: Sequence[str] = ()
) -> Iterator[Store]:
    """Hold a node and its GPUs on this host. Yields a store that proves the lease with every write.

    Conflict names the holder when somebody else holds the node. The lease of a dead process of this host is
    taken over at once, a lease of another host when it has run out.
    """
    release_dead(store, node, clock)
    lease = store.acquire_lease(node, holder(), now=clock(), ttl_s=ttl_s)
    try:
        with locked_gpus(gpus), Heartbeat(store, lease, clock, ttl_s):
            yield store.fenced(lease, clock)
    finally:
        store.release_lease(lease)


def holder() -> str:
    """This process by host, pid and start time, so that others on the host can see whether it still runs."""
    return f"{socket.gethostname()} pid {os.getpid()} since {_begun(psutil.Process())}"


def _begun(process: psutil.Process) -> str:
    return f"{datetime.fromtimestamp(round(process.create_time()), UTC):%Y-%m-%d %H:%M:%S} UTC"


def is_dead(holder: str) -> bool:
    """Whether a holder is a process of this host that has ended; False if that cannot be known."""
    host, _, rest = holder.partition(" pid ")
    pid, _, since = rest.partition(" since ")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        process = psutil.Process(int(pid))
        # Leases of earlier releases have the seconds since 1970.
        known = (_begun(process), f"{process.create_time():.0f}")
        return since not in known or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def release_dead(store: Store, node: str, clock: Clock) -> None:
    """Release the lease of a node whose holder was a process of this host and has ended."""
    for lease in store.leases(now=clock()):
        if lease.node == node and is_dead(lease.holder):
            store.release_lease(lease)


class Heartbeat:
    """Renews a lease from its own thread until the `with` block ends; a lost lease is not taken again."""

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
    """Hold the lock of each GPU on this host, always in the same order. Conflict names a GPU that is held."""
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
        raise Conflict(
            f"GPU {uuid} is in use by another tuner on this host: {who}; wait until it has ended"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, holder().encode(), 0)
    return descriptor


def lock_path(uuid: str) -> Path:
    """The lock file of a GPU, the same for every user and every TUNER_HOME of this host."""
    return Path(tempfile.gettempdir()) / "vllm-tuner-gpus" / (re.sub(r"[^A-Za-z0-9._-]", "_", uuid) + ".lock")
