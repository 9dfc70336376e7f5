"""What stands behind a trial: charts of its outcomes (cumulative latencies with bands, a replay over time),
and the log of its engine, as far as it is on this host.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tuner import masking
from tuner.engine import failures
from tuner.errors import BadInput
from tuner.measures import many
from tuner.metrics import CANCELLED, LATENCY_MS, counted, resampled, ttft_ms
from tuner.records import Launch, Measurement, Outcome, SliceMeasurement, Trial, of_attribution
from tuner.replay import outcomes
from tuner.report.board import Board
from tuner.report.charts import Axis, Curve, Panel, curves, panels, shared
from tuner.report.words import knobs
from tuner.search.trial_view import is_number
from tuner.settings import under_home

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
    """The outcomes of a slice, None if their file is not on this host."""
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


def _rounds(found: Measurement) -> str:
    """What the launches of one confirmation of a trial share: their folders' names without the repeat."""
    return "-".join(found.folder.split("-")[:-2])


def samples(trial: Trial) -> list[PassLatencies]:
    """The passes of the newest confirmation (without any, of an attribution); the last pass of the search for
    a trial that was not measured again.
    """
    every = [m for m in trial.measurements if m.purpose == "confirm"]
    every = [m for m in every if not of_attribution(m.folder)] or every
    again = [m for m in every if _rounds(m) == _rounds(every[-1])]
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
        name = f"trial {trial.label}" + (f" ({known})" if own else "")
        found.append(Named(name=name, kind=known if own else next(others), trial=trial))
    return found


def latencies(shown: Sequence[Named]) -> list[tuple[str, str]]:
    """(caption, drawing) per latency: what share of requests was at least so fast, per trial."""
    found = [(each, passes) for each in shown if (passes := samples(each.trial))]
    if not found:
        return []
    return [(_caption(kind, [p for _, p in found]), _latency(found, kind)) for kind in LATENCY_MS]


def _caption(kind: str, found: Sequence[Sequence[PassLatencies]]) -> str:
    counts = [len(passes) for passes in found]
    repeats = max(counts)
    span = f"{min(counts)} to {repeats}" if min(counts) < repeats else f"{repeats}"
    told = f"Bands span {span} repeats." if repeats > 1 else "Bands: 95 %, bootstrap over blocks of 10 s."
    if repeats == 1 and all(band(passes, kind, np.array([1.0])) is None for passes in found):
        told = "No bands: there is only one replay, and it is shorter than 50 s."
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
    words = ("seconds since the slice began", "the replay over time")
    return [
        (caption, panels([together(p) for p in drawn], words[0], span, words[1]))
        for caption, _, drawn in found
    ]


def strips(rows: Sequence[Outcome], window_s: float, engine: Mapping[str, Sequence[float]]) -> list[Panel]:
    """Arrivals, first tokens, requests in flight, and the engine's own numbers if they were kept."""
    edges = np.linspace(0.0, window_s, BINS + 1)
    span = window_s / BINS
    arrivals = np.histogram([o.scheduled_s for o in rows], edges)[0] / span
    ok = [o for o in rows if o.ok and o.first_token_s is not None]
    waiting = _level([(o.scheduled_s, _end(o, o.first_token_s, window_s)) for o in rows], edges[1:])
    answering = _level([(o.first_token_s or 0.0, _end(o, o.last_token_s, window_s)) for o in ok], edges[1:])
    return [
        Panel(name="arrivals (requests/s)", style="bars", x=edges[:-1].tolist(), y=arrivals.tolist()),
        Panel(
            name="ttft (ms) at the time when the request was due; × failed", style="dots", log=True,
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
    "preemptions": ("preemptions since the slice began", 1.0, "four"),
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


LAST = 64 * 1024
"""How many bytes from the end are looked at for the last lines."""


def log_path(trial: Trial, launches: Sequence[Launch]) -> Path:
    """Where the log of a trial's engine lies, if it does. A screened trial shares its engine with others; one
    that was not measured (yet) has the log in its own folder, or in that of the engine that ran meanwhile.
    """
    by = trial.measurement.launch_id if trial.measurement else None
    found = next((each.directory for each in launches if each.id == by), None)
    path = under_home(found or trial.directory or "") / "engine.log"
    if found is None and not path.is_file():
        newest = _meanwhile(trial, launches)
        if newest is not None and newest.directory:
            return under_home(newest.directory) / "engine.log"
    return path


def _meanwhile(trial: Trial, launches: Sequence[Launch]) -> Launch | None:
    """The last engine that ran while a trial did."""
    until = trial.ended_at or datetime.max.replace(tzinfo=UTC)
    found = [
        each
        for each in launches
        if each.started_at <= until and (each.ended_at is None or each.ended_at >= trial.started_at)
    ]
    return max(found, key=lambda each: each.started_at, default=None)


def to_screen(trial: Trial, launches: Sequence[Launch]) -> str:
    """For a trial that was not measured (yet): the larger engine in which it is to be screened. Empty for
    other trials.
    """
    launch = _meanwhile(trial, launches) if trial.measurement is None else None
    argv = launch.argv if launch is not None else ()
    sizes = {flag: int(value) for flag, value in pairwise(argv) if value.isdecimal()}
    larger = {
        name: size
        for name, value in trial.candidate.items()
        if is_number(value) and (size := sizes.get(f"--{name.replace('_', '-')}", 0)) > value
    }
    if not larger:
        return ""
    planned = "should have been" if trial.ended_at else "is to be"
    return f"It {planned} screened in an engine with {knobs(larger)}."


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log, secrets masked; none if it is not on this host."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LAST))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return masking.text(text).splitlines()[-lines:]


def root_cause(trial: Trial, path: Path) -> str:
    """The line of a failed trial's log that shows why; empty if none does."""
    if trial.cause not in failures.KINDS or not path.is_file():
        return ""
    return masking.text(failures.classify(path.read_text(errors="replace"), None, "startup").evidence)
