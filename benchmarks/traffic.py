"""Traffic in numbers: imports, prompts, and what a recording proxy adds.

    python -m benchmarks.traffic [TRACES] [--rate 200] [--rounds 3] [--realtime]

TRACES is a directory with AzureLLMInferenceTrace_conv.csv and mooncake_conversation_trace.jsonl; without it
only the proxy is measured. What is timed runs in a process of its own; upstream and client share one core,
the proxy has the other, its writer runs where there is room.
"""

import argparse
import asyncio
import dataclasses
import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import uvloop

from tuner.engine.server import Server, serve
from tuner.knobs.catalogue import read_back
from tuner.records import LaunchSpec, Slice
from tuner.replay.feeder import Prompts, salt
from tuner.replay.plan import PLANS, Load
from tuner.replay.timeline import replay
from tuner.traffic.importers import read_any
from tuner.traffic.trace import Trace, bundled

VOCABULARY = 152_064
CHUNKS = 20
TOKEN = b'data: {"choices": [{"text": "x"}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 1000, "completion_tokens": 20}}\n\n'


def importing(path: Path) -> None:
    """Print seconds and peak memory of an import, and of the first 1,000 prompts after it."""
    began = time.perf_counter()
    trace = read_any(path)
    took = time.perf_counter() - began
    print(f"{path.name}: {len(trace):,} rows imported in {took:.2f} s, {_peak_mib():.0f} MiB")
    if not len(trace.blocks):
        return
    began = time.perf_counter()
    prompts = Prompts(trace, VOCABULARY, salt(0, 1, 0))
    prompts.token_json(0)
    first = time.perf_counter() - began
    size = sum(len(prompts.token_json(row)) for row in range(1000))
    took = time.perf_counter() - began
    tokens = int(trace.input_len[:1000].sum())
    print(f"  first prompt after {first * 1e3:.1f} ms; 1,000 prompts ({tokens:,} tokens, {size >> 20} MiB)")
    print(f"  in {took:.2f} s = {took:.2f} ms each; peak {_peak_mib():.0f} MiB")


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def upstream(port: int) -> None:
    """A server that streams CHUNKS events, 5 ms apart, whatever is asked."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
                writer.write(HEAD)
                for number in range(CHUNKS):
                    event = USAGE if number == CHUNKS - 1 else TOKEN
                    writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                    await asyncio.sleep(0.005)
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port, limit=1 << 22)
    await server.serve_forever()


class Client:
    """Keep-alive connections to one port; measures the time to the first byte of an answer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, body: bytes) -> tuple[float, float, float]:
        """(monotonic stamp of sending, seconds to the first event, seconds to the last byte)."""
        while self._free:
            reader, writer = self._free.pop()
            if not reader.at_eof():
                break
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        sent = time.monotonic()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        await reader.readuntil(b"\n\n")
        first = time.monotonic() - sent
        await reader.readuntil(b"0\r\n\r\n")
        self._free.append((reader, writer))
        return sent, first, time.monotonic() - sent


