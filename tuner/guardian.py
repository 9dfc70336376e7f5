"""The guardian's program: reaps the launches of a controller that is gone (`python -m tuner.guardian`)."""

import json
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress

from tuner.errors import BadInput
from tuner.processes import call_off, reap


def guard(lines: Iterable[str]) -> None:
    """A line maps tags to stop commands, or to null at their end; what is open when they end is reaped."""
    known: dict[str, list[str] | None] = {}
    for line in lines:
        known |= json.loads(line)
    for tag, stop_command in known.items():
        if stop_command is not None:
            with suppress(BadInput):
                call_off(stop_command, tag)
            reap(tag)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its controller, whatever is sent to all of us
    guard(sys.stdin)
