"""Who else wants the processor while we measure, and how to keep sender and engine apart."""

import ctypes
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

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
    core. False where the kernel does not support it.
    """
    call = SET_ATTRIBUTES.get(platform.machine())
    if call is None:
        return False
    attributes = struct.pack("<IIQiIQQQII", 56, 0, 0, 0, 0, turn_ns, 0, 0, 0, 0)
    return int(ctypes.CDLL(None).syscall(call, 0, attributes, 0)) == 0


class Contention:
    """CPU pressure and steal since it was made; None where the kernel does not count it."""

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
