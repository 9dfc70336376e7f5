"""Signals to end, put off while something must not stop half way."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], object] | int | None


class Deferred:
    """`with deferred:` puts signals to end off until its end, then raises KeyboardInterrupt if one came;
    within it `with deferred.open():` lets them through as they were before. Main thread only; else nothing.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Handler] = {}
        self._came = False

    def __enter__(self) -> "Deferred":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in ENDING}
        return self

    def __exit__(self, *_: object) -> None:
        self._install()
        if self._came:
            raise KeyboardInterrupt

    @contextmanager
    def open(self) -> Iterator[None]:
        """Signals do again what they did before; one that was put off raises KeyboardInterrupt now."""
        if self._came:
            raise KeyboardInterrupt
        self._install()
        try:
            yield
        finally:
            for number in self._before:
                signal.signal(number, self._note)

    def _install(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