async def passing(direct: int, proxied: int, trace: Trace, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Direct and proxied requests, in turn: rows of (sent, seconds to the first event, to the last byte)."""
    clients = (Client(direct), Client(proxied))
    ids = Prompts(trace, VOCABULARY, salt(0, 1, 0))
    bodies = [
        b'{"model": "m", "stream": true, "prompt": ' + ids.token_json(row) + b"}" for row in range(len(trace))
    ]
    zero = time.monotonic() + 0.5
    due = trace.arrival_s / trace.duration_s * (len(trace) / (2 * rate))

    async def one(row: int) -> tuple[float, float, float]:
        await asyncio.sleep(max(0.0, zero + due[row] - time.monotonic()))
        return await clients[row % 2].ask(bodies[row])

    gc.collect()
    gc.disable()
    found = np.array(await asyncio.gather(*(one(row) for row in range(len(trace)))))
    gc.enable()
    return found[0::2], found[1::2]


def proxy(directory: Path, rate: float, rounds: int, realtime: bool) -> None:
    """Print what the proxy adds to an answer, and how far captured arrivals are from the sent ones."""
    direct, proxied, out = 18_801, 18_802, directory / "c.jsonl"
    serve = f"import uvloop; from benchmarks.traffic import upstream; uvloop.run(upstream({direct}))"
    capture = (
        "from pathlib import Path; from tuner.traffic.capture.proxy import run; "
        f"print(run('http://127.0.0.1:{direct}', Path({str(out)!r}), port={proxied}))"
    )
    running = [subprocess.Popen([sys.executable, "-c", code]) for code in (serve, capture)]
    cores = sorted(os.sched_getaffinity(0))
    try:
        _until_open(direct)
        _until_open(proxied)
        for pid, core in ((0, cores[0]), (running[0].pid, cores[0]), (running[1].pid, cores[-1])):
            _settle(pid or os.getpid(), core, realtime)
        trace = bundled()
        uvloop.run(passing(direct, proxied, trace.take(range(100)), rate))  # connections, warm code
        before = _cpu_s(running[1].pid)
        pairs = [uvloop.run(passing(direct, proxied, trace, rate)) for _ in range(rounds)]
        spent = _cpu_s(running[1].pid) - before
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait()
    plain, through = (np.concatenate(side) for side in zip(*pairs, strict=True))
    print(f"{rate:.0f} req/s through the proxy, as many direct ({len(through)} each), p50/p99 in ms:")
    for column, name in ((1, "first event"), (2, f"whole answer of {CHUNKS} chunks")):
        a, b = (np.percentile(side[:, column] * 1e3, [50, 99]) for side in (plain, through))
        print(f"  {name}: direct {a[0]:.2f}/{a[1]:.2f}, proxied {b[0]:.2f}/{b[1]:.2f},", end=" ")
        print(f"added {b[0] - a[0]:.2f}/{b[1] - a[1]:.2f}")
    print(f"  the proxy's own CPU: {spent / len(through) * 1e3:.2f} ms per request")
    sent = np.sort(pairs[-1][1][:, 0])
    captured = read_any(out).arrival_s[-len(sent) :]
    gap = (captured - captured[0]) - (sent - sent[0])
    error = np.median(np.abs(gap - np.median(gap))) * 1e3
    print(f"captured arrivals against sent ones: median |error| {error:.2f} ms")


class Proxied:
    """An engine as a replay sees it, its traffic led through a proxy."""

    def __init__(self, server: Server, port: int) -> None:
        self._server, self.host, self.port = server, "127.0.0.1", port

    def __getattr__(self, name: str) -> object:
        return getattr(self._server, name)


async def again(directory: Path, realtime: bool) -> None:
    """Print how a capture of a capture's replay differs from it: order, lengths, arrivals."""
    plan = dataclasses.replace(
        PLANS["standard"], warmup_waves=0, priming_turnovers=0.0, load_warmup_s=0.0, tail_limit_s=30.0
    )
    spec = LaunchSpec(
        read_back=read_back(),
        launch_id=f"benchmark-{os.getpid()}",
        command=(sys.executable, "-m", "tuner.simulator.app"),
        model="Qwen/Qwen2.5-7B-Instruct",
        argv=("--max-model-len", "16384"),
        served_name="study",
        directory=str(directory),
    )
    source, speed, found = bundled(), 2.0, []
    source = source.take(np.flatnonzero(source.arrival_s < 60))
    async with serve(spec) as server:
        for name in ("first", "second"):
            upstream, file = f"http://{server.host}:{server.port}", directory / f"{name}.jsonl"
            words = ("capture", "--upstream", upstream, "--port", "18803", "--out", str(file))
            running = await asyncio.create_subprocess_exec(sys.executable, "-m", "tuner", *words)
            await asyncio.to_thread(_until_open, 18_803)
            part = Slice(name="all", start_s=0.0, duration_s=source.duration_s + 1)
            _settle(running.pid, sorted(os.sched_getaffinity(0))[-1], realtime)
            load = Load(
                seed=1, number=1, model=server.names[0], vocabulary=VOCABULARY, speed=speed, realtime=realtime
            )
            await replay(Proxied(server, 18_803), source, [part], plan, load)
            running.send_signal(signal.SIGINT)
            await running.wait()
            source, speed = read_any(file).take(np.arange(len(source))), 1.0  # what came after is the tail's
            found.append(source)
    first, second = found
    same = [np.array_equal(getattr(first, one), getattr(second, one)) for one in ("input_len", "output_len")]
    print(
        f"capture → replay → capture of {len(first)} requests: prompts in order {same[0]}, answers {same[1]}"
    )
    error = np.abs(second.arrival_s - first.arrival_s - np.median(second.arrival_s - first.arrival_s)) * 1e3
    print(f"  arrivals: median |difference| {np.median(error):.2f} ms, p95 {np.percentile(error, 95):.2f} ms")


def _settle(pid: int, core: int, realtime: bool) -> None:
    """Pin every thread of a process; with `realtime` nobody else's work comes before it."""
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, {core})
        if realtime:
            os.sched_setscheduler(thread.id, os.SCHED_RR, os.sched_param(1))


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _until_open(port: int) -> None:
    import socket

    for _ in range(400):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"nothing listens on {port}")


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="?", type=Path)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--realtime", action="store_true", help="for a busy machine: SCHED_RR for all three")
    chosen = parser.parse_args()
    if chosen.traces:
        for name in ("AzureLLMInferenceTrace_conv.csv", "mooncake_conversation_trace.jsonl"):
            path = str(chosen.traces / name)
            code = f"import benchmarks.traffic as b; b.importing(b.Path({path!r}))"
            subprocess.run([sys.executable, "-c", code], check=True)
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(again(Path(directory), chosen.realtime))
        proxy(Path(directory), chosen.rate, chosen.rounds, chosen.realtime)


if __name__ == "__main__":
    main()
