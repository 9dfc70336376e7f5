"""HTTP/1.1 on raw asyncio protocols: one write per request, bytes stamped as they come and parsed later.

No cap on requests in flight, no queue for a connection: a request that finds none idle gets a new one. Every
stamp is `time.perf_counter_ns()`, taken before a byte is looked at.
"""

import asyncio
import socket
from collections.abc import Callable
from time import perf_counter_ns
from typing import cast

OPEN_S = 10.0


class Exchange:
    """One request and the raw bytes of its answer; `done` is called once, whatever happened.

    `sent_ns` is taken when the request is handed to the kernel: just before its write, or before the connect
    that it then waits for; `written_ns` just before its (last) write, 0 while there was none; `stamps[k]`
    when `parts[k]` came. `failure` is None when the answer was complete as HTTP; what it says is for
    `sse.read` to tell.
    """

    __slots__ = (
        "done", "end_ns", "failure", "key", "parts", "request", "resent", "sent_ns", "stamps", "written_ns",
    )  # fmt: skip

    def __init__(self, key: int, request: bytes, done: Callable[["Exchange"], None]) -> None:
        self.key = key
        self.request = request
        self.done = done
        self.sent_ns = 0
        self.written_ns = 0
        self.end_ns = 0
        self.stamps: list[int] = []
        self.parts: list[bytes] = []
        self.failure: str | None = None
        self.resent = False


class Framing:
    """Finds the end of an HTTP/1.1 answer with the least work: whole only when `complete` says so."""

    __slots__ = ("_body", "_buffer", "_mode", "_need", "_taken", "keep", "status")

    def __init__(self) -> None:
        self._mode = "head"
        self._buffer = b""
        self._taken = 0
        self._need = 0
        self._body = 0
        self.keep = True
        self.status = 0

    def complete(self, parts: list[bytes]) -> bool:
        """Whether the answer ends with the last part. Chunked answers are walked only where they may end."""
        if self._mode == "head" and not self._head(parts):
            return False
        if self._mode == "length":
            self._body += sum(len(part) for part in parts[self._taken :])
            self._taken = len(parts)
            return self._body >= self._need
        if self._mode == "close" or not _may_end(parts):
            return False
        return self._walk(parts)

    def _head(self, parts: list[bytes]) -> bool:
        self._buffer += b"".join(parts[self._taken :])
        self._taken = len(parts)
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        lines = self._buffer[:end].lower().split(b"\r\n")
        self.status = int(lines[0].split(b" ", 2)[1])
        headers = dict(line.split(b":", 1) for line in lines[1:] if b":" in line)
        self._buffer = self._buffer[end + 4 :]
        self.keep = headers.get(b"connection", b"").strip() != b"close" and lines[0].startswith(b"http/1.1")
        if b"chunked" in headers.get(b"transfer-encoding", b""):
            self._mode = "chunked"
        elif b"content-length" in headers:
            self._mode = "length"
            self._need = int(headers[b"content-length"])
            self._body = len(self._buffer)
        else:
            self._mode = "close"
            self.keep = False
        return True

    def _walk(self, parts: list[bytes]) -> bool:
        buffer = self._buffer + b"".join(parts[self._taken :])
        self._taken = len(parts)
        position = 0
        while True:
            line = buffer.find(b"\r\n", position)
            if line < 0:
                break
            size = int(buffer[position:line].split(b";", 1)[0], 16)
            if size == 0:
                if buffer[line : line + 4] == b"\r\n\r\n" or b"\r\n\r\n" in buffer[line:]:
                    return True
                break
            if line + 2 + size + 2 > len(buffer):
                break
            position = line + 2 + size + 2
        self._buffer = buffer[position:]
        return False

    @property
    def until_close(self) -> bool:
        """Whether the answer ends when the connection does."""
        return self._mode == "close"


def _may_end(parts: list[bytes]) -> bool:
    last = parts[-1]
    if len(last) >= 4 or len(parts) == 1:
        return last.endswith(b"\r\n\r\n")
    return b"".join(parts[-4:]).endswith(b"\r\n\r\n")


