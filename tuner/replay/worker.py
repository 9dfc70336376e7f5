"""A sender process: `python -m tuner.replay.worker DIRECTORY NUMBER HOST PORT [--realtime]`.

The controller listens at DIRECTORY/socket and sends frames (jobs.py): O get ready, with so many connections;
Z zero of the clock; X cut all. It gets P ready, R results, T how far results are complete (`TOLD`), F
finished with X (JSON of the sender's own numbers). Jobs come from DIRECTORY/jobs (`feeder`); the sender stops
reading there while it holds AHEAD_BYTES. It ends when its controller does.
"""

import asyncio
import gc
import json
import marshal
import os
import resource
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import uvloop

from tuner.replay.contention import short_turns
from tuner.replay.jobs import Job, Sent, frame, read_frame
from tuner.replay.sender import Sender
from tuner.replay.wire import Pool

# (the perf_counter_ns before which all results were reported, whether tokens came since the last report).
TOLD = struct.Struct("<q?")
FLUSH_S = 0.05  # how often results are reported: the judge asks five times as rarely

# The most bytes of bodies that one sender holds; before the clock starts there is no limit.
AHEAD_BYTES = 64 << 20


class Queue:
    """Jobs ahead of their time."""

    def __init__(self) -> None:
        self._jobs: deque[Job | None] = deque()
        self._came = asyncio.Event()
        self._went = asyncio.Event()
        self._size = 0
        self.closed = False
        self.bounded = False

    def put(self, job: Job | None) -> None:
        """Add a job (None: there are no more)."""
        if not self.closed:
            self._size += len(job.body) if job is not None else 0
            self._jobs.append(job)
            self._came.set()

    async def room(self) -> None:
        """Wait until there is room for another job; there always is before the clock starts."""
        while self.bounded and self._size > AHEAD_BYTES and not self.closed:
            self._went.clear()
            await self._went.wait()

    def close(self) -> None:
        """Take no more jobs."""
        self.closed = True
        self._went.set()

    async def jobs(self) -> AsyncIterator[Job]:
        """The jobs until None."""
        while True:
            while not self._jobs:
                self._came.clear()
                await self._came.wait()
            job = self._jobs.popleft()
            if job is None:
                return
            self._size -= len(job.body)
            self._went.set()
            yield job


class Worker:
    """Runs one play after another, as the controller's frames ask."""

    def __init__(self, host: str, port: int, writer: asyncio.StreamWriter) -> None:
        self.pool = Pool(host, port)
        self.writer = writer
        self.results: list[bytes] = []
        self.received = 0
        self.fresh()

    def fresh(self) -> None:
        """Forget the last play."""
        self.queue = Queue()
        self.enough, self.fed = asyncio.Event(), asyncio.Event()
        self.sender = Sender(self.pool, self.take)
        self.player: asyncio.Task[None] | None = None
        self.used = usage()
        self.begun = perf_counter_ns()

    def take(self, sent: Sent) -> None:
        """Keep a result for the next flush."""
        self.results.append(sent.pack())

    async def flush_often(self) -> None:
        """Send results home in batches, for as long as the worker lives."""
        while True:
            await asyncio.sleep(FLUSH_S)
            if self.player is not None:
                self.flush()

    def flush(self) -> None:
        """Write what gathered."""
        if self.results:
            self.tell(b"R", marshal.dumps(self.results))
            self.results = []
        self.tell(b"T", TOLD.pack(self.sender.told_ns, self.pool.received != self.received))
        self.received = self.pool.received

    def tell(self, kind: bytes, payload: bytes = b"") -> None:
        """Write a frame to the controller."""
        self.writer.write(frame(kind, payload))

    async def take_jobs(self, path: Path, number: int) -> None:
        """Queue what the feeder sends, for as long as it lives."""
        reader, writer = await asyncio.open_unix_connection(str(path), limit=1 << 20)
        writer.write(b"%d\n" % number)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                kind, payload = await read_frame(reader)
                if kind == b"J":
                    self.queue.put(Job.unpack(payload))
                    await self.queue.room()
                elif kind == b"P":
                    self.enough.set()
                else:
                    self.queue.put(None)
                    self.fed.set()
        self.enough.set()
        self.fed.set()

    async def frame(self, kind: bytes, payload: bytes) -> None:
        """Act on one frame."""
        if kind == b"O":
            with suppress(OSError):
                await self.pool.open(int(payload))
            await self.enough.wait()
            self.tell(b"P")
        elif kind == b"Z":
            self.used, self.begun = usage(), perf_counter_ns()
            self.queue.bounded = True
            self.player = asyncio.create_task(self.sender.play(self.queue.jobs(), int(payload)))
        elif kind == b"X":
            await self.finish(payload.decode())

    async def finish(self, reason: str) -> None:
        """Cut what flies and report this process's own numbers."""
        used = usage()
        if self.player is not None:
            self.player.cancel()
            await asyncio.gather(self.player, return_exceptions=True)
        await self.sender.cut_all(reason)
        self.queue.close()
        await self.fed.wait()
        self.flush()
        wakes = self.sender.alarm.wakes_ms
        said = {
            "cpu_s": used[0] - self.used[0],
            "span_s": (perf_counter_ns() - self.begun) / 1e9,
            "preempted": used[1] - self.used[1],
            "wake_p99_ms": float(np.percentile(wakes, 99)) if wakes else 0.0,
            "opened": self.pool.opened,
            "realtime": float(os.sched_getscheduler(0) == os.SCHED_RR),
        }
        self.tell(b"F", json.dumps(said).encode())
        self.sender.close()
        self.fresh()


def usage() -> tuple[float, int]:
    """CPU seconds of this process and how often it was preempted."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_nivcsw


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection inside; what lives before is out of its sight."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


async def serve(directory: Path, number: int, host: str, port: int) -> None:
    """Act on frames until the socket ends; then this process ends."""
    reader, writer = await asyncio.open_unix_connection(str(directory / "socket"), limit=1 << 20)
    worker = Worker(host, port, writer)
    tasks = [asyncio.create_task(worker.flush_often())]
    with suppress(asyncio.IncompleteReadError, ConnectionError), quiet_collector():
        while True:
            kind, payload = await read_frame(reader)
            if kind == b"O" and len(tasks) == 1:
                tasks.append(asyncio.create_task(worker.take_jobs(directory / "jobs", number)))
            await worker.frame(kind, payload)
    os._exit(0)


def many_files() -> None:
    """Allow as many connections as the host allows at all."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    many_files()
    short_turns()
    if "--realtime" in sys.argv:  # the report shows whether the kernel granted it
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
