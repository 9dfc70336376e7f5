"""What earlier boots leave for the next one: how long it takes, its KV cache, and compiled code.

There is one compile cache per engine build and GPU type. Launches share it; it is wiped when it is damaged.
"""

import fcntl
import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from tuner.adapters import adapter_of

CEILING_S = 3600.0
FLOOR_S = 60.0
UNKNOWN_S = 900.0

# So many launches are needed before their median predicts the next one.
ENOUGH = 3

# Keys of a launch's timeline: by which share the KV cache of its discarded first boot differed, and after how
# many seconds that boot was ready.
FIRST_DRIFT, FIRST_S = "first_kv_drift", "first_ready_s"

# The first argument that the tuner itself adds to make limits changeable.
LIMITS_CLASS = "--scheduler-cls"
CACHE_MARK = ".tuner-compile-cache"
_COMPILED = re.compile(r"Compiling a graph for|torch\.compile takes")
_LOADED = re.compile(r"Directly load (?:the|AOT)")


def ready_deadline(ready_s: Sequence[float], *, ceiling_s: float = CEILING_S) -> float:
    """Seconds to wait for the next launch: three times the median of this node's own launches, but at least
    60 s and at most the ceiling. If there are fewer than three launches, 900 s (or the ceiling).
    """
    if len(ready_s) < ENOUGH:
        return min(UNKNOWN_S, ceiling_s)
    return min(ceiling_s, max(FLOOR_S, 3.0 * median(ready_s)))


def compiled_anew(log: str) -> bool:
    """Whether this boot compiled code that was not in the cache (its KV cache may come out smaller)."""
    return _COMPILED.search(log) is not None and _LOADED.search(log) is None


def first_drifts(timelines: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """By which share the KV cache of a first boot differed from the next boot's, for launches that did
    both."""
    return tuple(drift for each in timelines if (drift := each.get(FIRST_DRIFT)) is not None)


def boots_again(drifts: Sequence[float], *, tolerance: float = 0.01) -> bool:
    """Whether a boot that compiled is discarded and repeated. It is, until one repeat of its compile group
    has shown the difference, and afterwards only if that difference was above the tolerance."""
    return not drifts or max(abs(drift) for drift in drifts) > tolerance


def about_first(timelines: Sequence[Mapping[str, float]]) -> str:
    """One phrase about the first boots that were discarded."""
    drifts = first_drifts(timelines)
    if not drifts:
        return "none was discarded"
    most = max(abs(drift) for drift in drifts)
    return f"{len(drifts)} discarded: the KV cache of the next boot differed by up to {most:.1%}"


def settles(
    launches: Sequence[tuple[Sequence[str], Mapping[str, float]]], argv: Sequence[str]
) -> bool | None:
    """Whether a boot of these arguments that compiles is discarded and repeated; None: `serve` decides.

    `launches` are (argv, timeline) of the study. Only those of the same compile group count, because the
    memory that compiling takes depends on the shapes that are compiled.
    """
    alike = [timeline for words, timeline in launches if compile_group(words) == compile_group(argv)]
    return None if boots_again(first_drifts(alike)) else False


def compile_group(argv: Sequence[str]) -> tuple[str, ...]:
    """The arguments that decide which code is compiled: all but those that make limits changeable."""
    at = argv.index(LIMITS_CLASS) if LIMITS_CLASS in argv else len(argv)
    return tuple(argv[:at])


def kv_drift(now: int | None, earlier: Sequence[int | None], *, tolerance: float = 0.01) -> float | None:
    """By which share the KV cache differs from earlier boots of the same configuration, if that is above
    the tolerance: such measurements are not comparable. None if they agree or no earlier boot is known."""
    known = [tokens for tokens in earlier if tokens]
    if not now or not known:
        return None
    usual = median(known)
    drift = (now - usual) / usual
    return drift if abs(drift) > tolerance else None


def cache_root(
    home: Path, *, version: str, platform: str, gpu_name: str | None, command: tuple[str, ...]
) -> Path:
    """The folder in which launches of this engine build on this card keep what they compiled."""
    build = hashlib.sha256("\0".join((version, platform, gpu_name or "", *command)).encode()).hexdigest()[:12]
    path = home / "compile-cache" / f"{version}-{build}"
    path.mkdir(parents=True, exist_ok=True)
    (path / CACHE_MARK).touch()
    return path


def cache_environment(path: Path, engine: str = "vllm") -> dict[str, str]:
    """The variables that make an engine of that kind keep its compiled code there."""
    return {name: str(path / folder) for name, folder in adapter_of(engine).compile_cache.items()}


def _ours(env: Mapping[str, str], engine: str) -> Path | None:
    """The root of a launch's compile cache, None if we did not make it."""
    root = next((name for name, folder in adapter_of(engine).compile_cache.items() if not folder), "")
    where = Path(env.get(root) or "")
    return where if (where / CACHE_MARK).exists() else None


@contextmanager
def claimed_cache(env: Mapping[str, str], engine: str = "vllm") -> Iterator[dict[str, str]]:
    """Lock the compile cache of a launch, because two writers damage it. A launch that finds it locked gets a
    second cache beside it. Yields the variables to lay over `env`; none if the tuner did not make it."""
    where = _ours(env, engine)
    if where is None:
        yield {}
        return
    number = 1
    while True:
        path = Path(where if number == 1 else f"{where}-{number}")
        path.mkdir(exist_ok=True)
        with (path / CACHE_MARK).open("a") as mark:
            try:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                number += 1
                continue
            yield cache_environment(path, engine)
            return


def wipe_cache(env: Mapping[str, str], engine: str = "vllm") -> bool:
    """Empty the compile cache of a launch, if it is one of ours. Returns whether it was."""
    where = _ours(env, engine)
    if where is None:
        return False
    for entry in where.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
    return True
