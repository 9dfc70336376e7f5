"""Which windows of a trace are replayed: by hand or chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInput, nearest
from tuner.records import Slice
from tuner.traffic.trace import Trace

_KEYS = ("name", "start_s", "duration_s", "held_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
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


def choose(
    trace: Trace,
    how: Literal["auto"] | Sequence[Mapping[str, object]],
    *,
    limits: Limits | None = None,
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
                f"slices: '{how}' is not known{nearest(how, ['auto'])}; 'auto' or a list of windows"
            )
        return _auto(trace, limits or Limits())
    if not how:
        raise BadInput("slices: the list is empty; give windows or 'auto'")
    chosen = tuple(_by_hand(trace, given, place) for place, given in enumerate(how))
    names = [one.name for one in chosen]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(f"slices: the name '{twice}' occurs twice")
    if all(one.held_out for one in chosen):
        raise BadInput("slices: all are held out; at least one must be measured")
    return chosen


def rows(trace: Trace, window: Slice) -> NDArray[np.int64]:
    """Row indices that arrive in [start_s, start_s + duration_s), ascending."""
    edges = [window.start_s, window.start_s + window.duration_s]
    first, last = np.searchsorted(trace.arrival_s, edges, side="left")
    return np.arange(first, last, dtype=np.int64)


def _by_hand(trace: Trace, given: Mapping[str, object], place: int) -> Slice:
    if unknown := next((key for key in given if key not in _KEYS), None):
        raise BadInput(f"slices[{place}]: unknown key '{unknown}'{nearest(unknown, _KEYS)}")
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
        raise BadInput(f"slices[{place}]: 'name' is {name!r}, expected a name")
    made = Slice(name=name, start_s=numbers["start_s"], duration_s=numbers["duration_s"], held_out=held_out)
    if made.start_s > trace.duration_s:
        raise BadInput(
            f"slices[{place}]: start_s {made.start_s:g} lies beyond the end of the trace, whose last request"
            f" arrives at {trace.duration_s:g} s"
        )
    if not len(rows(trace, made)):
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


def _auto(trace: Trace, limits: Limits) -> tuple[Slice, ...]:
    if not trace.duration_s:
        which = "the only request" if len(trace) == 1 else f"all {len(trace)} requests"
        raise BadInput(
            f"slices: {which} of the trace arrive{'s' * (len(trace) == 1)} at one moment: it has no rate to"
            " replay; give a window by hand: [{start_s: 0, duration_s: SECONDS}]"
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


def _length(trace: Trace, limits: Limits, most_s: float) -> float:
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
