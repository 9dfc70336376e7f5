"""The core against the real scheduler, step by step: same requests, same limits, same steps. One launch."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.engine.real import real
from tuner.engine.server import Server, serve
from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import Limits, Request

pytestmark = pytest.mark.vllm

LIMITS = Limits(
    max_num_seqs=8,
    max_num_batched_tokens=512,
    num_blocks=64,
    block_size=32,
    max_model_len=2000,
    async_scheduling=False,
)
BLOCKER = (1790, 190)
"""Its prompt leaves no room for any other while it runs, so that all others wait when it ends."""
LENGTHS = [(230 + 41 * i % 470, 15 + 37 * i % 110) for i in range(14)]
ITERATION = re.compile(
    r"Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, "
    r"(\d+) generation requests, (\d+) generation tokens"
)


async def send(server: Server, number: int, lengths: tuple[int, int]) -> asyncio.StreamReader:
    prompt, output = lengths
    body = {
        "model": server.names[0],
        "prompt": [11 + (number * 7919 + 13 * i * i) % 400 for i in range(prompt)],
        "max_tokens": output,
        "min_tokens": output,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
    writer.write(b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
    await writer.drain()
    return reader


async def scenario(directory: Path) -> tuple[str, int]:
    """The engine's log of the run, and its preemptions."""
    argv: tuple[str, ...] = ("--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--block-size", "32")
    argv += ("--num-gpu-blocks-override", "64", "--max-model-len", "2000")
    async with serve(real(directory, *argv, "--enable-logging-iteration-details")) as server:
        assert (await server.reset_cache()).proved
        start = len(server.log.read_text(errors="replace"))
        readers = [await send(server, 0, BLOCKER)]
        while not (await server.metrics())["running"]:
            await asyncio.sleep(0.005)
        for number, lengths in enumerate(LENGTHS, 1):
            readers.append(await send(server, number, lengths))
            while (await server.metrics())["waiting"] != number:
                await asyncio.sleep(0.002)
        for reader in readers:
            assert b" 200 " in (await reader.read()).split(b"\r\n", 1)[0]
        preempted = (await server.metrics())["preemptions"] or 0
        return server.log.read_text(errors="replace")[start:], int(preempted)


def simulated() -> tuple[list[tuple[int, int]], int]:
    """(requests, tokens) of each step, and preemptions."""
    scheduler = Scheduler(LIMITS)
    scheduler.add(Request(0, 0.0, BLOCKER))
    found = []
    late = [Request(number, float(number), lengths) for number, lengths in enumerate(LENGTHS, 1)]
    while (step := scheduler.schedule()) is not None:
        found.append((step.decodes + step.prefills, step.tokens))
        scheduler.complete(step)
        for request in late:
            scheduler.add(request)
        late = []
    return found, scheduler.preemptions


def test_every_step_holds_the_same_requests_and_tokens(tmp_path: Path) -> None:
    text, preempted = asyncio.run(scenario(tmp_path))
    real_steps = [
        (int(m[2]) + int(m[4]), int(m[3]) + int(m[5]))
        for m in ITERATION.finditer(text)
        if int(m[3]) + int(m[5])
    ]
    steps, preemptions = simulated()
    assert preemptions > 0, "the scenario must preempt"
    assert real_steps == steps
    assert preempted == preemptions
