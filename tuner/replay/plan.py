"""How thoroughly to measure (Plan), what to send (Load), and which rows are sent when: load warm-up, window
and tail as one stream on absolute times.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInput
from tuner.records import Slice, Slo
from tuner.traffic import slices
from tuner.traffic.trace import STATUSES, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how often is measured, and which replay is believed."""

    name: str
    """What the study file calls it."""
    slices: int
    """how many slices `slices: auto` takes for the search"""
    slice_s: float
    """seconds of a slice that `slices: auto` takes"""
    repeats: int
    """how often the confirmation launches each configuration at first"""
    most_repeats: int
    """how often at most, while the answer is open"""
    finalists: int = 2
    """how many candidates the confirmation measures beside the baseline"""
    warmup_waves: int
    """waves of warm-up requests at most"""
    warmup_requests: int
    """requests in a wave"""
    warmup_agreement: float = 0.2
    """the warm-up ends when the median TTFT of two waves differs by no more than this share"""
    warmup_limit_s: float
    """seconds of warm-up at most"""
    warmup_tokens: int
    """tokens that a warm-up request answers"""
    priming_turnovers: float
    """how often priming fills the KV cache, counted in tokens"""
    priming_limit_s: float
    """seconds of priming at most"""
    priming_concurrency: int = 16
    """priming requests at once"""
    load_warmup_s: float
    """seconds of recorded traffic that are sent before a slice is measured"""
    tail_limit_s: float
    """seconds that requests of a slice may take after its end"""
    scrape_s: float = 1.0
    """seconds between two readings of the engine's metrics"""
    lateness_ms: float = 5.0
    """requests may be sent so many milliseconds late (p99) …"""
    lateness_share: float = 0.05
    """… or this share of the median TTFT, whichever is more"""
    completion_mismatch: float = 0.005
    """share of the answers that may have another length than the trace says"""
    sender_cpu: float = 0.8
    """share of a core that the busiest sender may use"""
    attribution: float = 0.3
    """share of the search\'s GPU-seconds for finding out which knobs pay; 0: the run does not do this"""
    demonstration: bool = False
    """Do not act on its numbers."""

    @property
    def most(self) -> int:
        """How often each configuration of a confirmation is launched at most."""
        return max(self.repeats, self.most_repeats)


PLANS: Mapping[str, Plan] = MappingProxyType(
    {
        "quick": Plan(
            name="quick", slices=1, slice_s=3.0, repeats=2, most_repeats=3, finalists=1, demonstration=True,
            attribution=0.0,
            warmup_waves=2, warmup_requests=4, warmup_tokens=4, warmup_limit_s=1.0,
            priming_turnovers=0.25, priming_limit_s=0.5,
            load_warmup_s=0.5, tail_limit_s=5.0, scrape_s=0.25,
            lateness_ms=100.0, lateness_share=0.25, sender_cpu=0.95,
        ),
        "brief": Plan(
            name="brief", slices=1, slice_s=10.0, repeats=3, most_repeats=6,
            warmup_waves=2, warmup_requests=4, warmup_tokens=4, warmup_limit_s=2.0,
            priming_turnovers=0.25, priming_limit_s=1.0,
            load_warmup_s=0.5, tail_limit_s=10.0, scrape_s=0.5,
            lateness_ms=50.0, lateness_share=0.1, sender_cpu=0.95,
        ),
        "standard": Plan(
            name="standard", slices=3, slice_s=60.0, repeats=3, most_repeats=6,
            warmup_waves=5, warmup_requests=64, warmup_tokens=16, warmup_limit_s=120.0,
            priming_turnovers=1.0, priming_limit_s=180.0,
            load_warmup_s=20.0, tail_limit_s=90.0,
        ),
        "thorough": Plan(
            name="thorough", slices=3, slice_s=300.0, repeats=5, most_repeats=8,
            warmup_waves=8, warmup_requests=256, warmup_tokens=32, warmup_limit_s=600.0,
            priming_turnovers=1.5, priming_limit_s=900.0,
            load_warmup_s=60.0, tail_limit_s=300.0,
        ),
    }
)  # fmt: skip

