"""Capture → import → replay on the simulated engine → capture again: the structure is still the same."""

import asyncio
import dataclasses
import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.traffic.upstream import post, proxied
from tuner.engine.server import Server, serve
from tuner.knobs.catalogue import read_back
from tuner.records import LaunchSpec, Slice
from tuner.replay.plan import PLANS, Causality, Load
from tuner.replay.timeline import Replayed, replay
from tuner.traffic.capture.files import Sink
from tuner.traffic.capture.recorder import Recorder
from tuner.traffic.importers import read_any
from tuner.traffic.trace import STATUSES, Trace

MODEL = "Qwen/Qwen2.5-7B-Instruct"
PLAN = dataclasses.replace(
    PLANS["quick"],
    warmup_waves=0,
    load_warmup_s=0.0,
    priming_turnovers=0.0,
    tail_limit_s=20.0,
    lateness_ms=60_000.0,
)
TURNS, TALKS, BLOCK = 3, 4, 16
KINDS: tuple[Causality, ...] = ("open", "session", "live")
WATCHDOG_S = 600.0


class Behind:
    """The engine as a replay sees it, its traffic led through a proxy."""

    def __init__(self, server: Server, port: int) -> None:
        self._server, self.host, self.port = server, "127.0.0.1", port

    def __getattr__(self, name: str) -> object:
        return getattr(self._server, name)


def spec(directory: Path) -> LaunchSpec:
    return LaunchSpec(
        read_back=read_back(),
        launch_id=f"structure-{os.getpid()}-{directory.name}",
        command=(sys.executable, "-m", "tuner.simulator.app"),
        model=MODEL,
        argv=("--max-model-len", "4096", "--scheduling-policy", "priority", "--enable-prompt-tokens-details"),
        served_name="study",
        directory=str(directory),
        env={"TUNER_SIM_CARD": "h100-80"},
        ready_timeout_s=60.0,
    )


async def talk(port: int, model: str, number: int) -> None:
    """One client's conversation: each turn carries the one before and adds to it."""
    prompt = [100 + number] * (2 * BLOCK)
    for turn in range(TURNS):
        prompt = prompt + [1000 + 10 * number + turn] * (BLOCK * (1 + number) + turn)
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 4 + turn,
            "ignore_eos": True,
            "priority": number,
        }
        if number == 1:
            body |= {"n": 2, "temperature": 1.0}
        if number == 2 and turn == TURNS - 1:
            await hang_up(port, json.dumps(body | {"max_tokens": 2000, "stream": True}).encode())
            return
        status, answer = await post(
            port, json.dumps(body).encode(), headers=f"x-session-id: talk-{number}\r\n"
        )
        assert status == 200, answer
        await asyncio.sleep(0.05)