class Connection(asyncio.Protocol):
    """A keep-alive connection that carries one exchange at a time."""

    __slots__ = ("_framing", "exchange", "pool", "transport", "used")

    def __init__(self, pool: "Pool") -> None:
        self.pool = pool
        self.transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self.used = False
        self._framing = Framing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.pool.opened += 1

    def send(self, exchange: Exchange) -> None:
        """Write head and body in one go; the stamp is taken before."""
        self.exchange = exchange
        self._framing = Framing()
        exchange.written_ns = perf_counter_ns()
        exchange.sent_ns = exchange.sent_ns or exchange.written_ns
        if self.transport is not None:
            self.transport.write(exchange.request)

    def data_received(self, data: bytes) -> None:
        now = perf_counter_ns()
        exchange = self.exchange
        if exchange is None:
            self.close()
            return
        exchange.stamps.append(now)
        exchange.parts.append(data)
        try:
            complete = self._framing.complete(exchange.parts)
        except (ValueError, IndexError):
            self._finish("malformed HTTP answer")
            self.close()
            return
        if self._framing.status == 200:
            self.pool.received += 1
        if complete:
            self._finish(None)
            if self._framing.keep:
                self.used = True
                self.pool.idle.append(self)
            else:
                self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.pool.idle:
            self.pool.idle.remove(self)
        exchange = self.exchange
        self.transport = None
        if exchange is None:
            return
        if self._framing.until_close and exc is None:
            self._finish(None)
        elif self.used and not exchange.parts and not exchange.resent:
            self.exchange = None
            exchange.resent = True
            self.pool.send(exchange)
        else:
            self._finish("connection reset" if exc or exchange.parts else "connection closed unanswered")

    def cut(self, reason: str) -> None:
        """Give the exchange up: reset the socket, so that the server sees its client go."""
        self._finish(reason)
        self.close()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _finish(self, failure: str | None) -> None:
        exchange = self.exchange
        self.exchange = None
        if exchange is None:
            return
        exchange.failure = failure
        exchange.end_ns = perf_counter_ns()
        self.pool.flying.pop(exchange.key, None)
        exchange.done(exchange)


class Pool:
    """Connections to one server: as many as are needed at once, reused last in, first out. `received` counts
    pieces of good answers.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.idle: list[Connection] = []
        self.flying: dict[int, Connection | None] = {}
        self.opened = 0
        self.received = 0
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, count: int) -> None:
        """Have so many connections idle, so that the first burst finds them; fewer where a server takes more
        than OPEN_S to accept them. OSError when the server is not there."""
        loop = asyncio.get_running_loop()
        end = loop.time() + OPEN_S
        while len(self.idle) < count and loop.time() < end:
            _, connection = await loop.create_connection(lambda: Connection(self), self.host, self.port)
            self.idle.append(connection)

    def send(self, exchange: Exchange) -> None:
        """Send at once; never waits, never refuses."""
        while self.idle:
            connection = self.idle.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                self.flying[exchange.key] = connection
                connection.send(exchange)
                return
        self.flying[exchange.key] = None
        task = asyncio.get_running_loop().create_task(self._connect_and_send(exchange))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect_and_send(self, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        exchange.sent_ns = exchange.sent_ns or perf_counter_ns()
        try:
            _, connection = await loop.create_connection(lambda: Connection(self), self.host, self.port)
        except OSError as error:
            if self.flying.pop(exchange.key, self) is None:
                exchange.failure = f"connect: {error.strerror or error}"
                exchange.end_ns = perf_counter_ns()
                exchange.done(exchange)
            return
        if self.flying.get(exchange.key, self) is None:
            self.flying[exchange.key] = connection
            connection.send(exchange)
        else:
            self.idle.append(connection)

    def cut(self, exchange: Exchange, reason: str) -> None:
        """End an exchange that is still flying: its deadline passed, or nobody waits for it any more."""
        if exchange.key not in self.flying:
            return
        connection = self.flying[exchange.key]
        if connection is not None:
            connection.cut(reason)
            return
        del self.flying[exchange.key]
        exchange.failure = reason
        exchange.end_ns = perf_counter_ns()
        exchange.done(exchange)

    async def close(self) -> None:
        """Close every connection and wait for pending connects."""
        for connection in [*self.idle, *(c for c in self.flying.values() if c is not None)]:
            connection.close()
        self.idle.clear()
        for task in list(self._opening):
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)


def post(host: str, port: int, path: str, body: bytes) -> bytes:
    """The bytes of a POST request with a JSON body."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def get(host: str, port: int, path: str) -> bytes:
    """The bytes of a GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: */*\r\n\r\n".encode()
