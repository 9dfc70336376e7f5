"""The proxy's connections to the upstream. A connection serves one request at a time."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import httptools

from tuner.traffic.capture.recorder import RecordedExchange

Headers = list[tuple[bytes, bytes]]
CONNECTION = (b"connection", b"keep-alive", b"proxy-connection")
MOST_HEAD_BYTES = 1 << 18  # usual servers allow 8 to 64 KiB
END = b"\r\n\r\n"


@dataclass(slots=True, eq=False)
class Request:
    """One request of a client. `head` is the head as it goes to the upstream; `size` is the number of bytes
    of the body.
    """

    method: bytes
    head: bytes = b""
    body: list[bytes] = field(default_factory=list)
    size: int = 0
    keep: bool = True
    exchange: RecordedExchange | None = None


class Client(Protocol):
    """The connection of the client that waits for an answer."""

    transport: asyncio.Transport
    upstream: "UpstreamConnection | None"

    def answered(self, whole: bool) -> None:
        """The answer has ended: complete (`whole`) or not."""

    def refuse(self, status: int, sentence: str) -> None:
        """There is no answer."""

    def connect(self, request: Request) -> None:
        """The idle connection was already closed: sends the request over a new one."""


class UpstreamConnection(asyncio.Protocol):
    """A connection to the upstream, which serves one client's request at a time."""

    def __init__(self, free: "list[UpstreamConnection]") -> None:
        """`free` is the list of connections that wait for a request."""
        self._free = free
        self.transport: asyncio.Transport
        self.gone = False
        self._used = False
        self._client: Client | None = None
        self._request = Request(b"")
        self._head = b""
        self._write: Callable[[bytes], None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._keep = self._framed = self._done = False
        self.on_body: Callable[[bytes], None] = _nothing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, client: Client, request: Request) -> None:
        """Send a request; its answer goes to the client."""
        client.upstream, self._client, self._request = self, client, request
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
        """Reads the answer's head, and forwards it with the bytes that came after it."""
        client = self._client
        if client is None:
            self.abort()  # it answers though nobody asked
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
        client.transport.write(b"\r\n".join(kept) + whole[end:])
        self._write = client.transport.write
        return whole

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._keep = self._parser.should_keep_alive()  # right now only: at the end of the answer it is False
        names = {name for name, _ in self._headers}
        self._framed = bool(names & {b"content-length", b"transfer-encoding"})
        if self._request.exchange is not None:
            self._request.exchange.answering(self._parser.get_status_code(), self._headers)
        if self._request.method == b"HEAD":
            self._done = True

    def on_message_complete(self) -> None:
        self._done = True

    def _end(self) -> None:
        client, self._client = self._client, None
        self._used = True
        if self._keep and not self.gone and not self.transport.is_closing():
            self.transport.resume_reading()
            self._free.append(self)
        else:
            self._request.keep = self._request.keep and self._framed
            self.transport.close()
        if client is not None:
            client.answered(whole=True)

    def _broken(self) -> None:
        """The upstream closed the connection. If it was an idle connection that was already closed, a new one
        is used. Otherwise the client is informed.
        """
        client, self._client = self._client, None
        if client is None:
            return
        if self._write is not None:
            client.answered(whole=False)
        elif self._used and not self._head:
            client.upstream = None
            client.connect(self._request)
        else:
            client.refuse(502, "the upstream broke off before its answer")

    def abort(self) -> None:
        """Closes the connection at once."""
        self.gone = True
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        if self in self._free:
            self._free.remove(self)
        if self._client is None:
            return
        if self._write is not None and not self._framed and error is None:
            self._request.keep = False  # an answer without a length ends like this
            self._end()
        else:
            self._broken()


def _nothing(body: bytes) -> None:
    pass
