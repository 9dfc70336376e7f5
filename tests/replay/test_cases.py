"""The public faults that a replay must survive, by their number in docs/cases.md (R1 to R20)."""

import asyncio
import dataclasses
import json
import math
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.public import public
from tests.replay.engine import (
    HEAD,
    KnownEngine,
    Script,
    chunked,
    event,
    events,
    running,
    slow_to_accept,
    usage,
)
from tests.replay.test_timeline import LOAD, PLAN, play, within
from tests.replay.traces import trace
from tuner.errors import Aborted
from tuner.metrics import fold
from tuner.records import Outcome, Slice, Slo
from tuner.replay import fidelity
from tuner.replay.feeder import Bodies, Feeder
from tuner.replay.plan import PLANS
from tuner.replay.sender import AHEAD_BYTES, Job, Sender, Sent, read_frame
from tuner.replay.timeline import measure, replay
from tuner.replay.wire import Pool
from tuner.traffic.importers import read_any
from tuner.traffic.trace import Trace
from tuner.tuning.significance import Spread, drifted

ALL = Slice(name="all", start_s=0.0, duration_s=1.0)


def outcome(row: int = 0, **given: object) -> Outcome:
    """A request of row that was answered in 100 ms, unless told otherwise."""
    at = float(str(given.get("scheduled_s", 0.0)))
    usual: dict[str, object] = {
        "row": row, "scheduled_s": at, "sent_s": at, "first_token_s": at + 0.05, "last_token_s": at + 0.1,
        "end_s": at + 0.1, "input_tokens": 8, "expected_input": 8, "output_tokens": 2, "expected_output": 2,
        "chunk_s": np.array([at + 0.05, at + 0.1]), "chunk_tokens": np.array([1, 1], np.int32),
    }  # fmt: skip
    return Outcome(**{**usual, **given})  # type: ignore[arg-type]


def gates(outcomes: Sequence[Outcome], *, planned: int | None = None, cpu: float = 0.1) -> tuple[str, ...]:
    """The names of the gates of the standard thresholds that these outcomes fail."""
    evidence = fidelity.Evidence(
        sent=[Sent(key=k, outcome=o) for k, o in enumerate(outcomes)],
        planned=len(outcomes) if planned is None else planned,
        cpu=cpu,
    )
    return tuple(why.split(":")[0] for why in fidelity.check(evidence, PLANS["standard"]).failed)


def job(key: int, at_s: float = 0.0, *, tokens: int = 3, **given: object) -> Job:
    """A request for some tokens."""
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": tokens}).encode()
    usual: dict[str, object] = {"expected_input": 3, "expected_output": tokens, "deadline_s": 60.0}
    return Job(key=key, row=key, at_s=at_s, body=body, **{**usual, **given})  # type: ignore[arg-type]


async def each(jobs: Sequence[Job]) -> AsyncIterator[Job]:
    for one in jobs:
        yield one


async def send(engine: KnownEngine, jobs: AsyncIterator[Job]) -> tuple[list[Sent], Pool]:
    """Play jobs in this process and wait for all."""
    found: list[Sent] = []
    pool = Pool(engine.host, engine.port)
    sender = Sender(pool, found.append)
    await sender.play(jobs, time.perf_counter_ns())
    await sender.settle(50.0)
    await pool.close()
    return found, pool


def test_case_r01_latency_counts_from_the_schedule_even_when_the_sender_stalls() -> None:
    async def stalling() -> AsyncIterator[Job]:
        yield job(0)
        time.sleep(0.3)  # the sender's own core is taken away
        for key in range(1, 20):
            yield job(key, 0.01 * key)

    async def go() -> list[Sent]:
        async with running() as engine:
            return (await send(engine, stalling()))[0]

    outcomes = [sent.outcome for sent in within(go())]
    stalled = [o for o in outcomes if o.row == 1]
    assert stalled[0].first_token_s is not None
    assert stalled[0].first_token_s - stalled[0].scheduled_s > 0.28
    assert "lateness" in gates(outcomes)


