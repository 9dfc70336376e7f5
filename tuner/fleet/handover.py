"""Takes production off a node for a run and brings it back. What must be undone is written down first.

Hooks come only from TUNER_HOME/nodes/NAME.yaml, which a person or `tuner node add` writes; no HTTP request
can set them.
"""

import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import FrameType

from tuner import masking, processes
from tuner.errors import Conflict, NotFound, TunerError, Unavailable
from tuner.fleet.hooks import Hook, hooks, path_of
from tuner.fleet.nodes import LEASE_S, held, holder, is_dead, release_dead
from tuner.history.store import Store
from tuner.records import JSON, Node
from tuner.tuning.context import silent
from tuner.tuning.execution import Say, reconcile

Clock = Callable[[], datetime]
TRIES = 3
READY_POLL_S = 1.0
ENDING = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], object] | int | None
RECENT = 5
"""How many of the newest studies of a node are searched for engines that are still running."""


class Deferred:
    """Holds SIGINT and SIGTERM back in a `with` block, and raises KeyboardInterrupt at its end if one came.
    Inside, `with deferred.open():` lets signals act as before. Does nothing outside the main thread.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Handler] = {}
        self._came = False

    def __enter__(self) -> "Deferred":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in ENDING}
        return self

    def __exit__(self, *_: object) -> None:
        self._install()
        if self._came:
            raise KeyboardInterrupt

    @contextmanager
    def open(self) -> Iterator[None]:
        """Signals act as before the block; a signal that was held back raises KeyboardInterrupt now."""
        if self._came:
            raise KeyboardInterrupt
        self._install()
        try:
            yield
        finally:
            for number in self._before:
                signal.signal(number, self._note)

    def _install(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True


@contextmanager
def handed_over(
    store: Store, node: Node, *, home: Path, clock: Clock, say: Say = silent, ttl_s: float = LEASE_S
) -> Iterator[Store]:
    """Hold a node alone: leased, its GPUs locked, the work of a dead controller undone, production off. All
    is given back, however the block ends. Yields a store whose writes prove the lease.

    Conflict when somebody else holds the node, or the node is in state fault. A signal that comes while
    production is being taken off or brought back raises KeyboardInterrupt when production is back.
    """
    try:
        known = store.node(node.name)
    except NotFound:
        known = store.add_node(replace(node, host=node.host or socket.gethostname()))
    if known.state == "fault":
        raise Conflict(faulty(node.name))
    _wait_for_restorer(store, node.name, home, clock)
    place = _Place(store, node.name, home, clock, say)
    with (
        Deferred() as signals,
        held(store, node.name, clock=clock, ttl_s=ttl_s, gpus=node.gpus or known.gpus) as fenced,
    ):
        place.undo()
        try:
            place.drain(hooks(home, node.name))
            with signals.open():
                yield fenced
        finally:
            with _still_ours(store, fenced, node.name, clock):
                place.undo()


def recover(store: Store, node: str, *, home: Path, clock: Clock, say: Say = silent, host: str = "") -> bool:
    """Undo what a dead controller left on a node: first its engines, then its hooks. True when there was
    work. `host` is where it was (empty: here); the hooks run here.

    A node that somebody holds is left alone (False). Conflict when the node is in state fault or the journal
    is of another host. Unavailable when a hook fails; the journal stays for the next try.
    """
    if store.handover(node) is None or is_held(store, node, clock):
        return False
    with Deferred(), held(store, node, clock=clock):
        return _Place(store, node, home, clock, say, host).undo()


def forget(store: Store, node: str, *, clock: Clock) -> bool:
    """Clear the journal of a node, whatever its host, and run nothing: production was brought back by hand.
    True when there was one. A node that somebody holds is left alone (False).
    """
    if store.handover(node) is None or is_held(store, node, clock):
        return False
    with held(store, node, clock=clock):
        store.set_handover(node, None)
        if store.node(node).state != "fault":
            store.set_node_state(node, "free")
        return True


def found(store: Store, node: str) -> list[str]:
    """What the journal of a node says, a line for each fact. Empty if nothing is to be undone."""
    journal = store.handover(node)
    if not isinstance(journal, dict):
        return []
    entries = journal.get("hooks")
    left = [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    return [
        f"node {node}: production was drained from host {journal.get('host')} at {journal.get('at', '?')}"
        f" by {journal.get('holder')}",
        *(f"  {e.get('name')}: {shlex.join(masking.arguments(_words(e.get('restore'))))}" for e in left),
    ]


def recover_all(store: Store, *, home: Path, clock: Clock, say: Say = silent) -> bool:
    """`recover` for every node. Problems are reported and left. True when there was no problem."""
    well = True
    for node in store.nodes():
        try:
            recover(store, node.name, home=home, clock=clock, say=say)
        except TunerError as error:
            well = False
            say(str(error))
    return well


def _wait_for_restorer(store: Store, node: str, home: Path, clock: Clock) -> None:
    """Wait while another process brings production back for a dead controller; it needs a short time."""
    deadline = time.monotonic() + budget_s(home, node) + READY_POLL_S
    while (drainer := drained_by(store, node)) is not None and is_dead(drainer):
        if time.monotonic() > deadline or not is_held(store, node, clock):
            return
        time.sleep(READY_POLL_S / 10)


def drained_by(store: Store, node: str) -> str | None:
    """The controller that took production off a node; None when there is nothing to undo."""
    journal = store.handover(node)
    return str(journal.get("holder")) if isinstance(journal, dict) else None


def is_held(store: Store, node: str, clock: Clock) -> bool:
    """Whether a living controller holds a node."""
    release_dead(store, node, clock)
    return any(lease.node == node for lease in store.leases(now=clock()))


@contextmanager
def _still_ours(store: Store, fenced: Store, node: str, clock: Clock) -> Iterator[None]:
    """Take an expired lease again when nobody else has the node. Conflict when somebody has: that controller
    then brings production back.
    """
    try:
        fenced.set_node_state(node, store.node(node).state)  # a write proves the lease
    except Unavailable:
        yield  # production is more important than the record
    except Conflict:
        with held(store, node, clock=clock):
            yield
    else:
        yield


def budget_s(home: Path, node: str) -> float:
    """The maximum seconds to bring production back."""
    return sum(hook.timeout_s for hook in hooks(home, node))


def faulty(node: str) -> str:
    return f"node {node} is in state fault: repair it, then type 'tuner node restore {node} --mended'"


_watchers: dict[str, list[processes.Detached]] = {}
"""Per node, the processes that bring production back if this one dies. They end when production is back."""


class _Place:
    """A node whose lease this process holds."""

    def __init__(self, store: Store, node: str, home: Path, clock: Clock, say: Say, host: str = "") -> None:
        self._store, self._node, self._home, self._clock, self._say = store, node, home, clock, say
        self._host = host or socket.gethostname()
        self._drained: list[dict[str, JSON]] = []
        self._drainer = holder()

    def drain(self, hooks: Sequence[Hook]) -> None:
        """Take production off, hook by hook. The journal of all hooks is written first."""
        entries = [entry for hook in hooks if (entry := self._entry(hook)) is not None]
        if not entries:
            return
        self._drainer, self._drained = holder(), entries
        self._write(entries)
        _watchers.setdefault(self._node, []).append(_watch(self._store, self._node, self._home))
        self._store.set_node_state(self._node, "draining")
        for entry in entries:
            self._say(f"draining {entry['name']} on node {self._node}")
            problem = _run(_words(entry["drain"]), _seconds(entry))
            if problem is not None:
                raise Unavailable(f"node {self._node}: {entry['name']} was not drained: {problem}")
        self._store.set_node_state(self._node, "leased")

    def _entry(self, hook: Hook) -> dict[str, JSON] | None:
        """The journal entry of a hook; None when production does not run there."""
        answer = ""
        if hook.ask:
            done = processes.run(hook.ask, timeout_s=hook.timeout_s)
            answer = " ".join(done.out.split())
            if done.code != 0 or not hook.expects(answer):
                said = (done.err.strip() or answer or "no answer")[-200:]
                raise Unavailable(f"node {self._node}: the state of {hook.name} is not known: {said}")
            if hook.is_idle(answer):
                self._say(f"{hook.name} does not run on node {self._node}: nothing to drain")
                return None
        restore: list[JSON] = [word.replace("{answer}", answer) for word in hook.restore]
        return {
            "name": hook.name,
            "drain": list(hook.drain),
            "restore": restore,
            "ready": list(hook.ready),
            "timeout_s": hook.timeout_s,
        }

    def undo(self) -> bool:
        """Restore the entries of the journal, the last one first. True when there was one.

        When the journal cannot be read now, the copy in memory is used, because production must come back.
        """
        try:
            left = self._journal()
            if left:
                clear_engines(self._store, self._node, home=self._home, clock=self._clock, say=self._say)
        except Unavailable:
            if not self._drained:
                raise
            left = self._drained
        done = bool(left)
        while left:
            self._restore(left[-1])
            left = left[:-1]
            with suppress(Unavailable):
                self._write(left)
        self._drained = []
        for watcher in _watchers.pop(self._node, []):
            watcher.kill()
            watcher.wait()
        if done:
            with suppress(Unavailable):
                self._store.set_node_state(self._node, "free")
        return done

    def _journal(self) -> list[dict[str, JSON]]:
        journal = self._store.handover(self._node)
        if not isinstance(journal, dict):
            return []
        if (host := journal.get("host")) != self._host:
            raise Conflict(
                f"production on node {self._node} was drained from host {host}. Restore it on that "
                f"host. If that host is gone (a pod), type 'tuner node restore {self._node} --from "
                f"{host}' here"
            )
        entries, self._drainer = journal.get("hooks"), str(journal.get("holder"))
        if self._store.node(self._node).state == "fault":
            raise Conflict(f"production is NOT restored: {faulty(self._node)}")
        return [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []

    def _write(self, entries: Sequence[Mapping[str, JSON]]) -> None:
        journal: dict[str, JSON] = {
            "host": self._host,
            "holder": self._drainer,
            "at": self._clock().isoformat(),
            "hooks": [dict(entry) for entry in entries],
        }
        self._store.set_handover(self._node, journal if entries else None)

    def _restore(self, entry: Mapping[str, JSON]) -> None:
        self._say(f"restoring {entry['name']} on node {self._node}")
        deadline = time.monotonic() + _seconds(entry)
        problem = None
        for _ in range(TRIES):
            problem = _run(_words(entry["restore"]), max(1.0, deadline - time.monotonic()))
            if problem is None:
                problem = _until_ready(_words(entry["ready"]), deadline)
            if problem is None:
                return
        with suppress(Unavailable):
            self._store.set_node_state(self._node, "dirty")
        raise Unavailable(
            f"node {self._node}: production ({entry['name']}) is NOT restored: {problem}."
            f" Type 'tuner node restore {self._node}' to try again"
        )


def clear_engines(store: Store, node: str, *, home: Path, clock: Clock, say: Say = silent) -> None:
    """End engines that dead controllers left on a node, because they hold the memory that production needs.

    An engine that survives SIGKILL puts the node in state fault: Conflict. A stop command that cannot be
    started is reported.
    """
    reconcile(store, home, node=node, clock=clock, say=say)
    living = processes.tags()
    recent = (each for study in store.studies(node=node)[:RECENT] for each in store.launches(study.id))
    if any(each.id in living for each in recent):
        store.set_node_state(node, "fault")
        raise Conflict(f"an engine survived SIGKILL, so production stays down: {faulty(node)}")


def _watch(store: Store, node: str, home: Path) -> processes.Detached:
    """Start a process that brings production back if this process dies before it did so itself."""
    url = store.database.url.render_as_string(hide_password=False)
    words = [sys.executable, "-m", "tuner", "node", "restore", node, "--after", holder()]
    env = {"TUNER_HOME": str(home), "TUNER_DATABASE_URL": url, "PYTHONPATH": str(Path(__file__).parents[2])}
    log = path_of(home, node).with_suffix(".log")
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return processes.detach(words, env=env, log=log)
    except OSError as error:
        raise Unavailable(
            f"node {node}: the process that restores production after a crash cannot start: {error.strerror}"
        ) from error


def _words(value: JSON) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else []


def _seconds(entry: Mapping[str, JSON]) -> float:
    value = entry["timeout_s"]
    return float(value) if isinstance(value, int | float) else 0.0


def _run(words: Sequence[str], timeout_s: float) -> str | None:
    """Why a command failed, None when it did not."""
    try:
        done = processes.run(words, timeout_s=timeout_s)
    except TunerError as error:
        return str(error)
    if done.code is None:
        return f"{words[0]} did not end within {timeout_s:.0f} s"
    said = (done.err.strip() or done.out.strip()).splitlines()
    return None if done.code == 0 else f"{words[0]} ended with {done.code}: {said[-1][:200] if said else ''}"


def _until_ready(words: Sequence[str], deadline: float) -> str | None:
    """Run the command until it succeeds. Returns its last message when it does not by the deadline."""
    if not words:
        return None
    while (problem := _run(words, max(1.0, deadline - time.monotonic()))) is not None:
        if time.monotonic() + READY_POLL_S > deadline:
            return f"it is not ready: {problem}"
        time.sleep(READY_POLL_S)
    return None
