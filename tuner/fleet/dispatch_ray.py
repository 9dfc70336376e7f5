"""Ray: the nodes of a cluster, and the controller's end of the worker on each.

Ray is imported only when a cluster is used, because it is an extra (`cluster`).
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner import __version__
from tuner.errors import Aborted, BadInput, Conflict, Unavailable
from tuner.fleet.handover import Deferred
from tuner.fleet.node_worker import Done, NodeAnswer, NodeWorker
from tuner.measures import many
from tuner.records import LaunchSpec, Measurement
from tuner.tuning.context import LaunchJob, Measured, Note
from tuner.tuning.study import Prepared
from tuner.tuning.survey import EngineFile, Surveyed

GRANT_S = 120.0
"""Seconds that a node may take to start a worker on its GPUs; another job of the cluster may hold them."""
RETURN_S = 300.0
"""Seconds to wait for a lost node to come back, or for a free node of its class."""
ASK_S = 1.0
KNOCK_S = 10.0
ADDRESS = re.compile(r"^(auto|ray://[^\s/]+:\d+|[^\s/:]+:\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A living node of the cluster, as Ray reports it. `labels` are those that it was started with."""

    ray_id: str
    name: str
    host: str
    gpus: int
    labels: Mapping[str, str]

    @property
    def facts(self) -> Mapping[str, str]:
        """The keys and values that a selector can match."""
        card = self.labels.get("ray.io/accelerator-type", "").lower()
        plain = {key: value for key, value in self.labels.items() if not key.startswith("ray.io/")}
        return {"gpu": card, **plain, "name": self.name, "host": self.host}


def _ray() -> Any:
    import ray

    return ray


def connect(address: str) -> None:
    """Join a cluster as its driver. BadInput without the extra, Unavailable when nothing answers there."""
    if not ADDRESS.match(address):
        raise BadInput(f"--on {address}: give auto, HOST:PORT or ray://HOST:PORT")
    if address != "auto":
        _knock(address)
    try:
        with Deferred():  # an import that is cut in the middle leaves a Ray whose exit handler fails
            ray = _ray()
    except ImportError:
        raise BadInput("--on needs Ray: pip install 'vllm-config-tuner[cluster]'") from None
    try:
        _join(ray, address)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        reason = (
            said[0] if len(said) == 1 else f"{said[0]} {said[-1].strip()}"
        )  # the last line of a traceback has the reason
        raise Unavailable(
            f"no Ray cluster answers at {address} ({reason[:300]}); `ray start --head` starts one"
        ) from error


def _join(ray: Any, address: str) -> None:
    """Connect. Ray's client server starts a server per client and gives up early on a busy host:
    try again.
    """
    for again in (True, True, False):
        try:
            with _our_signals():
                ray.init(address=address, namespace="vllm-tuner", log_to_driver=False, logging_level="ERROR")
            return
        except ConnectionError as error:
            if not again or "Starting Ray client server failed" not in str(error):
                raise


@contextmanager
def _our_signals() -> Iterator[None]:
    """Keep our SIGTERM handler, which stops engines first. Ray's ends the process at once with exit
    code 15.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _knock(address: str) -> None:
    """Unavailable when nothing listens there. Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()
    except (OSError, OverflowError) as error:
        raise Unavailable(
            f"no Ray cluster answers at {address} ({error}); `ray start --head` starts one"
        ) from error


@contextmanager
def dumps_in(log: Path) -> Iterator[None]:
    """Send what Ray's libraries write to standard error into a log, but not what the tuner writes. Ray dumps
    the state of tasks and nodes there when a node is lost.
    """
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        sink = log.open("a")
    except OSError as error:
        raise Unavailable(f"cannot write {log}: {error.strerror or error}") from error
    sys.stderr.flush()
    before, handlers = sys.stderr, logging.getLogger("ray").handlers
    streams = [each for each in handlers if isinstance(each, logging.StreamHandler)]
    with sink, os.fdopen(os.dup(2), "w", buffering=1) as shown:
        os.dup2(sink.fileno(), 2)
        sys.stderr = shown
        for handler in streams:
            handler.setStream(sink)
        try:
            yield
        finally:
            for handler in streams:
                handler.setStream(before)
            sys.stderr = before
            os.dup2(shown.fileno(), 2)


def disconnect() -> None:
    """Leave the cluster; this driver's workers end."""
    with contextlib.suppress(ConnectionError):
        _ray().shutdown()