def test_case_r02_a_busy_sender_voids_the_trial_and_says_what_to_change() -> None:
    assert gates([outcome(k) for k in range(100)]) == ()
    assert gates([outcome(k) for k in range(100)], cpu=0.95) == ("sender_cpu",)
    late = [outcome(k, sent_s=0.02) for k in range(100)]
    assert gates(late) == ("lateness",)
    slow = [outcome(k, sent_s=0.02, first_token_s=1.0, last_token_s=2.0) for k in range(100)]
    assert gates(slow) == (), "5 % of the median TTFT is allowed"


def test_a_server_that_is_slow_to_accept_makes_no_sender_late() -> None:
    """The kernel tries again after a second where the server's queue is full; the schedule runs on."""

    async def go() -> list[Sent]:
        async with slow_to_accept(0.1) as engine:
            return (await send(engine, each([job(k) for k in range(6)])))[0]

    found = within(go())
    assert all(sent.outcome.ok for sent in found)
    waited = [sent for sent in found if sent.waited_s > 0.9]
    assert waited
    for sent in waited:
        assert sent.outcome.first_token_s is not None
        assert sent.outcome.first_token_s - sent.outcome.scheduled_s > sent.waited_s
    evidence = fidelity.Evidence(sent=found, planned=6, cpu=0.1)
    said = fidelity.check(evidence, dataclasses.replace(PLANS["standard"], lateness_ms=500.0))
    assert said.failed == ()
    assert (said.values["connect_wait_max_ms"] or 0) > 900
    assert any("to take their connection" in warning for warning in said.warnings)


def test_case_r03_nothing_caps_the_requests_in_flight() -> None:
    async def go() -> tuple[list[Sent], KnownEngine]:
        async with running(Script(hold_until=600)) as engine:
            found, _ = await send(engine, each([job(k) for k in range(600)]))
            return found, engine

    found, engine = within(go())
    assert engine.most_in_flight == 600
    assert sum(sent.outcome.ok for sent in found) == 600


def test_case_r04_connections_are_reused_and_nothing_is_lost() -> None:
    async def go() -> tuple[list[Sent], Pool, KnownEngine]:
        async with running() as engine:
            found, pool = await send(engine, each([job(k, k * 0.001) for k in range(2000)]))
            return found, pool, engine

    found, pool, engine = within(go())
    assert len(found) == 2000
    assert all(sent.outcome.ok for sent in found)
    assert pool.opened == engine.connections
    assert pool.opened < 2000


def test_case_r05_tokens_sent_in_bundles_show_as_silence() -> None:
    bundled = outcome(chunk_s=np.arange(4) * 0.16, chunk_tokens=np.array([1, 8, 8, 8], np.int32))
    evidence = fidelity.Evidence(sent=[Sent(key=0, outcome=bundled)], planned=1, cpu=0.1)
    said = fidelity.check(evidence, PLANS["standard"]).values
    assert said["silence_max_ms"] == pytest.approx(160)
    assert said["chunks_per_token"] == pytest.approx(4 / 25)


