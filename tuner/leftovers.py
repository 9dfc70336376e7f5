"""Finds and removes what a process tree leaves: zombies, log, temporary files, shared memory,
control group.
"""

import hashlib
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

TAG = "TUNER_LAUNCH_ID"
TRACKER_GRACE_S = 5.0
LOG_LIMIT = 16 << 20
LOG_KEPT = 200_000
LINE_LIMIT = 65_536

# A younger folder may belong to a launch that is just starting.
SCRATCH_S = 3600.0


def tags() -> dict[str, list[psutil.Process]]:
    """The living processes of every launch on this host, by tag, without this process and its parents."""
    own = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        if process.pid in own:
            continue
        try:
            tag = process.environ().get(TAG)
            if tag is not None and process.status() != psutil.STATUS_ZOMBIE:
                found.setdefault(tag, []).append(process)
        except (psutil.Error, OSError):
            continue  # it has ended, or belongs to another user
    return found


def tagged(tag: str | None = None) -> list[psutil.Process]:
    """The living processes of one launch, or of all launches."""
    found = tags()
    return [each for one in found.values() for each in one] if tag is None else found.get(tag, [])


def group_of(pid: int) -> int | None:
    """The process group of a process, None when it has ended."""
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def lives(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def is_tracker(pid: int) -> bool:
    """Whether a process is a resource tracker of Python's multiprocessing, which removes forgotten files."""
    try:
        return any("multiprocessing.resource_tracker" in word for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def collect_zombies(pids: Iterable[int], *, session: int | None = None) -> int:
    """Wait for dead orphans that this process inherited as subreaper: those of `pids`, and those of the
    session with the leader `session`, which itself is not waited for. Returns how many.
    """
    known, collected = set(pids), 0
    for child in psutil.Process().children():
        try:
            ours = child.pid in known or (session is not None and os.getsid(child.pid) == session)
            if ours and child.pid != session and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
                collected += 1
        except (psutil.Error, OSError):
            continue
    return collected


def private_directory(tag: str) -> Path:
    """The TMPDIR of a launch, for sockets and temporary files. Its path is short, since socket paths are
    limited.
    """
    base = tempfile.gettempdir()
    return Path(base if len(base) < 40 else "/tmp", f"tuner-{tag}"[:60])


def cgroup_home() -> Path | None:
    """The folder where we may make control groups (version 2, or the pids hierarchy), None if there
    is none.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    paths = {controller: path for _, controller, path in (line.split(":", 2) for line in lines)}
    homes = [(Path("/sys/fs/cgroup"), paths.get("")), (Path("/sys/fs/cgroup/pids"), paths.get("pids"))]
    for root, path in homes:
        home = root / (path or "").lstrip("/")
        if path is not None and (home / "cgroup.procs").exists() and os.access(home, os.W_OK):
            return home
    return None


def enter_cgroup(tag: str, pid: int) -> Path | None:
    """Put a process into its own control group, if the host allows it."""
    home = cgroup_home()
    if home is None:
        return None
    group = home / f"tuner-{tag}"
    try:
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        leave_cgroup(tag)
        return None
    return group


def cgroup_members(tag: str) -> list[int]:
    """Living processes in a launch's control group; none when it has none."""
    home = cgroup_home()
    try:
        listed = (home / f"tuner-{tag}" / "cgroup.procs").read_text().split() if home else []
    except OSError:
        return []
    return [int(pid) for pid in listed if pid != "0" and lives(int(pid))]


def leave_cgroup(tag: str) -> None:
    """Kill the processes of a launch's control group (one write in version 2) and remove the group."""
    home = cgroup_home()
    group = home / f"tuner-{tag}" if home else None
    if group is None or not group.is_dir():
        return
    try:
        if (group / "cgroup.kill").exists():
            (group / "cgroup.kill").write_text("1")
        group.rmdir()
    except OSError:
        return  # still busy: the search by tag has reported the surviving processes


def shared_files(pid: int) -> set[Path]:
    """Files in shared memory that a process has mapped or holds open."""
    try:
        process = psutil.Process(pid)
        paths = {m.path for m in process.memory_maps()} | {f.path for f in process.open_files()}
    except (psutil.Error, OSError):
        return set()
    return {Path(path) for path in paths if path.startswith("/dev/shm/")}


def leaked_files(since: float) -> set[Path]:
    """Offload files of ours in shared memory that were made after `since` (a wall-clock time)."""
    found = set()
    for path in Path("/dev/shm").glob("vllm_offload_*"):
        try:
            about = path.stat()
        except OSError:
            continue
        if about.st_uid == os.getuid() and about.st_mtime >= since:
            found.add(path)
    return found


def remove_unused(paths: set[Path]) -> None:
    """Remove shared-memory files that no living process uses any more."""
    candidates = {path for path in paths if path.exists()}
    if candidates:
        for pid in psutil.pids():
            candidates -= shared_files(pid)
    for path in candidates:
        with suppress(OSError):
            path.unlink()


def clear(directory: Path) -> None:
    """Remove a private directory and its content, if permissions allow it."""
    for root, folders, files in os.walk(directory, topdown=False):
        for name in files:
            with suppress(OSError):
                Path(root, name).unlink()
        for name in folders:
            path = Path(root, name)
            with suppress(OSError):
                path.unlink() if path.is_symlink() else path.rmdir()
    with suppress(OSError):
        directory.rmdir()


class Log:
    """Copies a pipe into a file in its own thread, so that the writer never waits for us.

    `lost` is the error that stopped the writing (a full disk); later output is read and dropped.
    """

    def __init__(self, pipe: IO[bytes] | None, path: Path, redact: Callable[[bytes], bytes]) -> None:
        self.lost: OSError | None = None
        self._redact = redact
        self._thread = threading.Thread(target=self._drain, args=(pipe, path), daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(timeout=10)

    def _drain(self, pipe: IO[bytes] | None, path: Path) -> None:
        if pipe is None:
            return
        with pipe:
            try:
                with path.open("w+b", buffering=0) as file:
                    self._copy(pipe, file)
            except OSError as error:
                self.lost = error
            while pipe.read(65536):
                pass

    def _copy(self, pipe: IO[bytes], file: IO[bytes]) -> None:
        size, whole = 0, True
        while line := pipe.readline(LINE_LIMIT):
            if whole:
                size += file.write(self._redact(line)) or 0
            whole = line.endswith(b"\n")  # the rest of an overlong line is left out
            if size > LOG_LIMIT:
                size = _shorten(file)


def _shorten(file: IO[bytes]) -> int:
    """Keep only head and tail of a log that is too long. Returns its new size."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - LOG_KEPT)
    tail = file.read(LOG_KEPT)
    file.truncate(LOG_KEPT)
    file.seek(LOG_KEPT)
    file.write(b"\n[tuner: %d bytes left out]\n" % (size - 2 * LOG_KEPT))
    file.write(tail)
    return file.tell()


class KillingOrder:
    """The order in which processes are killed. After the grace time, all are killed except Python's
    resource trackers, which clear shared memory when their clients have ended. The trackers are killed only
    if they are alone and do not end.
    """

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._begun = time.monotonic()
        self._alone: float | None = None

    def next(self, living: Iterable[int]) -> list[int]:
        now = time.monotonic()
        trackers = {pid for pid in living if is_tracker(pid)}
        others = [pid for pid in living if pid not in trackers]
        self._alone = None if others else self._alone or now
        if self._alone is not None and now - self._alone > TRACKER_GRACE_S:
            return sorted(trackers)
        return others if now - self._begun >= self._grace_s else []


def scratch_prefix(pid: int | None = None) -> str:
    """The prefix of the temporary folders of a process (default: this one). It has pid and host, so that
    others can see whether the process still lives; a folder may be shared with other hosts.
    """
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]
    return f"tuner-{os.getpid() if pid is None else pid}-{host}-"


def sweep_scratch() -> list[Path]:
    """Remove the temporary folders of this host whose process has ended without removing them.
    Returns them.
    """
    base, living, removed = Path(tempfile.gettempdir()), set(tags()), list[Path]()
    for path in sorted(base.glob("tuner-*")):
        pid, tag = re.match(r"tuner-(\d+)-", path.name), path.name.removeprefix("tuner-")
        try:
            found = path.lstat()
        except OSError:
            continue
        if found.st_uid != os.getuid() or not path.is_dir() or path.is_symlink():
            continue
        if pid is not None:
            gone = path.name.startswith(scratch_prefix(int(pid[1]))) and not psutil.pid_exists(int(pid[1]))
        else:
            fresh = time.time() - found.st_mtime < SCRATCH_S
            gone = (
                re.fullmatch(r"(sender-)?[0-9a-f]{12,32}", tag) is not None
                and tag not in living
                and not fresh
            )
        if gone:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed
