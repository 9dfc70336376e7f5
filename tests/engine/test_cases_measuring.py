"""Public faults that falsify what is measured on a running engine; the numbers are those of docs/cases.md."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.engine.helpers import spec
from tests.replay.traces import trace
from tuner.engine.server import serve
from tuner.records import Slice
from tuner.replay.plan import PLANS, Load
from tuner.replay.timeline import Replayed, replay

PLAN = dataclasses.replace(
    PLANS["quick"], warmup_waves=20, warmup_requests=1, warmup_limit_s=60.0, lateness_ms=5000.0,
    load_warmup_s=0.2, tail_limit_s=30.0,
)  # fmt: skip


async def replayed(directory: Path, fault: str) -> Replayed:
    traffic = trace(np.arange(20) * 0.05, inputs=8, outputs=2)
    part = Slice(name="all", start_s=0.0, duration_s=1.0)
    load = Load(seed=1, number=1, model="study", vocabulary=1000, isolated=True)
    async with serve(spec(directory, fault)) as server:
        return await replay(server, traffic, [part], PLAN, load)


@pytest.mark.slow
def test_case_19_slow_first_requests_fall_into_the_warm_up(tmp_path: Path) -> None:
    """The engine compiles on its first six requests; its answers say which were slow."""
    result = asyncio.run(replayed(tmp_path, "slow_first=6"))
    outcomes = result.slices[0].outcomes
    assert len(outcomes) == 20
    assert all(o.ok for o in outcomes)
    assert [o.row for o in outcomes if o.cached_tokens] == []
