"""What the engine room's tests share: launch specs, and a look at what a launch left behind."""

import sys
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path

from tuner.engine.server import serve
from tuner.errors import EngineError
from tuner.knobs.catalogue import read_back
from tuner.leftovers import lives, private_directory
from tuner.processes import tagged
from tuner.records import Candidate, LaunchSpec, Value

FAULT_ENGINE = (sys.executable, str(Path(__file__).with_name("fault_engine.py")))


def spec(
    directory: Path,
    *faults: str,
    command: tuple[str, ...] = FAULT_ENGINE,
    asked: dict[str, Value] | None = None,
    **changes: object,
) -> LaunchSpec:
    """A launch of the fault engine that misbehaves as ordered, with short patience."""
    asked = asked or {}
    knobs = [part for name, value in asked.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    settings: dict[str, object] = {
        "launch_id": uuid.uuid4().hex,
        "command": command,
        "model": "tiny",
        "argv": (*knobs, *(part for fault in faults for part in ("--fault", fault))),
        "served_name": "study",
        "directory": str(directory),
        "asked": Candidate(asked),
        "read_back": read_back(),
        "ready_timeout_s": 30.0,
        "stop_timeout_s": 2.0,
    }
    return LaunchSpec(**{**settings, **changes})  # type: ignore[arg-type]


async def ending(launch: LaunchSpec) -> EngineError:
    """Launch something that is not to become ready; how it ended."""
    try:
        async with serve(launch):
            pass
    except EngineError as error:
        return error
    raise AssertionError("the engine became ready")


def shared_files() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def leftovers(launch: LaunchSpec) -> list[object]:
    """Processes and temporary files of a launch that is over; empty when all is well."""
    found: list[object] = list(tagged(launch.launch_id))
    if private_directory(launch.launch_id).exists():
        found.append(private_directory(launch.launch_id))
    return found


def temporary_files() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("tuner-*"))


def alive(pids: Iterable[int]) -> list[int]:
    """Those of the processes that live and are no zombies."""
    return [pid for pid in pids if lives(pid)]


__all__ = ["FAULT_ENGINE", "alive", "ending", "leftovers", "shared_files", "spec", "temporary_files"]
