"""docs/cases.md R19 on a whole public trace: 12,031 prompts of 145 M tokens, none built before its time."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.replay.engine import Script, running
from tests.replay.test_timeline import PLAN
from tuner.records import Slice
from tuner.replay.plan import Load
from tuner.replay.timeline import replay
from tuner.traffic.importers import read_any

WATCHDOG_S = 600.0
MOST_MIB = 1024


def peak_mib() -> int:
    """The most resident memory of this process alone; `ru_maxrss` starts with that of its parent."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) // 1024


def start(path: Path) -> dict[str, object]:
    """Import and replay three seconds, against an engine in this same process; what it took."""
    began = time.monotonic()
    trace = read_any(path)
    imported = time.monotonic() - began
    part = Slice(name="some", start_s=600.0, duration_s=3.0)
    load = Load(seed=1, number=1, model="m", vocabulary=152_064, isolated=True)

    async def go() -> tuple[float, list[tuple[bool, int, int]]]:
        async with running(Script()) as engine:
            playing = asyncio.create_task(replay(engine, trace, [part], PLAN, load))
            while not engine.bodies and not playing.done():
                await asyncio.sleep(0.01)
            first = time.monotonic() - began
            outcomes = (await playing).slices[0].outcomes
        return first, [(o.ok, o.input_tokens, int(trace.input_len[o.row])) for o in outcomes]

    first, outcomes = asyncio.run(go())
    return {
        "rows": len(trace),
        "tokens": int(trace.input_len.sum(dtype="int64")),
        "imported_s": round(imported, 2),
        "first_request_s": round(first, 2),
        "peak_mib": peak_mib(),
        "exact": all(ok and got == wanted for ok, got, wanted in outcomes),
        "requests": len(outcomes),
    }


def test_case_r19_a_long_trace_starts_without_its_prompts_in_memory(real: Callable[[str], Path]) -> None:
    path = real("mooncake_conversation_trace.jsonl")
    done = subprocess.run(
        [sys.executable, "-m", "tests.traffic.test_case_r19", str(path)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=WATCHDOG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rows"] == 12_031
    assert found["tokens"] == 144_793_823
    assert found["requests"] > 0
    assert found["exact"]
    assert found["peak_mib"] < MOST_MIB


if __name__ == "__main__":
    print(json.dumps(start(Path(sys.argv[1]))))
