"""What stands in the way of a run on this host, and how to mend it."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from tuner import processes
from tuner.engine.gpu import Gpus
from tuner.errors import TunerError
from tuner.history.store import Store
from tuner.settings import Settings
from tuner.tuning import study as studies

FREE_GIB = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at. `mend` says what to do when it is not ok."""

    name: str
    verdict: Literal["ok", "warning", "error"]
    found: str
    mend: str = ""


def examine(settings: Settings, study: Path | None, *, clock: Callable[[], datetime]) -> Iterator[Check]:
    """All checks, in order; those of a study only when one is named."""
    yield _python()
    yield _home(settings.home)
    yield _database(settings.url)
    yield _cores()
    yield _left_over()
    yield _gpus()
    if study is not None:
        yield _study(study, settings, clock)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Check(
        name="python", verdict="ok" if ok else "error", found=version, mend="" if ok else "use 3.11 or newer"
    )


def _home(home: Path) -> Check:
    existing = next(p for p in (home, *home.parents) if p.exists())
    if not os.access(existing, os.W_OK):
        return Check(name="home", verdict="error", found=f"{home} cannot be written", mend="set TUNER_HOME")
    free = shutil.disk_usage(existing).free / 2**30
    verdict: Literal["ok", "warning"] = "ok" if free > FREE_GIB else "warning"
    mend = "" if verdict == "ok" else "free some space (tuner gc) or set TUNER_HOME"
    return Check(name="home", verdict=verdict, found=f"{home}, {free:.0f} GiB free", mend=mend)


def _database(url: str) -> Check:
    shown = url.split("@")[-1]
    try:
        store = Store(url, create=False, patience_s=2.0)
        count = len(store.studies())
        store.close()
    except TunerError as error:
        missing = error.exit_code == 4
        mend = "" if missing else "tuner db upgrade, or mend TUNER_DATABASE_URL"
        return Check(name="database", verdict="ok" if missing else "error", found=str(error), mend=mend)
    return Check(name="database", verdict="ok", found=f"{shown}, {count} studies")


def _cores() -> Check:
    count = len(os.sched_getaffinity(0))
    if count < 2:
        mend = "engine and sender share it: latencies will be too high; give the host another core"
        return Check(name="cores", verdict="warning", found="1 core", mend=mend)
    return Check(name="cores", verdict="ok", found=f"{count} cores")


def _left_over() -> Check:
    found = processes.tagged()
    if not found:
        return Check(name="processes", verdict="ok", found="no engine of ours is running")
    pids = ", ".join(str(p.pid) for p in found)
    return Check(
        name="processes",
        verdict="warning",
        found=f"engines of a run are alive: {pids}",
        mend="a run is going on, or its controller died: tuner tune on its study clears it",
    )


def _gpus() -> Check:
    gpus = Gpus.open()
    if gpus.absent is not None:
        return Check(name="gpus", verdict="ok", found=gpus.absent)
    names = ", ".join(f"{g.name} {g.memory_bytes / 2**30:.0f} GiB" for g in gpus.gpus)
    if (use := gpus.foreign_use()) is not None:
        return Check(
            name="gpus", verdict="warning", found=f"{names}; {use}", mend="stop what holds GPU memory"
        )
    return Check(name="gpus", verdict="ok", found=names)


def _study(path: Path, settings: Settings, clock: Callable[[], datetime]) -> Check:
    try:
        try:
            store: Store | None = Store(settings.url, create=False)
        except TunerError:
            store = None
        prepared = studies.load(path, store=store, now=clock())
    except TunerError as error:
        return Check(name="study", verdict="error", found=str(error), mend="mend what the sentence names")
    dropped = f"; not turned: {', '.join(prepared.space.dropped)}" if prepared.space.dropped else ""
    found = (
        f"{prepared.study.name}: vLLM {prepared.facts.version} ({prepared.facts.platform}), model"
        f" {prepared.model.name}, {len(prepared.trace)} requests,"
        f" {prepared.space.size} configurations{dropped}"
    )
    return Check(name="study", verdict="ok", found=found)
