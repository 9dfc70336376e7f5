"""What the commands that run studies share: how a signal ends them, and how their winner is pulled."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from tuner.records import Study
    from tuner.tuning.events import Tell

T = TypeVar("T")
INTERRUPTED = 8
"""Exit code of a run that was stopped by a signal and can be resumed."""


def interruptible(work: "Coroutine[Any, Any, T]", tell: "Tell") -> T:
    """Do the work; SIGINT and SIGTERM cancel it, and the process ends with exit code 8."""
    import asyncio
    import signal

    import uvloop

    from tuner.tuning.events import Event

    async def main() -> T:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        return await task

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(main())
        except asyncio.CancelledError:
            tell(Event(kind="note", text="stopped; the same command goes on with this run"))
            raise typer.Exit(INTERRUPTED) from None


def program() -> str:
    """How this program is called from here: by its name when that finds it, else by its path."""
    found = shutil.which("tuner")
    own = Path(sys.argv[0])
    return "tuner" if found or own.name != "tuner" else os.path.relpath(own)


def pull_words(study: "Study") -> str:
    """The command that prints a study's challenger as a file that `vllm serve --config` reads."""
    words = [program(), "profile", "resolve", "--model", study.model, "--node", study.node]
    words += ["--workload", study.workload, "--alias", "challenger", "--format", "vllm-yaml"]
    return shlex.join(words)
