"""What pulls and history cost over HTTP: `tuner serve` on a filled history beside a FastAPI app with one
empty route, each one uvicorn worker on a core of its own, asked by turns by a client on another core.

python benchmarks/service.py fill --url sqlite:////tmp/big.db --trials 1000000
python benchmarks/service_http.py --url sqlite:////tmp/big.db
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import cast

import httpx
import uvloop

from tuner.history.store import Store

ROOT = Path(__file__).resolve().parents[1]
MODEL = "Qwen/Qwen2.5-7B-Instruct"
CONNECTIONS = 16
PORTS = {"empty": 18640, "service": 18641}


class Pipe(asyncio.Protocol):
    """One kept connection; answers are told apart by their Content-Length."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._waiting: asyncio.Future[int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        lower = head.lower()
        at = lower.find(b"content-length: ")
        length = int(lower[at + 16 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(body) >= length and self._waiting is not None:
            self._buffer = b""
            self._waiting.set_result(int(head[9:12]))

    async def ask(self, request: bytes) -> int:
        assert self._transport is not None
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._waiting


async def connect(port: int) -> list[Pipe]:
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(Pipe, "127.0.0.1", port) for _ in range(CONNECTIONS)]
    return [pipe for _, pipe in made]


async def capacity(port: int, request: bytes, seconds: float, wanted: int) -> float:
    """Answers per second with every connection always waiting for one."""
    pipes, end, done = await connect(port), time.perf_counter() + seconds, 0

    async def one(pipe: Pipe) -> None:
        nonlocal done
        while time.perf_counter() < end:
            assert await pipe.ask(request) == wanted
            done += 1

    await asyncio.gather(*(one(pipe) for pipe in pipes))
    return done / seconds


async def paced(port: int, request: bytes, rate: float, seconds: float) -> list[float]:
    """Milliseconds from the moment that a request was due (Poisson, fixed seed) to its answer."""
    free: asyncio.Queue[Pipe] = asyncio.Queue()
    for pipe in await connect(port):
        free.put_nowait(pipe)
    chance, taken, tasks = random.Random(1), [], set()
    due, begun = 0.0, time.perf_counter()

    async def one(at: float) -> None:
        pipe = await free.get()
        await pipe.ask(request)
        taken.append((time.perf_counter() - begun - at) * 1000)
        free.put_nowait(pipe)

    while due < seconds:
        due += chance.expovariate(rate)
        wait = due - (time.perf_counter() - begun)
        if wait > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(one(due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return taken


def request(path: str, *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]
    return "\r\n".join(lines).encode()


def serve_empty() -> None:
    import uvicorn
    from fastapi import FastAPI

    app = FastAPI()

    @app.get("/empty")
    async def empty() -> dict[str, str]:
        return {}

    uvicorn.run(app, port=PORTS["empty"], access_log=False, log_config=None, loop="uvloop", http="httptools")


@contextmanager
def running(words: Sequence[str], port: int, path: str, env: dict[str, str], core: int) -> Iterator[None]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(words, env=env, cwd=ROOT, stdout=log, stderr=log)
        try:
            os.sched_setaffinity(process.pid, {core})
            end = time.monotonic() + 120
            while True:
                try:
                    httpx.get(f"http://127.0.0.1:{port}{path}")
                    break
                except httpx.TransportError:
                    assert process.poll() is None, "the server did not start"
                    assert time.monotonic() < end, "the server does not answer"
                    time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait()


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


async def pulls(token: str, seconds: float, rounds: int) -> None:
    pull = f"/v1/profiles/resolve?model={MODEL}&node=n7&workload=chat&format=vllm-yaml"
    bearer = f"Authorization: Bearer {token}"
    answer = httpx.get(
        f"http://127.0.0.1:{PORTS['service']}{pull}", headers={"Authorization": f"Bearer {token}"}
    )
    assert answer.status_code == 200, answer.text
    kinds = {
        "empty route": (PORTS["empty"], request("/empty"), 200),
        "resolve, 200": (PORTS["service"], request(pull, bearer), 200),
        "resolve, 304": (
            PORTS["service"],
            request(pull, bearer, f"If-None-Match: {answer.headers['etag']}"),
            304,
        ),
    }
    most: dict[str, list[float]] = {name: [] for name in kinds}
    late: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds):
        for name, (port, asked, wanted) in kinds.items():
            most[name].append(await capacity(port, asked, seconds, wanted))
        half = most["empty route"][number] / 2
        for name, (port, asked, _) in kinds.items():
            late[name].append(p99(await paced(port, asked, half, seconds)))
    print(f"{rounds} rounds of {seconds:g} s, {CONNECTIONS} connections; medians over the rounds")
    print("route           answers/s   of empty   p99 ms at half the empty route's capacity   of empty")
    for name in kinds:
        share = median(a / b for a, b in zip(most[name], most["empty route"], strict=True))
        ratio = median(a / b for a, b in zip(late[name], late["empty route"], strict=True))
        print(f"{name:14} {median(most[name]):10.0f} {share:10.2f} {median(late[name]):20.2f} {ratio:32.2f}")


def history(token: str, store: Store, repeats: int) -> None:
    """What `GET /v1/history` takes for one node and for a page of nodes, one request at a time."""
    newest = store.runs(limit=1)[0].started_at
    asked = {"model": MODEL, "metric": "ttft_p95_ms", "until": datetime.now(UTC).isoformat()}
    for days, where in (
        (30, {"node": "n7"}),
        (92, {"node": "n7"}),
        (9999, {"node": "n7"}),
        (92, {"limit": "3"}),
    ):
        params = {**asked, **where, "since": (newest - timedelta(days=days)).isoformat()}
        taken, answer = timed(token, "/v1/history", params, repeats)
        places = answer.json()["places"]
        count = sum(len(place["nights"]) for place in places)
        print(f"GET /v1/history, {len(places)} nodes, {count} nights: {taken}")


def others(token: str, repeats: int) -> None:
    """What else people and Prometheus ask, on the same history."""
    for path in ("/", "/studies", "/history", "/profiles", "/v1/studies", "/v1/runs", "/metrics"):
        taken, answer = timed(token, path, {}, repeats)
        print(f"GET {path}, {len(answer.content) / 1024:.0f} KiB: {taken}")


def timed(token: str, path: str, params: dict[str, str], repeats: int) -> tuple[str, httpx.Response]:
    """Milliseconds in words, and the last answer; the first one is not counted."""
    headers, cookies = {"Authorization": f"Bearer {token}"}, {"tuner_token": token}
    address = f"http://127.0.0.1:{PORTS['service']}"
    taken = []
    with httpx.Client(base_url=address, headers=headers, cookies=cookies, timeout=60) as client:
        for _ in range(repeats + 1):
            began = time.perf_counter()
            answer = client.get(path, params=params)
            taken.append((time.perf_counter() - began) * 1000)
            assert answer.status_code == 200, answer.text
    return f"median {median(taken[1:]):.1f} ms, p99 {p99(taken[1:]):.1f} ms", answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--serve-empty", action="store_true")
    given = parser.parse_args()
    if given.serve_empty:
        serve_empty()
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    store = Store(given.url)
    token = store.create_token("bench", ["read"], now=datetime.now(UTC))[1]
    env = {**os.environ, "TUNER_DATABASE_URL": given.url, "TUNER_HOME": tempfile.mkdtemp()}
    empty = [sys.executable, __file__, "--serve-empty"]
    ours = [sys.executable, "-m", "tuner", "serve", "--host", "127.0.0.1", "--port", str(PORTS["service"])]
    core = cores[-1]
    print(f"cores: client {cores[0]}, servers {core}")
    with (
        running(empty, PORTS["empty"], "/empty", env, core),
        running(ours, PORTS["service"], "/healthz", env, core),
    ):
        uvloop.run(pulls(token, given.seconds, given.rounds))
        history(token, store, given.repeats)
        others(token, min(10, given.repeats))
    store.close()


if __name__ == "__main__":
    main()
