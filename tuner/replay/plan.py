"""How thoroughly to measure (Plan), what to send (Load), which slices of a trace are replayed, and when
each row is sent. Load warm-up, window and tail are one stream on absolute times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInput, nearest
from tuner.records import Slice, Slo
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
    """share of the search\'s GPU-seconds for finding out which knobs give the gain; 0: no attribution"""
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

    `speed` 2.0 sends the same rows twice as fast. `kv_tokens` is the largest KV capacity among the
    candidates (None: this engine's). `deadline_s` None = max(60 s, 4 × the SLO's E2E limit). `history` is
    open (every row is sent at its recorded time), session (a turn waits for its parent's answer and the
    think time) or live (like session, and the prompt contains the tokens that the engine answered).
    `isolated` skips the lock of the host. `realtime` asks the kernel for real-time priority of the senders;
    the report says whether it was granted.
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
    """BadInput if a slice and the seconds before and after its window come to more than MOST requests."""
    count = len(slice_rows(trace, part)) * (1 + around_s * speed / part.duration_s)
    if count > MOST:
        raise BadInput(
            f"slice {part.name} at speed {speed:g}, with {around_s:g} s of traffic before and after it, has"
            f" {count:.3g} requests, but at most {MOST:,} can be replayed. Use a lower speed or another plan"
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


_SLICE_KEYS = ("name", "start_s", "duration_s", "held_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceLimits:
    """How long automatically chosen slices are. The lower limits hold at the mean rate, unless `max_s` or the
    end of the trace is nearer.

    `requests` for the percentile asked (200 for p95, 1,000 for p99); `turnover_tokens` is the KV capacity
    that the input should fill once; `speed` is the replay's: d trace seconds last d / speed.
    """

    requests: int = 200
    min_s: float = 60.0
    max_s: float = 600.0
    turnover_tokens: int = 0
    slices: int = 3
    held_out: bool = True
    speed: float = 1.0


def choose_slices(
    trace: Trace,
    how: Literal["auto"] | Sequence[Mapping[str, object]],
    *,
    limits: SliceLimits | None = None,
) -> tuple[Slice, ...]:
    """The slices to replay: measured ones first, then held-out ones, each in order of their start.

    `auto`: the windows with the peak load, the median load and the most bursts, and one held out; they never
    overlap. There are fewer if the trace is too short. Each leaves traffic before it for warming up, if the
    trace has it. By hand: mappings of start_s, duration_s and, if wanted, name and held_out. BadInput names
    the slice and the key that is wrong.
    """
    if not len(trace):
        raise BadInput("slices: the trace has no request")
    if isinstance(how, str):
        if how != "auto":
            raise BadInput(
                f"slices: '{how}' is not known{nearest(how, ['auto'])}; write 'auto' or a list of slices"
            )
        return _auto(trace, limits or SliceLimits())
    if not how:
        raise BadInput("slices: the list is empty; give slices or 'auto'")
    chosen = tuple(_by_hand(trace, given, place) for place, given in enumerate(how))
    names = [one.name for one in chosen]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(f"slices: the name '{twice}' occurs twice")
    if all(one.held_out for one in chosen):
        raise BadInput("slices: all are held out; at least one must be measured")
    return chosen


def slice_rows(trace: Trace, window: Slice) -> NDArray[np.int64]:
    """Row indices that arrive in [start_s, start_s + duration_s), ascending."""
    edges = [window.start_s, window.start_s + window.duration_s]
    first, last = np.searchsorted(trace.arrival_s, edges, side="left")
    return np.arange(first, last, dtype=np.int64)


def _by_hand(trace: Trace, given: Mapping[str, object], place: int) -> Slice:
    if unknown := next((key for key in given if key not in _SLICE_KEYS), None):
        raise BadInput(f"slices[{place}]: unknown key '{unknown}'{nearest(unknown, _SLICE_KEYS)}")
    numbers = {}
    for key in ("start_s", "duration_s"):
        value = given.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise BadInput(f"slices[{place}]: '{key}' is {value!r}, expected seconds")
        numbers[key] = float(value)
    if numbers["start_s"] < 0 or numbers["duration_s"] <= 0:
        raise BadInput(f"slices[{place}]: start_s must be ≥ 0 and duration_s > 0, got {numbers}")
    held_out, name = given.get("held_out", False), given.get("name", f"slice-{place}")
    if not isinstance(held_out, bool):
        raise BadInput(f"slices[{place}]: 'held_out' is {held_out!r}, expected true or false")
    if not isinstance(name, str) or not name:
        raise BadInput(f"slices[{place}]: 'name' is {name!r}, expected a text")
    made = Slice(name=name, start_s=numbers["start_s"], duration_s=numbers["duration_s"], held_out=held_out)
    if made.start_s > trace.duration_s:
        raise BadInput(
            f"slices[{place}]: start_s {made.start_s:g} lies beyond the end of the trace, whose last request"
            f" arrives at {trace.duration_s:g} s"
        )
    if not len(slice_rows(trace, made)):
        end = numbers["start_s"] + numbers["duration_s"]
        raise BadInput(
            f"slices[{place}]: no request arrives in [{made.start_s:g}, {end:g}) s; "
            f"the trace lasts {trace.duration_s:.1f} s"
        )
    return made


@dataclass(frozen=True, slots=True)
class _Windows:
    """Every window of one length on a grid: starts, requests, load in tokens, dispersion of counts."""

    length: float
    starts: NDArray[np.float64]
    count: NDArray[np.int64]
    load: NDArray[np.float64]
    bursts: NDArray[np.float64]


def _auto(trace: Trace, limits: SliceLimits) -> tuple[Slice, ...]:
    if not trace.duration_s:
        which = "the only request" if len(trace) == 1 else f"all {len(trace)} requests"
        raise BadInput(
            f"slices: {which} of the trace arrive{'s' * (len(trace) == 1)} at one moment, so there is no rate"
            " to replay. Give a window by hand: [{start_s: 0, duration_s: SECONDS}]"
        )
    wanted = limits.slices + limits.held_out
    end = float(np.nextafter(trace.duration_s, np.inf))
    if end <= limits.min_s * limits.speed * 1.5 or len(trace) < 2 * wanted:
        return (Slice(name="whole", start_s=0.0, duration_s=max(end, 1e-3)),)
    length = _length(trace, limits, end / wanted)
    windows = _windows(trace, length, end)
    lead = min(length, max(0.0, end - wanted * length) / 2)
    free = (windows.count > 0) & (windows.starts >= lead)
    made: list[Slice] = []
    names = ["peak", "median", "bursty"][: limits.slices] + ["held-out"] * limits.held_out
    for name in names:
        best = _pick(name, windows, free)
        if best is None:
            break
        start = float(windows.starts[best])
        made.append(Slice(name=name, start_s=start, duration_s=length, held_out=name == "held-out"))
        free &= np.abs(windows.starts - start) >= length * (1 - 1e-9)
    return tuple(made)


def _length(trace: Trace, limits: SliceLimits, most_s: float) -> float:
    """Trace seconds per slice: long enough at the mean rates, at most what leaves room for all slices."""
    rate = len(trace) / max(trace.duration_s, 1e-9)
    tokens_rate = float(trace.input_len.sum(dtype=np.int64)) / max(trace.duration_s, 1e-9)
    need = max(limits.requests / rate, limits.turnover_tokens / max(tokens_rate, 1e-9))
    need = max(need, limits.min_s * limits.speed)
    return float(min(need, limits.max_s * limits.speed, most_s * 0.95))


def _windows(trace: Trace, length: float, end: float) -> _Windows:
    starts = np.arange(0.0, max(end - length, 0.0) + 1e-9, length / 8)
    if starts[-1] + length < end:
        starts = np.append(starts, end - length)
    first = np.searchsorted(trace.arrival_s, starts)
    last = np.searchsorted(trace.arrival_s, starts + length)
    tokens = np.concatenate([[0.0], np.cumsum(trace.input_len + trace.output_len.astype(np.float64))])
    bin_s = max(min(1.0, length / 20), 1e-3)
    bursts = np.zeros(len(starts))
    for place, start in enumerate(starts):
        inside = trace.arrival_s[first[place] : last[place]] - start
        counts = np.bincount((inside / bin_s).astype(np.int64), minlength=int(length / bin_s))
        bursts[place] = counts.var() / counts.mean() if len(inside) else 0.0
    return _Windows(length, starts, last - first, tokens[last] - tokens[first], bursts)


def _pick(name: str, windows: _Windows, free: NDArray[np.bool_]) -> int | None:
    """The free window that fits the name best; the earliest of equals."""
    if not free.any():
        return None
    if name == "peak":
        merit = windows.load
    elif name == "bursty":
        merit = windows.bursts
    else:
        quantile = 0.5 if name == "median" else 0.75
        merit = -np.abs(windows.load - np.quantile(windows.load[windows.count > 0], quantile))
    return int(np.argmax(np.where(free, merit, -np.inf)))
