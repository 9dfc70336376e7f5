"""The program `tuner`, also `python -m tuner`."""

import gc
import os
import signal
import sys
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)
RUNS = (["tune"], ["demo"], ["compare"], ["upgrade-check"], ["schedule", "run"])
LINT = (["lint"],)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(8)  # errors.INTERRUPTED, which may not be loaded yet


def is_run(typed: list[str], commands: tuple[list[str], ...] = RUNS) -> bool:
    """Whether these words start a run, or another of `commands`. Options of the program itself, such as
    --no-color, stand before.
    """
    while typed and typed[0].startswith("-"):
        typed = typed[1:]
    return any(typed[: len(words)] == words for words in commands)


def main() -> None:
    """Run the command line. A signal ends a run with exit code 8, also while modules are loaded."""
    runs = is_run(sys.argv[1:])
    if runs:
        for number in ENDING:
            signal.signal(number, _leave)
    if is_run(sys.argv[1:], LINT):  # it answers and ends; the collector would take a quarter of its time
        gc.disable()
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads that it does not need
    from tuner.cli import main as command_line

    try:
        command_line()
    finally:
        if runs:  # while Python shuts down, a second signal would end it with another code
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
