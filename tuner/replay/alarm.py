"""Waking at an instant to some ten microseconds, without spinning: a timerfd in the event loop.

An event loop's own timers are a millisecond coarse. `perf_counter_ns` is CLOCK_MONOTONIC on Linux, so its
readings are absolute times for the kernel's timer too. Where there is no timerfd the loop's timer wakes 1 ms
early and yields until the time has come.
"""

import asyncio
import ctypes
import heapq
import os
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns

MONOTONIC, ABSOLUTE = 1, 1  # timerfd's numbers
NEVER = 1 << 62

# Calls in a row before the loop looks at its sockets.
AT_ONCE = 16
EARLY_S = 0.001  # how late an event loop's own timers may be


class _Timer(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """Calls at instants, in one event loop; `wakes_ms` gathers how late they were, `next_ns` is the earliest.

    Whoever is busy for long may `look` in between.
    """

    def __init__(self) -> None:
        self.wakes_ms: list[float] = []
        self.next_ns = NEVER
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.Handle | None = None
        try:
            self._fd = int(self._libc.timerfd_create(MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        except AttributeError:
            self._fd = -1
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._rang)

    def at(self, due_ns: int, call: Callable[[], None]) -> None:
        """Call at `due_ns` (perf_counter_ns), or as soon after as the loop is free."""
        self._number += 1
        heapq.heappush(self._waiting, (due_ns, self._number, call))
        if due_ns < self.next_ns:
            self._arm()

    def look(self, most: int) -> None:
        """Make the calls that are due, `most` of them at once; the others follow when the loop was round."""
        for _ in range(most):
            now = perf_counter_ns()
            if not self._waiting or self._waiting[0][0] > now:
                break
            due_ns, _, call = heapq.heappop(self._waiting)
            self.wakes_ms.append((now - due_ns) / 1e6)
            call()
        self._arm()

    async def until(self, due_ns: int) -> None:
        """Return at `due_ns` (perf_counter_ns) or as soon after as the loop is free."""
        if due_ns <= perf_counter_ns():
            return
        future = self._loop.create_future()
        self.at(due_ns, lambda: None if future.done() else future.set_result(None))
        await future

    def _arm(self) -> None:
        self.next_ns = due_ns = self._waiting[0][0] if self._waiting else NEVER
        if self._fd >= 0:
            timer = _Timer(0, 0, due_ns // 1_000_000_000, due_ns % 1_000_000_000)
            self._libc.timerfd_settime(self._fd, ABSOLUTE, ctypes.byref(timer), None)
            return
        if self._handle is not None:
            self._handle.cancel()
        early = (due_ns - perf_counter_ns()) / 1e9 - EARLY_S
        if due_ns < NEVER:
            call = self._loop.call_later
            self._handle = call(early, self._rang) if early > 0 else self._loop.call_soon(self._rang)

    def _rang(self) -> None:
        if self._fd >= 0:
            with suppress(BlockingIOError):
                os.read(self._fd, 8)
        self.look(AT_ONCE)

    def close(self) -> None:
        """Give the timer back."""
        self._waiting.clear()
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
