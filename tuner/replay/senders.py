"""The controller's side of sender processes: start, feed ahead of time, gather, end."""

import asyncio
import json
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns

from tuner import processes
from tuner.errors import Aborted, BadInput
from tuner.replay.jobs import Job, Sent
from tuner.replay.worker import FRAME

START_S = 60.0
AHEAD_S = 15.0
"""Jobs of this much schedule lie with the senders before the clock starts ..."""
AHEAD_BYTES = 64 << 20
"""... or bodies of this size; hardly more than this ever lies with one sender."""
BATCH, BATCH_BYTES = 64, 1 << 20


class Senders:
    """Sender processes on one engine. A job goes to the sender of its group: sessions stay whole. `heard`
    grows while tokens come.
    """

    def __init__(
        self, host: str, port: int, count: int, cores: Sequence[int] | None, *, realtime: bool = False
    ) -> None:
        self.realtime = realtime
        self.host = host
        self.port = port
        self.count = count
        self.cores = cores
        self.broken: str | None = None
        self.heard = 0
        self.reports: list[Mapping[str, float]] = []
        self._on_sent: Callable[[Sent], None] = lambda sent: None
        self._tag = f"sender-{uuid.uuid4().hex[:12]}"
        self._directory = Path(tempfile.mkdtemp(prefix="tuner-"))
        self._links: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._processes: list[processes.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._finished = asyncio.Semaphore(0)
        self._prepared = asyncio.Semaphore(0)
        self._ahead = [0] * count
        self._took = asyncio.Event()
        self._started = asyncio.Event()
        self._zero_ns = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start the processes and wait for them. Aborted when they do not come."""
        came = asyncio.Semaphore(0)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._links.append((reader, writer))
            came.release()

        path = str(self._directory / "socket")
        self._server = await asyncio.start_unix_server(accept, path)
        for number in range(self.count):
            self._processes.append(self._spawn(number, path))
        try:
            async with asyncio.timeout(START_S):
                for _ in range(self.count):
                    await came.acquire()
        except TimeoutError as error:
            log = (self._directory / "sender-0.log").read_text(errors="replace")
            raise Aborted(
                f"a sender process did not start within {START_S:.0f} s: {log[-200:].strip()}",
                cause="sender",
            ) from error
        self._readers = [asyncio.create_task(self._read(number)) for number in range(self.count)]

    def _spawn(self, number: int, path: str) -> processes.Process:
        cores = None if self.cores is None else [self.cores[number % len(self.cores)]]
        try:
            return processes.spawn(
                [
                    sys.executable,
                    "-m",
                    "tuner.replay.worker",
                    path,
                    self.host,
                    str(self.port),
                    *(["--realtime"] if self.realtime else []),
                ],
                env={},
                directory=self._directory,
                log=self._directory / f"sender-{number}.log",
                tag=self._tag,
                cores=cores,
            )
        except (BadInput, OSError) as error:
            raise Aborted(f"cannot start a sender process: {error}", cause="sender") from error

    async def _read(self, number: int) -> None:
        reader = self._links[number][0]
        try:
            while True:
                kind, length = FRAME.unpack(await reader.readexactly(FRAME.size))
                payload = await reader.readexactly(length)
                if kind == b"R":
                    self._on_sent(Sent.unpack(payload))
                elif kind == b"A":
                    self._ahead[number] -= int(payload)
                    self._took.set()
                elif kind == b"T":
                    self.heard += 1
                elif kind == b"P":
                    self._prepared.release()
                else:
                    self.reports.append(json.loads(payload))
                    self._finished.release()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.broken = "a sender process ended in the middle of a replay"
            self._took.set()
            self._prepared.release()
            self._finished.release()

    def _tell(self, number: int, kind: bytes, payload: bytes = b"") -> None:
        self._links[number][1].write(FRAME.pack(kind, len(payload)) + payload)

    def begin(self, on_sent: Callable[[Sent], None], connections: int) -> None:
        """A new play: where its results go, and how many connections to open ahead."""
        self._on_sent = on_sent
        self.reports = []
        self._started.clear()
        self._ahead = [0] * self.count
        for number in range(self.count):
            self._tell(number, b"O", str(connections // self.count).encode())

    async def feed(self, jobs: Iterable[tuple[int, Callable[[], Job]]], ready: asyncio.Event) -> None:
        """Build and hand over jobs in order, `(group, make)` each; bodies are built in a thread, in batches.

        `ready` is set once AHEAD_S of schedule, AHEAD_BYTES of bodies, or all of it, is over there; from then
        on the schedule is fed as the clock goes.
        """
        coming = iter(jobs)
        first: float | None = None
        while batch := await asyncio.to_thread(_batch, coming):
            for group, job in batch:
                number = group % self.count
                self._tell(number, b"J", job.pack())
                self._ahead[number] += len(job.body)
            first = batch[0][1].at_s if first is None else first
            if batch[-1][1].at_s - first > AHEAD_S:
                ready.set()
                await self._keep_pace(batch[-1][1].at_s)
            while max(self._ahead) > AHEAD_BYTES and self.broken is None:
                ready.set()
                self._took.clear()
                await self._took.wait()
        for number in range(self.count):
            self._tell(number, b"E")
        ready.set()

    async def _keep_pace(self, at_s: float) -> None:
        """Wait until no more than AHEAD_S of schedule lies ahead."""
        await self._started.wait()
        ahead = at_s - (perf_counter_ns() - self._zero_ns) / 1e9
        await asyncio.sleep(max(0.0, ahead - AHEAD_S))

    async def prepared(self) -> None:
        """Wait until every sender has opened its connections and read what it was fed so far."""
        for number in range(self.count):
            self._tell(number, b"P")
        for _ in range(self.count):
            await self._prepared.acquire()

    def go(self, zero_ns: int) -> None:
        """Start the clock: `zero_ns` is a perf_counter_ns, which all processes of a Linux host share."""
        self._zero_ns = zero_ns
        self._started.set()
        for number in range(self.count):
            self._tell(number, b"Z", str(zero_ns).encode())

    async def cut(self, reason: str) -> None:
        """End the play: everything still in flight is given up, and every job is accounted for."""
        for number in range(self.count):
            self._tell(number, b"X", reason.encode())
        for _ in range(self.count):
            await self._finished.acquire()

    async def close(self) -> None:
        """End the processes and remove what they left."""
        for _, writer in self._links:
            writer.close()
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for process in self._processes:
            await processes.stop(process, timeout_s=5.0)
        if self._server is not None:
            self._server.close()
            with suppress(asyncio.CancelledError):
                await self._server.wait_closed()
        shutil.rmtree(self._directory, ignore_errors=True)


def _batch(jobs: Iterator[tuple[int, Callable[[], Job]]]) -> list[tuple[int, Job]]:
    """The next jobs, built: up to BATCH of them or BATCH_BYTES of bodies. Empty at the end."""
    built: list[tuple[int, Job]] = []
    size = 0
    for group, make in jobs:
        job = make()
        built.append((group, job))
        size += len(job.body)
        if len(built) >= BATCH or size >= BATCH_BYTES:
            break
    return built
