"""Sends jobs at their absolute times and makes outcomes of the answers.

The schedule is absolute: a late request does not delay the next one. Requests are prepared some time before
they are due, and the alarm sends them. Answers are parsed in small steps, so that sockets are read in
between.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter_ns

from tuner.metrics import CANCELLED
from tuner.replay import sse
from tuner.replay.alarm import Alarm
from tuner.replay.jobs import Ended, Job, Sent, late, never_sent, sent_of
from tuner.replay.wire import HttpExchange, Pool, post

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
        """Have a request ready for the alarm, which sends it at once where it is due by now."""
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
            answer = sse.StreamedAnswer(keep_ids=job.children)
            try:
                yield from sse.reader(answer, exchange.stamps, exchange.parts, job.choices)
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
