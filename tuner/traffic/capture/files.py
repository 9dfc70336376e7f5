"""The files of captures. Lines are only appended. A file gets another name when the next one begins, and the
oldest files are removed.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tuner.errors import BadInput, NotFound, Unavailable, nearest
from tuner.records import JSON

OPEN, CLOSED = ".jsonl.part", ".jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """When a file begins (each hour or day of UTC, or beyond a size), and how many closed ones are kept."""

    every: Literal["hour", "day"] | None = None
    max_bytes: int | None = None
    keep: int | None = None


class Sink:
    """The file that is being written.

    Each append is a single write, so a killed capture can be read up to its last write. With `name`, the
    files are DIRECTORY/NAME-<UTC stamp>.jsonl, and an open file also ends in `.part`. Without `name` there is
    one file.
    """

    def __init__(self, path: Path, name: str | None = None, rotation: Rotation | None = None) -> None:
        if name is not None and (not name or set(name) & set("/\\\0") or name.startswith(".")):
            raise BadInput(
                f"capture name '{name}': expected a plain word, because it becomes part of a file name"
            )
        self.rotation = rotation or Rotation()
        self._base, self._name = path, name
        self._swept = False
        self._file = -1
        self._size = 0
        self._began = datetime.min.replace(tzinfo=UTC)
        self.path = path

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "Sink":
        """A sink, from the result of `as_json`."""
        return cls(Path(told["path"]), told["name"], Rotation(**told["rotation"]))

    def as_json(self) -> dict[str, JSON]:
        """The sink as plain JSON, for another process."""
        return {"path": str(self._base), "name": self._name, "rotation": asdict(self.rotation)}

    def again(self) -> "Sink":
        """The sink of the next file of the same name."""
        following = Sink(self._base, self._name, self.rotation)
        following._swept = True
        return following

    def open(self, now: datetime) -> None:
        """Begins a file. The first file of a name closes files that a killed capture left open. Unavailable
        if the disk fails.
        """
        try:
            if self._name is not None:
                self._base.mkdir(parents=True, exist_ok=True)
                for left in () if self._swept else _in_order(self._base, self._name, OPEN):
                    left.rename(_closed(left))
                self._swept = True
                self.path = _free(self._base, f"{self._name}-{now:%Y%m%dT%H%M%SZ}")
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
            self._file = os.open(self.path, flags, 0o600)
        except FileExistsError as error:
            raise BadInput(f"{self.path}: exists already; a capture never writes over one") from error
        except OSError as error:
            raise Unavailable(f"{self.path}: cannot be written: {error.strerror or error}") from error
        self._size, self._began = 0, now

    def write(self, data: bytes) -> None:
        """Appends bytes. OSError if the disk fails."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self._size += len(data)

    def due(self, now: datetime) -> bool:
        """Whether a new file should begin."""
        if self._name is None:
            return False
        form = {"hour": "%Y%m%d%H", "day": "%Y%m%d", None: "-"}[self.rotation.every]
        if now.strftime(form) != self._began.strftime(form):
            return True
        return self.rotation.max_bytes is not None and self._size >= self.rotation.max_bytes

    def close(self) -> None:
        """Closes and renames the file, and removes closed files beyond `keep`."""
        if self._file < 0:
            return
        os.close(self._file)
        self._file = -1
        if self._name is None:
            return
        self.path = self.path.rename(_closed(self.path))
        if self.rotation.keep is not None:
            for old in closed_files(self._base, self._name)[: -self.rotation.keep or None]:
                old.unlink(missing_ok=True)


def closed_files(directory: Path, name: str) -> list[Path]:
    """The closed captures of a name, oldest first."""
    return _in_order(directory, name, CLOSED)


def latest(directory: Path, name: str) -> Path:
    """The newest capture of a name: the newest closed file, otherwise the open one. NotFound if there is
    none.
    """
    if closed := closed_files(directory, name):
        return closed[-1]
    if being := _in_order(directory, name, OPEN):
        return being[-1]
    known = {path.name.rsplit("-", 1)[0] for path in directory.glob(f"*-*{CLOSED}*")}
    raise NotFound(f"no capture named '{name}' in {directory}{nearest(name, known)}")


def find(ref: str, directories: Sequence[Path]) -> Path | None:
    """`latest:NAME` of a study: the newest capture of this name in any of the directories, otherwise None.
    NAME may begin with a directory, relative to these.
    """
    prefix, colon, asked = ref.partition(":")
    if prefix != "latest" or not colon:
        return None
    place, found = Path(asked).expanduser(), list[Path]()
    for directory in directories:
        with suppress(NotFound):
            found.append(latest(directory / place.parent, place.name))
    return max(found, key=lambda path: path.name, default=None)


def _in_order(directory: Path, name: str, ending: str) -> list[Path]:
    """The files of a name, oldest first. Files of longer names that begin with it are not included."""
    found = []
    for path in directory.glob(f"{name}-*{ending}"):
        stamp, _, number = path.name.removeprefix(f"{name}-").removesuffix(ending).partition(".")
        if len(stamp) == 16 and stamp[8] == "T" and stamp.endswith("Z"):
            found.append((stamp, number, path))
    return [path for _, _, path in sorted(found)]


def _closed(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(OPEN) + CLOSED)


def _free(directory: Path, stem: str) -> Path:
    """A file name that no open or closed capture has."""
    number = 0
    while True:
        tail = f".{number:04d}" if number else ""
        if not any((directory / f"{stem}{tail}{ending}").exists() for ending in (OPEN, CLOSED)):
            return directory / f"{stem}{tail}{OPEN}"
        number += 1
