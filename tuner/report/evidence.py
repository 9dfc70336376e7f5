"""Charts of outcomes: cumulative latencies with bands, and a replay over time."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInput
from tuner.measures import many
from tuner.metrics import CANCELLED, LATENCY_MS, counted, resampled, ttft_ms
from tuner.records import Measurement, Outcome, SliceMeasurement, Trial
from tuner.replay import outcomes
from tuner.report.board import Board
from tuner.report.charts import Axis, Curve, Panel, curves, panels, shared

NAMES = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "end to end"}
BLOCK_S = 10.0
MIN_BLOCKS = 5
RESAMPLES = 200
GRID = 120
BINS = 120
Float = NDArray[np.float64]
KINDS = ("front", "three", "four")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLatencies:
    """The outcomes of one pass: latency and scheduled time per request, seconds since its slice began."""

    scheduled_s: Float
    latency: Mapping[str, Float]


def read_slice(part: SliceMeasurement) -> list[Outcome] | None:
    """The outcomes of a slice, None where their file is not on this host."""
    if part.outcomes_file is None or not outcomes.is_here(part.outcomes_file):
        return None
    try:
        return outcomes.read(part.outcomes_file)
    except BadInput:
        return None


def _sample(measurement: Measurement) -> PassLatencies | None:
    kept: list[Outcome] = []
    offset, at = 0.0, list[float]()
    for part in measurement.slices:
        found = read_slice(part)
        if found is None:
            return None
        slice_kept = counted(found)
        kept += slice_kept
        at += [o.scheduled_s + offset for o in slice_kept]
        offset += part.window_s
    if not kept:
        return None
    latency = {kind: np.array([each(o) for o in kept]) for kind, each in LATENCY_MS.items()}
    return PassLatencies(scheduled_s=np.array(at), latency=latency)


def samples(trial: Trial) -> list[PassLatencies]:
    """The passes of the confirmation; the last pass of the search for a trial that was not measured again."""
    again = [m for m in trial.measurements if m.purpose == "confirm"]
    searched = [m for m in trial.measurements if m.purpose == "search"][-1:]
    for passes in (again, searched):
        found = [s for m in passes if (s := _sample(m)) is not None]
        if found:
            return found
    return []


def cumulative(values: Float, at: Float, weights: Float | None = None) -> Float:
    """The share of values at or below each point; failed requests (+inf) never arrive."""
    known = ~np.isnan(values)
    counts = np.ones(int(known.sum())) if weights is None else weights[known]
    order = np.argsort(values[known], kind="stable")
    upper = np.concatenate([[0.0], np.cumsum(counts[order])])
    found = upper[np.searchsorted(values[known][order], at, side="right")] / max(upper[-1], 1e-12)
    return np.asarray(found, np.float64)


def band(passes: Sequence[PassLatencies], kind: str, at: Float) -> tuple[Float, Float] | None:
    """Where the curve may lie: the span of the repeats, else 95 % of a bootstrap over blocks of 10 s.

    None for one pass shorter than five blocks.
    """
    if len(passes) > 1:
        drawn = np.array([cumulative(p.latency[kind], at) for p in passes])
        return drawn.min(axis=0), drawn.max(axis=0)
    block = (passes[0].scheduled_s // BLOCK_S).astype(np.int64)
    if not len(block) or int(block.max()) + 1 < MIN_BLOCKS:
        return None
    weights = resampled(block, RESAMPLES, np.random.default_rng(0))
    drawn = np.array([cumulative(passes[0].latency[kind], at, row) for row in weights])
    low, high = np.quantile(drawn, (0.025, 0.975), axis=0)
    return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A trial in a picture of several: its name there, and its colour (a kind of `charts.Curve`)."""

    name: str
    kind: str
    trial: Trial


def named(board: Board, trials: Iterable[Trial]) -> list[Named]:
    """Trials of one study: baseline and winner in their own colours, the others in turn."""
    others = iter(KINDS * 100)
    found = []
    for trial in trials:
        known = board.kind(trial)
        own = known in ("baseline", "winner")
        name = f"trial {trial.number}" + (f" ({known})" if own else "")
        found.append(Named(name=name, kind=known if own else next(others), trial=trial))
    return found


def latencies(shown: Sequence[Named]) -> list[tuple[str, str]]:
    """(caption, drawing) per latency: what share of requests was at least so fast, per trial."""
    found = [(each, passes) for each in shown if (passes := samples(each.trial))]
    if not found:
        return []
    return [(_caption(kind, [p for _, p in found]), _latency(found, kind)) for kind in LATENCY_MS]


def _caption(kind: str, found: Sequence[Sequence[PassLatencies]]) -> str:
    repeats = max(len(passes) for passes in found)
    told = f"Bands span {repeats} repeats." if repeats > 1 else "Bands: 95 %, bootstrap over blocks of 10 s."
    if repeats == 1 and all(band(passes, kind, np.array([1.0])) is None for passes in found):
        told = "No bands: one pass shorter than 50 s."
    return f"{NAMES[kind].capitalize()}: share of requests within this latency. {told}"


