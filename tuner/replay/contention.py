"""Who else wants the processor while we measure, and how to keep sender and engine apart."""

import os
from collections.abc import Sequence
from pathlib import Path

PRESSURE = Path("/proc/pressure/cpu")
STAT = Path("/proc/stat")


def split(available: Sequence[int], senders: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(cores for the engine, cores for the senders), disjoint; on a single core they share it."""
    cores = tuple(sorted(available))
    if len(cores) < 2:
        return cores, cores
    count = min(senders, len(cores) - 1)
    return cores[:-count], cores[-count:]


def available() -> tuple[int, ...]:
    """The cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


class Contention:
    """CPU pressure and steal over a stretch of time. What the kernel does not tell is None."""

    def __init__(self, pressure: Path = PRESSURE, stat: Path = STAT) -> None:
        self._pressure, self._stat = pressure, stat
        self._before = (_stalled_us(pressure), _steal(stat))

    def since(self, seconds: float) -> dict[str, float | None]:
        """`cpu_pressure`: share of the time in which somebody waited for a core; `steal`: hypervisor's."""
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
