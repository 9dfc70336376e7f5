"""Capture in front of and inside the real vLLM: it replays with the same cached tokens."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.engine.test_cases_processes import until
from tests.traffic.conftest import make
from tests.traffic.upstream import post, proxied
from tests.vllm import ENGINE_BLOCK, Shared, captured_inside
from tuner.engine.server import Server
from tuner.replay.feeder import Prompts, salt
from tuner.traffic.capture.files import Sink
from tuner.traffic.capture.recorder import Recorder
from tuner.traffic.importers import read_any
from tuner.traffic.structure import predicted_hits
from tuner.traffic.trace import Trace


def conversations() -> Trace:
    """Ten conversations of three turns on two system prompts, their turns mixed, tails of any length."""
    chance = np.random.default_rng(3)
    ids: list[list[int]] = []
    lengths: list[int] = []
    histories = [list(range(20)) if one % 2 else list(range(50, 62)) for one in range(10)]
    fresh = 1000
    for _ in range(3):
        for one in chance.permutation(10).tolist():
            added = int(chance.integers(4, 20))
            histories[one] = histories[one] + list(range(fresh, fresh + added))
            fresh += added
            ids.append(list(histories[one]))
            lengths.append(16 * len(ids[-1]) + int(chance.integers(0, 16)))
    return make(lengths, ids=ids, output=2)


async def send_all(trace: Trace, port: int, model: str, key: bytes) -> list[int]:
    """Every row's prompt, one after another; what the engine says it found cached."""
    prompts, cached = Prompts(trace, 2048, key), []
    for row in range(len(trace)):
        body = {"model": model, "prompt": prompts.tokens(row).tolist(), "max_tokens": 2, "ignore_eos": True}
        status, answer = await post(port, json.dumps(body).encode())
        assert status == 200, answer
        usage = json.loads(answer)["usage"]
        assert usage["prompt_tokens"] == trace.input_len[row]
        cached.append((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))
    return cached


async def through_a_proxy(trace: Trace, server: Server, file: Path) -> list[int]:
    """The same through a recording proxy."""
    async with proxied(f"http://{server.host}:{server.port}", Recorder(Sink(file))) as port:
        return await send_all(trace, port, server.names[0], salt(0, 1, 0))


def told_inside(directory: Path, rows: int) -> tuple[list[int], list[int]]:
    """(prompt lengths, cached tokens) of the last requests of the engine's own capture, still open."""
    (file,) = captured_inside(directory).iterdir()
    found = read_any(file)
    return found.input_len[-rows:].tolist(), found.obs_cached[-rows:].tolist()


@pytest.mark.vllm
def test_a_capture_replays_with_the_same_cached_tokens(real_server: Shared, tmp_path: Path) -> None:
    source, server, directory = conversations(), real_server.server, real_server.directory
    twice = 2 * source.input_len.tolist()

    async def go() -> tuple[list[int], list[int]]:
        assert (await server.reset_cache()).proved
        first = await through_a_proxy(source, server, tmp_path / "c.jsonl")
        captured = read_any(tmp_path / "c.jsonl")
        again = await send_all(captured, server.port, server.names[0], salt(0, 2, 0))
        await until(lambda: told_inside(directory, len(twice)) == (twice, first + again))
        return first, again

    first, again = real_server.loop.run_until_complete(go())
    captured = read_any(tmp_path / "c.jsonl")
    assert captured.input_len.tolist() == source.input_len.tolist()
    assert captured.obs_cached.tolist() == first == again
    assert predicted_hits(source, range(len(source)), ENGINE_BLOCK).tolist() == first
    assert predicted_hits(captured, range(len(captured)), ENGINE_BLOCK).tolist() == first
    assert sum(first) > 0
