"""A sender process: `python -m tuner.replay.worker SOCKET HOST PORT [--realtime]`, fed by `senders.Senders`.

Frames both ways on a Unix socket: kind (1 byte), length (4), payload. In: O connections to open, J job,
E end of jobs, P prepared?, Z zero of the clock, X cut all. Out: P prepared (all before it is done), R a
result, A bytes of bodies taken from the queue, T tokens came, F finished with X (JSON of its own numbers).
The controller keeps the bytes that lie ahead within bounds. It ends when the socket does: it cannot outlive
its controller.
"""

import asyncio
import gc
import json
import os
import resource
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter_ns

import numpy as np
import uvloop

from tuner.replay.jobs import Job, Sent
from tuner.replay.sender import Sender
from tuner.replay.wire import Pool

FRAME = struct.Struct("<cI")
FLUSH_S = 0.05


class Queue:
    """Jobs ahead of their time; `taken` counts the bytes that left it."""

    def __init__(self) -> None:
        self._jobs: deque[Job | None] = deque()
        self._came = asyncio.Event()
        self.taken = 0

    def put(self, job: Job | None) -> None:
        """Add a job (None: there are no more)."""
        self._jobs.append(job)
        self._came.set()

    async def jobs(self) -> AsyncIterator[Job]:
        """The jobs until None."""
        while True:
            while not self._jobs:
                self._came.clear()
                await self._came.wait()
            job = self._jobs.popleft()
            if job is None:
                return
            self.taken += len(job.body)
            yield job


class Worker:
    """One play after another, as the frames say."""

    def __init__(self, host: str, port: int, writer: asyncio.StreamWriter) -> None:
        self.pool = Pool(host, port)
        self.writer = writer
        self.results: list[bytes] = []
        self.received = 0
        self.fresh()

    def fresh(self) -> None:
        """Forget the last play."""
        self.queue = Queue()
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
            self.flush()

    def flush(self) -> None:
        """Write what gathered."""
        if self.pool.received != self.received:
            self.writer.write(FRAME.pack(b"T", 0))
            self.received = self.pool.received
        if self.queue.taken:
            payload = str(self.queue.taken).encode()
            self.writer.write(FRAME.pack(b"A", len(payload)) + payload)
            self.queue.taken = 0
        if self.results:
            self.writer.writelines(part for raw in self.results for part in (FRAME.pack(b"R", len(raw)), raw))
            self.results = []

    async def frame(self, kind: bytes, payload: bytes) -> None:
        """Do what one frame says."""
        if kind == b"J":
            self.queue.put(Job.unpack(payload))
        elif kind == b"E":
            self.queue.put(None)
        elif kind == b"O":
            with suppress(OSError):
                await self.pool.open(int(payload))
        elif kind == b"Z":
            self.used, self.begun = usage(), perf_counter_ns()
            zero = int(payload)
            self.player = asyncio.create_task(self.sender.play(self.queue.jobs(), zero))
        elif kind == b"P":
            self.writer.write(FRAME.pack(b"P", 0))
        elif kind == b"X":
            await self.finish(payload.decode())

    async def finish(self, reason: str) -> None:
        """Cut what flies and report this process's own numbers."""
        used = usage()
        if self.player is not None:
            self.player.cancel()
            await asyncio.gather(self.player, return_exceptions=True)
        await self.sender.cut_all(reason)
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
        payload = json.dumps(said).encode()
        self.writer.write(FRAME.pack(b"F", len(payload)) + payload)
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


async def serve(path: str, host: str, port: int) -> None:
    """Obey frames until the socket ends; a play of its own then ends with it."""
    reader, writer = await asyncio.open_unix_connection(path, limit=1 << 20)
    worker = Worker(host, port, writer)
    flusher = asyncio.create_task(worker.flush_often())
    with suppress(asyncio.IncompleteReadError, ConnectionError), quiet_collector():
        while True:
            kind, length = FRAME.unpack(await reader.readexactly(FRAME.size))
            await worker.frame(kind, await reader.readexactly(length))
    flusher.cancel()
    os._exit(0)


def realtime() -> None:
    """Ask for round-robin real-time priority; where the kernel refuses, the report says so."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def many_files() -> None:
    """Allow as many connections as the host allows at all."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    many_files()
    if "--realtime" in sys.argv:
        realtime()
    uvloop.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
