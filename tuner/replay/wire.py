"""HTTP/1.1 on raw sockets in an event loop: one write per request, bytes stamped by the kernel, parsed later.

The number of requests in flight has no limit: a request that finds no idle connection gets a new one. Every
stamp is on the clock of `time.perf_counter_ns()`. The kernel stamps what it receives, so a late read does not
make the answer late; without kernel stamps, a read is stamped before its bytes are parsed.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter_ns, time_ns

from tuner.replay.alarm import Alarm

OPEN_S = 10.0
READ, SAID = 1 << 14, 64  # bytes of a read, and of the kernel's stamp beside it
SO_TIMESTAMPNS = 35  # Linux's number; the socket module has no name for it
TIMESPEC = struct.Struct("qq")

# A stamp of the kernel that lies further off is not used, and two clocks that are read further apart are read
# again.
FAR_NS, TOGETHER_NS = 10_000_000_000, 20_000


class HttpExchange:
    """One request and the raw bytes of its answer; `done` is called once, also after a failure.

    `sent_ns` is taken just before the request's write, or before the connect that it waits for; `written_ns`
    just before its last write (0: there was none); `stamps[k]` when `parts[k]` came. `failure` is None if the
    HTTP answer is complete; `sse.read` reads its content.
    """

    __slots__ = (
        "done", "end_ns", "failure", "key", "parts", "request", "resent", "sent_ns", "stamps", "written_ns",
    )  # fmt: skip

    def __init__(self, key: int, request: bytes, done: Callable[["HttpExchange"], None]) -> None:
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
    """Finds the end of an HTTP/1.1 answer with little work; only `complete` shows whether all of it came."""

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


class Connection:
    """A keep-alive connection that carries one exchange at a time. It reads with the kernel's stamps."""

    __slots__ = ("_fd", "_framing", "_left", "_loop", "exchange", "open", "pool", "sock", "used")

    def __init__(self, pool: "Pool", sock: socket.socket) -> None:
        self.pool = pool
        self.sock = sock
        self.open = True
        self.exchange: HttpExchange | None = None
        self.used = False
        self._framing = Framing()
        self._left: memoryview = memoryview(b"")
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._loop.add_reader(self._fd, self._readable)
        pool.opened += 1

    def send(self, exchange: HttpExchange) -> None:
        """Write head and body in one go; the stamp is taken before."""
        self.exchange = exchange
        self._framing = Framing()
        exchange.written_ns = perf_counter_ns()
        exchange.sent_ns = exchange.sent_ns or exchange.written_ns
        self._left = memoryview(exchange.request)
        self._write()
        if self._left:
            self._loop.add_writer(self._fd, self._writable)

    def _write(self) -> None:
        """Write what the kernel takes now; a broken connection shows at the next read."""
        try:
            self._left = self._left[self.sock.send(self._left) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._left = memoryview(b"")

    def _writable(self) -> None:
        self._write()
        if not self._left:
            self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        try:
            data, said, _, _ = self.sock.recvmsg(READ, SAID)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lost(error)
            return
        if not data:
            self._lost(None)
            return
        if self.exchange is None:
            self.close()
            return
        now = perf_counter_ns()
        self._received(self.exchange, data, stamp(now, said))
        alarm = self.pool.alarm
        if alarm is not None and alarm.next_ns <= now:
            alarm.look(1)

    def _received(self, exchange: HttpExchange, data: bytes, at_ns: int) -> None:
        exchange.stamps.append(at_ns)
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
            if self._framing.keep and not self._left:
                self.used = True
                self.pool.idle.append(self)
            else:
                self.close()

    def _lost(self, error: OSError | None) -> None:
        """The other side closed the connection, or it broke."""
        self.close()
        if self in self.pool.idle:
            self.pool.idle.remove(self)
        exchange = self.exchange
        if exchange is None:
            return
        if self._framing.until_close and error is None:
            self._finish(None)
        elif self.used and not exchange.parts and not exchange.resent:
            self.exchange = None
            exchange.resent = True
            self.pool.send(exchange)
        else:
            self._finish("connection reset" if error or exchange.parts else "connection closed unanswered")

    def cut(self, reason: str) -> None:
        """Give the exchange up: close the socket, so that the server sees its client go."""
        self._finish(reason)
        self.close()

    def close(self) -> None:
        """Let go of the socket."""
        if self.open:
            self.open = False
            self._loop.remove_reader(self._fd)
            if self._left:
                self._loop.remove_writer(self._fd)
            self.sock.close()

    def _finish(self, failure: str | None) -> None:
        exchange = self.exchange
        self.exchange = None
        if exchange is None:
            return
        exchange.failure = failure
        exchange.end_ns = perf_counter_ns() if failure or not exchange.stamps else exchange.stamps[-1]
        self.pool.flying.pop(exchange.key, None)
        exchange.done(exchange)


def stamp(now_ns: int, said: Sequence[tuple[int, int, bytes]]) -> int:
    """When the kernel received the data, on the clock of `perf_counter_ns`; `now_ns` if the kernel gives no
    stamp. Kernel stamps use the wall clock; one that differs much was made before the wall clock was changed.
    """
    for _, kind, data in said:
        if kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = TIMESPEC.unpack_from(data)
            behind = time_ns() - seconds * 1_000_000_000 - nanoseconds
            while (then_ns := perf_counter_ns()) - now_ns > TOGETHER_NS:  # interrupted between the clocks
                now_ns, behind = then_ns, time_ns() - seconds * 1_000_000_000 - nanoseconds
            return now_ns - behind if 0 <= behind < FAR_NS else now_ns
    return now_ns


class Pool:
    """Connections to one server: as many as are needed at once, reused last in, first out. `received` counts
    pieces of good answers; `alarm` is looked at after every read, so that reading makes no send late.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.idle: list[Connection] = []
        self.flying: dict[int, Connection | None] = {}
        self.opened = 0
        self.received = 0
        self.alarm: Alarm | None = None
        self._family: int | None = None
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, count: int) -> None:
        """Open connections until `count` are idle, so that the first burst finds them; fewer if a server
        takes more than OPEN_S to accept them. OSError when the server is not there.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + OPEN_S
        while len(self.idle) < count and loop.time() < end:
            self.idle.append(await self._connected())

    async def _connected(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self._family is None:
            self._family = (await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM))[0][0]
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, (self.host, self.port))
        except BaseException:
            sock.close()
            raise
        return Connection(self, sock)

    def send(self, exchange: HttpExchange) -> None:
        """Send at once; never waits, never refuses."""
        while self.idle:
            connection = self.idle.pop()
            if connection.open:
                self.flying[exchange.key] = connection
                connection.send(exchange)
                return
        self.flying[exchange.key] = None
        task = asyncio.get_running_loop().create_task(self._connect_and_send(exchange))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect_and_send(self, exchange: HttpExchange) -> None:
        exchange.sent_ns = exchange.sent_ns or perf_counter_ns()
        try:
            connection = await self._connected()
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

    def cut(self, exchange: HttpExchange, reason: str) -> None:
        """End an exchange that is still in flight, because of its deadline or the end of the replay."""
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
            connection.exchange = None
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
