"""One running vLLM (CPU build) that the real tests of all rooms share: a launch is what costs most."""

import uuid
from pathlib import Path

from benchmarks.tiny import ENV
from tests.engine.conformance import Launched
from tests.engine.real import real
from tuner.engine import limits
from tuner.records import LaunchSpec

ENGINE_BLOCK = 128
ROOT = Path(__file__).parents[1]


def shared_launch(directory: Path) -> LaunchSpec:
    """With all that one of the rooms looks at: live limits, the capture inside, numbers per request."""
    launch_id = uuid.uuid4().hex
    installed = limits.install(directory, launch_id, str(ROOT))
    capture = {"TUNER_CAPTURE_OUT": str(captured_inside(directory)), "TUNER_CAPTURE_NAME": "in"}
    return real(
        directory,
        *("--enable-prompt-tokens-details", "--enable-per-request-metrics"),
        *("--block-size", str(ENGINE_BLOCK)),
        *("--middleware", "tuner.traffic.capture.middleware.VllmCapture", *installed.argv),
        launch_id=launch_id,
        env={**ENV, **installed.env, **capture},
    )


def captured_inside(directory: Path) -> Path:
    """Where the engine's own capture lies."""
    return directory / "inside"


class Shared(Launched):
    """The running engine; `loop` is the event loop that its server belongs to."""

    def __init__(self, directory: Path) -> None:
        super().__init__(shared_launch(directory))
        self.directory = directory


__all__ = ["ENGINE_BLOCK", "Shared", "captured_inside", "shared_launch"]
