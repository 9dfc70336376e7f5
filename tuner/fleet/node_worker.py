"""The worker on one node of a cluster: does the launch jobs of a controller, and never opens the database."""

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner import __version__, processes
from tuner.engine.gpu import Gpus
from tuner.errors import Aborted, BadInput, TunerError
from tuner.fleet import nodes
from tuner.records import LaunchSpec
from tuner.settings import Settings
from tuner.tuning.context import HostContext, LaunchJob, Measured, News, split_cores
from tuner.tuning.study import Prepared
from tuner.tuning.survey import EngineFile, Surveyed
from tuner.tuning.trial import LocalHost

POLL_S = 5.0
"""Seconds that a worker waits for news before it answers that there is none."""
IDLE_S = 300.0
"""Seconds for which a worker keeps an engine that nobody asks for: its controller may hang."""
FILES = ("*.parquet", "*.log")
"""The files of a launch that come back from the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of an order: the measurements or the error, and the files of its directory by name."""

    measured: tuple[Measured, ...] = ()
    error: TunerError | None = None
    files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """The description of a node, or the error why it cannot be used."""

    version: str
    surveyed: Surveyed | None = None
    error: TunerError | None = None


class NodeWorker:
    """The worker on one node. Its process holds the locks of the GPUs; a guardian ends its engine with it."""

    def __init__(self) -> None:
        self._news: list[News | Done] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._place: HostContext | None = None
        self._engines: LocalHost | None = None
        self._staying: LaunchSpec | None = None
        self._idle: asyncio.Task[None] | None = None
        self._locks: object = None

    async def look(self, name: str, engine: EngineFile, base: str, labels: Mapping[str, str]) -> NodeAnswer:
        """Describe this node, by its own engine, and lock the GPUs that it was given."""
        try:
            seen = await asyncio.to_thread(nodes.fingerprint, name, engine, base=Path(base), labels=labels)
            if self._locks is None:
                locks = nodes.locked_gpus(seen.node.gpus)
                locks.__enter__()
                self._locks = locks  # held until this process ends
        except TunerError as error:
            return NodeAnswer(version=__version__, error=error)
        return NodeAnswer(version=__version__, surveyed=seen)

    async def set_up(
        self, prepared: Prepared, dead: Mapping[str, Sequence[str]], isolated: bool = False
    ) -> tuple[str, ...]:
        """Take a study, and end what dead launches left here, each with its stop command. Returns a sentence
        per stop command that could not be started.
        """
        engine = prepared.file.engine
        node = prepared.node
        gpus = Gpus.open(engine.env, only=node.gpus) if node.gpus else Gpus(nvml=None)
        cores = split_cores(sorted(os.sched_getaffinity(0)))
        self._place = HostContext(prepared=prepared, cores=cores, gpus=gpus, isolated=isolated)
        self._engines = LocalHost(self._place)
        problems = []
        for tag, stop in dead.items():
            try:
                await asyncio.to_thread(processes.reap, tag, stop_command=stop)
            except BadInput as error:
                problems.append(str(error))
                await asyncio.to_thread(processes.reap, tag)
            shutil.rmtree(scratch_of(tag), ignore_errors=True)
        return tuple(problems)

    async def begin(self, order: LaunchJob) -> None:
        """Start an order; `news` reports its progress."""
        await _halted(self._idle)
        await _halted(self._task)
        self._news, self._changed = [], asyncio.Event()
        self._task = asyncio.ensure_future(self._do(order))

    async def news(self, after: int) -> Sequence[News | Done]:
        """The news after the first `after` ones; waits POLL_S for some. The last one is Done."""
        if self._task is not None and self._task.done() and len(self._news) <= after:
            self._task.result()
        if len(self._news) <= after:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), POLL_S)
            except TimeoutError:
                return ()
        return tuple(self._news[after:])

    async def stop(self) -> None:
        """Stop the order. Returns when no engine is left."""
        await _halted(self._idle)
        await _halted(self._task)
        if self._engines is not None:
            await self._engines.release()

    async def holds(self, launch_id: str) -> bool:
        """Whether the engine of this launch still runs. It stays for another IDLE_S."""
        await _halted(self._idle)
        if self._engines is None or not await self._engines.holds(launch_id):
            return False
        self._idle = asyncio.ensure_future(self._release_idle())
        return True

    async def release(self) -> Mapping[str, bytes]:
        """Stop the engine that stayed, if any. Returns its files by name."""
        await self.stop()
        spec, self._staying = self._staying, None
        return {} if spec is None else _taken(Path(spec.directory))

    async def _release_idle(self) -> None:
        await asyncio.sleep(IDLE_S)
        if self._engines is not None:
            await self._engines.release()

    def _note(self, news: News | Done) -> None:
        self._news.append(news)
        self._changed.set()

    async def _do(self, order: LaunchJob) -> None:
        place, engines = self._place, self._engines
        if place is None or engines is None:
            raise RuntimeError("set_up comes before begin")
        scratch = scratch_of(order.spec.launch_id)
        files_in = scratch if order.limits is None else scratch / "replay"
        spec = replace(
            order.spec, directory=str(files_in), cores=place.cores.engine,
            gpus=place.prepared.node.gpus, command=place.prepared.command,
        )  # fmt: skip
        measured: tuple[Measured, ...] = ()
        failure: TunerError | None = None
        stays = False
        try:
            _make(files_in)
            measured = tuple(await engines(replace(order, spec=spec), self._note))
        except TunerError as error:
            failure = error
        finally:
            stays = order.stay and await engines.holds(spec.launch_id)
            if stays and order.limits is None:
                self._staying = spec
            files = {} if stays and order.limits is None else _taken(files_in)
            if self._staying is None:
                shutil.rmtree(scratch, ignore_errors=True)
        if stays:
            self._idle = asyncio.ensure_future(self._release_idle())
        self._note(Done(measured=measured, error=failure, files=files))


async def _halted(task: "asyncio.Task[None] | None") -> None:
    """Cancel a task, and wait until it has ended."""
    if task is not None and not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _taken(directory: Path) -> dict[str, bytes]:
    """The files of a launch by name; the folder is removed."""
    files = {path.name: path.read_bytes() for pattern in FILES for path in directory.glob(pattern)}
    shutil.rmtree(directory, ignore_errors=True)
    return files


def scratch_of(launch_id: str) -> Path:
    """The folder of a launch's files until they are sent back."""
    return Settings().home / "work" / launch_id


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Aborted(f"cannot make {directory}: {error.strerror}", cause="disk") from error
