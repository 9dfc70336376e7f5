"""Waking at an instant to some ten microseconds, without spinning: a timerfd in the event loop.

An event loop's own timers are a millisecond coarse. `perf_counter_ns` is CLOCK_MONOTONIC on Linux, so its
readings are absolute times for the kernel's timer too. Where there is no timerfd the loop's timer wakes 1 ms
early and yields until the time has come.
"""

import asyncio
import ctypes
import heapq
import os
from time import perf_counter_ns

MONOTONIC, ABSOLUTE = 1, 1
NEAR_NS = 30_000
"""Closer than this is now, or is yielded away."""


class _Timer(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """Waits of any number of tasks of one event loop; `wakes_ms` gathers how late they woke."""

    def __init__(self) -> None:
        self.wakes_ms: list[float] = []
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._number = 0
        self._loop = asyncio.get_running_loop()
        try:
            self._fd = int(self._libc.timerfd_create(MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        except AttributeError:
            self._fd = -1
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._rang)

    async def until(self, due_ns: int) -> None:
        """Return at `due_ns` (perf_counter_ns) or as soon after as the loop is free."""
        left = due_ns - perf_counter_ns()
        if left > NEAR_NS:
            if self._fd >= 0:
                await self._sleep(due_ns)
            elif left > 1_000_000:
                await asyncio.sleep(left / 1e9 - 0.001)
            self.wakes_ms.append((perf_counter_ns() - due_ns) / 1e6)
        while perf_counter_ns() < due_ns:
            await asyncio.sleep(0)

    async def _sleep(self, due_ns: int) -> None:
        future = self._loop.create_future()
        self._number += 1
        heapq.heappush(self._waiting, (due_ns, self._number, future))
        if self._waiting[0][2] is future:
            self._set(due_ns)
        await future

    def _set(self, due_ns: int) -> None:
        timer = _Timer(0, 0, due_ns // 1_000_000_000, due_ns % 1_000_000_000)
        self._libc.timerfd_settime(self._fd, ABSOLUTE, ctypes.byref(timer), None)

    def _rang(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        now = perf_counter_ns()
        while self._waiting and (self._waiting[0][0] <= now or self._waiting[0][2].done()):
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)
        if self._waiting:
            self._set(self._waiting[0][0])

    def close(self) -> None:
        """Give the timer back."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
