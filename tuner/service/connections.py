"""The protocol of each connection: uvicorn's, with limits on the size, number and time of requests."""

import asyncio
from typing import Any, cast

import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tuner.traffic.capture.proxy import TimedClient

HEAD_S = 20.0
"""Seconds from the connection, the last answer or a request's first byte to the end of its headers. A TLS
handshake gets half of this time.
"""
BODY_S = 300.0
"""Seconds from the end of the headers to the end of the body."""
TAKE_S = 60.0
"""Seconds in which a client must take some bytes of an answer that waits for it."""
MOST_CONNECTIONS = 800
"""Most open connections: fewer than the 1024 file descriptors that a process usually has."""
LARGEST_HEAD, MOST_HEADERS = 32 * 1024, 100
"""Bytes and lines of a request's head. Neither uvicorn nor httptools has a limit for them."""
LARGEST_REQUEST = 64 * 1024**2
"""Bytes of a whole request with its chunk headers. middleware.py limits the body that routes get."""
MOST_WAITING = 4
"""Requests that a client may send on one connection before the answer to the first one."""


class TimedHead(TimedClient, HttpToolsProtocol):
    """Closes connections that are too slow or too large.

    It closes a connection if the request line and headers, or the body, do not arrive in time or do not end.
    It also closes a connection if its client sends requests faster than it takes the answers, or does not
    take the answers. If too many connections are open, it closes the one that has waited longest for its
    client.
    """

    _in_head = _began = True
    _taken = _head = 0

    @property
    def take_s(self) -> float:
        """The same time for every answer."""
        return TAKE_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            self._make_room(cast(TimedHead, each) for each in self.connections)
        self._wait(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._go_on()
        self._took()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not take its answer as fast as it comes."""
        self._must_take()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has taken most of what waited. The rest of the last answer must be taken too, even if
        the connection is being closed.
        """
        if not self.transport.is_closing():
            self._took()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """More bytes have arrived. The bytes of the piece in which a request begins are not counted."""
        self._began = False
        super().data_received(data)
        self._taken = 0 if self._began else self._taken + len(data)
        if self._taken > (LARGEST_HEAD if self._in_head else LARGEST_REQUEST):
            self._close()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self._close()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._in_head = self._began = True
        self._head = 0
        self._wait(HEAD_S)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the address."""
        self._more_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. A header after the body is not kept, because no route reads it."""
        self._more_head(len(name) + len(value))
        if self._in_head:
            if len(self.headers) >= MOST_HEADERS:
                raise ValueError(f"more than {MOST_HEADERS} headers")
            super().on_header(name, value)

    def _more_head(self, size: int) -> None:
        """Counts the bytes and lines of a head. An error here ends the connection with status 400."""
        self._head += size
        if self._head > LARGEST_HEAD:
            raise ValueError(f"a head of more than {LARGEST_HEAD} bytes")

    def on_headers_complete(self) -> None:
        """The head is whole. An error here ends the connection with status 400."""
        self._in_head = False
        self._wait(BODY_S)
        if len(self.pipeline) >= MOST_WAITING:
            raise ValueError(f"more than {MOST_WAITING} requests wait for an answer")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is whole."""
        self._go_on()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer was written. The next request must begin in time; empty lines do not count as a
        beginning.
        """
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif self.cycle.response_complete and self._overdue is None:
            self._wait(HEAD_S)

    def timeout_keep_alive_handler(self) -> None:
        """No request came after the last one."""
        self._close()

    def _should_upgrade_to_ws(self) -> bool:
        """Always no, because no route uses WebSocket, and uvicorn's WebSocket protocol has no limits."""
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """Another protocol was asked for, and is not supported. The next answer is the last one, because the
        bytes after it cannot be read.
        """
        self.cycle.keep_alive = False


class Loop(uvloop.Loop):
    """An event loop whose servers give a TLS handshake half of the time that a request's head has."""

    async def create_server(  # type: ignore[override]
        self, *words: Any, **named: Any
    ) -> asyncio.AbstractServer:
        """As uvloop's method, but with a shorter limit for TLS handshakes. uvloop's limit is a minute, and
        during this minute the connection is not counted yet.
        """
        if named.get("ssl") is not None:
            named |= {"ssl_handshake_timeout": HEAD_S / 2, "ssl_shutdown_timeout": HEAD_S / 2}
        return await super().create_server(*words, **named)
