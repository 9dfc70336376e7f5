"""The proxy: what comes from one side is written to the other at once, and looked at afterwards.

Raw asyncio protocols instead of an ASGI server: a chunk costs one read, one write and one step of the parser
that finds the end of the answer. Heads are rewritten where HTTP asks for it (connection, host), bodies never.
"""

import asyncio
import json
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import cast
from urllib.parse import urlsplit

import httptools

from tuner.errors import BadInput
from tuner.traffic.capture.recorder import RECORDED, Exchange, Recorder

Headers = list[tuple[bytes, bytes]]
HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"}
    | {b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect", b"proxy-connection"}
)
CONNECTION = (b"connection", b"keep-alive", b"proxy-connection")
MOST_HEAD_BYTES = 1 << 18
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
END = b"\r\n\r\n"


class Proxy:
    """Passes requests to `upstream` (http or https URL), with a recorder or without.

    Connections to the upstream are kept and reused.
    """

    def __init__(self, upstream: str, recorder: Recorder | None = None) -> None:
        parts = urlsplit(upstream if "://" in upstream else f"http://{upstream}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"upstream '{upstream}': expected a URL such as http://127.0.0.1:8000")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.prefix = parts.path.rstrip("/").encode()
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self.recorder = recorder
        self.free: list[Behind] = []
        self.fronts: set[Front] = set()

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """A server that can be started; port 0 takes a free one. OSError when the port is taken."""
        return await asyncio.get_running_loop().create_server(
            lambda: Front(self), host, port, backlog=2048, start_serving=False
        )

    async def close(self, patience_s: float = 0.0) -> None:
        """Let answers under way end for a while, then cut what is left."""
        deadline = asyncio.get_running_loop().time() + patience_s
        for front in list(self.fronts):
            front.finish()
        while self.fronts and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for front in list(self.fronts):
            front.abort()
        while self.free:
            self.free.pop().abort()
        await asyncio.sleep(0)  # connection_lost of what was aborted


@dataclass(slots=True, eq=False)
class Request:
    """One request of a client as it came; `head` is what goes to the upstream, ready to be sent."""

    method: bytes
    head: bytes = b""
    body: list[bytes] = field(default_factory=list)
    keep: bool = True
    exchange: Exchange | None = None


class Front(asyncio.Protocol):
    """A client's connection. Requests are served one after another, in order."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.transport: asyncio.Transport
        self.behind: Behind | None = None
        self.request: Request | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._connecting: asyncio.Task[None] | None = None
        self._last = False
        self._peer: str | None = None
        self._target = b""
        self._headers: Headers = []
        self._next = Request(b"")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if peer else None
        self.proxy.fronts.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:  # nobody upgrades here: it goes on as HTTP/1.1
            self._parser = httptools.HttpRequestParser(self)
            if rest := data[int(error.args[0]) :]:
                self.data_received(rest)
        except httptools.HttpParserError:
            self.refuse(400, "this is not HTTP")

    def on_message_begin(self) -> None:
        self._target, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        method = self._parser.get_method()
        keep = self._parser.should_keep_alive()
        one = self._next = Request(method, keep=keep)
        if method == b"POST" and self._path() in RECORDED and self.proxy.recorder is not None:
            one.exchange = Exchange.begun(self._peer, self._headers)
            one.exchange.body = one.body
        if (b"expect", b"100-continue") in ((n, v.lower()) for n, v in self._headers if n == b"expect"):
            self.transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._next.body.append(body)

    def on_message_complete(self) -> None:
        one = self._next
        one.head = self._head(one, self._parser.get_http_version())
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
        """Send the next request on over a kept connection, or a new one."""
        if not self._waiting:
            if self._last:
                self.transport.close()
            return
        self.request = self._waiting.popleft()
        while self.proxy.free:
            behind = self.proxy.free.pop()
            if not behind.gone:
                behind.send(self, self.request)
                return
        self.connect(self.request)

    def connect(self, request: Request) -> None:
        """Send a request over a new connection."""
        self._connecting = asyncio.get_running_loop().create_task(self._connect(request))

    async def _connect(self, request: Request) -> None:
        proxy = self.proxy
        try:
            _, behind = await asyncio.get_running_loop().create_connection(
                lambda: Behind(proxy), proxy.host, proxy.port, ssl=proxy.tls
            )
        except OSError as error:
            self.refuse(502, f"the upstream cannot be reached: {error.strerror or error}")
            return
        if self.request is request:
            behind.send(self, request)
        else:
            proxy.free.append(behind)

    def answered(self, whole: bool) -> None:
        """The answer has ended, `whole` or broken off."""
        request, self.request, self.behind = self.request, None, None
        if request is None:
            return
        self._record(request, whole)
        if not whole:
            self.transport.abort()
        elif not request.keep:
            self.transport.close()
        else:
            self._serve()

    def _record(self, request: Request, whole: bool) -> None:
        exchange = request.exchange
        if exchange is not None and self.proxy.recorder is not None:
            exchange.whole = exchange.whole or whole
            exchange.end_ns = monotonic_ns()
            self.proxy.recorder.end(exchange)

    def refuse(self, status: int, sentence: str) -> None:
        """Answer in the upstream's place, and close."""
        body = json.dumps({"error": {"message": sentence, "type": "proxy", "code": status}}).encode()
        head = b"HTTP/1.1 %d %b\r\nconnection: close\r\ncontent-type: application/json\r\n" % (
            status,
            b"Bad Gateway" if status == 502 else b"Bad Request",
        )
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        if self.request is not None:
            self.request.keep = False
            if self.request.exchange is not None:
                self.request.exchange.code = status
            self.answered(whole=True)
        self.transport.close()

    def finish(self) -> None:
        """Close once nothing is under way."""
        self._last = True
        if self.request is None:
            self._serve()

    def abort(self) -> None:
        """Cut at once."""
        self.transport.abort()

    def pause_writing(self) -> None:
        if self.behind is not None:
            self.behind.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.behind is not None:
            self.behind.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """The client is gone: break off the upstream too, so that the engine sees it."""
        self.proxy.fronts.discard(self)
        if self._connecting is not None:
            self._connecting.cancel()
        behind, request, self.behind, self.request = self.behind, self.request, None, None
        if behind is not None:
            behind.abort()
        if request is not None:
            self._waiting.appendleft(request)
        elif self._next.exchange is not None and self._next.exchange.number == -1:
            self._waiting.append(self._next)  # it left in the middle of its own request
        for one in self._waiting:
            if one.exchange is not None:
                one.exchange.cut = True
            self._record(one, whole=False)
        self._waiting.clear()


class Behind(asyncio.Protocol):
    """A connection to the upstream, lent to one client's request at a time."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.transport: asyncio.Transport
        self.gone = False
        self._used = False
        self._front: Front | None = None
        self._request = Request(b"")
        self._head = b""
        self._write: Callable[[bytes], None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._keep = self._framed = self._done = False
        self.on_body: Callable[[bytes], None] = _nothing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, front: Front, request: Request) -> None:
        """Send a request; its answer goes to the client."""
        front.behind, self._front, self._request = self, front, request
        self._head, self._write, self._headers = b"", None, []
        self._keep = self._framed = self._done = False
        exchange = request.exchange
        self.on_body = _nothing if exchange is None else exchange.passed
        self._parser = httptools.HttpResponseParser(self)
        self.transport.writelines([request.head, *request.body])

    def data_received(self, data: bytes) -> None:
        if self._write is not None:
            self._write(data)  # first of all
        elif (first := self._first(data)) is None:
            return
        else:
            data = first
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()
            self._broken()
            return
        if self._done:
            self._end()

    def _first(self, data: bytes) -> bytes | None:
        """The answer's head, once it is there, and what came with it; both are passed on."""
        front = self._front
        if front is None:
            self.abort()  # it speaks unasked
            return None
        self._head += data
        while (end := self._head.find(END)) >= 0 and self._head.startswith(b"HTTP/1.1 1"):
            self._head = self._head[end + len(END) :]  # 1xx: between the upstream and us
        if end < 0:
            if len(self._head) > MOST_HEAD_BYTES:
                self.abort()
                self._broken()
            return None
        whole, self._head = self._head, b""
        lines = whole[:end].split(b"\r\n")
        kept = [line for line in lines if line.partition(b":")[0].lower() not in CONNECTION]
        if not self._request.keep:
            kept.append(b"connection: close")
        front.transport.write(b"\r\n".join(kept) + whole[end:])
        self._write = front.transport.write
        return whole

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._keep = self._parser.should_keep_alive()  # told by the head alone; asked later it is False
        names = {name for name, _ in self._headers}
        self._framed = bool(names & {b"content-length", b"transfer-encoding"})
        if self._request.exchange is not None:
            self._request.exchange.answering(self._parser.get_status_code(), self._headers)
        if self._request.method == b"HEAD":
            self._done = True

    def on_message_complete(self) -> None:
        self._done = True

    def _end(self) -> None:
        front, self._front = self._front, None
        self._used = True
        if self._keep and not self.gone and not self.transport.is_closing():
            self.transport.resume_reading()
            self.proxy.free.append(self)
        else:
            self._request.keep = self._request.keep and self._framed
            self.transport.close()
        if front is not None:
            front.answered(whole=True)

    def _broken(self) -> None:
        """The upstream broke off: pass that on; where it was a kept connection gone stale, try a new one."""
        front, self._front = self._front, None
        if front is None:
            return
        if self._write is not None:
            front.answered(whole=False)
        elif self._used and not self._head:
            front.behind = None
            front.connect(self._request)
        else:
            front.refuse(502, "the upstream broke off before its answer")

    def abort(self) -> None:
        """Cut at once."""
        self.gone = True
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        if self in self.proxy.free:
            self.proxy.free.remove(self)
        if self._front is None:
            return
        if self._write is not None and not self._framed and error is None:
            self._request.keep = False  # an answer without a length ends like this
            self._end()
        else:
            self._broken()


def _nothing(body: bytes) -> None:
    pass
