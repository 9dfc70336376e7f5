"""Sender processes: they end with their controller, and their own end is not silent."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.replay.engine import running
from tests.replay.test_timeline import LOAD, PLAN, within
from tests.replay.traces import trace
from tuner.errors import Aborted, EngineError, Infeasible
from tuner.records import Slice
from tuner.replay.timeline import Partial, replay
from tuner.replay.timing import Alarm, Contention, split

LONG = trace(np.arange(600) * 0.1)
MINUTE = Slice(name="minute", start_s=0.0, duration_s=60.0)

CONTROLLER = """
import asyncio
from tests.replay.test_timeline import LOAD
from tests.replay.traces import trace
from tuner.replay.feeder import Source
from tuner.replay.timeline import Senders

async def main():
    source = Source(trace=trace([0.0]), load=LOAD, priorities=False, senders=2)
    senders = Senders("127.0.0.1", 9, source, None)
    await senders.start()
    print(*(process.pid for process in senders._processes), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_senders_end_when_their_controller_is_killed() -> None:
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert controller.stdout is not None
    with controller.stdout:
        senders = [psutil.Process(int(pid)) for pid in controller.stdout.readline().split()]
    assert len(senders) == 3
    controller.kill()
    controller.wait()
    _, alive = psutil.wait_procs(senders, timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("which", ["sender", "feeder"])
def test_a_sender_or_feeder_that_dies_aborts_the_replay(which: str) -> None:
    before = children()

    def kill(partial: Partial) -> None:
        for pid in children() - before:
            if f"tuner.replay.{which}" in psutil.Process(pid).cmdline():
                os.kill(pid, signal.SIGKILL)

    async def go() -> None:
        async with running() as engine:
            await replay(engine, LONG, [MINUTE], PLAN, LOAD, judge=kill)

    with pytest.raises(Aborted, match=f"{which} process ended") as caught:
        within(go())
    assert caught.value.cause == "sender"


def test_an_engine_that_dies_ends_the_replay_with_its_fault() -> None:
    async def go() -> None:
        async with running() as engine:

            async def fault(phase: str) -> EngineError | None:
                return None if engine.alive else Infeasible("out of memory", cause="oom_load")

            engine.fault = fault  # type: ignore[method-assign]

            def die(partial: Partial) -> None:
                engine.alive = False

            await replay(engine, LONG, [MINUTE], PLAN, LOAD, judge=die)

    with pytest.raises(Infeasible, match="out of memory"):
        within(go())


def test_replays_of_one_host_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_HOME", str(tmp_path))
    load = dataclasses.replace(LOAD, isolated=False)
    short = Slice(name="short", start_s=0.0, duration_s=0.5)
    spans: list[tuple[float, float]] = []

    async def one() -> None:
        async with running() as engine:
            replayed = await replay(engine, LONG, [short], PLAN, load)
            ended = time.monotonic()
            spans.append((ended - 0.5, ended))
            assert len(replayed.slices[0].outcomes) == 5

    async def go() -> None:
        await asyncio.gather(one(), one())

    within(go())
    (_, first), (second, _) = sorted(spans)
    assert second >= first


def test_engine_and_senders_get_cores_of_their_own() -> None:
    assert split((0, 1)) == ((0,), (1,))
    assert split(range(8), 2) == ((0, 1, 2, 3, 4, 5), (6, 7))
    assert split((3,)) == ((3,), (3,))
    assert split((0, 1), 4) == ((0,), (1,))


def test_contention_is_told_as_shares_and_absence_as_none(tmp_path: Path) -> None:
    pressure, stat = tmp_path / "pressure", tmp_path / "stat"
    pressure.write_text("some avg10=1.0 avg60=0.0 avg300=0.0 total=1000000\n")
    stat.write_text("cpu  100 0 0 100 0 0 0 0 0 0\n")
    seen = Contention(pressure, stat)
    pressure.write_text("some avg10=1.0 avg60=0.0 avg300=0.0 total=3000000\n")
    stat.write_text("cpu  150 0 0 100 0 0 0 50 0 0\n")
    assert seen.since(4.0) == {"cpu_pressure": 0.5, "steal": 0.5}
    nowhere = Contention(tmp_path / "no", tmp_path / "none")
    assert nowhere.since(4.0) == {"cpu_pressure": None, "steal": None}


def test_an_alarm_wakes_all_who_wait_in_their_order() -> None:
    async def go() -> list[int]:
        alarm, woken = Alarm(), list[int]()
        now = time.perf_counter_ns()

        async def wait(number: int, after_ms: float) -> None:
            due = now + int(after_ms * 1e6)
            await alarm.until(due)
            assert time.perf_counter_ns() >= due
            woken.append(number)

        await asyncio.gather(wait(2, 40), wait(0, -5), wait(3, 60), wait(1, 20))
        alarm.close()
        return woken

    assert within(go()) == [0, 1, 2, 3]


def test_a_replay_is_cancelled_while_its_bodies_are_built() -> None:
    """Nobody waits for the rest of them, and no process is left."""
    before = children()
    traffic = trace(np.arange(300) * 0.1, inputs=20_000)
    whole = Slice(name="whole", start_s=0.0, duration_s=30.0)
    plan = dataclasses.replace(PLAN, warmup_waves=0, load_warmup_s=0.0)

    async def go() -> None:
        async with running() as engine:
            replaying = asyncio.create_task(replay(engine, traffic, [whole], plan, LOAD))
            while engine.connections < 10:  # the senders get ready, and the feeder builds
                await asyncio.sleep(0.01)
            replaying.cancel()
            await asyncio.wait({replaying})
            assert replaying.cancelled()
            places = [task.get_coro().cr_code.co_filename for task in asyncio.all_tasks()]  # type: ignore[union-attr]
            assert not [place for place in places if "tuner/replay" in place]

    within(go())
    left = [" ".join(psutil.Process(pid).cmdline()) for pid in children() - before]
    assert not [words for words in left if "tuner.replay" in words]


def test_who_is_busy_can_look_whether_a_call_is_due() -> None:
    async def go() -> list[str]:
        alarm, made = Alarm(), list[str]()
        now = time.perf_counter_ns()
        for name, due in (("b", now - 1), ("a", now - 2), ("later", now + 3_600_000_000_000)):
            alarm.at(due, lambda name=name: made.append(name))  # type: ignore[misc]
        assert not made
        alarm.look(1)
        assert made == ["a"], "one at a time, the oldest first"
        alarm.look(16)
        assert alarm.next_ns == now + 3_600_000_000_000
        alarm.close()
        return made

    assert within(go()) == ["a", "b"]
