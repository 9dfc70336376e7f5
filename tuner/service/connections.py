"""The protocol of each connection: uvicorn's, with limits on the size, number and time of requests."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 20.0
"""Seconds from the first byte (or the connection) to the end of a request's headers. Without a limit, anyone
on the network could hold connections open until the service has no file descriptor left."""
BODY_S = 300.0
"""Seconds from the end of the headers to the end of the body, for the same reason."""
TAKE_S = 60.0
"""Seconds in which a client takes some of an answer that waits for it, for the same reason."""
LARGEST_HEAD = 64 * 1024
"""Bytes of a request's head, beyond the piece that it begins in. Neither uvicorn nor httptools limits it."""
LARGEST_REQUEST = 64 * 1024**2
"""Bytes of a whole request, with the marks of its chunks; middleware.py limits the body that routes get."""
MOST_WAITING = 16
"""Requests that a client may send on one connection before the answer to the first one."""


class TimedHead(HttpToolsProtocol):
    """Closes a connection whose request line and headers, or whose body, do not come in time or do not end,
    and one that sends requests faster than it takes answers, or does not take them.
    """

    _overdue: asyncio.TimerHandle | None = None
    _untaken: asyncio.TimerHandle | None = None
    _in_head = _began = True
    _taken = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._done()
        self._taking()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not take its answer as fast as it comes."""
        self._taking()
        self._untaken = self.loop.call_later(TAKE_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        """It has taken most of what waited."""
        self._taking()
        super().resume_writing()

    def _taking(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def data_received(self, data: bytes) -> None:
        """More bytes; those of the piece that a request begins in are not counted."""
        self._began = False
        super().data_received(data)
        self._taken = 0 if self._began else self._taken + len(data)
        if self._taken > (LARGEST_HEAD if self._in_head else LARGEST_REQUEST):
            self.transport.close()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._in_head = self._began = True
        self._wait(HEAD_S)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. What comes after the body, no route reads: it is not kept."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole. An error here ends the connection with status 400."""
        self._in_head = False
        self._wait(BODY_S)
        if len(self.pipeline) >= MOST_WAITING:
            raise ValueError(f"more than {MOST_WAITING} requests wait for an answer")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is whole."""
        self._done()
        super().on_message_complete()

    def _wait(self, most_s: float) -> None:
        self._done()
        self._overdue = self.loop.call_later(most_s, self.transport.close)

    def _done(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
