"""The simulated engine as a process with vLLM's HTTP front: `python -m tuner.simulator.app` takes the argv of
vLLM's API server.

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
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from time import monotonic, time
from typing import Any
from urllib.parse import unquote

import httptools

from tuner.adapters.live_limits import NAMES, VARIABLE, LimitRefused
from tuner.knobs.model import ModelFacts
from tuner.simulator.boot import Booted, NotStarted, announce, boot, cache_config, log, server_info
from tuner.simulator.cost import Memory
from tuner.simulator.engine import Engine, RealPace
from tuner.simulator.options import Options, release_of
from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import EngineRequest, SchedulerLimits

REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class ClientConnection(asyncio.Protocol):
    """Parses requests and hands them on, one at a time per connection."""

    def __init__(self, handler: Callable[["ClientConnection", str, str, bytes], None]) -> None:
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._queue: list[tuple[str, str, bytes]] = []
        self._busy = False
        self._keep = True
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._url = b""
        self.on_lost: Callable[[], None] | None = None
        self.peer = ""
        self.begun_s = 0.0  # when the last request's first bytes came

    # ---- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        peer = transport.get_extra_info("peername") or ("", 0)
        self.peer = f"{peer[0]}:{peer[1]}"

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.answer(400, b"Invalid HTTP request received.", "text/plain; charset=utf-8")
            if self._transport is not None:
                self._transport.close()

    # ---- httptools

    def on_message_begin(self) -> None:
        self._body, self._url = [], b""
        self.begun_s = monotonic()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._keep = self._parser.should_keep_alive()
        method = self._parser.get_method().decode()
        self._queue.append((method, unquote(self._url.decode("latin-1")), b"".join(self._body)))
        self._work()

    def _work(self) -> None:
        if self._busy or not self._queue or self._transport is None:
            return
        self._busy = True
        method, url, body = self._queue.pop(0)
        self._handler(self, method, url, body)

    # ---- answers

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        """A complete answer."""
        if self._transport is not None:
            head = f"HTTP/1.1 {status} {REASONS.get(status, '')}\r\ncontent-length: {len(body)}\r\n"
            self._transport.write(f"{head}content-type: {kind}\r\n\r\n".encode() + body)
        self._done()

    def begin_stream(self) -> None:
        """The head of a stream of server-sent events."""
        if self._transport is not None:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )

    def send_chunk(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self, data: bytes) -> None:
        """The last events and the end of the stream, in one write."""
        if self._transport is not None:
            self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        self._done()

    def _done(self) -> None:
        self._busy = False
        self.on_lost = None
        if self._transport is None:
            return
        if not self._keep:
            self._transport.close()
        else:
            self._work()


_WORD = " a"


class Rejected(Exception):
    """A body that the engine answers with an error: (status, type, message, parameter)."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param

    def body(self) -> bytes:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error}).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A completion as the client requested it."""

    chat: bool = False
    model: str
    prompt: Sequence[int]
    length: int
    count: int
    stream: bool
    usage: bool
    continuous: bool
    priority: int


def read_order(
    body: bytes, names: Sequence[str], max_model_len: int, vocabulary: int, *, chat: bool = False
) -> CompletionRequest:
    """Check a body as vLLM does. Rejected otherwise."""
    try:
        raw = json.loads(body)
    except ValueError as error:
        raise Rejected(400, "Bad Request", f"JSON decode error: {error}") from None
    if not isinstance(raw, dict):
        raise Rejected(400, "Bad Request", "the body is not an object")
    model = raw.get("model") or names[0]
    if model not in names:
        raise Rejected(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
    prompt = _prompt(_talk(raw.get("messages")) if chat else raw.get("prompt"), vocabulary)
    room = max_model_len - len(prompt)
    asked = raw.get("max_completion_tokens", raw.get("max_tokens")) if chat else raw.get("max_tokens", 16)
    length = room if asked is None else _whole(asked, "max_tokens")
    if room < 1 or length > room:
        raise Rejected(
            400,
            "BadRequestError",
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{length} output tokens and your prompt contains {len(prompt)} input tokens, for a total of "
            f"{length + len(prompt)} tokens. Please reduce the length of the input prompt or the number of "
            "requested output tokens.",
            "input_tokens",
        )
    if length < 1:
        raise Rejected(400, "BadRequestError", f"max_tokens must be at least 1, got {length}.", "max_tokens")
    options: dict[str, Any] = raw.get("stream_options") or {}
    return CompletionRequest(
        chat=chat,
        model=model,
        prompt=prompt,
        length=length,
        count=_whole(raw.get("n", 1), "n"),
        stream=bool(raw.get("stream", False)),
        usage=bool(options.get("include_usage", False)),
        continuous=bool(options.get("continuous_usage_stats", False)),
        priority=_whole(raw.get("priority", 0), "priority"),
    )


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Rejected(400, "Bad Request", f"{name}: Input should be a valid integer", name)
    return value


def _talk(messages: object) -> str:
    """Messages as one text; each begins where the one before ends, so that turns share their prefix."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages) or not messages:
        raise Rejected(400, "Bad Request", "messages: a list of messages is required", "messages")
    return "".join(f"{one.get('role')}:{one.get('content')}\n" for one in messages)


