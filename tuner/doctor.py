"""Checks of a host and a study: problems that would prevent a run, and how to solve them."""

import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import psutil

from tuner import masking, processes
from tuner.engine.gpu import Gpus, User
from tuner.engine.http import fresh_port
from tuner.errors import TunerError
from tuner.history.store import Store
from tuner.leftovers import shared_files
from tuner.measures import many
from tuner.settings import Settings
from tuner.tuning import study as studies

FREE_GIB = 5.0
SHARED_GIB = 1.0
SHARED = Path("/dev/shm")
HOLDS = "stop the process that holds the memory, or hide that GPU with CUDA_VISIBLE_DEVICES"

# Exit codes of `tuner doctor` by the first check with an error; 0 without an error.
EXIT_CODES: Mapping[str, int] = MappingProxyType(
    {
        "python": 10,
        "home": 11,
        "disk": 12,
        "database": 13,
        "cores": 14,
        "processes": 15,
        "gpus": 16,
        "shared memory": 17,
        "port": 18,
        "study": 19,
        "engine": 20,
        "flags": 21,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check. `mend` says what to do if it failed."""

    name: str
    verdict: Literal["ok", "warning", "error"]
    found: str
    mend: str = ""


def examine(settings: Settings, study: Path | None, *, clock: Callable[[], datetime]) -> Iterator[Check]:
    """All checks, in order. A study and its engine are checked only when a study is given."""
    yield _python()
    yield from _home(settings.home)
    yield _database(settings.url)
    yield _cores()
    running = processes.tags()
    ours = _launched(settings.url, running)
    yield left_over(running, ours)
    yield gpus(Gpus.open(), busy_with_ours=bool(ours))
    yield shared_memory(SHARED)
    yield _port()
    if study is not None:
        yield from _study(study, settings, clock)


def exit_code(checks: Sequence[Check]) -> int:
    """The code of the first error found, 0 when there is none; warnings do not count."""
    return next((EXIT_CODES[check.name] for check in checks if check.verdict == "error"), 0)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Check(
        name="python",
        verdict="ok" if ok else "error",
        found=version,
        mend="" if ok else "install Python 3.11 or newer",
    )


def _home(home: Path) -> Iterator[Check]:
    existing = next(p for p in (home, *home.parents) if p.exists() or p.is_symlink())
    if not existing.is_dir():
        mend = f"set TUNER_HOME to a folder, or move {existing} away"
        is_one = "a link that leads to no folder" if existing.is_symlink() else "a file, not a folder"
        yield Check(name="home", verdict="error", found=f"{existing} is {is_one}", mend=mend)
        return
    if not os.access(existing, os.W_OK):
        yield Check(
            name="home",
            verdict="error",
            found=f"{home} cannot be written",
            mend="make it writable for your user, or set TUNER_HOME to another folder",
        )
        return
    yield Check(name="home", verdict="ok", found=str(home))
    yield disk(existing, shutil.disk_usage(existing).free / 2**30)


def disk(where: Path, free_gib: float) -> Check:
    """Space for logs, outcomes and compile caches: an error below 0.1 GiB, a warning below 5."""
    if free_gib > FREE_GIB:
        return Check(name="disk", verdict="ok", found=f"{free_gib:.0f} GiB free at {where}")
    return Check(
        name="disk",
        verdict="error" if free_gib < 0.1 else "warning",
        found=f"{free_gib:.1f} GiB free at {where}",
        mend="delete old files with `tuner gc --apply`, or set TUNER_HOME to another disk",
    )


def _database(url: str) -> Check:
    shown = masking.text(url)
    try:
        store = Store(url, create=False, patience_s=2.0)
        count = len(store.studies())
        store.close()
    except TunerError as error:
        missing = error.exit_code == 4
        mend = "" if missing else "run `tuner db upgrade`, or correct TUNER_DATABASE_URL"
        return Check(name="database", verdict="ok" if missing else "error", found=str(error), mend=mend)
    return Check(name="database", verdict="ok", found=f"{shown}, {many(count, 'study')}")


def _cores() -> Check:
    count = len(os.sched_getaffinity(0))
    if count < 2:
        mend = (
            "give the host a second core: on one core, the sender slows the engine, so latencies are too high"
        )
        return Check(name="cores", verdict="warning", found="1 core", mend=mend)
    return Check(name="cores", verdict="ok", found=many(count, "core"))


def _launched(url: str, running: Mapping[str, object]) -> set[str]:
    """The launches of our history among those that run on this host."""
    if not running:
        return set()
    try:
        store = Store(url, create=False, patience_s=2.0)
    except TunerError:
        return set()
    try:
        return store.known_launches(running.keys())
    except TunerError:
        return set()
    finally:
        store.close()


def left_over(running: Mapping[str, Sequence[psutil.Process]], ours: Collection[str]) -> Check:
    """Engines that run on this host, by launch. `ours` are in our history; the others belong to another
    history.
    """
    if not running:
        return Check(name="processes", verdict="ok", found="no engine of a tuner is running")
    ourselves = bool(ours)
    shown = {tag: living for tag, living in running.items() if (tag in ours) == ourselves}
    pids = ", ".join(str(p.pid) for living in shown.values() for p in living)
    whose = "a run" if ourselves else "a run with another TUNER_HOME or database"
    return Check(
        name="processes",
        verdict="warning",
        found=f"engines of {whose} are alive: {pids}",
        mend="wait until the run ends. If its process died, `tuner tune` with the same study ends the engines"
        if ourselves
        else "wait until this run has ended, because it uses cores and memory that your run needs",
    )


def gpus(found: Gpus, *, busy_with_ours: bool = False) -> Check:
    """The GPUs and the processes that use their memory. Foreign use would stop a run, so it is an error."""
    if found.absent is not None:
        mend = "only the simulated engine and CPU builds can be tuned here"
        return Check(name="gpus", verdict="ok", found=found.absent, mend=mend)
    names = ", ".join(f"{g.name} {g.memory_bytes / 2**30:.0f} GiB" for g in found.gpus)
    use = found.foreign_use()
    if use is None:
        return Check(name="gpus", verdict="ok", found=names)
    holders = "; ".join(_holder(user) for user in found.users()) or "the driver does not name the process"
    return Check(
        name="gpus",
        verdict="warning" if busy_with_ours else "error",
        found=f"{names}; {use}: {holders}",
        mend="wait until the run ends" if busy_with_ours else HOLDS,
    )


def _holder(user: User) -> str:
    size = "" if user.memory_bytes is None else f" with {user.memory_bytes / 2**30:.1f} GiB"
    try:
        return f"{psutil.Process(user.pid).name()} ({user.pid}){size}"
    except psutil.Error:
        return f"pid {user.pid} outside this container{size}"


def shared_memory(where: Path) -> Check:
    """Space in shared memory for the processes of an engine, and files that a dead engine left there."""
    if not where.is_dir():
        return Check(
            name="shared memory",
            verdict="error",
            found=f"there is no {where}",
            mend=f"mount a tmpfs at {where}",
        )
    free = shutil.disk_usage(where).free / 2**30
    forgotten = [path for path in sorted(where.glob("vllm_offload_*")) if not _used(path)]
    if forgotten:
        size = sum(path.stat().st_size for path in forgotten) / 2**30
        named = f"{many(len(forgotten), 'offload file')} of dead engines: {size:.1f} GiB"
        mend = f"rm {' '.join(str(path) for path in forgotten[:3])}{' …' if len(forgotten) > 3 else ''}"
        return Check(
            name="shared memory", verdict="warning", found=f"{free:.1f} GiB free; {named}", mend=mend
        )
    if free < SHARED_GIB:
        mend = "free shared memory; start a container with --ipc=host or --shm-size=8g"
        low: Literal["warning", "error"] = "error" if free < 2**-4 else "warning"
        return Check(name="shared memory", verdict=low, found=f"{free:.2f} GiB free", mend=mend)
    return Check(name="shared memory", verdict="ok", found=f"{free:.0f} GiB free")


def _used(path: Path) -> bool:
    return any(path in shared_files(pid) for pid in psutil.pids())


def _port() -> Check:
    try:
        port = fresh_port()
    except OSError as error:
        mend = "turn the loopback interface on (ip link set lo up), or close programs that hold ports"
        return Check(name="port", verdict="error", found=f"no free port: {error}", mend=mend)
    return Check(name="port", verdict="ok", found=f"port {port} on loopback is free")


def _study(path: Path, settings: Settings, clock: Callable[[], datetime]) -> Iterator[Check]:
    try:
        try:
            store: Store | None = Store(settings.url, create=False)
        except TunerError:
            store = None
        prepared = studies.load(path, store=store, now=clock())
    except TunerError as error:
        yield Check(
            name="study",
            verdict="error",
            found=str(error),
            mend=f"correct {path} as the message says, then run this command again",
        )
        return
    facts = prepared.facts
    yield Check(
        name="study",
        verdict="ok",
        found=f"{prepared.study.name}: model {prepared.model.name}, {many(len(prepared.trace), 'request')},"
        f" {many(prepared.space.size, 'configuration')}",
    )
    yield Check(name="engine", verdict="ok", found=f"{facts.kind} {facts.version} on {facts.platform}")
    yield flags(prepared.space.dropped)


def flags(dropped: Mapping[str, str]) -> Check:
    """Knobs of the space that the installed engine does not have, each with the reason."""
    if not dropped:
        return Check(name="flags", verdict="ok", found="the engine has every knob of the space")
    listed = "; ".join(f"{name}: {why}" for name, why in dropped.items())
    mend = "you may remove them from the space. The search ignores them"
    return Check(
        name="flags", verdict="warning", found=f"the engine does not have these knobs: {listed}", mend=mend
    )