async def hang_up(port: int, body: bytes) -> None:
    """Ask, read the first token, and go."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-session-id: talk-2\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    await reader.readuntil(b"data:")
    writer.close()
    await writer.wait_closed()


async def recorded(server: Server, file: Path) -> Trace:
    """What four clients say, one after another beginning 30 ms apart."""
    async with proxied(f"http://{server.host}:{server.port}", Recorder(Sink(file))) as port:

        async def late(number: int) -> None:
            await asyncio.sleep(0.03 * number)
            await talk(port, server.names[0], number)

        await asyncio.gather(*(late(number) for number in range(TALKS)))
    return read_any(file)


async def replayed(server: Server, trace: Trace, file: Path, history: Causality) -> tuple[Replayed, Trace]:
    async with proxied(f"http://{server.host}:{server.port}", Recorder(Sink(file))) as port:
        whole = Slice(name="all", start_s=0.0, duration_s=float(trace.duration_s) + 1.0)
        load = Load(
            seed=1,
            number=1,
            model=server.names[0],
            vocabulary=150_000,
            history=history,
            isolated=True,
        )
        found = await replay(Behind(server, port), trace, [whole], PLAN, load)  # type: ignore[arg-type]
    return found, read_any(file)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, dict[Causality, tuple[Replayed, Trace]]]:
    """The first capture, and by kind of history what its replay gave and the capture of it."""
    directory = tmp_path_factory.mktemp("structure")

    async def go() -> tuple[Trace, dict[Causality, tuple[Replayed, Trace]]]:
        async with asyncio.timeout(WATCHDOG_S), serve(spec(directory)) as server:
            first = await recorded(server, directory / "first.jsonl")
            again = {kind: await replayed(server, first, directory / f"{kind}.jsonl", kind) for kind in KINDS}
        return first, again

    return asyncio.run(go())


def test_the_first_capture_has_all_of_it(both: tuple[Trace, dict[Causality, tuple[Replayed, Trace]]]) -> None:
    first, _ = both
    assert len(first) == TALKS * TURNS
    assert sorted(np.unique(first.session, return_counts=True)[1].tolist()) == [TURNS] * TALKS
    assert (first.parent >= 0).sum() == TALKS * (TURNS - 1)
    assert sorted(first.priority.tolist()) == sorted(list(range(TALKS)) * TURNS)
    assert first.n.tolist().count(2) == TURNS
    assert [STATUSES[code] for code in first.status].count("cancelled") == 1
    later = first.parent >= 0
    assert (first.think_s[later] >= 0.0).all()


@pytest.mark.parametrize("stream", [True, False])
def test_chats_are_captured_in_front_of_the_simulated_engine(tmp_path: Path, stream: bool) -> None:
    file = tmp_path / "chats.jsonl"

    async def chat(port: int, model: str) -> None:
        talk = [{"role": "user", "content": "well then " * 40}]
        for turn in range(TURNS):
            body = {"model": model, "messages": talk, "max_tokens": 4 + turn}
            if stream:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            status, answer = await post(port, json.dumps(body).encode(), path="/v1/chat/completions")
            assert status == 200, answer
            assert (b"chat.completion.chunk" in answer) is stream
            talk += [{"role": "assistant", "content": " a" * (4 + turn)}]
            talk += [{"role": "user", "content": f"and {turn}? " * 20}]

    async def go() -> None:
        async with asyncio.timeout(WATCHDOG_S), serve(spec(tmp_path)) as server:
            here = proxied(f"http://{server.host}:{server.port}", Recorder(Sink(file)))
            async with here as port:
                await chat(port, server.names[0])

    asyncio.run(go())
    found = read_any(file)
    assert found.output_len.tolist() == [4, 5, 6]
    assert [STATUSES[code] for code in found.status] == ["ok"] * TURNS
    assert (np.diff(found.input_len) > 0).all()
    for before, after in pairwise(range(TURNS)):
        shared = found.row_blocks(before).tolist()
        assert shared
        assert found.row_blocks(after).tolist()[: len(shared)] == shared


def sharing(trace: Trace, rows: list[int]) -> list[list[int]]:
    """Each row's blocks, renumbered by first appearance among these rows."""
    seen: dict[int, int] = {}
    return [[seen.setdefault(one, len(seen)) for one in trace.row_blocks(row).tolist()] for row in rows]


def by_talk(trace: Trace, count: int) -> list[int]:
    """The first rows, conversation by conversation (they differ in priority), each in order of arrival."""
    return sorted(range(count), key=lambda row: (int(trace.priority[row]), row))


@pytest.mark.parametrize("kind", ["open", "session", "live"])
def test_a_capture_of_its_replay_has_the_same_structure(
    both: tuple[Trace, dict[Causality, tuple[Replayed, Trace]]], kind: Causality
) -> None:
    first, again = both
    found, second = again[kind]
    assert not found.fidelity.failed, found.fidelity
    count = len(first)
    assert found.fidelity.values["planned"] == count
    assert found.fidelity.values["cancelled"] == 1
    ours, theirs = by_talk(first, count), by_talk(second, count)
    for column in ("input_len", "n", "priority", "status"):
        a, b = getattr(first, column), getattr(second, column)
        assert a[ours].tolist() == b[theirs].tolist(), column
    ended = [STATUSES[code] == "ok" for code in first.status[ours]]
    a, b = first.output_len[ours], second.output_len[theirs]
    assert a[ended].tolist() == b[ended].tolist()
    assert sharing(first, ours) == sharing(second, theirs)
    assert found.slices[0].outcomes[0].ok


def test_an_open_replay_keeps_the_order_of_all_requests(
    both: tuple[Trace, dict[Causality, tuple[Replayed, Trace]]],
) -> None:
    first, again = both
    _, second = again["open"]
    count = len(first)
    assert second.input_len[:count].tolist() == first.input_len.tolist()
    assert second.priority[:count].tolist() == first.priority.tolist()


@pytest.mark.parametrize("kind", ["session", "live"])
def test_a_turn_is_sent_after_the_answer_to_the_last(
    both: tuple[Trace, dict[Causality, tuple[Replayed, Trace]]], kind: Causality
) -> None:
    first, again = both
    _, second = again[kind]
    order = by_talk(second, len(first))
    for talk_rows in (order[start : start + TURNS] for start in range(0, len(order), TURNS)):
        for before, after in pairwise(talk_rows):
            assert second.arrival_s[after] >= second.arrival_s[before] + second.obs_e2e_s[before]