Causality = Literal["open", "session", "live"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent: seed, number and repeat make the prompts' salt.

    `speed` 2.0 sends the same rows twice as fast. `kv_tokens` is the largest KV capacity among the candidates
    (None: this engine's). `deadline_s` None = max(60 s, 4 × the SLO's E2E limit). `history`: open = every row
    at its recorded time, session = a turn waits for its parent's answer and the think time, live = session,
    and the prompt carries the tokens that the engine answered. `isolated` skips the lock of the host.
    `realtime` asks the kernel for real-time priority of the senders; the report says whether it was granted.
    """

    seed: int
    number: int
    repeat: int = 0
    speed: float = 1.0
    model: str
    vocabulary: int
    slo: Slo = field(default_factory=Slo)
    deadline_s: float | None = None
    kv_tokens: int | None = None
    history: Causality = "open"
    senders: int = 1
    cores: tuple[int, ...] | None = None
    isolated: bool = False
    realtime: bool = False

    @property
    def deadline(self) -> float:
        """Seconds after its scheduled time at which a request counts as failed."""
        if self.deadline_s is not None:
            return self.deadline_s
        return max(60.0, 4 * (self.slo.e2e_ms or 0.0) / 1000)


# Requests of one slice with what goes before and after it; more is a slip of the pen.
MOST = 1_000_000

# Prompt kinds of a schedule's rows (`bodies.Bodies`), by the sign of their filler.
KINDS = {0: "", -1: "filler before", 1: "filler after"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SendSchedule:
    """Rows and when they are due, seconds after the window's start (negative: load warm-up), ascending.

    `measured[k]` = inside the window [0, window_s) by scheduled arrival. `filler[k]` = a row borrowed from
    elsewhere with other tokens, because the trace has nothing there: -1 before its start, 1 after its end.
    """

    window_s: float
    rows: NDArray[np.int64]
    at_s: NDArray[np.float64]
    measured: NDArray[np.bool_]
    filler: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.rows)


def check_size(trace: Trace, part: Slice, *, speed: float, around_s: float) -> None:
    """BadInput where a slice and the seconds before and after its window come to more than MOST requests."""
    count = len(slices.rows(trace, part)) * (1 + around_s * speed / part.duration_s)
    if count > MOST:
        raise BadInput(
            f"slice {part.name} at speed {speed:g}, with {around_s:g} s of traffic before and after it, has"
            f" {count:.3g} requests, at most {MOST:,} can be replayed: use a lower speed, or a shorter plan"
        )


def schedule(trace: Trace, part: Slice, *, speed: float, warmup_s: float, tail_s: float) -> SendSchedule:
    """The rows of a slice with real traffic before and after it.

    The traffic before the window shares its prefixes as recorded. Where the trace begins or ends too early,
    rows of the slice itself are sent as filler. BadInput if that is more than MOST requests.
    """
    check_size(trace, part, speed=speed, around_s=warmup_s + tail_s)
    window = part.duration_s / speed
    at = (trace.arrival_s - part.start_s) / speed
    usable = trace.input_len > 0
    inside = (at >= 0) & (at < window) & usable
    around = (at >= -warmup_s) & (at < window + tail_s) & usable & ~inside
    rows = np.flatnonzero(inside | around)
    pieces = [(rows, at[rows], inside[rows], np.zeros(len(rows), np.int8))]
    own = np.flatnonzero(inside)
    first, last = (float(at[0]), float(at[-1])) if len(at) else (0.0, 0.0)
    if first > -warmup_s and warmup_s > 0:
        stop = min(0.0, first)
        pieces += _filler(own, at[own], (-warmup_s, stop), window, -1)
    if last < window + tail_s and tail_s > 0:
        pieces += _filler(own, at[own], (max(window, last), window + tail_s), window, 1)
    joined = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    order = np.argsort(joined[1], kind="stable")
    return SendSchedule(
        window_s=window,
        rows=joined[0][order].astype(np.int64),
        at_s=joined[1][order],
        measured=joined[2][order],
        filler=joined[3][order],
    )


def _filler(
    own: NDArray[np.int64], at: NDArray[np.float64], span: tuple[float, float], window: float, sign: int
) -> list[tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_], NDArray[np.int8]]]:
    """The slice's own rows, repeated over [start, stop)."""
    start, stop = span
    pieces = []
    shift = np.floor(start / window) * window
    while shift < stop and len(own) and window > 0:
        moved = at + shift
        kept = (moved >= start) & (moved < stop)
        count = int(kept.sum())
        pieces.append((own[kept], moved[kept], np.zeros(count, bool), np.full(count, sign, np.int8)))
        shift += window
    return pieces


def priming_rows(trace: Trace, part: Slice, *, before_s: float, tokens: float) -> NDArray[np.int64]:
    """Rows before the load warm-up, in order, that bring `tokens` prompt tokens (fewer at the start)."""
    stop = int(np.searchsorted(trace.arrival_s, part.start_s - before_s, side="left"))
    lengths = trace.input_len[:stop].astype(np.int64)
    behind = np.cumsum(lengths[::-1])
    count = min(stop, int(np.searchsorted(behind, tokens, side="left")) + 1) if tokens > 0 else 0
    rows = np.arange(stop - count, stop, dtype=np.int64)
    return rows[trace.input_len[rows] > 0]


def warmup_rows(trace: Trace, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Rows for engine warm-up: the longest prompt first, then evenly through the lengths."""
    ranked = rows[np.argsort(-trace.input_len[rows].astype(np.int64), kind="stable")]
    if len(ranked) == 0:
        return ranked
    return ranked[np.linspace(0, len(ranked) - 1, count).round().astype(np.int64)]


def cancel_after(trace: Trace, row: int) -> float | None:
    """Seconds after its arrival at which the recorded client hung up; None when it did not."""
    if STATUSES[int(trace.status[row])] != "cancelled":
        return None
    after = float(trace.obs_e2e_s[row])
    return after if after >= 0 else None


def lineage(
    trace: Trace, timetable: SendSchedule, *, waits: bool = True
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per position: that of the parent turn in the same timetable (-1: none), and of the root turn. Without
    `waits` no turn waits for another: none has a parent.
    """
    own = np.flatnonzero(timetable.filler == 0)
    place = dict(zip(timetable.rows[own].tolist(), own.tolist(), strict=True))
    parents = np.full(len(timetable), -1, np.int64)
    roots = np.arange(len(timetable), dtype=np.int64)
    for position in own.tolist() if waits else ():
        parent = place.get(int(trace.parent[timetable.rows[position]]), -1)
        if 0 <= parent < position:
            parents[position] = parent
            roots[position] = roots[parent]
    return parents, roots
