"""A production that is a file: `up` while it serves; every drain and restore adds a line to its log."""

import sys
from pathlib import Path

import yaml

from tuner.fleet.hooks import path_of

PROGRAM = """\
import sys, time
from pathlib import Path
what, place = sys.argv[1], Path(sys.argv[2])
with (place / "log").open("a") as log:
    log.write(what + "\\n")
trouble = place / ("no-" + what)
if trouble.exists():
    text = trouble.read_text()
    if text == "hang":
        time.sleep(600)
    left = int(text) - 1
    trouble.unlink() if left == 0 else trouble.write_text(str(left))
    sys.exit("the unit is masked")
if what == "ready":
    sys.exit((place / "state").read_text() != "up")
(place / "state").write_text("up" if what == "restore" else "down")
"""


class Production:
    """Served from a folder; its hooks are registered for a node."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir(parents=True, exist_ok=True)
        (place / "production.py").write_text(PROGRAM)
        (place / "state").write_text("up")
        (place / "log").write_text("")

    def words(self, what: str) -> list[str]:
        return [sys.executable, str(self.place / "production.py"), what, str(self.place)]

    def register(self, home: Path, node: str, *, timeout_s: float = 60.0) -> None:
        pair = {"drain": self.words("drain"), "restore": self.words("restore")}
        entry = {"command": pair, "ready": self.words("ready"), "timeout_s": timeout_s}
        path = path_of(home, node)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump({"handover": [entry]}))

    def trouble(self, what: str, times: int | str) -> None:
        """The next so many calls fail, or `hang`."""
        (self.place / f"no-{what}").write_text(str(times))

    @property
    def up(self) -> bool:
        return (self.place / "state").read_text() == "up"

    @property
    def log(self) -> list[str]:
        return [line for line in (self.place / "log").read_text().split() if line != "ready"]
