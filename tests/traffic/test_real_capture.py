"""Capture in front of and inside the real vLLM: it replays with the same cached tokens. One launch."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.real import real
from tests.traffic.conftest import make
from tests.traffic.upstream import post, served
from tuner.engine.server import Server, serve
from tuner.traffic.capture.files import Sink
from tuner.traffic.capture.middleware import Capture
from tuner.traffic.capture.proxy import Proxy
from tuner.traffic.capture.recorder import Recorder
from tuner.traffic.importers import read_any
from tuner.traffic.prompts import Prompts, salt
from tuner.traffic.reuse import predicted_hits
from tuner.traffic.trace import Trace

ENGINE_BLOCK = 128
ROOT = Path(__file__).parents[2]


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
    recorder = Recorder(Sink(file))
    recorder.start()
    proxy = Proxy(f"http://{server.host}:{server.port}")
    async with served(Capture(proxy, recorder)) as port:
        cached = await send_all(trace, port, server.names[0], salt(0, 1, 0))
    proxy.close()
    recorder.stop()
    return cached


@pytest.mark.vllm
def test_a_capture_replays_with_the_same_cached_tokens(tmp_path: Path) -> None:
    source, inside = conversations(), tmp_path / "inside"
    launch = real(
        tmp_path,
        *("--enable-prompt-tokens-details", "--block-size", str(ENGINE_BLOCK)),
        *("--middleware", "tuner.traffic.capture.middleware.VllmCapture"),
    )
    env = {
        **launch.env,
        "PYTHONPATH": str(ROOT),
        "TUNER_CAPTURE_OUT": str(inside),
        "TUNER_CAPTURE_NAME": "in",
    }

    async def go() -> tuple[list[int], list[int]]:
        async with serve(replace(launch, env=env)) as server:
            first = await through_a_proxy(source, server, tmp_path / "c.jsonl")
            captured = read_any(tmp_path / "c.jsonl")
            again = await send_all(captured, server.port, server.names[0], salt(0, 2, 0))
        return first, again

    first, again = asyncio.run(go())
    captured = read_any(tmp_path / "c.jsonl")
    assert captured.input_len.tolist() == source.input_len.tolist()
    assert captured.obs_cached.tolist() == first == again
    assert predicted_hits(source, range(len(source)), ENGINE_BLOCK).tolist() == first
    assert predicted_hits(captured, range(len(captured)), ENGINE_BLOCK).tolist() == first
    assert sum(first) > 0
    (file,) = inside.iterdir()
    engines_own = read_any(file)
    rows = len(source)
    assert engines_own.input_len[-2 * rows :].tolist() == 2 * source.input_len.tolist()
    assert engines_own.obs_cached[-2 * rows :].tolist() == first + again
