"""One replay, from a ready engine to a measurement: the warm-up, then for each slice the cache reset,
priming, load warm-up, the window by scheduled arrival, and the tail under load. Also the sender processes
that do this. The formulas are in `tuner/metrics.py`.
"""

import asyncio
import fcntl
import json
import marshal
import math
import os
import pickle
import resource
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from tuner import processes
from tuner.errors import Aborted, BadInput, Unavailable
from tuner.leftovers import scratch_prefix
from tuner.metrics import CUT, fold, pool_engine
from tuner.records import (
    Fidelity,
    Measurement,
    MeasurementKind,
    Outcome,
    Purpose,
    Slice,
    SliceMeasurement,
    Slo,
)
from tuner.replay import fidelity
from tuner.replay.feeder import Bodies, Source, Stretch
from tuner.replay.plan import Load, Plan, SendSchedule, lineage, schedule
from tuner.replay.prepare import (
    EngineHandle,
    Notes,
    Observer,
    Preparer,
    Progress,
    check_alive,
    growing,
    recomputed,
)
from tuner.replay.sender import TOLD, Sent, frame, read_frame
from tuner.replay.timing import Contention, giving_way
from tuner.replay.wire import Pool
from tuner.settings import Settings
from tuner.traffic.trace import Trace

# Seconds between attempts to get the lock while another replay holds it.
LOCK_S = 0.1
LEAD_S = 0.05  # before the first request is due, so that every sender knows the clock's zero
WATCH_S = 0.25  # seconds between two questions to the judge

# Between two looks at the engine's health.
LOOK_S = 2.0

# Connections opened ahead of a window at most: a server under load is slow to accept new ones. Half of the
# files that an engine started here may open is the other bound.
CONNECTIONS = 8192


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partial:
    """What a judge sees while a window runs.

    `outcomes` are counted requests, at least all that ended before `now_s`, the time up to which the senders
    have reported. `waiting_s` are the scheduled times of counted requests that were due by then and had not
    ended; turns that wait for another turn are left out, since their time is not known yet. `planned` counts
    the requests of the window.
    """

    slice: Slice
    now_s: float
    window_s: float
    planned: int
    outcomes: Sequence[Outcome]
    waiting_s: Sequence[float]