def test_case_r08_whatever_breaks_off_is_a_failure_without_throughput() -> None:
    said = [chunked(one) for one in events(3, 3)]
    broken: dict[int, list[bytes | None]] = {
        0: [HEAD, *said[:2], chunked(event({"error": {"message": "dead"}})), said[-1], b"0\r\n\r\n"],
        1: [HEAD, *said[:-1], b"0\r\n\r\n"],
        2: [HEAD, *said[:2], b""],
        3: [b""],
        4: [b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"],
    }

    async def go() -> list[Sent]:
        async with running(Script(behave=lambda number, _: broken.get(number))) as engine:
            pool = Pool(engine.host, engine.port)
            found: list[Sent] = []
            for key in range(6):
                sender = Sender(pool, found.append)
                await sender.play(each([job(key)]), time.perf_counter_ns())
                await sender.settle(50.0)
            await pool.close()
            return found

    outcomes = [sent.outcome for sent in within(go())]
    assert [o.ok for o in outcomes] == [False] * 5 + [True]
    assert outcomes[0].error == "error in the stream: dead"
    assert outcomes[2].error == "connection reset"
    assert outcomes[2].output_tokens == 2
    values = fold(outcomes, 1.0, Slo(), asked=["ttft_p95_ms"])
    assert values["failed"] == 5
    assert values["output_tokens_per_s"] == 3
    assert values["slo_attainment"] == pytest.approx(1 / 6)
    assert math.isinf(values["ttft_p95_ms"])


def test_case_r09_what_never_answers_stays_in_the_sample() -> None:
    traffic = trace(np.arange(40) * 0.02)
    hung = Script(
        behave=lambda number, body: [None] if number % 20 == 9 and body["max_tokens"] == 4 else None
    )
    load = dataclasses.replace(LOAD, deadline_s=1.0)
    replayed, _ = within(play(hung, traffic, ALL, load=load))
    values = measure(replayed, Slo(ttft_ms=10000), asked=["ttft_p99_ms"]).values
    assert values["requests"] == 40
    assert values["failed"] >= 1
    assert math.isinf(values["ttft_p99_ms"])
    assert values["slo_attainment"] < 1
    report = replayed.fidelity.values
    assert report["planned"] == (report["answered"] or 0) + (report["failed"] or 0)
    assert all("deadline" in (o.error or "") for o in replayed.slices[0].outcomes if not o.ok)


def test_case_r10_a_second_run_shares_no_block_with_the_first() -> None:
    traffic = trace(np.arange(10) * 0.02, inputs=30, outputs=7, blocks=[[1, 2, 3]] * 10, block_size=10)

    async def go() -> list[set[tuple[int, ...]]]:
        firsts = []
        async with running() as engine:
            for repeat in (0, 1):
                engine.bodies.clear()
                await replay(engine, traffic, [ALL], PLAN, dataclasses.replace(LOAD, repeat=repeat))
                firsts.append({first_block(b) for b in engine.bodies if b["max_tokens"] == 7})
            assert engine.reset_calls == 2
        return firsts

    first, second = within(go())
    assert first
    assert not first & second


def test_case_r10_a_refused_reset_aborts_and_an_absent_one_is_recorded() -> None:
    traffic = trace(np.arange(5) * 0.02)
    with pytest.raises(Aborted, match="refused to reset"):
        within(play(Script(resets=["refused"] * 20), traffic, ALL))
    replayed, engine = within(play(Script(resets=["refused", "body"]), traffic, ALL))
    assert engine.reset_calls == 2
    assert replayed.fidelity.values["cache_reset_proved"] == 1
    replayed, _ = within(play(Script(resets=["absent"]), traffic, ALL))
    assert replayed.fidelity.values["cache_reset_proved"] == 0
    assert any("fresh tokens" in warning for warning in replayed.fidelity.warnings)


def test_case_r11_the_cold_wave_falls_into_the_warm_up() -> None:
    cold: list[Mapping[str, object]] = []

    def notice(number: int, body: Mapping[str, object]) -> None:
        if number < PLAN.warmup_requests:
            cold.append(body)

    traffic = trace(np.arange(10) * 0.02, inputs=30, outputs=7, blocks=[[1, 2, 3]] * 10, block_size=10)
    replayed, engine = within(play(Script(behave=notice), traffic, ALL))
    measured = [body for body in engine.bodies if body["max_tokens"] == 7]
    assert len(replayed.slices[0].outcomes) == 10
    assert replayed.fidelity.values["warmup_waves"] == 2
    assert len(cold) == PLAN.warmup_requests
    assert not any(body in measured for body in cold)
    assert not {first_block(body) for body in cold} & {first_block(body) for body in measured}


def first_block(body: Mapping[str, object]) -> tuple[int, ...]:
    """The first ten tokens of a body's prompt."""
    prompt = body["prompt"]
    assert isinstance(prompt, list)
    return tuple(prompt[:10])


IDENTICAL = """
import hashlib, numpy as np
from tests.replay.test_cases import LOAD, trace
from tuner.replay.feeder import Bodies
ids = [[1, 2], [1, 3], [], [1, 2, 4, 5], [9], []]
t = trace(np.arange(6) * 0.1, inputs=[25, 30, 7, 40, 10, 1], blocks=ids, block_size=10)
b = Bodies(t, LOAD)
print(hashlib.sha256(b"".join(b.job(k, k, 0.0).body for k in range(6))).hexdigest())
"""


def test_case_r12_bodies_are_byte_identical_in_any_process() -> None:
    def run(seed: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", IDENTICAL],
            capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
        ).stdout  # fmt: skip

    assert run("1") == run("2") != ""


def test_case_r12_prompts_have_exactly_the_recorded_length() -> None:
    def lengths(traffic: Trace, rows: Sequence[int]) -> list[int]:
        bodies = Bodies(traffic, LOAD)
        return [len(json.loads(bodies.job(0, row, 0.0).body)["prompt"]) for row in rows]

    bare = trace([0.0, 1.0], inputs=[100, 33])
    assert lengths(bare, [0, 1]) == [100, 33]
    prompts = [json.loads(Bodies(bare, LOAD).job(0, row, 0.0).body)["prompt"] for row in (0, 1)]
    assert prompts[0][:33] != prompts[1], "rows without ids are unique"
    assert lengths(read_any(public("mooncake_conversation_trace.jsonl")), [0]) == [6758]


def test_case_r13_a_prompt_counted_otherwise_voids_the_trial() -> None:
    traffic = trace(np.arange(10) * 0.02)
    replayed, _ = within(play(Script(prompt_tokens=lambda prompt: len(prompt) + 1), traffic, ALL))
    assert [why.split(":")[0] for why in replayed.fidelity.failed] == ["prompt_tokens"]
    assert "13 prompt tokens, but 12 were sent" in replayed.fidelity.failed[0]


def test_case_r14_answers_of_another_length_void_the_trial() -> None:
    traffic = trace(np.arange(40) * 0.02)
    replayed, _ = within(play(Script(tokens=lambda body: 2), traffic, ALL))
    assert [why.split(":")[0] for why in replayed.fidelity.failed] == ["completion_tokens"]
    assert replayed.fidelity.values["completion_mismatch"] == 1
    few = [outcome(k, output_tokens=1 if k == 0 else 2) for k in range(400)]
    assert gates(few) == ()
    assert gates(few[:100]) == ("completion_tokens",)


def test_case_r15_ids_that_contradict_the_length_are_counted(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 10, "input_length": 600, "output_length": 5, "hash_ids": [1, 2, 3, 4]},
        {"timestamp": 20, "input_length": 1024, "output_length": 5, "hash_ids": [1]},
    ]
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_any(path, format="mooncake", unit="ms")
    quality = found.meta["quality"]
    assert isinstance(quality, dict)
    assert quality["blocks_beyond_length_cut"] == 1
    assert quality["blocks_short_of_length"] == 1
    bodies = Bodies(found, LOAD)
    lengths = [len(json.loads(bodies.job(0, row, 0.0).body)["prompt"]) for row in range(3)]
    assert lengths == [1000, 600, 1024]


