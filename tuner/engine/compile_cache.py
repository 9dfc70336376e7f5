"""One compile cache root per engine build and GPU type: kept between launches, wiped when it is damaged."""

import fcntl
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

MARK = ".tuner-compile-cache"


def root(home: Path, *, version: str, platform: str, gpu_name: str | None, command: tuple[str, ...]) -> Path:
    """Where launches of this engine build on this card keep what they compiled."""
    build = hashlib.sha256("\0".join((version, platform, gpu_name or "", *command)).encode()).hexdigest()[:12]
    path = home / "compile-cache" / f"{version}-{build}"
    path.mkdir(parents=True, exist_ok=True)
    (path / MARK).touch()
    return path


def environment(path: Path) -> dict[str, str]:
    """What makes an engine keep its compiled code there."""
    return {"VLLM_CACHE_ROOT": str(path), "TORCHINDUCTOR_CACHE_DIR": str(path / "torchinductor")}


@contextmanager
def claimed(env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Hold the compile cache of a launch alone, as two writers damage it; a launch that finds it taken gets
    the next root beside it. Yields what to lay over `env`; nothing where the root is not one of ours."""
    where = env.get("VLLM_CACHE_ROOT")
    if where is None or not Path(where, MARK).exists():
        yield {}
        return
    number = 1
    while True:
        path = Path(where if number == 1 else f"{where}-{number}")
        path.mkdir(exist_ok=True)
        with (path / MARK).open("a") as mark:
            try:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                number += 1
                continue
            yield environment(path)
            return


def wipe(env: Mapping[str, str]) -> bool:
    """Empty the compile cache of a launch, if it is one of ours. Whether anything was removed."""
    where = env.get("VLLM_CACHE_ROOT")
    if where is None or not Path(where, MARK).exists():
        return False
    for entry in Path(where).iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
    return True
