"""The simulated engine as a process: `python -m tuner.simulator.app` takes the argv of vLLM's API server.

Settings that vLLM does not have come from the environment: TUNER_SIM_CARD (a preset), TUNER_SIM_CARDS (how
many), TUNER_SIM_COEFFICIENTS (JSON, from a calibration), TUNER_SIM_SPEED (2 = twice real time),
TUNER_SIM_NOISE (relative, one standard deviation per step), TUNER_SIM_SEED, TUNER_SIM_STARTUP_S (how long it
pretends to load), TUNER_SIM_BLIND=1 (every step takes 10 ms whatever the knobs say) and TUNER_SIM_RELEASE
(JSON: another release, see `tuner.simulator.options`).
"""

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tuner.adapters.live_limits import NAMES, VARIABLE, LimitRefused
from tuner.knobs.model import ModelFacts
from tuner.simulator.boot import Booted, NotStarted, announce, boot, cache_config, log, server_info
from tuner.simulator.cost import Memory
from tuner.simulator.engine import Engine, RealPace
from tuner.simulator.http import REASONS, ClientConnection, Completion, Rejected, read_order
from tuner.simulator.options import Options, release_of
from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import SchedulerLimits

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")


class ApiServer:
    """The routes of the API server over one engine."""

    def __init__(
        self, options: Options, memory: Memory, engine: Engine, facts: ModelFacts, dev: bool
    ) -> None:
        self.options, self.memory, self.engine, self.facts, self.dev = options, memory, engine, facts, dev
        self._numbers = itertools.count()
        self._started = int(datetime.now().timestamp())

    def handle(self, connection: ClientConnection, method: str, url: str, body: bytes) -> None:
        path = url.partition("?")[0]
        if method == "POST" and path in COMPLETIONS:
            self._complete(connection, body, method, path)
            return
        status, answer, kind = self._answer(method, path)
        self._access(connection, method, path, status)
        connection.answer(status, answer, kind)

    def _answer(self, method: str, path: str) -> tuple[int, bytes, str]:
        known = {"/health": "GET", "/ping": "GET", "/v1/models": "GET", "/version": "GET", "/metrics": "GET"}
        if self.dev:
            known |= {"/server_info": "GET", "/reset_prefix_cache": "POST"}
        if path not in known and path not in COMPLETIONS:
            return 404, b'{"detail":"Not Found"}', "application/json"
        if known.get(path, "POST") != method:
            return 405, b'{"detail":"Method Not Allowed"}', "application/json"
        if path in ("/health", "/ping"):
            return 200, b"", "text/plain"
        if path == "/metrics":
            page = self.engine.counters.page(
                self.options.names[0], self.engine.gauges(), cache_config(self.options)
            )
            return 200, page.encode(), "text/plain; version=0.0.4; charset=utf-8"
        found: Any
        if path == "/version":
            found = {"version": release_of(os.environ).version}
        elif path == "/v1/models":
            model = {
                "object": "model",
                "created": self._started,
                "owned_by": "vllm",
                "root": self.options.model,
                "parent": None,
                "max_model_len": self.options.limits.max_model_len,
                "permission": [],
            }
            found = {"object": "list", "data": [{"id": name, **model} for name in self.options.names]}
        elif path == "/reset_prefix_cache":
            found = {"success": self._reset()}
        else:
            found = server_info(self.options) | {"simulated": {"flushes": self.engine.punctuality.report()}}
        return 200, json.dumps(found).encode(), "application/json"

    def _access(self, connection: ClientConnection, method: str, path: str, status: int) -> None:
        if self.options.access_log:
            words = REASONS.get(status, "")
            print(f'INFO:     {connection.peer} - "{method} {path} HTTP/1.1" {status} {words}', flush=True)

    def _complete(self, connection: ClientConnection, body: bytes, method: str, path: str) -> None:
        limits = self.options.limits
        try:
            chat, sizes = path == COMPLETIONS[1], (limits.max_model_len, self.facts.vocab_size)
            order = read_order(body, self.options.names, *sizes, chat=chat)
        except Rejected as rejected:
            self._access(connection, method, path, rejected.status)
            connection.answer(rejected.status, rejected.body())
            return
        done = Completion(
            connection,
            order,
            details=self.options.prompt_details,
            interval=self.options.stream_interval,
            finished=lambda: self._access(connection, method, path, 200),
        )
        connection.on_lost = lambda: [self.engine.abort(request) for request in done.requests]  # type: ignore[assignment, func-returns-value]
        done.start(self.engine, self._numbers, caching=limits.enable_prefix_caching)

    def _reset(self) -> bool:
        log("APIServer", "Resetting prefix cache...")
        pool = self.engine.scheduler.pool
        if pool.forget():
            log("EngineCore", "Successfully reset prefix cache")
            return True
        held = pool.total - pool.free
        words = f"Failed to reset prefix cache because some blocks ({held}) are not freed yet"
        log("EngineCore", words, "WARNING")
        return False