def _prompt(prompt: object, vocabulary: int) -> Sequence[int]:
    """Token ids of a prompt; a text counts four characters as a token, deterministically."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (list, str)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        parts = [prompt[i : i + 4] for i in range(0, len(prompt), 4)]
        return [sum(ord(c) << (7 * i) for i, c in enumerate(part)) % vocabulary for part in parts] or [0]
    if not isinstance(prompt, list) or not prompt:
        raise Rejected(400, "Bad Request", "prompt: a text or a list of token ids is required", "prompt")
    try:
        tokens = array("q", prompt)
    except (TypeError, OverflowError):
        raise Rejected(400, "Bad Request", "prompt: Input should be a valid integer", "prompt") from None
    if max(tokens) >= vocabulary or min(tokens) < 0:
        out = max(tokens) if max(tokens) >= vocabulary else min(tokens)
        raise Rejected(400, "BadRequestError", f"Token id {out} is out of vocabulary", "prompt")
    return tokens


def segments_of(tokens: Sequence[int], block_size: int) -> tuple[tuple[int, int], ...]:
    """Content keys of the complete blocks of a prompt, each chained to the one before."""
    data = tokens if isinstance(tokens, array) else array("q", tokens)
    raw, width, key = data.tobytes(), block_size * data.itemsize, 0
    found = []
    for start in range(0, len(raw) - width + 1, width):
        key = hash((key, raw[start : start + width]))
        found.append((key, 1))
    return tuple(found)


class Completion:
    """One completion while it runs: turns counts of tokens into bytes on the connection."""

    def __init__(
        self,
        connection: ClientConnection,
        order: CompletionRequest,
        *,
        details: bool,
        interval: int,
        finished: Callable[[], None],
    ) -> None:
        self.connection = connection
        self.order = order
        self.requests: list[EngineRequest] = []
        self._details = details
        self._interval = interval
        self._finished = finished
        self._left = order.count
        self._total = 0
        kind, name = ("chat.completion", "chatcmpl") if order.chat else ("text_completion", "cmpl")
        name = f"{name}-{uuid.uuid4().hex[:16]}"
        kind += ".chunk" if order.chat and order.stream else ""
        self._head = {"id": name, "object": kind, "created": int(time()), "model": order.model}

    def start(self, engine: Engine, numbers: "itertools.count[int]", *, caching: bool) -> None:
        size = engine.scheduler.limits.block_size
        segments = segments_of(self.order.prompt, size) if caching else ()
        if self.order.stream:
            self.connection.begin_stream()
        for index in range(self.order.count):
            lengths = (len(self.order.prompt), self.order.length)
            request = EngineRequest(
                next(numbers), self.connection.begun_s, lengths, segments, self.order.priority
            )
            self.requests.append(request)
            engine.submit(request, self._sink(request, index))

    def _sink(self, request: EngineRequest, index: int) -> Callable[[int, bool], None]:
        prompt, order, send = len(self.order.prompt), self.order, self.connection.send_chunk
        interval = self._interval
        choice = self._choice(index, None)
        text = json.dumps({**self._head, "choices": [choice]}, separators=(",", ":")).encode()
        plain = b"data: " + text + b"\n\n"
        counted = (
            b"data: "
            + text[:-1]
            + b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\n'
        )

        def sink(count: int, last: bool) -> None:
            if last:
                self._end(request, index, count)
            elif order.stream and (count == 1 or count % interval == 0):
                send(counted % (prompt, prompt + count, count) if order.continuous else plain)

        return sink

    def _choice(self, index: int, finish: str | None) -> dict[str, Any]:
        """The choice in one chunk, or in a complete answer."""
        text = _WORD if self.order.stream else _WORD * self.order.length
        said: dict[str, Any] = {"text": text}
        if self.order.chat:
            said = {"delta" if self.order.stream else "message": {"role": "assistant", "content": text}}
        return {"index": index, **said, "logprobs": None, "finish_reason": finish, "stop_reason": None}

    def _usage(self, tokens: int, request: EngineRequest | None) -> dict[str, Any]:
        prompt = len(self.order.prompt)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + tokens,
            "completion_tokens": tokens,
        }
        if request is not None:
            details = {"cached_tokens": max(request.cached, 0)} if self._details else None
            usage["prompt_tokens_details"] = details
        return usage

    def _end(self, request: EngineRequest, index: int, count: int) -> None:
        self._left -= 1
        self._total += count
        if self.order.stream:
            chunk: dict[str, Any] = {**self._head, "choices": [self._choice(index, "length")]}
            if self.order.continuous:
                chunk["usage"] = self._usage(count, None)
            data = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
            if self._left:
                self.connection.send_chunk(data)
                return
            if self.order.usage:
                last = {**self._head, "choices": [], "usage": self._usage(self._total, request)}
                data += b"data: " + json.dumps(last, separators=(",", ":")).encode() + b"\n\n"
            self._finished()
            self.connection.end_stream(data + b"data: [DONE]\n\n")
        elif not self._left:
            self._finished()
            self.connection.answer(200, json.dumps(self._whole(request)).encode())

    def _whole(self, request: EngineRequest) -> dict[str, Any]:
        choices = [self._choice(index, "length") for index in range(self.order.count)]
        return {**self._head, "choices": choices, "usage": self._usage(self._total, request)}


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
            raise LimitRefused(
                f"{name} {wanted[name]} is above its value at launch, {getattr(launched, name)}"
            )
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
