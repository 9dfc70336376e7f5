"""The app as a process: vLLM's argv, words and exit codes, and a stream that counts right."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tuner.engine import metrics
from tuner.engine.http import fresh_port
from tuner.engine.server import Server, serve
from tuner.knobs.catalogue import CATALOGUE, read_back
from tuner.knobs.model import read
from tuner.records import LaunchSpec
from tuner.simulator.clock import Clock
from tuner.simulator.cost import CARDS, Coefficients, StepCost
from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import EngineRequest, SchedulerLimits

MODEL = "Qwen/Qwen2.5-7B-Instruct"
APP = (sys.executable, "-m", "tuner.simulator.app")


def spec(directory: Path, *argv: str, **env: str) -> LaunchSpec:
    return LaunchSpec(
        launch_id=f"sim-{os.getpid()}-{directory.name}",
        command=APP,
        model=MODEL,
        argv=("--max-model-len", "4096", *argv),
        served_name="study",
        directory=str(directory),
        read_back=read_back(),
        env={"TUNER_SIM_CARD": "h100-80", **env},
        ready_timeout_s=60.0,
    )


def refused(*argv: str, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [*APP, "--model", MODEL, *argv],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("--preemption-mode", "swap"), 2, "error: unrecognized arguments: --preemption-mode"),
        (("--scheduling-policy", "lifo"), 2, "invalid choice: 'lifo' (choose from 'fcfs', 'priority')"),
        (("--max-num-seqs", "many"), 2, "argument --max-num-seqs: invalid int value: 'many'"),
        (
            ("--max-num-seqs", "16", "--max-num-batched-tokens", "8"),
            1,
            "max_num_batched_tokens (8) must be greater than or equal to max_num_seqs (16)",
        ),
        (("--max-model-len", "99999"), 1, "User-specified max_model_len (99999) is greater than the derived"),
        (("--gpu-memory-utilization", "1.5"), 1, "1 validation error for CacheConfig"),
        (("--gpu-memory-utilization", "0.15"), 1, "No available memory for the cache blocks"),
        (("--num-gpu-blocks-override", "4"), 1, "To serve at least one request with the model's max seq len"),
        (("--block-size", "7"), 1, "No common block size for 7 (FLASH_ATTN: [MultipleOf(16)])"),
        (("--gpu-memory-utilization", "0.999", "--max-num-seqs", "4096"), 1, "CUDA out of memory occurred"),
        (("--tensor-parallel-size", "2"), 1, "larger than the number of available GPUs (1)"),
    ],
)
def test_it_refuses_as_vllm_does(argv: tuple[str, ...], code: int, words: str) -> None:
    got, text = refused(*argv)
    assert words in text
    assert got == code


def test_a_cpu_takes_multiples_of_32_and_its_own_memory() -> None:
    code, text = refused("--block-size", "16", TUNER_SIM_CARD="cpu", VLLM_CPU_KVCACHE_SPACE="4")
    assert (code, "CPU_ATTN: [MultipleOf(32)]" in text) == (1, True)


def test_unknown_cards_and_models_are_named() -> None:
    code, text = refused(TUNER_SIM_CARD="h100")
    assert code == 1
    assert "TUNER_SIM_CARD: unknown card 'h100'" in text
    done = subprocess.run([*APP, "--model", "/no/such/model"], capture_output=True, text=True, check=False)
    assert (done.returncode, "LocalEntryNotFoundError" in done.stderr) == (1, True)


def test_a_taken_port_ends_it() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        code, text = refused("--host", "127.0.0.1", "--port", port, "--max-model-len", "4096")
    assert (code, "[Errno 98]" in text) == (1, True)


def test_every_flag_of_a_knob_that_it_takes_is_a_knob_of_its_version() -> None:
    done = subprocess.run([*APP, "--help"], capture_output=True, text=True, check=True)
    taken = [name for name in CATALOGUE if f"--{name.replace('_', '-')} " in done.stdout]
    assert {"max_num_seqs", "max_num_batched_tokens", "block_size", "watermark"} <= set(taken)
    assert "cpu_offload_gb" not in taken  # what is not modelled is not offered


async def ask(server: Server, **body: Any) -> Any:
    whole = {"model": server.names[0], "prompt": list(range(10, 74)), "max_tokens": 5, **body}
    return await server.ask("POST", "/v1/completions", body=whole, timeout_s=60)


async def read_stream(server: Server, **body: Any) -> list[Any]:
    """The events of a streamed completion."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    whole = {"model": server.names[0], "prompt": list(range(10, 74)), "stream": True, **body}
    raw = json.dumps(whole).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n")
    writer.write(b"content-length: %d\r\n\r\n" % len(raw) + raw)
    text = (await reader.read()).decode()
    writer.close()
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_counts_its_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(spec(tmp_path, "--enable-prompt-tokens-details")) as server:
            options = {"include_usage": True, "continuous_usage_stats": True}
            events = await read_stream(server, max_tokens=7, stream_options=options)
            counts = [e["usage"]["completion_tokens"] for e in events]
            assert counts == [1, 2, 3, 4, 5, 6, 7, 7]
            assert events[-2]["choices"][0]["finish_reason"] == "length"
            assert events[-1]["choices"] == []
            again = await read_stream(server, max_tokens=2, stream_options=options)
            assert again[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
            plain = await read_stream(server, max_tokens=3)
            assert len(plain) == 3
            assert "usage" not in plain[0]
            assert (await ask(server, n=2)).json()["usage"]["completion_tokens"] == 10

    asyncio.run(scenario())


def test_wrong_bodies_get_vllms_errors(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(spec(tmp_path)) as server:
            for body, status, words in (
                ({"model": "other"}, 404, "The model `other` does not exist."),
                ({"max_tokens": 9000}, 400, "This model's maximum context length is 4096 tokens."),
                ({"prompt": [1, 999_999]}, 400, "Token id 999999 is out of vocabulary"),
                ({"prompt": []}, 400, "prompt"),
                ({"n": "two"}, 400, "valid integer"),
            ):
                reply = await ask(server, **body)
                assert reply.status == status
                assert words in json.dumps(reply.json())

    asyncio.run(scenario())


def test_a_client_that_leaves_frees_its_blocks(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(spec(tmp_path)) as server:
            _, writer = await asyncio.open_connection(server.host, server.port)
            raw = json.dumps({"model": "study", "prompt": [11] * 900, "max_tokens": 3000, "stream": True})
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
            writer.write((head + raw).encode())
            await writer.drain()
            while not (await server.metrics()).values["running"]:
                pass
            writer.close()
            while (await server.metrics()).values["running"]:
                pass
            assert (await server.reset_cache()).proved

    asyncio.run(scenario())


def test_sigterm_ends_it_cleanly(tmp_path: Path) -> None:
    port = fresh_port()
    command = [*APP, "--model", MODEL, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "Application startup complete" in line:
            break
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=600)[0]
    assert process.returncode == 0
    assert "shutdown triggered" in rest


def test_a_blind_engine_takes_ten_milliseconds_a_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(spec(tmp_path, TUNER_SIM_BLIND="1", TUNER_SIM_SPEED="10")) as server:
            await ask(server, max_tokens=50)
            info: Any = (await server.ask("GET", "/server_info")).json()
            assert info["simulated"]["flushes"]["steps"] >= 50

    asyncio.run(scenario())


def test_a_clock_that_no_machine_can_follow_loses_nothing(tmp_path: Path) -> None:
    """Thousands of steps in a row are late."""

    async def scenario() -> None:
        async with serve(spec(tmp_path, TUNER_SIM_SPEED="1000000")) as server:
            reply = await ask(server, max_tokens=3000)
            assert reply.json()["usage"]["completion_tokens"] == 3000

    asyncio.run(scenario())


def test_real_time_and_virtual_time_agree(tmp_path: Path) -> None:
    """Twelve requests at once, at a quarter of real time so that a busy machine hardly shows."""
    pace, tokens = 0.25, 30

    async def scenario() -> list[float]:
        launch = spec(tmp_path, "--max-num-seqs", "6", TUNER_SIM_SPEED=str(pace))
        async with serve(launch) as server:
            before = await server.metrics()
            await asyncio.gather(*(ask(server, prompt=[20 + n] * 600, max_tokens=tokens) for n in range(12)))
            after = await server.metrics()
            found = metrics.between(before, after)
            return [(found[name] or 0.0) * pace for name in ("e2e_seconds_sum", "ttft_seconds_sum")]

    measured = asyncio.run(scenario())
    facts = read(MODEL, env={})
    limits = SchedulerLimits(
        max_num_seqs=6, max_num_batched_tokens=8192, max_model_len=4096, num_blocks=60_000
    )
    requests = [EngineRequest(n, 0.0, (600, tokens)) for n in range(12)]
    Clock(Scheduler(limits), StepCost(facts, CARDS["h100-80"], Coefficients())).run(requests)
    front = 12 * Coefficients().request_s
    assert measured[0] == pytest.approx(sum(r.last for r in requests) + front, rel=0.15)
    assert measured[1] == pytest.approx(sum(r.first for r in requests) + front, rel=0.30)