async def serve_limits(scheduler: Scheduler, path: str) -> asyncio.Server:
    """Answer one JSON line per connection: {"limits": {…}} changes an idle engine, {} asks."""
    launched = scheduler.limits

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply = _reply(scheduler, launched, await reader.readline())
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()
        writer.close()

    Path(path).unlink(missing_ok=True)
    return await asyncio.start_unix_server(answer, path)


def _reply(scheduler: Scheduler, launched: SchedulerLimits, line: bytes) -> dict[str, Any]:
    reply: dict[str, Any] = {"ok": False, "base": "Scheduler", "launched": _shown(launched)}
    try:
        asked = json.loads(line)
        if "limits" in asked:
            change(scheduler, launched, asked["limits"])
        reply |= {"ok": True, "limits": _shown(scheduler.limits)}
    except LimitRefused as refused:
        reply["error"] = str(refused)
    except (ValueError, TypeError) as error:
        reply["error"] = f"{type(error).__name__}: {error}"
    return reply


def change(scheduler: Scheduler, launched: SchedulerLimits, wanted: Mapping[str, Any]) -> None:
    """Set limits as wanted, else as launched. LimitRefused while requests run, or above what was launched."""
    unfinished = len(scheduler.running) + len(scheduler.waiting)
    if unfinished:
        raise LimitRefused(f"busy: {unfinished} unfinished requests")
    unknown = sorted(set(wanted) - set(NAMES))
    if unknown:
        raise LimitRefused(f"unknown limit {', '.join(unknown)}")
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if wanted.get(name, 0) > getattr(launched, name):
            raise LimitRefused(f"{name} {wanted[name]} is above the launched {getattr(launched, name)}")
    limits = replace(launched, **{name: value for name, value in wanted.items() if value is not None})
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise LimitRefused(
            f"max_num_batched_tokens {limits.max_num_batched_tokens} is below max_num_seqs"
            f" {limits.max_num_seqs}"
        )
    scheduler.limits = limits
    scheduler.watermark = int(limits.watermark * limits.num_blocks)


def _shown(limits: SchedulerLimits) -> dict[str, Any]:
    return {name: getattr(limits, name) for name in NAMES}


async def serve(booted: Booted, env: Mapping[str, str]) -> int:
    """Listen until SIGTERM or SIGINT; 0 on a clean stop, 1 when the port is taken."""
    options, memory = booted.options, booted.memory
    loop = asyncio.get_running_loop()
    pace = RealPace(
        speed=float(env.get("TUNER_SIM_SPEED", "1")),
        noise=float(env.get("TUNER_SIM_NOISE", "0")),
        seed=int(env.get("TUNER_SIM_SEED", "0")),
        blind=env.get("TUNER_SIM_BLIND", "") in ("1", "true"),
    )
    engine = Engine(Scheduler(options.limits, tell=True), booted.cost, pace, loop)
    server = ApiServer(options, memory, engine, booted.facts, env.get("VLLM_SERVER_DEV_MODE") == "1")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((options.host, options.port))
    except OSError as error:
        print(f"Traceback (most recent call last):\nOSError: {error}", file=sys.stderr, flush=True)
        return 1
    announce(options, memory, release_of(env).version)
    try:
        await asyncio.wait_for(stop.wait(), float(env.get("TUNER_SIM_STARTUP_S", "0")) or 0.001)
        return 0
    except TimeoutError:
        pass
    log("EngineCore", "init engine (profile, create kv cache, warmup model) took 0.00 s")
    listener = await loop.create_server(lambda: ClientConnection(server.handle), sock=bound, backlog=4096)
    limits = env.get(VARIABLE) if "scheduler_cls" in options.given else None
    changing = await serve_limits(engine.scheduler, limits) if limits else None
    log("APIServer", f"Starting vLLM server on http://{options.host}:{options.port}")
    print("INFO:     Application startup complete.", flush=True)
    await stop.wait()
    listener.close()
    if changing is not None:
        changing.close()
    log("APIServer", "[shutdown] API server: shutdown triggered")
    return 0


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run one simulated engine; the exit code (argparse ends the process with 2 itself)."""
    try:
        booted = boot(argv, env)
    except NotStarted as failed:
        return failed.code
    import uvloop  # here: refusals need not pay for it

    return uvloop.run(serve(booted, env))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