def _latency(found: Sequence[tuple[Named, list[PassLatencies]]], kind: str) -> str:
    every = np.concatenate([p.latency[kind] for _, passes in found for p in passes])
    finite = every[np.isfinite(every) & (every > 0)]
    if not len(finite):
        return curves([], Axis(name="", low=0, high=1), Axis(name="", low=0, high=1), kind)
    low, high = float(finite.min()) / 1.05, float(finite.max()) * 1.05
    log = high / low > 4
    at = np.geomspace(low, high, GRID) if log else np.linspace(low, high, GRID)
    lines = []
    for each, passes in found:
        whole = np.concatenate([p.latency[kind] for p in passes])
        edges = band(passes, kind, at)
        shared = {"x": at.tolist(), "y": (cumulative(whole, at) * 100).tolist()}
        bands = {} if edges is None else {"low": (edges[0] * 100).tolist(), "high": (edges[1] * 100).tolist()}
        lines.append(Curve(name=each.name, kind=each.kind, **shared, **bands))
    x = Axis(name=f"{kind} (ms)", low=low, high=high, log=log)
    return curves(lines, x, Axis(name="requests (%)", low=0.0, high=100.0), NAMES[kind])


def timelines(shown: Sequence[Named]) -> list[tuple[str, str]]:
    """(caption, drawing) per trial and slice of the pass that the search saw, all on the same axes."""
    found: list[tuple[str, float, list[Panel]]] = []
    for each in shown:
        searched = each.trial.measurement
        for part in searched.slices if searched else ():
            rows = read_slice(part)
            if rows:
                series = outcomes.read_series(part.outcomes_file or "")
                said = f"slice {part.name}, {part.window_s:.4g} s of replay, {many(len(rows), 'request')}"
                caption = f"{each.name.capitalize()}: {said}"
                found.append((caption, part.window_s, strips(rows, part.window_s, series)))
    span = max((window for _, window, _ in found), default=1.0)
    together = shared([strip for _, _, drawn in found for strip in drawn])
    words = ("seconds since the window began", "the replay over time")
    return [
        (caption, panels([together(p) for p in drawn], words[0], span, words[1]))
        for caption, _, drawn in found
    ]


def strips(rows: Sequence[Outcome], window_s: float, engine: Mapping[str, Sequence[float]]) -> list[Panel]:
    """Arrivals, first tokens, requests in flight, and the engine's own numbers where they were kept."""
    edges = np.linspace(0.0, window_s, BINS + 1)
    span = window_s / BINS
    arrivals = np.histogram([o.scheduled_s for o in rows], edges)[0] / span
    ok = [o for o in rows if o.ok and o.first_token_s is not None]
    waiting = _level([(o.scheduled_s, _end(o, o.first_token_s, window_s)) for o in rows], edges[1:])
    answering = _level([(o.first_token_s or 0.0, _end(o, o.last_token_s, window_s)) for o in ok], edges[1:])
    return [
        Panel(name="arrivals (requests/s)", style="bars", x=edges[:-1].tolist(), y=arrivals.tolist()),
        Panel(
            name="ttft (ms), by when the request was due; × failed", style="dots", log=True,
            x=[o.scheduled_s for o in ok], y=[ttft_ms(o) for o in ok],
            crosses=[o.scheduled_s for o in rows if not o.ok and o.error != CANCELLED],
        ),
        Panel(name="waiting for the first token (requests)", style="line", kind="baseline",
              x=edges[1:].tolist(), y=waiting.tolist()),
        Panel(name="being answered (requests)", style="line", x=edges[1:].tolist(), y=answering.tolist()),
        *engine_panels(engine),
    ]  # fmt: skip


def _end(outcome: Outcome, at: float | None, window_s: float) -> float:
    return at if at is not None else outcome.end_s if outcome.end_s is not None else window_s


def _level(spans: Sequence[tuple[float, float]], at: Float) -> Float:
    starts, ends = (np.sort([pair[side] for pair in spans]) for side in (0, 1))
    begun, over = (np.searchsorted(each, at, side="right") for each in (starts, ends))
    return (begun - over).astype(np.float64)


ENGINE = {
    "kv_usage": ("KV cache in use (%)", 100.0, "three"),
    "waiting": ("queue by the engine (requests)", 1.0, "baseline"),
    "preemptions": ("preemptions since the window began", 1.0, "four"),
}


def engine_panels(
    engine: Mapping[str, Sequence[float | None]], shown: Mapping[str, tuple[str, float, str]] = ENGINE
) -> list[Panel]:
    """What the engine said of itself: a line for each name of `shown` (name, scale, colour) that it has."""
    at = [v or 0.0 for v in engine.get("at_s", ())]
    return [
        Panel(
            name=name,
            style="line",
            kind=kind,
            x=at,
            y=[math.nan if v is None else v * scale for v in engine[key]],
        )
        for key, (name, scale, kind) in shown.items()
        if key in engine and len(engine[key]) == len(at)
    ]
