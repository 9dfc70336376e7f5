"""Starts, tags and stops processes, each in its own session. No other file starts processes.

Every process of a launch has `TUNER_LAUNCH_ID=<tag>` in its environment, so that children that left the group
are found, too. If this process dies, a guardian process ends all launches that are open.
"""

import asyncio
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from tuner.errors import BadInput
from tuner.leftovers import TAG as TAG
from tuner.leftovers import (
    KillingOrder,
    Log,
    cgroup_members,
    clear,
    collect_zombies,
    enter_cgroup,
    group_of,
    leaked_files,
    leave_cgroup,
    lives,
    private_directory,
    remove_unused,
    shared_files,
)
from tuner.leftovers import tagged as tagged
from tuner.leftovers import tags as tags
from tuner.masking import users_mask

_KEEP_ENVIRON = {"SPT_NOENV": "1"}  # or setproctitle writes over the tag
_PR_SET_CHILD_SUBREAPER = 36

# How long a stop command may take.
STOP_S = 60.0
_started: set[int] = set()
Detached = subprocess.Popen[bytes]


def allow_files(most: int = 8192) -> None:
    """Let this process open as many files as it may, at most so many: each connection of a server is one,
    also while its TLS handshake lasts.
    """
    now, may = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if may == resource.RLIM_INFINITY else min(may, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, may))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The result of a short command. `code` is None when it was killed at its deadline."""

    code: int | None
    out: str
    err: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """How a process tree ended. `survivors` are processes that survived SIGKILL (a hard fault)."""

    how: str
    code: int | None
    seconds: float
    survivors: tuple[int, ...] = ()


class Process:
    """The leader of one process tree. The first look after its end stores its exit code, and whether it ended
    without being asked to.
    """

    def __init__(
        self, popen: "subprocess.Popen[bytes]", tag: str, log: Log, cgroup: Path | None, stop: Sequence[str]
    ) -> None:
        self.pid = popen.pid
        self.tag = tag
        self.stop_command = tuple(stop)
        self.asked = False
        self.ended_unasked = False
        self.started_at = time.time()
        self.cgroup = cgroup
        self._popen = popen
        self._log = log

    @property
    def code(self) -> int | None:
        """Exit code of the leader (negative: killed by that signal), None while it lives."""
        before = self._popen.returncode
        code = self._popen.poll()
        if before is None and code is not None and not self.asked:
            self.ended_unasked = True
        return code

    @property
    def writing(self) -> bool:
        """Whether the log may still grow: a process of the tree has the other end of the pipe open."""
        return self._log.open

    @property
    def log_lost(self) -> OSError | None:
        """The error that stopped the log from being written, None if all of it is there."""
        return self._log.lost

    def close(self) -> None:
        """Finish the log after the tree is gone."""
        self._log.join()
        _started.discard(self.pid)


class ProcessTable(Protocol):
    """The functions of the operating system that `stop` needs."""

    def members(self, process: Process) -> list[int]:
        """Living (not zombie) processes of the group, the tag or the control group."""

    def kill(self, pid: int, number: signal.Signals) -> None:
        """Send a signal; a process that is gone is no error."""


class HostTable:
    """The process table of this host."""

    def members(self, process: Process) -> list[int]:
        found = {p.pid for p in tagged(process.tag)}
        found.update(pid for pid in psutil.pids() if group_of(pid) == process.pid and lives(pid))
        if process.cgroup is not None:
            found.update(cgroup_members(process.tag))
        return sorted(found)

    def kill(self, pid: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


HOST = HostTable()


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str | None],
    directory: str | Path,
    log: str | Path,
    tag: str,
    cores: Iterable[int] | None = None,
    redact: Callable[[bytes], bytes] | None = None,
    stop_command: Sequence[str] = (),
) -> Process:
    """Start a command as leader of its own session. `env` is added to our environment; None removes a name.

    `stop_command` (`{tag}` replaced) ends processes that signals do not reach, such as a container; it runs
    before the launch is ended. Output goes through `redact` into `log`, line by line; a log beyond LOG_LIMIT
    keeps only its head and tail.
    """
    _become_subreaper()
    _guardian.guard(tag, stop_command)
    private = private_directory(tag)
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    full = _environment({**env, TAG: tag, "TMPDIR": str(private), **_KEEP_ENVIRON})
    try:
        popen = subprocess.Popen(
            list(command),
            env=full,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=users_mask(),
        )
    except OSError as error:
        clear(private)
        _guardian.forget(tag)
        raise BadInput(f"cannot start {command[0]!r}: {error.strerror or error}") from error
    _started.add(popen.pid)
    if cores is not None:
        pin(cores, popen.pid)
    cgroup = enter_cgroup(tag, popen.pid)
    return Process(popen, tag, Log(popen.stdout, Path(log), redact or bytes), cgroup, stop_command)


def run(
    command: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str | None] | None = None,
    stdin: str = "",
) -> Finished:
    """Run a short command to its end; at the deadline its whole session is killed (`code` None).

    `env` is added to our environment; None removes a name. BadInput when the program cannot be started.
    """
    try:
        popen = subprocess.Popen(
            list(command),
            env=_environment(env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            umask=users_mask(),
        )
    except OSError as error:
        raise BadInput(f"cannot start {command[0]!r}: {error.strerror or error}") from error
    _started.add(popen.pid)
    try:
        out, err = popen.communicate(stdin.encode(), timeout=timeout_s)
        code: int | None = popen.returncode
    except subprocess.TimeoutExpired:
        _kill_group(popen.pid)
        out, err = popen.communicate()
        code = None
    except BaseException:
        _kill_group(popen.pid)
        popen.communicate()
        raise
    finally:
        _started.discard(popen.pid)
    return Finished(code=code, out=out.decode(errors="replace"), err=err.decode(errors="replace"))


def detach(command: Sequence[str], *, env: Mapping[str, str | None], log: Path) -> Detached:
    """Start a command that survives this process: own session, no tag, output appended to `log`."""
    with log.open("ab") as out:
        return subprocess.Popen(
            list(command),
            env=_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def helper(command: Sequence[str], *, env: Mapping[str, str | None]) -> "subprocess.Popen[bytes]":
    """Start a program of the tuner that works through its pipes and ends when they close. It has no tag."""
    pipe = subprocess.PIPE
    return subprocess.Popen(list(command), env=_environment(env), stdin=pipe, stdout=pipe)


def pin(cores: Iterable[int], pid: int = 0) -> None:
    """Keep a process (0: this one) on the given cores; its later children inherit that."""
    os.sched_setaffinity(pid, set(cores))


def call_off(stop_command: Sequence[str], tag: str, *, timeout_s: float = STOP_S) -> None:
    """Run the stop command of a launch, if it has one. Its exit code is ignored, since a container may be
    gone already. BadInput if it cannot be started.
    """
    if stop_command:
        run([word.replace("{tag}", tag) for word in stop_command], timeout_s=timeout_s)


def reap(tag: str, *, stop_command: Sequence[str] = (), timeout_s: float = 10.0) -> int:
    """Run the stop command, kill all processes with the tag and remove its files. Returns how many.

    For launches whose controller has died; a launch of this process is ended with `stop`. BadInput if the
    stop command cannot be started; then nothing was done.
    """
    call_off(stop_command, tag)
    killed: set[int] = set()
    shared: set[Path] = set()
    deadline, order = time.monotonic() + timeout_s, KillingOrder(grace_s=0.0)
    while living := {p.pid for p in tagged(tag)} | set(cgroup_members(tag)):
        for pid in order.next(living):
            shared |= shared_files(pid)
            HOST.kill(pid, signal.SIGKILL)
        killed |= living
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    collect_zombies(killed)
    remove_unused(shared)
    clear(private_directory(tag))
    leave_cgroup(tag)
    return len(killed)


async def stop(
    process: Process,
    *,
    timeout_s: float = 30.0,
    kill_timeout_s: float = 60.0,
    table: ProcessTable = HOST,
) -> Stopped:
    """End a process tree: run its stop command (ignored if it cannot be started), send SIGTERM to the leader
    and again at half time, then SIGKILL to all that is left.
    """
    begun = time.monotonic()
    how, process.asked = ("exited" if process.code is not None else "terminated"), True
    with suppress(BadInput):
        await asyncio.to_thread(call_off, process.stop_command, process.tag, timeout_s=timeout_s)
    members = table.members(process)
    shared = {path for pid in members for path in shared_files(pid)}
    if not await _leader_ends(process, timeout_s, table):
        how = "killed"
    left = await _kill_all(process, kill_timeout_s, table, shared)
    collect_zombies(members, session=process.pid)
    if not left:
        process.close()
        remove_unused(shared | leaked_files(process.started_at))
        clear(private_directory(process.tag))
        leave_cgroup(process.tag)
        _guardian.forget(process.tag)
    return Stopped(how=how, code=process.code, seconds=time.monotonic() - begun, survivors=tuple(left))


async def _leader_ends(process: Process, timeout_s: float, table: ProcessTable) -> bool:
    """Send SIGTERM, and again at half time, since start-up code may swallow the first. True when the leader
    ended.
    """
    begun = time.monotonic()
    for share in (0.5, 1.0):
        if process.code is None:
            table.kill(process.pid, signal.SIGTERM)
        while process.code is None and time.monotonic() - begun < timeout_s * share:
            await asyncio.sleep(0.02)
    return process.code is not None


async def _kill_all(process: Process, timeout_s: float, table: ProcessTable, shared: set[Path]) -> list[int]:
    """Send SIGKILL until no member lives. Members that survive the timeout are returned. Their files in
    shared memory are added to `shared`.
    """
    order = KillingOrder(grace_s=0.0 if process.code is None else min(1.0, timeout_s / 2))
    begun = time.monotonic()
    while left := table.members(process):
        if time.monotonic() - begun > timeout_s:
            return left
        for pid in order.next(left):
            shared |= shared_files(pid)
            table.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.02)
    return []


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    full = {name: value for name, value in os.environ.items() if name != TAG}
    for name, value in changes.items():
        if value is None:
            full.pop(name, None)
        else:
            full[name] = value
    return full


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _become_subreaper() -> None:
    """Make orphans of our launches our children instead of init's, so that we can wait for them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _Guardian:
    """A process that ends the open launches when this process dies. It learns through a pipe which
    are open.
    """

    def __init__(self) -> None:
        self._popen: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._open: dict[str, tuple[str, ...]] = {}
        self._lock = threading.Lock()

    def guard(self, tag: str, stop_command: Sequence[str]) -> None:
        """Register a launch before its start. A guardian that died is replaced and gets all open launches."""
        with self._lock:
            if self._owner != os.getpid():
                self._open = {}
            self._open[tag] = tuple(stop_command)
            if self._owner == os.getpid() and self._popen is not None and self._popen.poll() is None:
                self._tell({tag: stop_command})
                return
            self._start()
            self._tell(self._open)

    def forget(self, tag: str) -> None:
        """Remove a launch after its end."""
        with self._lock:
            self._open.pop(tag, None)
            self._tell({tag: None})

    def _tell(self, news: Mapping[str, Sequence[str] | None]) -> None:
        if self._popen is not None and self._popen.stdin is not None:
            with suppress(OSError):  # the guardian died: the next launch starts another
                self._popen.stdin.write(f"{json.dumps(news)}\n".encode())
                self._popen.stdin.flush()

    def _start(self) -> None:
        self._owner = os.getpid()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tuner.processes"],
            stdin=subprocess.PIPE,
            env=_environment({"PYTHONPATH": str(Path(__file__).parents[1])}),
            start_new_session=True,
        )
        _started.add(self._popen.pid)


_guardian = _Guardian()


def guard(lines: Iterable[str]) -> None:
    """The guardian: end the launches that are open when the lines end, because the controller has died then.

    Each line maps tags of launches to their stop commands, or to null when a launch has ended.
    """
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
        signal.signal(
            number, signal.SIG_IGN
        )  # the guardian ends with its controller and not by a signal to the group
    guard(sys.stdin)