def test_case_r16_arrivals_are_read_exactly_and_coarse_clocks_are_found() -> None:
    azure = public("AzureLLMInferenceTrace_conv.csv")
    stamps = [line.split(",")[0] for line in azure.read_text().splitlines()[1:]]
    seconds = [int(s[11:13]) * 3600 + int(s[14:16]) * 60 + float(s[17:]) for s in stamps]
    assert np.abs(read_any(azure).arrival_s - (np.array(seconds) - seconds[0])).max() < 1e-6
    assert read_any(public("mooncake_conversation_trace.jsonl")).meta["resolution_s"] == 3.0


def test_case_r17_requests_of_the_future_hold_nobody_up() -> None:
    future = [job(k, 3600.0) for k in range(1, 5001)]

    async def go() -> list[Sent]:
        async with running() as engine:
            found: list[Sent] = []
            pool = Pool(engine.host, engine.port)
            sender = Sender(pool, found.append)
            player = asyncio.create_task(sender.play(each([job(0), *future]), time.perf_counter_ns()))
            while not found:
                await asyncio.sleep(0.01)
            player.cancel()
            await asyncio.gather(player, return_exceptions=True)
            await pool.close()
            assert sender.sent == 1
            return found

    assert within(go())[0].outcome.ok


def test_case_r18_a_straggler_after_the_window_leaves_goodput_alone() -> None:
    prompt = [outcome(k, scheduled_s=k * 1.0) for k in range(59)]
    straggler = outcome(59, scheduled_s=59.0, last_token_s=179.0, end_s=179.0)
    values = fold([*prompt, straggler], 60.0, Slo(ttft_ms=100))
    assert values["goodput_rps"] == 1.0
    assert values["request_rps"] == 1.0
    assert fold([*prompt, straggler], 60.0, Slo(e2e_ms=1000))["goodput_rps"] == pytest.approx(59 / 60)


