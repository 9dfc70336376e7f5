"""What runs on a node of a cluster: it does the controller's orders one by one and hands back records.

Nothing here knows the history. The class is plain; `dispatch` makes an actor of it, pinned to its node.
"""

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner import __version__, processes
from tuner.engine.gpu import Gpus
from tuner.errors import (
    Aborted,
    BadInput,
    Conflict,
    EngineError,
    Infeasible,
    NotFound,
    StudyFailed,
    TunerError,
    Unavailable,
)
from tuner.fleet import leases, nodes
from tuner.records import Measurement, Violation
from tuner.settings import Settings
from tuner.tuning.cores import split_cores
from tuner.tuning.study import Prepared, Surveyed
from tuner.tuning.studyfile import EngineFile
from tuner.tuning.trial import GateFailed, Measured, News, Order, Place, work_here

POLL_S = 5.0
"""How long a question for news waits for some."""
FILES = ("*.parquet", "*.log")
"""What comes back of a launch's directory."""

_PLAIN: Mapping[str, type[TunerError]] = {
    kind.__name__: kind for kind in (BadInput, NotFound, Conflict, Unavailable)
}
_ENGINE: Mapping[str, type[EngineError]] = {
    kind.__name__: kind for kind in (Infeasible, Aborted, StudyFailed)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An error as a record: what crosses machines is data."""

    kind: str
    reason: str
    cause: str = ""
    evidence: str = ""
    violation: Violation | None = None
    measurement: Measurement | None = None

    def error(self) -> TunerError:
        """The error again."""
        if self.measurement is not None:
            return GateFailed(self.measurement)
        if self.kind == "Infeasible":
            return Infeasible(self.reason, cause=self.cause, evidence=self.evidence, violation=self.violation)
        if self.kind in _ENGINE:
            return _ENGINE[self.kind](self.reason, cause=self.cause, evidence=self.evidence)
        return _PLAIN.get(self.kind, TunerError)(self.reason)


def fault_of(error: TunerError) -> Fault:
    """An error as a record; a subclass goes by its nearest ancestor that has a name here."""
    known = (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in {**_PLAIN, **_ENGINE})
    kind = next(known, "TunerError")
    if not isinstance(error, EngineError):
        return Fault(kind=kind, reason=str(error))
    return Fault(
        kind=kind,
        reason=str(error),
        cause=error.cause,
        evidence=error.evidence,
        violation=error.violation if isinstance(error, Infeasible) else None,
        measurement=error.measurement if isinstance(error, GateFailed) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How an order ended: what was measured, or the fault; and the files of its directory by name."""

    measured: tuple[Measured, ...] = ()
    fault: Fault | None = None
    files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """What a node says of itself, or why it cannot be used."""

    version: str
    surveyed: Surveyed | None = None
    fault: Fault | None = None


class NodeWorker:
    """One node at work. Its process holds the GPUs' locks and its guardian the engine: both end with it."""

    def __init__(self) -> None:
        self._news: list[News | Done] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._place: Place | None = None
        self._locks: object = None

    async def look(self, name: str, engine: EngineFile, base: str, labels: Mapping[str, str]) -> NodeAnswer:
        """What this node is, in its own engine's words; takes the locks of the GPUs it was given."""
        try:
            seen = await asyncio.to_thread(nodes.fingerprint, name, engine, base=Path(base), labels=labels)
            if self._locks is None:
                locks = leases.locked_gpus(seen.node.gpus)
                locks.__enter__()
                self._locks = locks  # held until this process ends
        except TunerError as error:
            return NodeAnswer(version=__version__, fault=fault_of(error))
        return NodeAnswer(version=__version__, surveyed=seen)

    async def set_up(
        self, prepared: Prepared, dead: Mapping[str, Sequence[str]], isolated: bool = False
    ) -> tuple[str, ...]:
        """Take a study; ends what is left here of launches that are dead, each with its stop command. Returns
        what kept that from being done.
        """
        engine = prepared.file.engine
        node = prepared.node
        gpus = Gpus.open(engine.env, only=node.gpus) if node.gpus else Gpus(nvml=None)
        cores = split_cores(sorted(os.sched_getaffinity(0)))
        self._place = Place(prepared=prepared, cores=cores, gpus=gpus, isolated=isolated)
        problems = []
        for tag, stop in dead.items():
            try:
                await asyncio.to_thread(processes.reap, tag, stop_command=stop)
            except BadInput as error:
                problems.append(str(error))
                await asyncio.to_thread(processes.reap, tag)
            shutil.rmtree(scratch_of(tag), ignore_errors=True)
        return tuple(problems)

    async def begin(self, order: Order) -> None:
        """Start on an order; `news` tells how it goes."""
        await self.stop()
        self._news, self._changed = [], asyncio.Event()
        self._task = asyncio.ensure_future(self._do(order))

    async def news(self, after: int) -> Sequence[News | Done]:
        """What happened since the first `after` news; waits a while for some. The last one is Done."""
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
        """End what is being done; returns when no engine is left."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _note(self, news: News | Done) -> None:
        self._news.append(news)
        self._changed.set()

    async def _do(self, order: Order) -> None:
        if self._place is None:
            raise RuntimeError("set_up comes before begin")
        scratch = scratch_of(order.spec.launch_id)
        place = self._place
        spec = replace(
            order.spec, directory=str(scratch), cores=place.cores.engine,
            gpus=place.prepared.node.gpus, command=place.prepared.command,
        )  # fmt: skip
        measured: tuple[Measured, ...] = ()
        fault: Fault | None = None
        try:
            _make(scratch)
            measured = tuple(await work_here(place, replace(order, spec=spec), self._note))
        except TunerError as error:
            fault = fault_of(error)
        finally:
            files = {path.name: path.read_bytes() for pattern in FILES for path in scratch.glob(pattern)}
            shutil.rmtree(scratch, ignore_errors=True)
        self._note(Done(measured=measured, fault=fault, files=files))


def scratch_of(launch_id: str) -> Path:
    """Where a launch keeps its files until they are handed back."""
    return Settings().home / "work" / launch_id


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Aborted(f"cannot make {directory}: {error.strerror}", cause="disk") from error
