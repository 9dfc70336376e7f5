"""The protocol of each connection: uvicorn's, with a limit on how long the head of a request may take."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 20.0
"""Seconds from the first byte (or the connection) to the end of a request's headers. Without a limit, anyone
on the network could hold connections open until the service has no file descriptor left."""


class TimedHead(HttpToolsProtocol):
    """Closes a connection whose request line and headers do not come in time."""

    _overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._done()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._done()
        super().on_headers_complete()

    def _wait(self) -> None:
        self._done()
        self._overdue = self.loop.call_later(HEAD_S, self.transport.close)

    def _done(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
