"""`max_speed` on a load whose limit is known, and how it is compared."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from tuner.records import Fidelity, Outcome, Slice, Slo
from tuner.replay.plan import Load
from tuner.replay.timeline import Judge, Partial, Replayed, SliceReplay
from tuner.tuning import trial
from tuner.tuning.significance import Spread, compare_values, spread_of

SLO = Slo(ttft_ms=100.0, attainment=0.9)
LOAD = Load(seed=1, number=3, repeat=2, model="m", vocabulary=100, slo=SLO, speed=2.0)


def part(name: str) -> Slice:
    return Slice(name=name, start_s=0.0, duration_s=10.0)


def outcome(row: int, ttft_s: float) -> Outcome:
    return Outcome(
        row=row, scheduled_s=0.1 * row, sent_s=0.1 * row, first_token_s=0.1 * row + ttft_s,
        last_token_s=0.1 * row + ttft_s, end_s=0.1 * row + ttft_s, output_tokens=1, expected_output=1,
        chunk_s=np.array([0.1 * row + ttft_s]), chunk_tokens=np.array([1], np.int32),
    )  # fmt: skip


class Served:
    """An engine that answers in time up to a speed per slice; it remembers what was asked of it."""

    def __init__(self, limits: dict[str, float], *, judged: bool, sent: Sequence[float] = ()) -> None:
        """`sent`: up to which speed the sender is in time, replay by replay; the last holds for the rest."""
        self.limits, self.judged, self.sent = limits, judged, [*sent]
        self.loads: list[Load] = []

    async def __call__(self, slices: Sequence[Slice], load: Load, judge: Judge) -> Replayed:
        self.loads.append(load)
        (one,) = slices
        late = 0.5 if load.speed > self.limits[one.name] else 0.05
        outcomes = tuple(outcome(row, late) for row in range(20))
        partial = Partial(slice=one, now_s=5.0, window_s=10.0, planned=20, outcomes=outcomes, waiting_s=())
        stopped = judge(partial) if self.judged else None
        replay = SliceReplay(slice=one, window_s=10.0, outcomes=outcomes)
        in_time = self.sent[min(len(self.loads), len(self.sent)) - 1] if self.sent else load.speed
        failed = () if load.speed <= in_time else ("lateness: the sender was late",)
        return Replayed(slices=(replay,), stopped=stopped, fidelity=Fidelity(failed=failed))


@pytest.mark.parametrize("judged", [True, False])
def test_the_slowest_slice_decides(judged: bool) -> None:
    served = Served({"a": 7.0, "b": 5.0}, judged=judged)
    found, doubts = asyncio.run(trial.max_speed(served, (part("a"), part("b")), LOAD, SLO))
    assert doubts == ()
    assert found.above is not None
    assert found.speed <= 5.0 < found.above
    assert found.above / found.speed <= 1.05


@pytest.mark.parametrize("judged", [True, False])
def test_what_the_sender_could_not_send_in_time_is_not_met(judged: bool) -> None:
    served = Served({"a": 30.0}, judged=judged, sent=[5.0])
    found, doubts = asyncio.run(trial.max_speed(served, (part("a"),), LOAD, SLO))
    assert found.speed <= 5.0
    assert doubts
    assert all("lateness" in doubt and doubt.startswith("max_speed: speed ") for doubt in doubts)


def test_a_sender_that_was_late_once_is_asked_again() -> None:
    served = Served({"a": 7.0}, judged=True, sent=[1.0, 100.0])
    found, doubts = asyncio.run(trial.max_speed(served, (part("a"),), LOAD, SLO))
    assert [load.speed for load in served.loads[:3]] == [2.0, 2.0, 4.0]
    assert 6.5 < found.speed <= 7.0
    assert doubts == ()


def test_no_prompt_is_sent_twice() -> None:
    served = Served({"a": 7.0}, judged=True, sent=[1.0, 100.0])
    asyncio.run(trial.max_speed(served, (part("a"),), LOAD, SLO))
    salts = [(load.number, load.repeat) for load in served.loads]
    assert len(set(salts)) == len(salts)
    assert (LOAD.number, LOAD.repeat) not in salts


def test_a_number_of_whole_replays_is_compared_by_its_repeats() -> None:
    rows = [1.0, 1.02, 0.98], [2.0, 2.05, 1.97]
    better = compare_values("max_speed", *rows, spread=spread_of(rows))
    assert better is not None
    assert better.word == "better"
    assert better.low < np.log(2.0) < better.high
    single = compare_values("max_speed", [1.0], [2.0], spread=Spread())
    assert single is not None
    assert single.word == "open"
    assert compare_values("max_speed", [], [2.0], spread=Spread()) is None
