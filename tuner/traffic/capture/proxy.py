"""The recording proxy: it forwards each piece at once and parses it afterwards. Clients have time limits:
without them, anyone on the network could hold connections open until the server has no file descriptor left.

It uses raw asyncio protocols instead of an ASGI server: a chunk costs one read, one write and one step of the
parser that finds the end of the answer. Heads are rewritten where HTTP requires it (connection, host), bodies
never.
"""

import asyncio
import json
import signal
import ssl
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic_ns
from typing import Self, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from tuner import processes
from tuner.errors import BadInput, Unavailable
from tuner.traffic.capture.files import Rotation, Sink
from tuner.traffic.capture.recorder import RECORDED, RecordedExchange, Recorder
from tuner.traffic.capture.upstream import END, Headers, Request, UpstreamConnection
from tuner.traffic.capture.writer import Counts


class TimedClient:
    """The time limits of a client connection. It is closed if its client does not continue, or does not take
    its answer.
    """

    transport: asyncio.Transport
    _overdue: asyncio.TimerHandle | None = None
    _untaken: asyncio.TimerHandle | None = None
    _since = 0.0

    @property
    def take_s(self) -> float:
        """Seconds in which the client must take some bytes of an answer that waits for it."""
        raise NotImplementedError

    def late(self) -> None:
        """The client did not continue in time."""
        self._close()

    def _wait(self, most_s: float) -> None:
        """Gives the client this many seconds to continue."""
        self._go_on()
        loop = asyncio.get_running_loop()
        self._overdue, self._since = loop.call_later(most_s, self.late), loop.time()

    def _go_on(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _must_take(self) -> None:
        """Gives the client the usual time to take what waits for it."""
        if self._untaken is None:
            loop = asyncio.get_running_loop()
            self._untaken, self._since = loop.call_later(self.take_s, self.transport.abort), loop.time()

    def _took(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def _close(self) -> None:
        """Closes the connection after its client has taken what waits, but within a time limit. A normal
        close would wait without end.
        """
        self.transport.close()
        self._must_take()

    def _make_room(self, others: Iterable[Self]) -> None:
        """Closes the connection that has waited longest for its client, or this one if no other waits."""
        waiting = (each for each in others if each._overdue or each._untaken)
        longest = min(waiting, key=lambda each: each._since, default=self)
        longest._go_on()
        longest._took()
        longest.transport.abort()


HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"}
    | {b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect", b"proxy-connection"}
)

# How long answers under way may still take after the signal.
PATIENCE_S = 10.0

# Anyone on the network may be a client: what it may send, how long it may take, how many there may be.
HEAD_S, BODY_S, IDLE_S, TAKE_S = 20.0, 300.0, 75.0, 300.0
LARGEST_HEAD, MOST_HEADERS = 64 * 1024, 200
LARGEST_BODY, MOST_HELD = 128 << 20, 512 << 20
"""Bytes of one body, and of all bodies whose requests have not been answered yet."""
MOST_WAITING = 16
"""Requests that a client may send on one connection before the answer to the first one."""
MOST_CLIENTS = 2000
SMALL = 4096
"""If a piece of a body has fewer bytes than this, the next piece is added to it, because a chunk may be a
single byte.
"""
REASONS = {400: b"Bad Request", 413: b"Content Too Large", 502: b"Bad Gateway", 503: b"Service Unavailable"}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Proxy:
    """Forwards requests to `upstream` (http or https URL), with or without a recorder. Connections to the
    upstream are reused.
    """

    def __init__(self, upstream: str, recorder: Recorder | None = None) -> None:
        parts = urlsplit(upstream if "://" in upstream else f"http://{upstream}")
        try:
            port = parts.port
        except ValueError as error:
            raise BadInput(f"upstream '{upstream}': {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"upstream '{upstream}': expected a URL such as http://127.0.0.1:8000")
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.prefix = parts.path.rstrip("/").encode()
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self.recorder = recorder
        self.free: list[UpstreamConnection] = []
        self.clients: set[ProxiedConnection] = set()
        self.held = 0

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """A server that can be started. With port 0 it uses a free port. OSError if the port is taken."""
        return await asyncio.get_running_loop().create_server(
            lambda: ProxiedConnection(self), host, port, backlog=2048, start_serving=False
        )

    async def close(self, patience_s: float = 0.0) -> None:
        """Waits a while until open answers have ended, then closes the others."""
        deadline = asyncio.get_running_loop().time() + patience_s
        for client in list(self.clients):
            client.finish()
        while self.clients and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for client in list(self.clients):
            client.abort()
        while self.free:
            self.free.pop().abort()
        await asyncio.sleep(0)  # connection_lost of what was aborted


class _Refused(Exception):
    """A request that is larger than a client may send."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class ProxiedConnection(TimedClient, asyncio.Protocol):
    """A client's connection. Requests are served one after another, in order."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.upstream: UpstreamConnection | None = None
        self.request: Request | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._connecting: asyncio.Task[None] | None = None
        self._owed = 0
        self._version = "1.1"
        self._last = False
        self._peer: str | None = None
        self._target = b""
        self._headers: Headers = []
        self._next = Request(b"")
        self._in_head = self._began = True
        self._head_bytes = self._taken = self._held = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if peer else None
        self.proxy.clients.add(self)
        if len(self.proxy.clients) > MOST_CLIENTS:
            self._make_room(self.proxy.clients)
        self._wait(IDLE_S)

    @property
    def take_s(self) -> float:
        """The same time for every answer."""
        return TAKE_S

    def late(self) -> None:
        """The client did not continue in time: closes the connection at once."""
        self.abort()

    def data_received(self, data: bytes) -> None:
        size, self._began = len(data), False
        while data and not self.transport.is_closing():
            data = self._parsed(self._take_owed(data) if self._owed else data)
        self._taken = 0 if self._began else self._taken + size
        if self._in_head and self._taken > LARGEST_HEAD:
            self.abort()

    def _parsed(self, data: bytes) -> bytes:
        """The bytes of a piece that the parser has not read."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:  # an upgrade is not forwarded: it goes on as HTTP/1.1
            self._parser = httptools.HttpRequestParser(self)
            return data[int(error.args[0]) :]
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _Refused):
                self.refuse(error.__context__.status, str(error.__context__))
            else:
                self.refuse(400, "this is not HTTP")
        return b""

    def _take_owed(self, data: bytes) -> bytes:
        """Takes the rest of the body of a request that offered an upgrade, because the parser does not read
        it. Returns the bytes after it.
        """
        body, rest = data[: self._owed], data[self._owed :]
        self._owed -= len(body)
        try:
            self.on_body(body)
        except _Refused as refused:
            self.refuse(refused.status, str(refused))
            return b""
        if not self._owed:
            self._whole()
        return rest

    def on_message_begin(self) -> None:
        self._target, self._headers = b"", []
        self._in_head = self._began = True
        self._head_bytes = 0
        self._wait(HEAD_S)

    def on_url(self, url: bytes) -> None:
        self._more_head(len(url))
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. A header after the body must not become a part of the next head."""
        self._more_head(len(name) + len(value))
        if self._in_head:
            self._headers.append((name.lower(), value))

    def _more_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > LARGEST_HEAD or len(self._headers) >= MOST_HEADERS:
            raise _Refused(400, f"a head may have at most {LARGEST_HEAD} bytes and {MOST_HEADERS} headers")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._wait(BODY_S)
        if len(self._waiting) >= MOST_WAITING:
            raise _Refused(400, f"more than {MOST_WAITING} requests wait for an answer")
        method = self._parser.get_method()
        keep = self._parser.should_keep_alive()
        one = self._next = Request(method, keep=keep)
        if method == b"POST" and self._path() in RECORDED and self.proxy.recorder is not None:
            one.exchange = RecordedExchange.begun(self._peer, self._headers)
            one.exchange.body = one.body
        if (b"expect", b"100-continue") in ((n, v.lower()) for n, v in self._headers if n == b"expect"):
            self.transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        one = self._next
        one.size += len(body)
        self._hold(len(body))
        if one.size > LARGEST_BODY:
            raise _Refused(413, f"a request may have at most {LARGEST_BODY} bytes")
        if self.proxy.held > MOST_HELD:
            raise _Refused(503, "too much is under way; try again")
        if one.body and len(one.body[-1]) < SMALL:
            one.body[-1] += body
        else:
            one.body.append(body)

    def _hold(self, size: int) -> None:
        self._held += size
        self.proxy.held += size

    def on_message_complete(self) -> None:
        self._version = self._parser.get_http_version()
        if self._parser.should_upgrade() and not self._next.body:
            told = dict(self._headers)
            self._owed = int(told.get(b"content-length", b"0"))
            if b"transfer-encoding" in told:
                self.refuse(400, "an upgrade with a chunked body is not passed on")
        if not self._owed:
            self._whole()

    def _whole(self) -> None:
        """A request has arrived completely."""
        self._go_on()
        one = self._next
        one.head = self._head(one, self._version)
        self._waiting.append(one)
        if self.request is None:
            self._serve()
        if one.exchange is not None and self.proxy.recorder is not None:
            self.proxy.recorder.begin(one.exchange)

    def _path(self) -> str:
        return self._target.partition(b"?")[0].decode("latin-1")

    def _head(self, one: Request, version: str) -> bytes:
        target = self.proxy.prefix + self._target
        line = b"%b %b HTTP/%b" % (one.method, target, version.encode())
        lines = [line, b"host: " + self.proxy.authority]
        lines += [name + b": " + value for name, value in self._headers if name not in HOP]
        length = sum(map(len, one.body))
        if length or one.method in (b"POST", b"PUT", b"PATCH"):
            lines.append(b"content-length: %d" % length)
        return b"\r\n".join(lines) + END

    def _serve(self) -> None:
        """Forwards the next request over an idle connection, or over a new one."""
        if not self._waiting:
            if self._last:
                self._close()
            if self._overdue is None:
                self._wait(IDLE_S)
            return
        self.request = self._waiting.popleft()
        while self.proxy.free:
            upstream = self.proxy.free.pop()
            if not upstream.gone:
                upstream.send(self, self.request)
                return
        self.connect(self.request)

    def connect(self, request: Request) -> None:
        """Send a request over a new connection."""
        self._connecting = asyncio.get_running_loop().create_task(self._connect(request))

    async def _connect(self, request: Request) -> None:
        proxy = self.proxy
        try:
            _, upstream = await asyncio.get_running_loop().create_connection(
                lambda: UpstreamConnection(proxy.free), proxy.host, proxy.port, ssl=proxy.tls
            )
        except OSError as error:
            self.refuse(502, f"the upstream cannot be reached: {error.strerror or error}")
            return
        if self.request is request:
            upstream.send(self, request)
        else:
            proxy.free.append(upstream)

    def answered(self, whole: bool) -> None:
        """The answer has ended: complete (`whole`) or not."""
        request, self.request, self.upstream = self.request, None, None
        if request is None:
            return
        self._record(request, whole)
        self._hold(-request.size)
        if not whole:
            self.transport.abort()
        elif not request.keep:
            self._close()
        else:
            self._serve()

    def _record(self, request: Request, whole: bool) -> None:
        exchange = request.exchange
        if exchange is not None and self.proxy.recorder is not None:
            exchange.whole = exchange.whole or whole
            exchange.end_ns = monotonic_ns()
            self.proxy.recorder.end(exchange)

    def refuse(self, status: int, sentence: str) -> None:
        """Sends an answer of our own instead of the upstream's, and closes."""
        body = json.dumps({"error": {"message": sentence, "type": "proxy", "code": status}}).encode()
        head = b"HTTP/1.1 %d %b\r\nconnection: close\r\ncontent-type: application/json\r\n" % (
            status,
            REASONS[status],
        )
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        if self.request is not None:
            self.request.keep = False
            if self.request.exchange is not None:
                self.request.exchange.code = status
            self.answered(whole=True)
        self._close()

    def finish(self) -> None:
        """Closes the connection when no request is open."""
        self._last = True
        if self.request is None:
            self._serve()

    def abort(self) -> None:
        """Closes the connection at once."""
        self.transport.abort()

    def pause_writing(self) -> None:
        self._must_take()
        if self.upstream is not None:
            self.upstream.transport.pause_reading()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._took()
        if self.upstream is not None:
            self.upstream.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """The client is gone. The connection to the upstream is closed too, so that the engine notices."""
        self.proxy.clients.discard(self)
        self._go_on()
        self._took()
        self._hold(-self._held)
        if self._connecting is not None:
            self._connecting.cancel()
        upstream, request, self.upstream, self.request = self.upstream, self.request, None, None
        if upstream is not None:
            upstream.abort()
        if request is not None:
            self._waiting.appendleft(request)
        elif self._next.exchange is not None and self._next.exchange.number == -1:
            self._waiting.append(self._next)  # the client left while its request was still arriving
        for one in self._waiting:
            if one.exchange is not None:
                one.exchange.cut = True
            self._record(one, whole=False)
        self._waiting.clear()


def run(
    upstream: str,
    out: Path,
    *,
    name: str | None = None,
    rotation: Rotation | None = None,
    host: str = "127.0.0.1",
    port: int = 8900,
    tokenizer: str | Path | None = None,
    raw: bool = False,
    ready: Callable[[int], None] = lambda _: None,
) -> Counts:
    """Serves until SIGINT or SIGTERM; returns the counts of the recorder. With `name`, `out` is a directory.

    `ready` is called with the port. A second signal ends open answers at once.
    """
    processes.allow_files()
    recorder = Recorder(Sink(out, name, rotation), tokenizer=tokenizer, raw=raw)
    proxy = Proxy(upstream, recorder)
    sys.setswitchinterval(0.0005)  # the recorder's thread must not hold up a chunk for longer
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(proxy, host, port, ready))
    finally:
        recorder.stop()
    return recorder.counts


async def _serve(proxy: Proxy, host: str, port: int, ready: Callable[[int], None]) -> None:
    stop, now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: now.set() if stop.is_set() else stop.set())
    try:
        server = await proxy.listen(host, port)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    if proxy.recorder is not None:
        proxy.recorder.start()
    await server.start_serving()
    ready(server.sockets[0].getsockname()[1])
    await stop.wait()
    server.close()
    closing = asyncio.create_task(proxy.close(PATIENCE_S))
    hurry = asyncio.create_task(now.wait())
    await asyncio.wait((closing, hurry), return_when=asyncio.FIRST_COMPLETED)
    if not closing.done():
        closing.cancel()
        await proxy.close()
    hurry.cancel()
