"""Shared by the commands that run studies: how a signal ends a run, and how its winner is pulled."""

import shlex
import shutil
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from tuner.errors import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from typing import Any

    from tuner.tuning.context import Tell

T = TypeVar("T")
ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ends_by_signal() -> "Iterator[None]":
    """The first SIGINT or SIGTERM inside ends the process with exit code 8; during `interruptible` work, when
    that work has stopped. Later signals are ignored, because engines are being stopped.
    """
    before = {number: signal.signal(number, _end) for number in ENDING}
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    finally:
        _now.cancel, _now.came = None, False
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(slots=True)
class _Now:
    """Whether a signal came, and the function that cancels the current work."""

    came: bool = False
    cancel: "Callable[[], object] | None" = None


_now = _Now()


def _end(number: int, frame: object) -> None:
    if _now.came:
        return
    _now.came = True
    if _now.cancel is None:
        # No KeyboardInterrupt: where one leaves exec() of a string, as in the import of a dataclass, Python
        # ends itself by SIGINT at exit, whoever caught it.
        raise SystemExit(INTERRUPTED)
    _now.cancel()


def interruptible(work: "Coroutine[Any, Any, T]", tell: "Tell") -> T:
    """Run a coroutine. Inside `ends_by_signal` a signal cancels it; then KeyboardInterrupt when it has
    stopped.
    """
    import asyncio

    import uvloop

    from tuner.tuning.context import RunEvent

    async def main() -> T:
        task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
        _now.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if _now.came:  # before, and Python ignored what it raised, as in the callback of a weak reference
            _now.cancel()
        return await task

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(main())
        except asyncio.CancelledError:
            tell(RunEvent(kind="note", text="stopped; the same command continues this run"))
            raise KeyboardInterrupt from None
        finally:
            _now.cancel = None
            work.close()


def program() -> str:
    """How to call this program from any folder: by its name if the shell finds it, otherwise by its path."""
    found = shutil.which("tuner")
    own = Path(sys.argv[0])
    return "tuner" if found or own.name != "tuner" else shlex.quote(str(own.absolute()))
