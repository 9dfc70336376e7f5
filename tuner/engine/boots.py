"""What earlier boots of a node tell about the next: how long to wait, how large a KV cache to expect."""

import re
from collections.abc import Sequence
from statistics import median

CEILING_S = 3600.0
FLOOR_S = 60.0
UNKNOWN_S = 900.0
_COMPILED = re.compile(r"Compiling a graph for|torch\.compile takes")
_LOADED = re.compile(r"Directly load (?:the|AOT)")


def ready_deadline(ready_s: Sequence[float], *, ceiling_s: float = CEILING_S) -> float:
    """Seconds to wait for the next launch: three times the median of this node's own, within 60 s and the
    ceiling; 900 s (or the ceiling) while there are fewer than three."""
    if len(ready_s) < 3:
        return min(UNKNOWN_S, ceiling_s)
    return min(ceiling_s, max(FLOOR_S, 3.0 * median(ready_s)))


def compiled_anew(log: str) -> bool:
    """Whether this boot compiled code that was not in the cache (its KV cache may come out smaller)."""
    return _COMPILED.search(log) is not None and _LOADED.search(log) is None


def kv_drift(now: int | None, earlier: Sequence[int | None], *, tolerance: float = 0.01) -> float | None:
    """Relative difference of the KV cache to earlier boots of the same configuration, when beyond the
    tolerance: measurements of those boots are not comparable. None when it agrees or nothing is known."""
    known = [tokens for tokens in earlier if tokens]
    if not now or not known:
        return None
    usual = median(known)
    drift = (now - usual) / usual
    return drift if abs(drift) > tolerance else None
