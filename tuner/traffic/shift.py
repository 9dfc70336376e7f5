"""What has moved between two traces: rates, lengths, mix and reuse, each with its size."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.traffic.statistics import dispersion
from tuner.traffic.structure import reuse_by_capacity
from tuner.traffic.trace import STATUSES, Trace

# A rate or length that changed by less has not moved.
MATERIAL = 0.10

# A share of requests or tokens that changed by less (of 1) has not moved.
MATERIAL_SHARE = 0.05

# Chance alone gives 3.3 standard errors once in a thousand comparisons.
_SIGMAS = 3.3

# The window in which bursts of arrivals are counted; `trace show` prints this one too.
_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """One number of two traces. `change` = (after − before) / before, for a share after − before; None where
    before is 0. `moved`: material, and more than chance explains.
    """

    name: str
    unit: str
    before: float
    after: float
    change: float | None
    moved: bool

    @property
    def sentence(self) -> str:
        """The number before and after, and the size of its change."""
        if self.unit == "share":
            return f"{self.name}: {self.before:.1%} → {self.after:.1%} of all"
        size = "" if self.change is None else f" ({self.change:+.1%})"
        return f"{self.name}: {self.before:,.4g} → {self.after:,.4g} {self.unit}{size}"


def compare(before: Trace, after: Trace) -> tuple[Shift, ...]:
    """Every number of both traces, in one order; `moved` marks those that differ. Empty traces: nothing."""
    if not len(before) or not len(after):
        return ()
    return (
        *_rates(before, after),
        *_lengths("prompt length", before.input_len, after.input_len),
        *_lengths("answer length", before.output_len, after.output_len),
        *_shares(before, after),
        *_reuse(before, after),
    )


def _rates(before: Trace, after: Trace) -> Iterator[Shift]:
    if not before.duration_s or not after.duration_s:
        return
    rates, noise = [], 0.0
    for one in (before, after):
        rate = len(one) / one.duration_s
        uneven = max(1.0, dispersion(one.arrival_s, _WINDOW_S) or 1.0)
        rates.append(rate)
        noise += uneven * rate / one.duration_s
    sure = abs(rates[1] - rates[0]) > _SIGMAS * math.sqrt(noise)
    yield _of("request rate", "requests/s", rates[0], rates[1], sure)


def _lengths(name: str, before: NDArray[np.int32], after: NDArray[np.int32]) -> Iterator[Shift]:
    """Median and p95; sure where the distributions differ by more than chance (Kolmogorov-Smirnov, 0.1 %)."""
    both = np.sort(np.concatenate([before, after]))
    ranks = [np.searchsorted(np.sort(one), both, side="right") / len(one) for one in (before, after)]
    distance = float(np.abs(ranks[0] - ranks[1]).max())
    sure = distance > 1.95 * math.sqrt((len(before) + len(after)) / (len(before) * len(after)))
    for percent in (50, 95):
        values = (float(np.percentile(before, percent)), float(np.percentile(after, percent)))
        yield _of(f"{name} p{percent}", "tokens", *values, sure)


def _shares(before: Trace, after: Trace) -> Iterator[Shift]:
    """Classes by priority, adapters, turns, parallel answers, failures: shares of requests."""
    for priority in np.union1d(before.priority, after.priority).tolist():
        yield _share(
            f"requests of priority {priority}", before.priority == priority, after.priority == priority
        )
    yield _share("requests for an adapter", before.lora >= 0, after.lora >= 0)
    yield _share("later turns of a conversation", before.parent >= 0, after.parent >= 0)
    yield _share("requests for several answers", before.n > 1, after.n > 1)
    ok = STATUSES.index("ok")
    yield _share("requests that did not end well", before.status != ok, after.status != ok)


def _reuse(before: Trace, after: Trace) -> Iterator[Shift]:
    if not len(before.blocks) or not len(after.blocks):
        return
    found = [reuse_by_capacity(one, [None])[None] for one in (before, after)]
    yield Shift(
        name="prompt tokens that a prefix cache of any size finds",
        unit="share",
        before=found[0],
        after=found[1],
        change=found[1] - found[0],
        moved=abs(found[1] - found[0]) >= MATERIAL_SHARE and min(len(before), len(after)) >= 20,
    )


def _share(name: str, before: NDArray[np.bool_], after: NDArray[np.bool_]) -> Shift:
    first, second = float(before.mean()), float(after.mean())
    pooled = (before.sum() + after.sum()) / (len(before) + len(after))
    noise = math.sqrt(pooled * (1 - pooled) * (1 / len(before) + 1 / len(after)))
    moved = abs(second - first) >= MATERIAL_SHARE and abs(second - first) > _SIGMAS * noise
    return Shift(name=name, unit="share", before=first, after=second, change=second - first, moved=moved)


def _of(name: str, unit: str, before: float, after: float, sure: bool) -> Shift:
    change = (after - before) / before if before else None
    moved = sure and (change is None or abs(change) >= MATERIAL)
    return Shift(name=name, unit=unit, before=before, after=after, change=change, moved=moved)
