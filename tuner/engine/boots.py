"""What earlier boots of a node tell about the next: how long to wait, how large a KV cache to expect."""

import re
from collections.abc import Mapping, Sequence
from statistics import median

CEILING_S = 3600.0
FLOOR_S = 60.0
UNKNOWN_S = 900.0
ENOUGH = 3
"""Launches whose median tells how long the next one takes."""
FIRST_DRIFT, FIRST_S = "first_kv_drift", "first_ready_s"
"""Where a launch's timeline keeps what its first boot differed by (a share), and when that one was ready."""
LIMITS_CLASS = "--scheduler-cls"
"""The first of the arguments that the tuner adds of its own accord."""
_COMPILED = re.compile(r"Compiling a graph for|torch\.compile takes")
_LOADED = re.compile(r"Directly load (?:the|AOT)")


def ready_deadline(ready_s: Sequence[float], *, ceiling_s: float = CEILING_S) -> float:
    """Seconds to wait for the next launch: three times the median of this node's own, within 60 s and the
    ceiling; 900 s (or the ceiling) while there are fewer than three."""
    if len(ready_s) < ENOUGH:
        return min(UNKNOWN_S, ceiling_s)
    return min(ceiling_s, max(FLOOR_S, 3.0 * median(ready_s)))


def compiled_anew(log: str) -> bool:
    """Whether this boot compiled code that was not in the cache (its KV cache may come out smaller)."""
    return _COMPILED.search(log) is not None and _LOADED.search(log) is None


def first_drifts(timelines: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """How much a KV cache differed after a first boot from the next one's, by launches that did both."""
    return tuple(drift for each in timelines if (drift := each.get(FIRST_DRIFT)) is not None)


def boots_again(drifts: Sequence[float], *, tolerance: float = 0.01) -> bool:
    """Whether a boot that compiled anew is thrown away, by what earlier ones of its group differed by: until
    one has shown what that changes, and ever after where it changed more than the tolerance."""
    return not drifts or max(abs(drift) for drift in drifts) > tolerance


def about_first(timelines: Sequence[Mapping[str, float]]) -> str:
    """One phrase on the first boots that were thrown away."""
    drifts = first_drifts(timelines)
    if not drifts:
        return "none was thrown away"
    most = max(abs(drift) for drift in drifts)
    return f"{len(drifts)} thrown away: the KV cache of the next boot differed by up to {most:.1%}"


def settles(
    launches: Sequence[tuple[Sequence[str], Mapping[str, float]]], argv: Sequence[str]
) -> bool | None:
    """Whether a boot of these arguments that compiles anew is thrown away; None: as the engine room does.

    `launches` are (argv, timeline) of the study. Only those of the same compile group tell: what compiling
    takes of the memory differs from one shape to another.
    """
    alike = [timeline for words, timeline in launches if compile_group(words) == compile_group(argv)]
    return None if boots_again(first_drifts(alike)) else False


def compile_group(argv: Sequence[str]) -> tuple[str, ...]:
    """What decides which code is compiled: every argument but the class that changes limits."""
    at = argv.index(LIMITS_CLASS) if LIMITS_CLASS in argv else len(argv)
    return tuple(argv[:at])


def kv_drift(now: int | None, earlier: Sequence[int | None], *, tolerance: float = 0.01) -> float | None:
    """Relative difference of the KV cache to earlier boots of the same configuration, when beyond the
    tolerance: measurements of those boots are not comparable. None when it agrees or nothing is known."""
    known = [tokens for tokens in earlier if tokens]
    if not now or not known:
        return None
    usual = median(known)
    drift = (now - usual) / usual
    return drift if abs(drift) > tolerance else None
