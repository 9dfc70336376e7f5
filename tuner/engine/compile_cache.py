"""One compile cache root per engine build and GPU type: kept between launches, wiped when it is damaged."""

import hashlib
import shutil
from collections.abc import Mapping
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


def wipe(env: Mapping[str, str]) -> bool:
    """Empty the compile cache of a launch, if it is one of ours. Whether anything was removed."""
    where = env.get("VLLM_CACHE_ROOT")
    if where is None or not Path(where, MARK).exists():
        return False
    for entry in Path(where).iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
    return True
