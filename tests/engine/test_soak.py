"""Many launches and stops in one controller, half of them killed at a random moment: nothing adds up.

TUNER_SOAK sets how many (20 by default; the output of 200 is kept in docs/results/engine-soak.txt).
"""

import asyncio
import gc
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.engine.helpers import leftovers
from tests.engine.test_cases_processes import until
from tests.engine.test_conformance import Simulated
from tuner.engine.http import is_free
from tuner.engine.server import serve
from tuner.errors import EngineError
from tuner.leftovers import shared_files
from tuner.processes import tagged
from tuner.records import LaunchSpec

LAUNCHES = int(os.environ.get("TUNER_SOAK", "20"))


@dataclass(frozen=True, slots=True)
class Controller:
    """What this process holds: descriptors, threads, children, MiB of memory."""

    descriptors: int
    threads: int
    children: int
    memory_mib: float

    @classmethod
    def now(cls) -> "Controller":
        gc.collect()
        own = psutil.Process()
        return cls(own.num_fds(), own.num_threads(), len(own.children()), own.memory_info().rss / 2**20)


async def whole(launch: LaunchSpec) -> tuple[str, int | None]:
    """From launch to stop, undisturbed."""
    async with serve(launch) as server:
        await server.metrics()
    return "stopped", server.port


async def killed(launch: LaunchSpec, after_s: float) -> tuple[str, int | None]:
    """All its processes are killed `after_s` after it started, wherever it is then."""
    seen: list[int] = []

    async def use() -> None:
        async with serve(launch) as server:
            seen.append(server.port)
            await until(lambda: not server.alive)

    task = asyncio.create_task(use())
    await until(lambda: tagged(launch.launch_id))
    await asyncio.sleep(after_s)
    for process in tagged(launch.launch_id):
        process.send_signal(signal.SIGKILL)
    outcome = (await asyncio.gather(task, return_exceptions=True))[0]
    if isinstance(outcome, EngineError):
        return f"killed while starting: {outcome.cause}", None
    assert outcome is None
    return "killed while serving", seen[0]


async def soak(directory: Path) -> tuple[Counter[str], list[Controller]]:
    """All launches in turn; what became of them, and what the controller held after each."""
    chance, counted, held = random.Random(0), Counter[str](), list[Controller]()
    for number in range(LAUNCHES):
        launch = Simulated.launch(directory / str(number))
        about = whole(launch) if number % 2 == 0 else killed(launch, chance.uniform(0.0, 2.0))
        ended, port = await about
        counted[ended] += 1
        assert leftovers(launch) == []
        assert port is None or is_free(port)
        held.append(Controller.now())
    return counted, held


def shared_memory() -> set[Path]:
    """Files in shared memory that no living process uses."""
    used = {path for pid in psutil.pids() for path in shared_files(pid)}
    return set(Path("/dev/shm").iterdir()) - used


def test_many_launches_leave_nothing_and_the_controller_stays_as_it_was(tmp_path: Path) -> None:
    begun, shared = time.monotonic(), shared_memory()
    counted, held = asyncio.run(soak(tmp_path))
    settled = held[min(9, len(held) // 2)]
    print(f"\n{LAUNCHES} launches in {time.monotonic() - begun:.0f} s: {dict(counted)}")
    print(f"controller after {held.index(settled) + 1}: {settled}\ncontroller after {LAUNCHES}: {held[-1]}")
    assert counted["stopped"] == (LAUNCHES + 1) // 2
    assert sum(counted.values()) == LAUNCHES
    assert held[-1].descriptors <= settled.descriptors + 2
    assert held[-1].threads <= settled.threads + 2
    assert held[-1].children == settled.children
    assert held[-1].memory_mib <= settled.memory_mib + 16
    asyncio.run(until(lambda: shared_memory() <= shared))  # other programs' files come and go