def test_case_r19_bodies_are_built_ahead_within_bounds(tmp_path: Path) -> None:
    made: list[int] = []
    size = 4 << 20

    def makers() -> Iterator[tuple[int, "Maker"]]:
        for key in range(64):
            yield 0, Maker(key, made, size)

    async def go() -> tuple[int, int]:
        kinds: list[bytes] = []

        async def sender(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while kinds[-1:] != [b"E"]:
                kinds.append((await read_frame(reader))[0])
            writer.close()

        async with await asyncio.start_unix_server(sender, str(tmp_path / "jobs")):
            _, link = await asyncio.open_unix_connection(str(tmp_path / "jobs"))
            feeder = Feeder({0: link})
            feeding = asyncio.create_task(feeder.feed(makers()))
            while b"P" not in kinds:
                await asyncio.sleep(0.01)
            built = len(made)
            feeder.stop()
            await feeding
            while kinds[-1] != b"E":
                await asyncio.sleep(0.01)
            link.close()
            return built, kinds.index(b"P")

    built, before_start = within(go())
    assert before_start * size <= AHEAD_BYTES + size
    assert built < 64


class Maker:
    """Builds one job of a given size, and notes that it did."""

    def __init__(self, key: int, made: list[int], size: int) -> None:
        self.key, self.made, self.size = key, made, size

    def __call__(self) -> Job:
        self.made.append(self.key)
        return dataclasses.replace(job(self.key, 0.001 * self.key), body=b"x" * self.size)


def test_case_r20_a_drifted_incumbent_is_told() -> None:
    usual = [outcome(k, scheduled_s=k * 0.1) for k in range(2000)]
    worse = [
        dataclasses.replace(o, first_token_s=o.scheduled_s + (0.125 if o.row % 50 == 0 else 0.05))
        for o in usual
    ]
    before, after = (fold(o, 200.0, Slo(ttft_ms=500)) for o in (usual, worse))
    spread = Spread(share=0.05, freedom=10)

    def moved(again: dict[str, float]) -> dict[str, float]:
        changes = {
            name: drifted(before[name], [again[name]], spread) for name in before if name.endswith("_ms")
        }
        return {name: change for name, change in changes.items() if change is not None}

    assert moved(before) == {}
    assert moved(after) == {"ttft_p99_ms": pytest.approx(1.5)}


def test_cached_tokens_are_kept_per_request() -> None:
    said = [*events(3, 1)[:1], event({"choices": [], "usage": usage(3, 1, cached=2)}), b"data: [DONE]\n\n"]
    raw: list[bytes | None] = [HEAD, *map(chunked, said), b"0\r\n\r\n"]

    async def go() -> list[Sent]:
        async with running(Script(behave=lambda number, body: raw)) as engine:
            return (await send(engine, each([job(0, tokens=1)])))[0]

    assert within(go())[0].outcome.cached_tokens == 2
