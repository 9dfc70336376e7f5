"""The same requests told by us and by the engine: the simulated one, and the real vLLM (`make test-vllm`)."""

import asyncio
import dataclasses
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay_agreement import Agreement, agree
from tests.replay.test_timeline import LOAD, within
from tests.replay.traces import trace
from tests.vllm import Shared
from tuner.engine.server import serve
from tuner.knobs.catalogue import read_back
from tuner.records import LaunchSpec
from tuner.traffic.trace import Trace

TRAFFIC = trace(np.arange(40) * 0.05, inputs=np.arange(40) * 5 + 20, outputs=np.arange(40) % 9 + 4)


async def told(launch: LaunchSpec, traffic: Trace) -> Agreement:
    async with serve(launch) as server:
        return await agree(server, traffic, dataclasses.replace(LOAD, model=launch.served_name))


def simulated(directory: Path) -> LaunchSpec:
    """The simulated engine with vLLM's argv."""
    return LaunchSpec(
        read_back=read_back(),
        launch_id=uuid.uuid4().hex,
        command=(sys.executable, "-m", "tuner.simulator.app"),
        model="Qwen/Qwen2.5-7B-Instruct",
        argv=("--max-model-len", "4096"),
        served_name="study",
        directory=str(directory),
        ready_timeout_s=60.0,
    )


def check(found: Agreement) -> None:
    """Counts are equal; our times are the engine's and a little more."""
    assert found.ours["requests"] == len(TRAFFIC)
    assert found.ours["input_tokens"] == TRAFFIC.input_len.sum()
    assert found.ours["output_tokens"] == TRAFFIC.output_len.sum()
    assert found.engine["ttft_mean_ms"] is not None
    counts = [why for why in found.differences() if "_ms" not in why]
    assert counts == []
    for name in ("ttft_mean_ms", "e2e_mean_ms"):
        theirs = found.engine[name]
        assert theirs is not None
        assert found.ours[name] > 0.9 * theirs, "we cannot have seen an answer before the engine gave it"


def test_the_simulated_engine_says_what_we_say(tmp_path: Path) -> None:
    check(within(told(simulated(tmp_path), TRAFFIC), 120))


@pytest.mark.vllm
def test_the_real_engine_says_what_we_say(real_server: Shared) -> None:
    load = dataclasses.replace(LOAD, model=real_server.spec.served_name)
    story = asyncio.wait_for(agree(real_server.server, TRAFFIC, load), 900)
    found = real_server.loop.run_until_complete(story)
    check(found)
    assert len(found.ttft_gaps_ms) == len(TRAFFIC)
    assert (found.ttft_gaps_ms > -1.0).all()
    assert np.isfinite(found.tpot_gaps_ms).any()
