"""The numbers of one replayed request, and how a measurement name is folded from them (docs/replay.md)."""

import math

import numpy as np
from numpy.typing import NDArray

from tuner.records import Outcome, Slo

CANCELLED = "cancelled by the client, as recorded"
"""Error of a request that its own client cut; it counts in nothing."""

Array = NDArray[np.float64]


def latency_ms(outcome: Outcome, kind: str) -> float:
    """TTFT, TPOT or E2E of one request, from its scheduled time; +inf when it failed.

    NaN where the request has no such value (time per token of one chunk).
    """
    first, last = outcome.first_token_s, outcome.last_token_s
    if not outcome.ok or first is None or last is None:
        return math.inf
    if kind == "ttft":
        return (first - outcome.scheduled_s) * 1e3
    if kind == "e2e":
        return (last - outcome.scheduled_s) * 1e3
    rest = int(outcome.chunk_tokens[1:].sum())
    return (last - first) / rest * 1e3 if rest > 0 else math.nan


def is_good(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request finished within every limit that the SLO sets for it."""
    slo = slo.of(outcome.classes)
    limits = (("ttft", slo.ttft_ms), ("tpot", slo.tpot_ms), ("e2e", slo.e2e_ms))
    if not outcome.ok:
        return False
    return not any(limit is not None and latency_ms(outcome, kind) > limit for kind, limit in limits)


def fold_latency(values: Array, share: float | None) -> float:
    """Mean or percentile of the values that are not NaN; NaN of nothing, +inf once it touches a failure."""
    kept = values[~np.isnan(values)]
    if not len(kept):
        return math.nan
    if share is None:
        finite = kept[np.isfinite(kept)]
        return float(finite.mean()) if len(finite) else math.inf
    ranked = np.sort(kept)
    place = share * (len(ranked) - 1)
    low, high = ranked[math.floor(place)], ranked[math.ceil(place)]
    return float(
        low if low == high or place == math.floor(place) else low + (place - math.floor(place)) * (high - low)
    )
