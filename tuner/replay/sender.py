"""A sender process: `python -m tuner.replay.sender DIRECTORY NUMBER HOST PORT [--realtime]`. It sends jobs at
their absolute times and makes outcomes of the answers (`Job` → `Sent`).

The schedule is absolute: a late request does not delay the next one. Requests are prepared some time before
they are due, and the alarm sends them. Answers are parsed in small steps, so that sockets are read in
between.

The controller listens at DIRECTORY/socket and sends frames: O get ready, with so many connections; Z zero of
the clock; X cut all. It gets P ready, R results, T how far results are complete (`TOLD`), F finished with X
(JSON of the sender's own numbers). Jobs come from DIRECTORY/jobs (`feeder`); the sender stops reading there
while it holds AHEAD_BYTES. It ends when its controller does. A frame is its kind (1 byte), the length of its
payload (4), and the payload.
"""

import asyncio
import gc
import json
import marshal
import math
import os
import resource
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import uvloop

from tuner.metrics import CANCELLED
from tuner.records import Outcome
from tuner.replay.timing import Alarm, short_turns
from tuner.replay.wire import HttpExchange, Pool, StreamedAnswer, answer_reader, post

PATH = "/v1/completions"
_FRAME = struct.Struct("<cI")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One request to send `at_s` after the zero. `counted` = scheduled inside the window.

    `cancel_s`: when the recorded client hung up, after `at_s`; `deadline_s` counts from `at_s` too.
    `parent` is the key of the turn before (-1: none), `children` whether turns wait for this one. In a live
    history `prompt` is the span of the prompt's JSON list in the body, and `delta` the JSON ids (without
    brackets) that this turn adds to its parent's prompt and answer.
    """

    key: int
    row: int
    at_s: float
    body: bytes
    expected_input: int
    expected_output: int
    choices: int = 1
    counted: bool = True
    cancel_s: float | None = None
    deadline_s: float = math.inf
    parent: int = -1
    think_s: float = 0.0
    children: bool = False
    prompt: tuple[int, int] = (0, 0)
    delta: bytes = b""
    path: str = PATH

    def after(self, ended: "Ended") -> "Job":
        """The job with its live prompt: the parent's prompt and answer, then its own delta."""
        if not self.delta or not ended.prompt or not ended.answer:
            return self
        start, stop = self.prompt
        live = ended.prompt[:-1] + b"," + ended.answer + b"," + self.delta + b"]"
        return replace(
            self, body=self.body[:start] + live + self.body[stop:], prompt=(start, start + len(live))
        )

    def pack(self) -> bytes:
        """The job as bytes for `unpack`, in a process of the same Python."""
        return marshal.dumps([getattr(self, name) for name in self.__slots__])

    @staticmethod
    def unpack(raw: bytes) -> "Job":
        """What `pack` made bytes of."""
        return Job(**dict(zip(Job.__slots__, marshal.loads(raw), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a turn that others wait for: when, and for a live history its prompt and answered ids."""

    key: int
    at_s: float
    prompt: bytes
    answer: bytes

    @staticmethod
    def of(job: Job, exchange: HttpExchange, answer: StreamedAnswer, zero_ns: int) -> "Ended":
        """From what the wire holds; a failed turn gives no live history."""
        whole = answer.error is None and exchange.failure is None
        return Ended(
            key=job.key,
            at_s=(exchange.end_ns - zero_ns) / 1e9,
            prompt=job.body[job.prompt[0] : job.prompt[1]] if whole else b"",
            answer=b",".join(b"%d" % one for one in answer.ids) if whole else b"",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sent:
    """An outcome with what only the connection saw: `engine` are the engine's own numbers of this request,
    `waited_s` how long the request waited for a connection.
    """

    key: int
    outcome: Outcome
    counted: bool = True
    resent: bool = False
    waited_s: float = 0.0
    engine: Mapping[str, float] = field(default_factory=dict)

    def pack(self) -> bytes:
        """The record as bytes for `unpack`, in a process of the same Python."""
        outcome = {name: getattr(self.outcome, name) for name in self.outcome.__slots__}
        outcome |= {name: outcome[name].tobytes() for name in ("chunk_s", "chunk_tokens")}
        return marshal.dumps((self.key, outcome, self.counted, self.resent, self.waited_s, dict(self.engine)))

    @staticmethod
    def unpack(raw: bytes) -> "Sent":
        """What `pack` made bytes of."""
        key, outcome, counted, resent, waited_s, engine = marshal.loads(raw)
        outcome["chunk_s"] = np.frombuffer(outcome["chunk_s"], np.float64)
        outcome["chunk_tokens"] = np.frombuffer(outcome["chunk_tokens"], np.int32)
        return Sent(
            key=key, outcome=Outcome(**outcome), counted=counted, resent=resent, waited_s=waited_s,
            engine=engine,
        )  # fmt: skip


def sent_of(job: Job, exchange: HttpExchange, answer: StreamedAnswer, zero_ns: int) -> Sent:
    """Fold one exchange into an outcome; times become seconds after the zero."""
    chunks = (np.asarray(answer.chunk_ns, dtype=np.int64) - zero_ns) / 1e9
    outcome = Outcome(
        row=job.row,
        scheduled_s=job.at_s,
        sent_s=(exchange.sent_ns - zero_ns) / 1e9 if exchange.sent_ns else None,
        first_token_s=float(chunks[0]) if len(chunks) else None,
        last_token_s=float(chunks[-1]) if len(chunks) else None,
        end_s=(exchange.end_ns - zero_ns) / 1e9,
        input_tokens=answer.prompt_tokens or 0,
        expected_input=job.expected_input,
        output_tokens=answer.completion_tokens if answer.completion_tokens is not None else answer.tokens,
        expected_output=job.expected_output,
        cached_tokens=answer.cached_tokens,
        chunk_s=chunks,
        chunk_tokens=np.asarray(answer.chunk_tokens, dtype=np.int32),
        error=exchange.failure or answer.error,
    )
    waited_ns = (exchange.written_ns or exchange.end_ns) - exchange.sent_ns if exchange.sent_ns else 0
    return Sent(
        key=job.key, outcome=outcome, counted=job.counted, resent=exchange.resent, waited_s=waited_ns / 1e9,
        engine=dict(answer.engine),
    )  # fmt: skip


def never_sent(job: Job, reason: str) -> Sent:
    """The record of a job that was never sent, because its parent was not answered."""
    outcome = Outcome(
        row=job.row,
        scheduled_s=job.at_s,
        expected_input=job.expected_input,
        expected_output=job.expected_output,
        error=f"not sent, because its parent got no answer: {reason}",
    )
    return Sent(key=job.key, outcome=outcome, counted=job.counted)


def late(deadline_s: float) -> str:
    """The error of a request that was not answered in time."""
    return f"no complete answer within the deadline of {deadline_s:g} s"


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """One frame, ready to write."""
    return _FRAME.pack(kind, len(payload)) + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """(kind, payload) of the next frame. asyncio.IncompleteReadError when the other process has ended."""
    kind, length = _FRAME.unpack(await reader.readexactly(_FRAME.size))
    return kind, await reader.readexactly(length)


# How long before its time a request is made ready, and how much of the schedule at once.
EARLY_S, TOGETHER_S = 0.25, 0.05

# Requests made ready before the loop looks at its sockets.
AT_ONCE = 16


class Sender:
    """Plays jobs against one server. `close` it in the end."""

    def __init__(self, pool: Pool, on_done: Callable[[Sent], None]) -> None:
        self.pool = pool
        self.in_flight: dict[int, tuple[Job, HttpExchange]] = {}
        self.sent = 0
        self.alarm = pool.alarm = Alarm()
        self._on_done = on_done
        self._zero_ns = 0
        self._finished: deque[tuple[Job, HttpExchange]] = deque()
        self._parsing: Iterator[None] | None = None
        self._parsed = asyncio.Event()
        self._parsed.set()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._ended: dict[int, Ended] = {}
        self._parked: dict[int, list[Job]] = {}
        self._ready: dict[int, Job] = {}
        self._went = asyncio.Event()

    async def play(self, jobs: AsyncIterator[Job], zero_ns: int) -> None:
        """Send every job at its time after `zero_ns` (perf_counter_ns); returns when the last was sent.

        A job with a parent waits for the parent's end and its think time, and does not hold up the others.
        """
        self._zero_ns = zero_ns
        count = 0
        async for job in jobs:
            if (job.at_s - EARLY_S) * 1e9 > perf_counter_ns() - zero_ns:
                await self.alarm.until(zero_ns + int((job.at_s - EARLY_S + TOGETHER_S) * 1e9))
            if job.parent < 0:
                self._prepare(job, job.at_s)
            elif (ended := self._ended.get(job.parent)) is None:
                self._parked.setdefault(job.parent, []).append(job)
            else:
                self._follow(job, ended)
            count += 1
            if not count % AT_ONCE:
                await asyncio.sleep(0)
        while self._ready:
            self._went.clear()
            await self._went.wait()

    def _follow(self, job: Job, ended: Ended) -> None:
        """Send a turn once its parent ended and the user thought, but not before its recorded time."""
        self._prepare(job.after(ended), max(job.at_s, ended.at_s + job.think_s))

    def _prepare(self, job: Job, due_s: float) -> None:
        """Have a request ready for the alarm, which sends it at once if it is due by now."""
        self._ready[job.key] = job
        if due_s != job.at_s:
            job = replace(job, at_s=due_s)
        exchange = HttpExchange(job.key, post(self.pool.host, self.pool.port, job.path, job.body), self._done)
        self.alarm.at(self._zero_ns + int(due_s * 1e9), partial(self._send, job, exchange))

    def _send(self, job: Job, exchange: HttpExchange) -> None:
        if self._ready.pop(job.key, None) is None:
            return
        self._went.set()
        self.in_flight[job.key] = (job, exchange)
        self.sent += 1
        self.pool.send(exchange)
        reason, wait = late(job.deadline_s), job.deadline_s
        if job.cancel_s is not None and job.cancel_s < wait:
            reason, wait = CANCELLED, job.cancel_s
        if math.isfinite(wait) and job.key in self.in_flight:
            late_s = (perf_counter_ns() - self._zero_ns) / 1e9 - job.at_s
            self._timers[job.key] = asyncio.get_running_loop().call_later(
                max(0.0, wait - late_s), self.pool.cut, exchange, reason
            )

    def _done(self, exchange: HttpExchange) -> None:
        job, _ = self.in_flight.pop(exchange.key)
        timer = self._timers.pop(exchange.key, None)
        if timer is not None:
            timer.cancel()
        self._finished.append((job, exchange))
        if self._parsing is None:
            self._parsing = self._parse()
            self._parsed.clear()
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        """Parse one slice, then let the loop look at its sockets again."""
        if self._parsing is None:
            return
        try:
            next(self._parsing)
        except StopIteration:
            self._parsing = None
            self._parsed.set()
            return
        asyncio.get_running_loop().call_soon(self._step)

    @property
    def told_ns(self) -> int:
        """All that ended before this instant has been handed to `on_done`."""
        return self._finished[0][1].end_ns if self._finished else perf_counter_ns()

    def _parse(self) -> Iterator[None]:
        while self._finished:
            job, exchange = self._finished[0]
            answer = StreamedAnswer(keep_ids=job.children)
            try:
                yield from answer_reader(answer, exchange.stamps, exchange.parts, job.choices)
            except (ValueError, IndexError):
                answer.error = "malformed answer"
            self._finished.popleft()
            self._on_done(sent_of(job, exchange, answer, self._zero_ns))
            if job.children:
                self._release(Ended.of(job, exchange, answer, self._zero_ns))
            yield

    def _release(self, ended: Ended) -> None:
        self._ended[ended.key] = ended
        for child in self._parked.pop(ended.key, []):
            self._follow(child, ended)

    async def settle(self, timeout_s: float) -> None:
        """Wait until nothing counted is in flight and all is parsed, or the timeout passes."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while any(job.counted for job, _ in self.in_flight.values()) or self._parsing is not None:
            left = end - loop.time()
            if left <= 0:
                return
            await asyncio.sleep(min(0.02, left))

    async def cut_all(self, reason: str) -> None:
        """Give up on everything in flight or waiting for a parent, parse what came, and account for all that
        was due."""
        now_s = (perf_counter_ns() - self._zero_ns) / 1e9
        unsent = [*self._ready.values(), *(job for jobs in self._parked.values() for job in jobs)]
        waiting = [job for job in unsent if job.parent >= 0 and job.at_s <= now_s]
        self._ready.clear()
        self._parked.clear()
        for _, exchange in list(self.in_flight.values()):
            self.pool.cut(exchange, reason)
        await self._parsed.wait()
        for job in waiting:
            self._on_done(never_sent(job, reason))

    def close(self) -> None:
        """Give the timer back."""
        self.pool.alarm = None
        self.alarm.close()


# (the perf_counter_ns before which all results were reported, whether tokens came since the last report).
TOLD = struct.Struct("<q?")
REPORT_S = 0.05  # how often results are reported: the judge asks five times as rarely

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
        self.used = own_usage()
        self.begun = perf_counter_ns()

    def take(self, sent: Sent) -> None:
        """Keep a result for the next flush."""
        self.results.append(sent.pack())

    async def flush_often(self) -> None:
        """Send results home in batches, for as long as the worker lives."""
        while True:
            await asyncio.sleep(REPORT_S)
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
            self.used, self.begun = own_usage(), perf_counter_ns()
            self.queue.bounded = True
            self.player = asyncio.create_task(self.sender.play(self.queue.jobs(), int(payload)))
        elif kind == b"X":
            await self.finish(payload.decode())

    async def finish(self, reason: str) -> None:
        """Cut what flies and report this process's own numbers."""
        used = own_usage()
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


def own_usage() -> tuple[float, int]:
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