Judge = Callable[[Partial], str | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SliceReplay:
    """One slice as it went. `outcomes` are those scheduled inside the window, in that order; `window_s` is
    shorter than planned only if a judge stopped it. `engine` are the engine's numbers over the window,
    `series` its scrapes as `observe.series` gives them.
    """

    slice: Slice
    window_s: float
    outcomes: tuple[Outcome, ...]
    engine: Mapping[str, float | None] = field(default_factory=dict)
    series: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """A complete replay; `stopped` is the judge's reason if the judge ended it early."""

    slices: tuple[SliceReplay, ...]
    fidelity: Fidelity = field(default_factory=Fidelity)
    stopped: str | None = None


async def replay(
    server: EngineHandle,
    trace: Trace,
    slices: Sequence[Slice],
    plan: Plan,
    load: Load,
    *,
    judge: Judge | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Replayed:
    """Replay every slice in turn. Raises the engine's fault (`server.fault`) if the engine dies meanwhile.

    One replay at a time per host, unless the load is isolated; others wait.
    """
    async with _only_replay(isolated=load.isolated):
        run = _Replay(server, trace, plan, load, judge, progress or (lambda _: None))
        try:
            return await run.all(slices)
        finally:
            await run.close()


@asynccontextmanager
async def _only_replay(*, isolated: bool = False) -> AsyncIterator[None]:
    """Hold this host's replay lock (two replays would measure each other); wait for it. The kernel frees it
    when its holder dies.
    """
    if isolated:
        yield
        return
    path = Settings().home / f"replay-{socket.gethostname()}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Unavailable(f"cannot open the replay lock {path}: {error.strerror}") from error
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOCK_S)
        yield
    finally:
        os.close(descriptor)


class _Replay:
    """The state of one replay."""

    def __init__(
        self,
        server: EngineHandle,
        trace: Trace,
        plan: Plan,
        load: Load,
        judge: Judge | None,
        progress: Callable[[Progress], None],
    ) -> None:
        self.server, self.trace, self.plan, self.load = server, trace, plan, load
        self.judge, self.progress = judge, progress
        self.pool = Pool(server.host, server.port)
        priorities = server.effective.get("scheduling_policy") == "priority"
        self.bodies = Bodies(trace, load, priorities=priorities)
        plain = replace(trace, meta={})
        source = Source(trace=plain, load=load, priorities=priorities, senders=load.senders)
        self.senders = Senders(server.host, server.port, source, load.cores)
        self.notes = Notes()
        self.prefix = fidelity.PrefixCounts()
        self.sent: list[Sent] = []
        self.planned = 0
        self.cpu = 0.0
        self.stopped: str | None = None

    async def all(self, slices: Sequence[Slice]) -> Replayed:
        """Every slice in turn, then the fidelity report."""
        plan, done = self.plan, list[SliceReplay]()
        prepare = Preparer(
            server=self.server, trace=self.trace, plan=plan, load=self.load, bodies=self.bodies,
            pool=self.pool, notes=self.notes, progress=self.progress,
        )  # fmt: skip
        bare = [schedule(self.trace, s, speed=self.load.speed, warmup_s=0, tail_s=0) for s in slices]
        starting = asyncio.create_task(self.senders.start())
        try:
            await prepare.warm_up(np.concatenate([s.rows for s in bare]) if bare else np.empty(0, np.int64))
        finally:
            await starting
        for part in slices:
            await prepare.reset()
            done.append(await self.one(part, await prepare.prime(part)))
            if self.stopped is not None:
                break
        evidence = fidelity.Evidence(
            sent=self.sent, planned=self.planned, cpu=self.cpu, curtailed=self.stopped is not None,
            extra={**self.notes.values, **self.prefix.values()}, warnings=tuple(self.notes.warnings),
        )  # fmt: skip
        return Replayed(slices=tuple(done), fidelity=fidelity.check(evidence, plan), stopped=self.stopped)

    async def one(self, part: Slice, primed: NDArray[np.int64]) -> SliceReplay:
        """Load warm-up, window and tail of one slice, as one stream of jobs; `primed` rows went before."""
        plan = self.plan
        timetable = schedule(
            self.trace, part, speed=self.load.speed, warmup_s=plan.load_warmup_s, tail_s=plan.tail_limit_s
        )
        parents, roots = lineage(self.trace, timetable, waits=self.load.history != "open")
        window = SliceWindow(part, timetable, parents, self.trace)
        self.planned += window.planned
        stretch = Stretch(timetable=timetable, parents=parents, roots=roots)
        observer = Observer(self.server, plan.scrape_s)
        watcher: asyncio.Task[None] | None = None
        try:
            most = min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
            await self.senders.begin(window.take, min(most, len(timetable)), stretch)
            contention = Contention()
            zero = perf_counter_ns() + int((plan.load_warmup_s + LEAD_S) * 1e9)
            self.senders.go(zero)
            watcher = asyncio.create_task(observer.run(zero, timetable.window_s))
            with giving_way():
                await self.watch(window, zero, observer)
        finally:
            if watcher is not None:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
            await self.senders.cut(CUT)
        self.sent += window.sent
        self.report(contention.since((perf_counter_ns() - zero) / 1e9 + plan.load_warmup_s))
        engine = await observer.conclude()
        if growing(engine, timetable.window_s):
            self.notes.warnings.append(f"slice {part.name}: the engine's queue grew during the whole slice")
        if (note := recomputed(engine)) is not None:
            self.notes.warnings.append(f"slice {part.name}: {note}")
        ended = min(window.now_s, timetable.window_s) if self.stopped else timetable.window_s
        outcomes = sorted(window.outcomes, key=lambda o: (o.scheduled_s, o.row))
        block_size = self.server.effective.get("block_size")
        if isinstance(block_size, int):
            about = (block_size, self.server.kv_tokens)
            await asyncio.to_thread(self.prefix.add, self.trace, (primed, timetable), outcomes, about)
        return SliceReplay(
            slice=part, window_s=ended, outcomes=tuple(outcomes), engine=engine, series=observer.series
        )

    def report(self, contention: Mapping[str, float | None]) -> None:
        """Add the senders' reports and the kernel's counters of this slice to the notes."""
        for said in self.senders.reports:
            self.cpu = max(self.cpu, said["cpu_s"] / max(said["span_s"], 1e-9))
            self.notes.highest("sender_preempted_per_s", said["preempted"] / max(said["span_s"], 1e-9))
            self.notes.highest("loop_wake_p99_ms", said["wake_p99_ms"])
            self.notes.highest("sender_realtime", said["realtime"])
        for name, value in contention.items():
            self.notes.highest(name, value)
        self.notes.values["senders"] = float(self.load.senders)
        self.notes.values["senders_pinned"] = float(self.load.cores is not None)

    async def watch(self, window: "SliceWindow", zero: int, observer: Observer) -> None:
        """Until every counted request ended: ask the judge, check the engine, report progress."""
        limit = window.window_s + self.plan.tail_limit_s
        looked, heard = -math.inf, self.senders.heard
        while True:
            window.now_s = (perf_counter_ns() - zero) / 1e9
            if self.senders.heard != heard:
                heard = self.senders.heard
                self.server.heard()
            if window.done or window.now_s > limit:
                return
            started, over = window.now_s >= 0, window.now_s >= window.window_s
            phase = "load warm-up" if not started else "last answers" if over else "window"
            self.progress(
                Progress(
                    phase=phase,
                    slice=window.slice.name,
                    done_s=window.now_s,
                    total_s=window.window_s,
                    engine=observer.now,
                )
            )
            if window.now_s - looked > LOOK_S or not self.server.alive:
                looked = window.now_s
                await check_alive(self.server)
            if self.senders.broken is not None:
                raise Aborted(self.senders.broken, cause="sender")
            told_s = (self.senders.told_ns - zero) / 1e9
            if self.judge is not None and told_s > 0:
                self.stopped = self.judge(window.partial(min(told_s, window.now_s)))
                if self.stopped is not None:
                    return
            left = window.window_s - window.now_s
            await asyncio.sleep(WATCH_S if left > WATCH_S else 0.02)

    async def close(self) -> None:
        """End the senders and close all connections."""
        await self.senders.close()
        await self.pool.close()


class SliceWindow:
    """Counted requests of one slice as they come in. `parents`: position of the turn that each waits for."""

    def __init__(
        self, part: Slice, timetable: SendSchedule, parents: NDArray[np.int64], trace: Trace
    ) -> None:
        self.slice, self.trace = part, trace
        self.window_s = timetable.window_s
        self.at_s = timetable.at_s[timetable.measured]
        self.keys = np.flatnonzero(timetable.measured)
        self.alone = parents[timetable.measured] < 0
        self.planned = len(self.at_s)
        self.now_s = -math.inf
        self.sent: list[Sent] = []
        self.outcomes: list[Outcome] = []
        self._ended: set[int] = set()

    def take(self, sent: Sent) -> None:
        self.sent.append(sent)
        if sent.counted:
            classes = self.trace.classes_of(sent.outcome.row)
            self.outcomes.append(replace(sent.outcome, classes=classes) if classes else sent.outcome)
            self._ended.add(sent.key)

    @property
    def done(self) -> bool:
        return self.now_s >= self.window_s and len(self.outcomes) >= self.planned

    def partial(self, now_s: float) -> Partial:
        due = int(np.searchsorted(self.at_s, now_s, side="right"))
        sure = np.flatnonzero(self.alone[:due])
        waiting = [
            at
            for key, at in zip(self.keys[sure].tolist(), self.at_s[sure].tolist(), strict=True)
            if key not in self._ended
        ]
        return Partial(
            slice=self.slice, now_s=now_s, window_s=self.window_s, planned=self.planned,
            outcomes=self.outcomes, waiting_s=waiting,
        )  # fmt: skip


def measure(
    replayed: Replayed,
    slo: Slo,
    *,
    price_per_gpu_hour: float | None = None,
    gpus: int = 1,
    extra: Mapping[str, float] | None = None,
    asked: Collection[str] = (),
    purpose: Purpose = "search",
    repeat: int = 0,
) -> Measurement:
    """The numbers of a replay, pooled over the slices and per slice. p99 is absent under 1,000 requests
    unless `asked` by name.

    `extra` adds numbers measured elsewhere (ready_s, gpu_memory_gib, …). A replay that was stopped early is
    `partial`.
    """
    parts = [(part.outcomes, part.window_s, part.engine) for part in replayed.slices]
    pooled = fold([o for outcomes, _, _ in parts for o in outcomes], sum(w for _, w, _ in parts), slo, asked)
    pooled.update(pool_engine([(engine, window) for _, window, engine in parts]))
    pooled.update(_cost(pooled, price_per_gpu_hour, gpus))
    pooled.update(extra or {})
    slices = tuple(
        SliceMeasurement(
            name=part.slice.name,
            window_s=part.window_s,
            values={
                **fold(part.outcomes, part.window_s, slo, asked),
                **pool_engine([(part.engine, part.window_s)]),
            },
        )
        for part in replayed.slices
    )
    kind: MeasurementKind = "partial" if replayed.stopped else "full"
    return Measurement(
        values=pooled, slices=slices, kind=kind, purpose=purpose, repeat=repeat, fidelity=replayed.fidelity
    )


def _cost(values: Mapping[str, float], price: float | None, gpus: int) -> dict[str, float]:
    """Price of a million output tokens at this rate."""
    rate = values.get("output_tokens_per_s", 0.0)
    if price is None or rate <= 0:
        return {}
    return {"cost_per_million_tokens": price * gpus / 3600 / rate * 1e6}


START_S = 60.0  # generous, since a loaded host starts processes slowly


class Senders:
    """Sender processes for one engine, and the feeder that builds what they send. A job goes to the sender of
    its group, so a session has one sender. `heard` counts reports of new tokens; every result that ended
    before `told_ns` has arrived.
    """

    def __init__(self, host: str, port: int, source: Source, cores: Sequence[int] | None) -> None:
        self.host = host
        self.port = port
        self.source = source
        self.count = source.senders
        self.cores = cores
        self.broken: str | None = None
        self.heard = 0
        self.reports: list[Mapping[str, float]] = []
        self._on_sent: Callable[[Sent], None] = lambda sent: None
        self._tag = f"sender-{uuid.uuid4().hex[:12]}"
        self._directory = Path(tempfile.mkdtemp(prefix=scratch_prefix()))
        self._links: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._feeder: asyncio.StreamWriter | None = None
        self._processes: list[processes.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._finished = asyncio.Semaphore(0)
        self._prepared = asyncio.Semaphore(0)
        self._told = [0] * self.count
        self._servers: list[asyncio.Server] = []

    @property
    def told_ns(self) -> int:
        return min(self._told)

    async def start(self) -> None:
        """Start the processes and wait for them. Aborted when they do not come."""
        came = asyncio.Semaphore(0)

        async def sender(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._links.append((reader, writer))
            came.release()

        async def feeder(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._feeder = writer
            self._readers.append(asyncio.create_task(self._watch_feeder(reader)))
            came.release()

        for name, accept in (("socket", sender), ("feeder", feeder)):
            self._servers.append(await asyncio.start_unix_server(accept, str(self._directory / name)))
        self._spawn("feeder", [str(self._directory)], self.cores)
        for number in range(self.count):
            realtime = ["--realtime"] if self.source.load.realtime else []
            words = [str(self._directory), str(number), self.host, str(self.port), *realtime]
            self._spawn("sender", words, self.cores and [self.cores[number % len(self.cores)]])
        try:
            async with asyncio.timeout(START_S):
                for _ in range(self.count + 1):
                    await came.acquire()
        except TimeoutError as error:
            raise Aborted(
                f"the sender processes did not start within {START_S:.0f} s: {self._log()}", cause="sender"
            ) from error
        self._readers += [asyncio.create_task(self._read(number)) for number in range(self.count)]
        self._tell_feeder(b"B", await asyncio.to_thread(pickle.dumps, self.source))

    def _spawn(self, what: str, words: Sequence[str], cores: Sequence[int] | None) -> None:
        name = f"{what}-{len(self._processes)}"
        try:
            process = processes.spawn(
                [sys.executable, "-m", f"tuner.replay.{what}", *words],
                env={}, directory=self._directory, log=self._directory / f"{name}.log", tag=self._tag,
                cores=cores,
            )  # fmt: skip
        except (BadInput, OSError) as error:
            raise Aborted(f"cannot start a sender process: {error}", cause="sender") from error
        self._processes.append(process)

    def _log(self) -> str:
        """The ends of the processes' logs."""
        texts = (path.read_text(errors="replace").strip() for path in sorted(self._directory.glob("*.log")))
        return "; ".join(text[-200:] for text in texts if text)

    async def _read(self, number: int) -> None:
        reader = self._links[number][0]
        try:
            while True:
                kind, payload = await read_frame(reader)
                if kind == b"R":
                    for raw in marshal.loads(payload):
                        self._on_sent(Sent.unpack(raw))
                elif kind == b"T":
                    self._told[number], heard = TOLD.unpack(payload)
                    self.heard += heard
                elif kind == b"P":
                    self._prepared.release()
                else:
                    self.reports.append(json.loads(payload))
                    self._finished.release()
        except (asyncio.IncompleteReadError, ConnectionError):
            self._broke("a sender process ended in the middle of a replay")

    async def _watch_feeder(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            await reader.read()
        self._broke(f"the feeder process ended in the middle of a replay: {self._log()}")

    def _broke(self, reason: str) -> None:
        self.broken = self.broken or reason
        for _ in range(self.count):
            self._prepared.release()
            self._finished.release()

    def _tell(self, number: int, kind: bytes, payload: bytes = b"") -> None:
        self._links[number][1].write(frame(kind, payload))

    def _tell_feeder(self, kind: bytes, payload: bytes = b"") -> None:
        if self._feeder is not None:
            self._feeder.write(frame(kind, payload))

    async def begin(self, on_sent: Callable[[Sent], None], connections: int, stretch: Stretch) -> None:
        """Begin a new play: `on_sent` takes its results, `connections` are opened ahead, `stretch` is sent.
        Returns when every sender has its connections and enough jobs to start. Aborted when a process ended.
        """
        self._on_sent = on_sent
        self.reports = []
        self._told = [0] * self.count
        self._tell_feeder(b"S", pickle.dumps(stretch))
        for number in range(self.count):
            self._tell(number, b"O", str(connections // self.count).encode())
        for _ in range(self.count):
            await self._prepared.acquire()
        if self.broken is not None:
            raise Aborted(self.broken, cause="sender")

    def go(self, zero_ns: int) -> None:
        """Start the clock: `zero_ns` is a perf_counter_ns, which all processes of a Linux host share."""
        self._tell_feeder(b"Z", str(zero_ns).encode())
        for number in range(self.count):
            self._tell(number, b"Z", str(zero_ns).encode())

    async def cut(self, reason: str) -> None:
        """End the play: everything still in flight is given up, and every job is accounted for."""
        self._tell_feeder(b"C")
        for number in range(self.count):
            self._tell(number, b"X", reason.encode())
        for _ in range(self.count):
            await self._finished.acquire()

    async def close(self) -> None:
        """End the processes and remove what they left."""
        for writer in [*(link for _, link in self._links), *([self._feeder] if self._feeder else [])]:
            writer.close()
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for process in self._processes:
            await processes.stop(process, timeout_s=5.0)
        for server in self._servers:
            server.close()
            with suppress(asyncio.CancelledError):
                await server.wait_closed()
        shutil.rmtree(self._directory, ignore_errors=True)
