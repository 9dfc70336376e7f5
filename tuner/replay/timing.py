"""What keeps the times of a replay true: the alarm that wakes a sender, the kernel's stamps on what came in,
cores of their own for engine and senders, and how busy the host was.
"""

import asyncio
import ctypes
import heapq
import os
import platform
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter_ns, time_ns

MONOTONIC, ABSOLUTE = 1, 1  # timerfd's numbers
NEVER = 1 << 62

# Calls in a row before the loop looks at its sockets.
CALLS_AT_ONCE = 16
LOOP_EARLY_S = 0.001  # how late an event loop's own timers may be


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
        early = (due_ns - perf_counter_ns()) / 1e9 - LOOP_EARLY_S
        if due_ns < NEVER:
            call = self._loop.call_later
            self._handle = call(early, self._rang) if early > 0 else self._loop.call_soon(self._rang)

    def _rang(self) -> None:
        if self._fd >= 0:
            with suppress(BlockingIOError):
                os.read(self._fd, 8)
        self.look(CALLS_AT_ONCE)

    def close(self) -> None:
        """Give the timer back."""
        self._waiting.clear()
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


SO_TIMESTAMPNS = 35  # Linux's number; the socket module has no name for it
TIMESPEC = struct.Struct("qq")

# A stamp of the kernel that lies further off is not used, and two clocks that are read further apart are read
# again.
FAR_NS, TOGETHER_NS = 10_000_000_000, 20_000


def stamp(now_ns: int, said: Sequence[tuple[int, int, bytes]]) -> int:
    """When the kernel received the data, on the clock of `perf_counter_ns`; `now_ns` if the kernel gives no
    stamp. Kernel stamps use the wall clock; one that differs much was made before the wall clock was changed.
    """
    for _, kind, data in said:
        if kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = TIMESPEC.unpack_from(data)
            behind = time_ns() - seconds * 1_000_000_000 - nanoseconds
            while (then_ns := perf_counter_ns()) - now_ns > TOGETHER_NS:  # interrupted between the clocks
                now_ns, behind = then_ns, time_ns() - seconds * 1_000_000_000 - nanoseconds
            return now_ns - behind if 0 <= behind < FAR_NS else now_ns
    return now_ns


PRESSURE = Path("/proc/pressure/cpu")
STAT = Path("/proc/stat")

# The number of the system call sched_setattr.
SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}


def split(available: Sequence[int], senders: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(cores for the engine, cores for the senders), disjoint; on a single core they share it."""
    cores = tuple(sorted(available))
    if len(cores) < 2:
        return cores, cores
    count = min(senders, len(cores) - 1)
    return cores[:-count], cores[-count:]


def give_way() -> None:
    """Do not interrupt a running process when we wake up (SCHED_BATCH, for the calling thread): so senders
    run before observers. It needs no privilege.
    """
    with suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def giving_way() -> Iterator[None]:
    """`give_way` inside."""
    before = os.sched_getscheduler(0)
    give_way()
    try:
        yield
    finally:
        if before == os.SCHED_OTHER:
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def short_turns(turn_ns: int = 100_000) -> bool:
    """Ask the kernel for short time slices (Linux 6.12 and later): a process that wakes up with a shorter
    slice than the running one gets the core at once. It needs no privilege and gives no larger share of the
    core. False if the kernel does not support it.
    """
    call = SET_ATTRIBUTES.get(platform.machine())
    if call is None:
        return False
    attributes = struct.pack("<IIQiIQQQII", 56, 0, 0, 0, 0, turn_ns, 0, 0, 0, 0)
    return int(ctypes.CDLL(None).syscall(call, 0, attributes, 0)) == 0


class Contention:
    """CPU pressure and steal since it was made; None if the kernel does not count it."""

    def __init__(self, pressure: Path = PRESSURE, stat: Path = STAT) -> None:
        self._pressure, self._stat = pressure, stat
        self._before = (_stalled_us(pressure), _steal(stat))

    def since(self, seconds: float) -> dict[str, float | None]:
        """`cpu_pressure`: share of the time in which a process waited for a core; `steal`: the hypervisor's
        share.
        """
        stalled, steal = _stalled_us(self._pressure), _steal(self._stat)
        was_stalled, was_steal = self._before
        found: dict[str, float | None] = {"cpu_pressure": None, "steal": None}
        if stalled is not None and was_stalled is not None and seconds > 0:
            found["cpu_pressure"] = (stalled - was_stalled) / 1e6 / seconds
        if steal is not None and was_steal is not None and (total := steal[1] - was_steal[1]) > 0:
            found["steal"] = (steal[0] - was_steal[0]) / total
        return found


def _stalled_us(path: Path) -> float | None:
    try:
        line = path.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    return float(line.rsplit("total=", 1)[1]) if "total=" in line else None


def _steal(path: Path) -> tuple[float, float] | None:
    """(stolen, all) ticks of all cores."""
    try:
        ticks = [float(one) for one in path.read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return None
    return (ticks[7], sum(ticks[:8])) if len(ticks) > 7 else None
