"""Keeps what the tuner writes from other users of the host."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

OTHERS = 0o077
"""The permissions of group and others, and the mask of new files."""
FOLDERS = ("logs", "traces", "captures", "uploads", "trials", "nodes", "studies", "controllers", "work")
"""The folders of a home that hold traffic, secrets of engines, or what was found."""
_users_mask: int | None = None


def mask_files() -> None:
    """From now on this process makes files for its own user only: 0600, folders 0700."""
    global _users_mask
    before = os.umask(OTHERS)
    if _users_mask is None:
        _users_mask = before


def users_mask() -> int:
    """The mask that the user set, for programs that we start; -1: it is the one in force."""
    return -1 if _users_mask is None else _users_mask


def publish(path: Path) -> None:
    """Gives a file that a person asked for the permissions that the user's own mask gives."""
    if _users_mask is not None:
        path.chmod(0o666 & ~_users_mask)


def tighten(home: Path) -> None:
    """Takes an existing home, the files in it and in its folders from group and others, also what an earlier
    release left open. What belongs to another user (a mounted volume) is left as it is.
    """
    with suppress(OSError):
        mode = home.stat().st_mode
        shared = mode & stat.S_ISVTX or home.resolve() in (Path("/"), Path.home().resolve())
        if not shared:
            tighten_files([home])
        tighten_files([*home.glob("tuner*.db*"), home / "notify.yaml"])
        for name in FOLDERS:
            tighten_files(_below(home / name))


def tighten_files(paths: Iterable[Path]) -> None:
    """Takes each of these from group and others where it is there and ours."""
    for path in paths:
        with suppress(OSError):
            found = path.lstat()
            if found.st_mode & OTHERS and found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode):
                path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)


def _below(folder: Path) -> Iterator[Path]:
    """A folder and what is in it; one that is closed is not looked into again, except two."""
    with suppress(OSError):
        was_open = folder.lstat().st_mode & OTHERS
        yield folder
        for root, folders, files in os.walk(folder) if was_open or folder.name in ("logs", "traces") else ():
            yield from (Path(root, name) for name in (*folders, *files))
