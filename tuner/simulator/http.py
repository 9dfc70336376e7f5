"""The engine's HTTP front: connections, and completions and chats from a body to vLLM's JSON and events."""

import asyncio
import itertools
import json
import uuid
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, time
from typing import Any
from urllib.parse import unquote

import httptools

from tuner.simulator.engine import Engine
from tuner.simulator.state import EngineRequest

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
