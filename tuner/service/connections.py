"""The protocol of each connection: uvicorn's, with limits on the size, number and time of requests."""

import asyncio
from typing import Any, cast

import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tuner.traffic.capture.clients import TimedClient

HEAD_S = 20.0
"""Seconds from the connection, the last answer or a request's first byte to the end of its headers, and twice
those of a TLS handshake."""
BODY_S = 300.0
"""Seconds from the end of the headers to the end of the body."""
TAKE_S = 60.0
"""Seconds in which a client takes some of an answer that waits for it."""
MOST_CONNECTIONS = 800
"""Open connections, below the 1024 file descriptors that a process usually has."""
LARGEST_HEAD, MOST_HEADERS = 32 * 1024, 100
"""Bytes and lines of a request's head. Neither uvicorn nor httptools limits them."""
LARGEST_REQUEST = 64 * 1024**2
"""Bytes of a whole request, with the marks of its chunks; middleware.py limits the body that routes get."""
MOST_WAITING = 4
"""Requests that a client may send on one connection before the answer to the first one."""


class TimedHead(TimedClient, HttpToolsProtocol):
    """Closes a connection whose request line and headers, or whose body, do not come in time or do not end,
    and one that sends requests faster than it takes answers, or does not take them. Where too many are open,
    the one that has waited longest for its client ends.
    """

    _in_head = _began = True
    _taken = _head = 0

    @property
    def take_s(self) -> float:
        """Of all answers."""
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
        """It has taken most of what waited. The rest of a closed connection's last answer must go too."""
        if not self.transport.is_closing():
            self._took()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """More bytes; those of the piece that a request begins in are not counted."""
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
        """A header. What comes after the body, no route reads: it is not kept."""
        self._more_head(len(name) + len(value))
        if self._in_head:
            if len(self.headers) >= MOST_HEADERS:
                raise ValueError(f"more than {MOST_HEADERS} headers")
            super().on_header(name, value)

    def _more_head(self, size: int) -> None:
        """Counts what a head is made of. An error here ends the connection with status 400."""
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
        """An answer is written. The next request must begin in time: empty lines are none."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif self.cycle.response_complete and self._overdue is None:
            self._wait(HEAD_S)

    def timeout_keep_alive_handler(self) -> None:
        """No request came after the last one."""
        self._close()

    def _should_upgrade_to_ws(self) -> bool:
        """No: no route speaks WebSocket, and its protocol has no limits."""
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """Another protocol is not spoken: the answer is the last one. What comes after it cannot be read."""
        self.cycle.keep_alive = False


class Loop(uvloop.Loop):
    """An event loop whose servers wait half as long for a TLS handshake as for a request's head."""

    async def create_server(  # type: ignore[override]
        self, *words: Any, **named: Any
    ) -> asyncio.AbstractServer:
        """As uvloop's. Its own limit is a minute, in which a connection is none yet."""
        if named.get("ssl") is not None:
            named |= {"ssl_handshake_timeout": HEAD_S / 2, "ssl_shutdown_timeout": HEAD_S / 2}
        return await super().create_server(*words, **named)
