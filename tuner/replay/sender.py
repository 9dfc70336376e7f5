"""Sends jobs at their absolute times and turns raw exchanges into outcomes.

The schedule is absolute: a late send does not move the next one. Between sends the loop sleeps until 1 ms
before the next, then yields and spins. The garbage collector is off meanwhile. Answers are parsed in slices
when the loop has nothing due.
"""

import asyncio
import gc
import math
import resource
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns

import numpy as np

from tuner.records import Outcome
from tuner.replay import sse
from tuner.replay.wire import Exchange, Pool

SPIN_NS = 1_000_000
CANCELLED = "cancelled by the client, as recorded"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One request to send: `at_s` after the zero, `request` its HTTP bytes, `counted` = inside the window.

    `cancel_s`: when the recorded client hung up, after `at_s`. `deadline_s` counts from `at_s`.
    """

    key: int
    row: int
    at_s: float
    request: bytes
    expected_input: int
    expected_output: int
    choices: int = 1
    counted: bool = True
    cancel_s: float | None = None
    deadline_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sent:
    """An outcome and what only the wire knows of it; `engine` is the engine's word on this request."""

    outcome: Outcome
    counted: bool = True
    resent: bool = False
    chunks: int = 0
    engine: dict[str, float] = field(default_factory=dict)


class Sender:
    """Plays jobs against one server. One per event loop; `lag_ns` gathers how late the loop woke."""

    def __init__(self, pool: Pool, on_done: Callable[[Sent], None]) -> None:
        self.pool = pool
        self.in_flight: dict[int, tuple[Job, Exchange]] = {}
        self._on_done = on_done
        self._zero_ns = 0
        self._finished: deque[tuple[Job, Exchange]] = deque()
        self._parsing: Iterator[None] | None = None
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._wanted = asyncio.Event()
        self.sent = 0

    async def play(self, jobs: AsyncIterator[Job], zero_ns: int) -> None:
        """Send every job at its time after `zero_ns` (perf_counter_ns); returns when the last was sent."""
        self._zero_ns = zero_ns
        async for job in jobs:
            due = zero_ns + int(job.at_s * 1e9)
            while (left := due - perf_counter_ns()) > SPIN_NS:
                await asyncio.sleep((left - SPIN_NS) / 1e9)
            while perf_counter_ns() < due:
                await asyncio.sleep(0)
            self._send(job)
            if not self.sent % 16:
                await asyncio.sleep(0)

    def _send(self, job: Job) -> None:
        exchange = Exchange(job.key, job.request, self._done)
        self.in_flight[job.key] = (job, exchange)
        self.sent += 1
        self.pool.send(exchange)
        late_s = (perf_counter_ns() - self._zero_ns) / 1e9 - job.at_s
        loop = asyncio.get_running_loop()
        reason, wait = "deadline", job.deadline_s
        if job.cancel_s is not None and job.cancel_s < wait:
            reason, wait = CANCELLED, job.cancel_s
        if math.isfinite(wait) and job.key in self.in_flight:
            delay = max(0.0, wait - late_s)
            self._timers[job.key] = loop.call_later(delay, self.pool.cut, exchange, reason)

    def _done(self, exchange: Exchange) -> None:
        job, _ = self.in_flight.pop(exchange.key)
        timer = self._timers.pop(exchange.key, None)
        if timer is not None:
            timer.cancel()
        self._finished.append((job, exchange))
        if self._parsing is None:
            self._parsing = self._parse()
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        """Parse one slice, then let the loop look at its sockets again."""
        if self._parsing is None:
            return
        try:
            next(self._parsing)
        except StopIteration:
            self._parsing = None
            self._wanted.set()
            return
        asyncio.get_running_loop().call_soon(self._step)

    def _parse(self) -> Iterator[None]:
        while self._finished:
            job, exchange = self._finished.popleft()
            answer = sse.Answer()
            try:
                yield from sse.reader(answer, exchange.stamps, exchange.parts, job.choices)
            except (ValueError, IndexError):
                answer.error = "malformed answer"
            self._on_done(sent_of(job, exchange, answer, self._zero_ns))
            yield

    async def settle(self, timeout_s: float) -> None:
        """Wait until nothing counted is in flight and all is parsed, or the timeout passes."""
        end = asyncio.get_running_loop().time() + timeout_s
        while any(job.counted for job, _ in self.in_flight.values()) or self._parsing is not None:
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                return
            await asyncio.sleep(min(0.02, left))

    async def cut_all(self, reason: str) -> None:
        """Give up on everything still in flight and parse what came."""
        for _, exchange in list(self.in_flight.values()):
            self.pool.cut(exchange, reason)
        while self._parsing is not None:
            self._wanted.clear()
            await self._wanted.wait()


def sent_of(job: Job, exchange: Exchange, answer: sse.Answer, zero_ns: int) -> Sent:
    """Fold one exchange into an outcome; times become seconds after the zero."""
    error = exchange.failure or answer.error
    chunks = (np.asarray(answer.chunk_ns, dtype=np.int64) - zero_ns) / 1e9
    tokens = np.asarray(answer.chunk_tokens, dtype=np.int32)
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
        chunk_tokens=tokens,
        error=error,
    )
    return Sent(
        outcome=outcome,
        counted=job.counted,
        resent=exchange.resent,
        chunks=len(chunks),
        engine=dict(answer.engine),
    )


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection inside; what lives before is frozen out of later ones."""
    was = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was:
            gc.enable()


def cpu_seconds() -> float:
    """CPU time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
