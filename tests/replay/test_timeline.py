import asyncio
import dataclasses
import json
from collections.abc import Coroutine
from typing import TypeVar

import numpy as np
import pytest

from tests.replay.engine import KnownEngine, Script, running
from tests.replay.traces import trace
from tuner.records import Slice, Slo
from tuner.replay.plan import PLANS, Load, Plan
from tuner.replay.timeline import Partial, Replayed, measure, replay
from tuner.traffic.trace import Trace

T = TypeVar("T")
PLAN = dataclasses.replace(PLANS["quick"], load_warmup_s=0.2, tail_limit_s=2.0, lateness_ms=5000.0)
LOAD = Load(seed=1, number=2, model="m", vocabulary=1000, isolated=True, slo=Slo(ttft_ms=60000))


def within(what: Coroutine[object, object, T], seconds: float = 60.0) -> T:
    """Run under a watchdog that only a hang can meet."""
    return asyncio.run(asyncio.wait_for(what, seconds))


async def play(
    script: Script, traffic: Trace, *slices: Slice, plan: Plan = PLAN, load: Load = LOAD
) -> tuple[Replayed, KnownEngine]:
    async with running(script) as engine:
        return await replay(engine, traffic, slices, plan, load), engine


def test_a_window_is_measured_by_scheduled_arrival_between_warm_up_and_tail() -> None:
    traffic = trace(np.arange(40) * 0.05, inputs=np.arange(40) % 7 + 5, outputs=3)
    part = Slice(name="peak", start_s=0.5, duration_s=1.0)
    replayed, engine = within(play(Script(first_s=0.01, gap_s=0.005), traffic, part))
    outcomes = replayed.slices[0].outcomes
    assert [o.row for o in outcomes] == list(range(10, 30))
    assert all(o.ok and o.output_tokens == 3 and o.input_tokens == o.expected_input for o in outcomes)
    assert [o.scheduled_s for o in outcomes] == pytest.approx([k * 0.05 for k in range(20)])
    assert not replayed.fidelity.failed
    assert engine.reset_calls == 1
    values = measure(replayed, LOAD.slo).values
    assert values["requests"] == 20
    assert values["request_rps"] == 20
    assert values["output_tokens_per_s"] == 60
    assert values["slo_attainment"] == 1
    assert "ttft_p99_ms" not in values
    assert values["ttft_p95_ms"] > 10


def test_the_engine_is_told_that_tokens_come() -> None:
    """While requests still run: none of these ends before the window does."""
    traffic = trace(np.zeros(3), inputs=5, outputs=20)
    plan = dataclasses.replace(PLAN, warmup_waves=0, tail_limit_s=30.0)
    told: list[int] = []

    async def go() -> None:
        async with running(Script(gap_s=0.1)) as engine:

            def look(partial: Partial) -> None:
                if not partial.outcomes:
                    told.append(engine.heard_calls)

            await replay(
                engine, traffic, [Slice(name="all", start_s=0, duration_s=1)], plan, LOAD, judge=look
            )

    within(go())
    assert max(told) > 0


def test_bodies_carry_exact_lengths_and_never_share_tokens_with_the_warm_up() -> None:
    traffic = trace(np.arange(10) * 0.02, inputs=20, outputs=2, blocks=[[1, 2]] * 10, block_size=10)
    part = Slice(name="all", start_s=0.0, duration_s=0.2)
    _, engine = within(play(Script(), traffic, part))
    prompts = [tuple(map(int, json.loads(json.dumps(b["prompt"])))) for b in engine.bodies]
    measured = {p for p, b in zip(prompts, engine.bodies, strict=True) if b["max_tokens"] == 2}
    warm = {p for p, b in zip(prompts, engine.bodies, strict=True) if b["max_tokens"] == PLAN.warmup_tokens}
    assert measured
    assert warm
    assert all(len(p) == 20 for p in prompts)
    assert not {p[:10] for p in measured} & {p[:10] for p in warm}
    body = engine.bodies[-1]
    assert body["min_tokens"] == body["max_tokens"]
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["temperature"] == 0.0


def test_a_judge_curtails_and_the_measurement_says_so() -> None:
    traffic = trace(np.arange(200) * 0.05)
    part = Slice(name="all", start_s=0.0, duration_s=10.0)
    seen: list[Partial] = []

    def judge(partial: Partial) -> str | None:
        seen.append(partial)
        return "beaten" if len(partial.outcomes) >= 5 else None

    async def go() -> Replayed:
        async with running() as engine:
            return await replay(engine, traffic, [part], PLAN, LOAD, judge=judge)

    replayed = within(go())
    assert replayed.stopped == "beaten"
    assert replayed.slices[0].window_s < 10
    assert measure(replayed, LOAD.slo).kind == "partial"
    assert not replayed.fidelity.failed
    assert seen[-1].planned == 200


def test_speed_sends_the_same_rows_in_less_time() -> None:
    traffic = trace(np.arange(20) * 0.1)
    part = Slice(name="all", start_s=0.0, duration_s=2.0)
    load = dataclasses.replace(LOAD, speed=4.0)
    replayed, _ = within(play(Script(), traffic, part, load=load))
    assert replayed.slices[0].window_s == 0.5
    assert [o.row for o in replayed.slices[0].outcomes] == list(range(20))


@pytest.mark.slow
def test_M9_five_hundred_sessions_are_served_at_once_and_none_is_lost() -> None:
    """All are sent before the first has its last token: the sender holds every one of them open."""
    sessions = 500
    arrivals = np.arange(sessions) * 0.002
    traffic = trace(arrivals, inputs=6, outputs=20, session=np.arange(sessions))
    part = Slice(name="all", start_s=0.0, duration_s=1.0)
    plan = dataclasses.replace(PLAN, warmup_waves=1, priming_turnovers=0.0, tail_limit_s=50.0)
    load = dataclasses.replace(LOAD, history="session")
    replayed, _ = within(play(Script(gap_s=0.3), traffic, part, plan=plan, load=load), 100.0)
    outcomes = replayed.slices[0].outcomes
    assert len(outcomes) == sessions
    assert all(o.ok and o.output_tokens == 20 for o in outcomes)
    assert max(o.sent_s or 0.0 for o in outcomes) < min(o.last_token_s or 0.0 for o in outcomes)
    assert measure(replayed, LOAD.slo).values["failed"] == 0
