"""What a full KV cache does on the real vLLM (CPU build), and what each knob that acts on it changes (M2).

Twenty-eight blocks of 32 tokens hold the prompts of eight requests, not their answers: the engine preempts
and computes again. Two launches, one per scheduling policy; limits change while the first one runs.
"""

import asyncio
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.tiny import ENV
from tests.engine.conformance import Launched
from tests.engine.real import real
from tuner.engine import limits, metrics
from tuner.engine.server import Server
from tuner.records import JSON, Value

pytestmark = pytest.mark.vllm

PROMPT, ANSWER = 96, 96
KV = ("--block-size", "32", "--num-gpu-blocks-override", "28", "--max-model-len", "640")


@dataclass(frozen=True)
class Served:
    """One burst: preemptions, tokens that the engine computed, and the order in which requests ended."""

    preemptions: float
    computed: int
    order: list[int]


def launched(directory: Path, policy: str) -> Launched:
    launch_id = uuid.uuid4().hex
    installed = limits.install(directory, launch_id)
    return Launched(
        real(
            directory, *KV, "--no-enable-prefix-caching", "--scheduling-policy", policy, *installed.argv,
            launch_id=launch_id, env={**ENV, **installed.env},
            asked={"num_gpu_blocks_override": 28, "scheduling_policy": policy},
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def fcfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    found = launched(tmp_path_factory.mktemp("fcfs"), "fcfs")
    yield found
    found.close()


async def burst(server: Server, count: int = 8, urgent: int = 0, priorities: bool = False) -> Served:
    """Send requests all at once, and `urgent` ones once the first of them have begun to answer."""
    before, counted = await server.metrics(), await server.steps()
    order: list[int] = []

    async def one(number: int) -> None:
        body: dict[str, JSON] = {
            "model": server.names[0], "prompt": [(7 * number + k) % 2000 + 10 for k in range(PROMPT)],
            "max_tokens": ANSWER, "ignore_eos": True,
        }  # fmt: skip
        if priorities:
            body["priority"] = 10 if number < count else 0
        reply = await server.ask("POST", "/v1/completions", body=body, timeout_s=300)
        assert reply.status == 200, reply.text
        order.append(number)

    sent = [asyncio.create_task(one(number)) for number in range(count)]
    while urgent and (await server.metrics())["generation_tokens"] == before["generation_tokens"]:
        await asyncio.sleep(0.01)
    sent += [asyncio.create_task(one(number)) for number in range(count, count + urgent)]
    await asyncio.gather(*sent)
    after = metrics.between(before, await server.metrics())
    assert after["generation_tokens"] == (count + urgent) * ANSWER, "every answer came whole"
    return Served(
        preemptions=after["preemptions"] or 0.0,
        computed=(await server.steps())["tokens"] - counted["tokens"],
        order=order,
    )


def under(running: Launched, limited: Mapping[str, Value]) -> Served:
    """A burst under these limits of the running engine, which has its launched ones again afterwards."""

    async def story() -> Served:
        assert await limits.change(running.server, limited)
        found = await burst(running.server)
        assert await limits.change(running.server, {})
        return found

    return running.loop.run_until_complete(story())


NEEDED = 8 * (PROMPT + ANSWER - 1)
"""Tokens that eight requests cost where none is computed twice (the last one made is not computed)."""


def test_M2_recompute_pays_for_every_preemption_with_tokens_computed_again(fcfs: Launched) -> None:
    assert fcfs.server.effective["num_gpu_blocks_override"] == 28
    found = under(fcfs, {})
    assert found.preemptions > 0
    assert found.computed >= NEEDED + PROMPT, "each preempted request begins with its prompt again"


def test_M2_a_watermark_admits_fewer_and_preempts_less(fcfs: Launched) -> None:
    without, with_half = under(fcfs, {"watermark": 0.0}), under(fcfs, {"watermark": 0.5})
    assert with_half.preemptions < without.preemptions
    assert with_half.computed < without.computed


def test_M2_an_admission_limit_that_the_cache_can_hold_preempts_nobody(fcfs: Launched) -> None:
    found = under(fcfs, {"max_num_seqs": 4})
    assert found.preemptions == 0
    assert found.computed == NEEDED


def test_M2_priority_takes_the_cache_from_the_patient(fcfs: Launched, tmp_path: Path) -> None:
    """Two urgent requests that come last end late under fcfs, and earlier under priority."""
    late = fcfs.loop.run_until_complete(burst(fcfs.server, 10, 2))
    urgent = launched(tmp_path, "priority")
    try:
        assert urgent.server.effective["scheduling_policy"] == "priority"
        found = urgent.loop.run_until_complete(burst(urgent.server, 10, 2, priorities=True))
    finally:
        urgent.close()
    assert late.preemptions > 0
    assert found.preemptions > 0

    def places(served: Served) -> float:
        return sum(served.order.index(number) for number in (10, 11)) / 2

    assert places(found) < places(late)
