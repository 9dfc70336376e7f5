"""Just enough HTTP/1.1 for an engine's front: connections kept alive, answers whole or in chunks."""

import asyncio
from collections.abc import Callable
from time import monotonic
from urllib.parse import unquote

import httptools

REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Connection(asyncio.Protocol):
    """Parses requests and hands them on, one at a time per connection."""

    def __init__(self, handler: Callable[["Connection", str, str, bytes], None]) -> None:
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
        """A whole answer."""
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
