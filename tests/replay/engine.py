"""An engine with known answers: HTTP, streamed completions and metrics as scripted; a program, not a mock."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from tuner.errors import EngineError
from tuner.records import Value

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(data: bytes) -> bytes:
    """One HTTP chunk."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(value: object, end: bytes = b"\n\n") -> bytes:
    """One server-sent event with a JSON payload."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + end


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, object]:
    """A usage object as vLLM writes it."""
    found: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached is not None:
        found["prompt_tokens_details"] = {"cached_tokens": cached}
    return found


def events(prompt: int, tokens: int, *, per_chunk: int = 1, text: str = "x") -> list[bytes]:
    """A complete answer: token chunks with continuous usage, the final usage chunk, [DONE]."""
    found = []
    for done in [*range(per_chunk, tokens, per_chunk), tokens]:
        choice = {"index": 0, "text": text, "finish_reason": "length" if done == tokens else None}
        found.append(event({"id": "c", "choices": [choice], "usage": usage(prompt, done)}))
    found.append(event({"id": "c", "choices": [], "usage": usage(prompt, tokens)}))
    found.append(b"data: [DONE]\n\n")
    return found


@dataclass(frozen=True, slots=True)
class Said:
    """What a cache reset said."""

    proved: bool
    how: str = "body"


@dataclass(slots=True)
class Script:
    """Timing and habits: `first_s` to the first token, `gap_s` between chunks, `per_chunk` tokens in each.

    `behave(number, body)` may return a list of raw writes for one request instead (None inside = never
    answer, b"" = drop the connection). `tokens(body)` is the length it really answers. With `hold_until`
    no answer starts before that many requests were in flight at once. `resets`: what resets say, in turn.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    per_chunk: int = 1
    behave: Callable[[int, Mapping[str, object]], list[bytes | None] | None] = lambda number, body: None
    tokens: Callable[[Mapping[str, object]], int] = lambda body: int(str(body["max_tokens"]))
    prompt_tokens: Callable[[list[int]], int] = len
    resets: list[str] = field(default_factory=list)
    hold_until: int = 0


class KnownEngine:
    """Satisfies what `replay` needs of a server, and remembers what it was asked."""

    host = "127.0.0.1"

    def __init__(self, script: Script) -> None:
        self.script = script
        self.port = 0
        self.kv_tokens: int | None = 1000
        self.effective: dict[str, Value] = {}
        self.alive = True
        self.bodies: list[dict[str, object]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.connections = 0
        self.reset_calls = 0
        self.heard_calls = 0
        self.full = asyncio.Event()

    async def reset_cache(self) -> Said:
        self.reset_calls += 1
        how = self.script.resets.pop(0) if self.script.resets else "body"
        return Said(how == "body", how)

    async def fault(self, phase: str) -> EngineError | None:
        return None

    kind = "vllm"

    async def steps(self) -> dict[str, object]:
        return {}

    def heard(self) -> None:
        self.heard_calls += 1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            text = f"vllm:num_requests_waiting 0\nvllm:num_requests_running {self.in_flight}\n".encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
            return True
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.in_flight >= self.script.hold_until:
            self.full.set()
        try:
            return await self._answer(body, writer, len(self.bodies) - 1)
        finally:
            self.in_flight -= 1

    async def _answer(self, body: dict[str, object], writer: asyncio.StreamWriter, number: int) -> bool:
        script = self.script
        raw = script.behave(number, body)
        if raw is not None:
            for part in raw:
                if part is None:
                    await asyncio.sleep(3600)
                elif part == b"":
                    writer.transport.abort()
                    return False
                else:
                    writer.write(part)
                    await asyncio.sleep(0)
            return True
        await self.full.wait()
        await asyncio.sleep(script.first_s)
        prompt = body["prompt"]
        assert isinstance(prompt, list)
        writer.write(HEAD)
        said = events(script.prompt_tokens(prompt), script.tokens(body), per_chunk=script.per_chunk)
        for number, one in enumerate(said):
            if number and number < len(said) - 2:
                await asyncio.sleep(script.gap_s)
            writer.write(chunked(one))
        writer.write(b"0\r\n\r\n")
        return True


@asynccontextmanager
async def slow_to_accept(gap_s: float, script: Script | None = None) -> AsyncIterator[KnownEngine]:
    """A KnownEngine whose server has no room for connections that wait, and takes one every `gap_s`."""
    engine = KnownEngine(script or Script())
    engine.full.set()
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    async def accept() -> None:
        while True:
            raw, _ = await loop.sock_accept(listener)
            reader, writer = await asyncio.open_connection(sock=raw)
            tasks.append(loop.create_task(engine.serve(reader, writer)))
            await asyncio.sleep(gap_s)

    with socket.create_server((engine.host, 0), backlog=0) as listener:
        listener.setblocking(False)
        engine.port = listener.getsockname()[1]
        tasks.append(loop.create_task(accept()))
        try:
            yield engine
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def running(script: Script | None = None) -> AsyncIterator[KnownEngine]:
    """A KnownEngine that listens on a free port of this host."""
    engine = KnownEngine(script or Script())
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            tasks.add(task)
        await engine.serve(reader, writer)

    server = await asyncio.start_server(accept, engine.host, 0, backlog=1024)
    engine.port = server.sockets[0].getsockname()[1]
    try:
        yield engine
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