def members() -> tuple[Member, ...]:
    """The living nodes by name. BadInput when two have one name, Unavailable when the cluster is gone."""
    try:
        told = _ray().nodes()
    except ConnectionError as error:
        raise Unavailable(f"the cluster no longer answers: {error}") from error
    found = sorted((_member(each) for each in told if each.get("Alive")), key=lambda m: m.name)
    names = [member.name for member in found]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(
                f"two nodes of the cluster have the name {name}: give each another name"
                " (ray start --labels node=NAME)"
            )
    return tuple(found)


def _member(told: Mapping[str, Any]) -> Member:
    labels = {str(k): str(v) for k, v in (told.get("Labels") or {}).items()}
    host = str(told.get("NodeManagerHostname") or told.get("NodeManagerAddress"))
    given = str(told.get("NodeName") or "")
    is_address = given in ("", told.get("NodeManagerAddress"))
    return Member(
        ray_id=str(told["NodeID"]),
        name=labels.get("node") or (host if is_address else given),
        host=host,
        gpus=int(told.get("Resources", {}).get("GPU", 0)),
        labels=labels,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hand:
    """A worker on a node, and the node's description."""

    member: Member
    actor: Any
    surveyed: Surveyed

    def end(self) -> None:
        """End the worker's process and everything that it started."""
        _end(self.actor)


async def hire(member: Member, engine: EngineFile, base: Path) -> Hand:
    """Start a worker on exactly this node, with all its GPUs, and ask it to describe the node.

    Conflict when the GPUs are not granted in time or another tuner on that host holds them; Unavailable when
    the node is lost meanwhile.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = _ray()
    pinned = NodeAffinitySchedulingStrategy(node_id=member.ray_id, soft=False)
    actor = (
        ray.remote(NodeWorker)
        .options(num_gpus=member.gpus, num_cpus=0, max_restarts=0, scheduling_strategy=pinned)
        .remote()
    )
    labels = {key: value for key, value in member.facts.items() if value and key not in ("name", "host")}
    try:
        seen: NodeAnswer = await asyncio.wait_for(
            _answer(actor.look.remote(member.name, engine, str(base), labels), member.name), GRANT_S
        )
        return Hand(member=member, actor=actor, surveyed=_surveyed(seen, member.name))
    except TimeoutError:
        _end(actor)
        raise Conflict(
            f"node {member.name} did not give its {many(member.gpus, 'GPU')} within {GRANT_S:.0f} s:"
            " another job of the cluster holds them. Wait until it has ended, or choose nodes with --nodes"
        ) from None
    except Aborted as error:
        _end(actor)
        raise Unavailable(f"{error} before its run began. Type the same command to try again") from error
    except BaseException:
        _end(actor)
        raise


def _surveyed(seen: NodeAnswer, node: str) -> Surveyed:
    """The description of a node. Its error is raised; BadInput for another version of the tuner."""
    if seen.version != __version__:
        raise BadInput(
            f"node {node} has vllm-config-tuner {seen.version}, but this host has {__version__}: install one"
            " version on both"
        )
    if seen.surveyed is None:
        raise seen.error or Unavailable(f"node {node} did not report its engine's version")
    return seen.surveyed


def _end(actor: Any) -> None:
    from ray.exceptions import RayError

    with contextlib.suppress(RayError, ConnectionError, ValueError):
        _ray().kill(actor, no_restart=True)


async def _answer(reference: Awaitable[Any], node: str) -> Any:
    """The answer of a worker. Aborted (node_lost) when the worker or its node is gone."""
    from ray.exceptions import RayError, RayTaskError

    try:
        return await reference
    except RayTaskError:
        raise
    except (RayError, ConnectionError) as error:  # the latter is Ray's client's
        raise Aborted(f"node {node} was lost ({type(error).__name__})", cause="node_lost") from error


class Remote:
    """Runs the launches of a study on a node of the cluster: an `EngineHost`.

    When the node is lost, the order is Aborted. The next order waits until the node is back or `spare` hires
    a free node of the same class. When neither happens, `gone` says so, and the run can be resumed as if it
    had been stopped.
    """

    def __init__(
        self,
        hand: Hand,
        prepared: Prepared,
        spare: Callable[[], Awaitable[Hand | None]],
        note: Note,
        *,
        isolated: bool = False,
    ) -> None:
        self.gone: str | None = None
        self._hand: Hand | None = hand
        self._name = hand.member.name
        self._prepared, self._spare, self._note = prepared, spare, note
        self._is_set_up, self._isolated = False, isolated
        self._dead: dict[str, Sequence[str]] = {}
        self._staying: LaunchSpec | None = None

    async def set_up(self, dead: Mapping[str, Sequence[str]]) -> None:
        """Send the study to the worker. `dead` are launches that were left open, with their stop commands.
        Aborted when the node is lost: the next order waits for it and sends the study again.
        """
        self._dead |= dead
        hand = await self._present()
        seen = hand.surveyed
        here = replace(
            self._prepared, command=seen.command, node=replace(self._prepared.node, gpus=seen.node.gpus)
        )
        try:
            asked = hand.actor.set_up.remote(here, self._dead, self._isolated)
            problems = await _answer(asked, hand.member.name)
        except Aborted:
            self._drop()
            raise
        for sentence in problems:
            self._note(sentence)
        self._dead, self._is_set_up = {}, True

    async def __call__(self, order: LaunchJob, note: Note) -> Sequence[Measured]:
        try:
            if not self._is_set_up:
                await self.set_up({})
            hand = await self._present()
            await _answer(hand.actor.begin.remote(order), hand.member.name)
            if order.stay and order.limits is None:
                self._staying = order.spec
            done = await self._listen(hand, note)
        except Aborted:
            self._lose(order.spec)
            raise
        except asyncio.CancelledError:
            await self._stop()
            raise
        _write(done.files, Path(order.spec.directory))
        if done.error is not None:
            raise done.error
        return tuple(_here(each, Path(order.spec.directory)) for each in done.measured)

    async def holds(self, launch_id: str) -> bool:
        """Whether the engine of this launch still runs on the node. False when the node is lost."""
        if self._hand is None or self._staying is None or self._staying.launch_id != launch_id:
            return False
        try:
            return bool(await _answer(self._hand.actor.holds.remote(launch_id), self._name))
        except Aborted:
            self._lose(self._staying)
            return False

    async def release(self) -> None:
        """Stop the engine that stayed on the node, and fetch its log. Nothing is left to do when the node is
        lost: its worker's guardian ends the engine.
        """
        spec, self._staying = self._staying, None
        if self._hand is None or spec is None:
            return
        try:
            files = await asyncio.shield(_answer(self._hand.actor.release.remote(), self._name))
        except Aborted:
            self._lose(spec)
            return
        _write(files, Path(spec.directory))

    async def end(self) -> None:
        """End the worker on the node."""
        if self._hand is not None:
            self._hand.end()
            self._hand = None

    async def _listen(self, hand: Hand, note: Note) -> Done:
        heard = 0
        while True:
            for news in await _answer(hand.actor.news.remote(heard), hand.member.name):
                heard += 1
                if isinstance(news, Done):
                    return news
                note(news)

    async def _present(self) -> Hand:
        """The worker, or a new one after a loss. CancelledError, with `gone` set, when there is
        none in time.
        """
        if self._hand is not None:
            return self._hand
        self._note(f"node {self._name} is lost: waiting for it or for a free node of its class")
        loop = asyncio.get_running_loop()
        end = loop.time() + RETURN_S
        while loop.time() < end:
            found = await self._spare()
            if found is not None:
                self._hand, self._is_set_up = found, False
                self._note(f"the run continues on node {found.member.name}")
                await self.set_up({})
                return found
            await asyncio.sleep(ASK_S)
        self.gone = (
            f"node {self._name} is lost, and there is no free node of its class "
            f"{self._prepared.node.gpu_class}. The same command continues its run"
        )
        raise asyncio.CancelledError(self.gone)

    def _lose(self, spec: LaunchSpec) -> None:
        """The worker is gone: what this launch left is to be ended on the node when it is back."""
        self._dead[spec.launch_id] = spec.stop_command
        self._drop()

    def _drop(self) -> None:
        if self._hand is not None:
            self._hand.end()
        self._hand, self._is_set_up, self._staying = None, False, None

    async def _stop(self) -> None:
        """Stop the order on the node. Returns when its engine or the node is gone."""
        if self._hand is not None:
            with contextlib.suppress(Aborted):
                await asyncio.shield(_answer(self._hand.actor.stop.remote(), self._name))


def _write(files: Mapping[str, bytes], directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / Path(name).name).write_bytes(content)
    except OSError as error:
        raise Aborted(f"cannot write {directory}: {error.strerror}", cause="disk") from error


def _here(measured: Measured, directory: Path) -> Measured:
    """The measurement with the paths of its outcomes on this machine."""
    found: Measurement = measured.measurement
    slices = tuple(
        replace(part, outcomes_file=str(directory / Path(part.outcomes_file).name))
        if part.outcomes_file
        else part
        for part in found.slices
    )
    return replace(measured, measurement=replace(found, slices=slices))
