"""Time limits for the clients of a server. Without them, anyone on the network could hold connections open
until the server has no file descriptor left.
"""

import asyncio
from collections.abc import Iterable
from typing import Self


class TimedClient:
    """Part of a protocol: ends the connection if its client does not go on, or does not take its answer."""

    transport: asyncio.Transport
    _overdue: asyncio.TimerHandle | None = None
    _untaken: asyncio.TimerHandle | None = None
    _since = 0.0

    @property
    def take_s(self) -> float:
        """Seconds in which the client takes some of an answer that waits for it."""
        raise NotImplementedError

    def late(self) -> None:
        """The client did not go on in time."""
        self._close()

    def _wait(self, most_s: float) -> None:
        """The client must go on within so many seconds."""
        self._go_on()
        loop = asyncio.get_running_loop()
        self._overdue, self._since = loop.call_later(most_s, self.late), loop.time()

    def _go_on(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _must_take(self) -> None:
        """The client must take what waits for it in time."""
        if self._untaken is None:
            loop = asyncio.get_running_loop()
            self._untaken, self._since = loop.call_later(self.take_s, self.transport.abort), loop.time()

    def _took(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def _close(self) -> None:
        """Ends the connection once its client has taken what waits: a close alone would wait for ever."""
        self.transport.close()
        self._must_take()

    def _make_room(self, others: Iterable[Self]) -> None:
        """Ends the connection that has waited longest for its client, or this one where none waits."""
        waiting = (each for each in others if each._overdue or each._untaken)
        longest = min(waiting, key=lambda each: each._since, default=self)
        longest._go_on()
        longest._took()
        longest.transport.abort()
