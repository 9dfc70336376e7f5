"""Outcomes → Measurement. Pure; the formulas are in docs/replay.md.

TTFT and E2E count from the scheduled time. A failed or cut request is +inf in percentiles and bad in goodput;
means are over the answered requests. The denominator of every rate is the window. Requests that their own
client cancelled count in nothing but the fidelity report.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.measures import MEASURES, OF_A_CLASS, STATISTICS
from tuner.records import Measurement, MeasurementKind, Outcome, Purpose, SliceMeasurement, Slo
from tuner.replay.jobs import CANCELLED, CUT
from tuner.replay.timeline import Replayed

P99_NEEDS = 1000
FloatArray = NDArray[np.float64]


def measure(
    replayed: Replayed,
    slo: Slo,
    *,
    price_per_gpu_hour: float | None = None,
    gpus: int = 1,
    extra: Mapping[str, float] | None = None,
    asked: Collection[str] = (),
    purpose: Purpose = "search",
    repeat: int = 0,
) -> Measurement:
    """Pooled over the slices, and per slice. p99 is absent under 1,000 requests unless `asked` by name.

    `extra` adds what only others know (ready_s, gpu_memory_gib ...). A curtailed replay is `partial`.
    """
    parts = [(part.outcomes, part.window_s, part.engine) for part in replayed.slices]
    pooled = fold([o for outcomes, _, _ in parts for o in outcomes], sum(w for _, w, _ in parts), slo, asked)
    pooled.update(_engine([(engine, window) for _, window, engine in parts]))
    pooled.update(_cost(pooled, price_per_gpu_hour, gpus))
    pooled.update(extra or {})
    slices = tuple(
        SliceMeasurement(
            name=part.slice.name,
            window_s=part.window_s,
            values={
                **fold(part.outcomes, part.window_s, slo, asked),
                **_engine([(part.engine, part.window_s)]),
            },
        )
        for part in replayed.slices
    )
    kind: MeasurementKind = "partial" if replayed.stopped else "full"
    return Measurement(
        values=pooled, slices=slices, kind=kind, purpose=purpose, repeat=repeat, fidelity=replayed.fidelity
    )


def fold(
    outcomes: Sequence[Outcome], window_s: float, slo: Slo, asked: Collection[str] = ()
) -> dict[str, float]:
    """The client-side numbers of the outcomes of windows that last `window_s` together, and of each class of
    requests among them (`measures.OF_A_CLASS`, as `interactive.ttft_p95_ms`).
    """
    values = _folded(outcomes, window_s, slo, asked)
    for name in sorted({each for outcome in outcomes for each in outcome.classes}):
        ours = [outcome for outcome in outcomes if name in outcome.classes]
        wanted = [metric.removeprefix(f"{name}.") for metric in asked]
        found = _folded(ours, window_s, slo, wanted)
        values |= {f"{name}.{metric}": value for metric, value in found.items() if metric in OF_A_CLASS}
    return values


def _folded(
    outcomes: Sequence[Outcome], window_s: float, slo: Slo, asked: Collection[str]
) -> dict[str, float]:
    kept = [o for o in outcomes if o.error != CANCELLED]
    answered = [o for o in kept if o.ok]
    samples = {
        "ttft": np.array([ttft_ms(o) for o in kept]),
        "tpot": _defined(np.array([tpot_ms(o) for o in kept])),
        "e2e": np.array([e2e_ms(o) for o in kept]),
    }
    values: dict[str, float] = {
        "requests": float(len(kept)),
        "failed": float(len(kept) - len(answered)),
        "unfinished": float(sum(o.error == CUT for o in kept)),
    }
    for kind, sample in samples.items():
        values.update(_statistics(kind, sample, np.ones(len(sample)), len(kept), asked))
    gaps, weights = itl_ms(kept)
    values.update(_statistics("itl", gaps, weights, len(kept), asked))
    good = sum(is_good(o, slo) for o in kept)
    if window_s > 0:
        values["goodput_rps"] = good / window_s
        values["request_rps"] = len(answered) / window_s
        values["output_tokens_per_s"] = sum(o.output_tokens for o in answered) / window_s
        values["input_tokens_per_s"] = sum(o.input_tokens for o in answered) / window_s
    if kept:
        values["slo_attainment"] = good / len(kept)
    for entry in MEASURES.values():
        if entry.compute is not None and (value := entry.compute(kept, window_s, slo)) is not None:
            values[entry.name] = value
    return values


def ttft_ms(outcome: Outcome) -> float:
    """Scheduled time → first chunk that carries a completion token; +inf when it failed."""
    if not outcome.ok or outcome.first_token_s is None:
        return math.inf
    return (outcome.first_token_s - outcome.scheduled_s) * 1000


def e2e_ms(outcome: Outcome) -> float:
    """Scheduled time → last chunk that carries a completion token; +inf when it failed."""
    if not outcome.ok or outcome.last_token_s is None:
        return math.inf
    return (outcome.last_token_s - outcome.scheduled_s) * 1000


def tpot_ms(outcome: Outcome) -> float:
    """(last − first chunk) / (tokens after the first chunk); NaN where nothing follows, +inf if failed."""
    if not outcome.ok or len(outcome.chunk_s) == 0:
        return math.inf
    later = int(outcome.chunk_tokens[1:].sum())
    if later == 0:
        return math.nan
    return float(outcome.chunk_s[-1] - outcome.chunk_s[0]) / later * 1000


def itl_ms(outcomes: Sequence[Outcome]) -> tuple[FloatArray, FloatArray]:
    """Gap of each chunk divided by its tokens, weighted by them. Tokens that a failure owes are +inf gaps."""
    gaps: list[FloatArray] = []
    weights: list[FloatArray] = []
    for outcome in outcomes:
        if outcome.ok:
            tokens = outcome.chunk_tokens[1:].astype(np.float64)
            gaps.append(np.diff(outcome.chunk_s) / tokens * 1000)
            weights.append(tokens)
        else:
            gaps.append(np.array([math.inf]))
            weights.append(np.array([float(max(1, outcome.expected_output - outcome.output_tokens))]))
    if not gaps:
        return np.empty(0), np.empty(0)
    return np.concatenate(gaps), np.concatenate(weights)


def is_good(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request met every limit. A limit on TPOT is met by an answer of one chunk."""
    if not outcome.ok:
        return False
    slo = slo.of(outcome.classes)
    checks = ((slo.ttft_ms, ttft_ms), (slo.tpot_ms, tpot_ms), (slo.e2e_ms, e2e_ms))
    return all(limit is None or not of(outcome) > limit for limit, of in checks)


def percentile(values: FloatArray, share: float, weights: FloatArray | None = None) -> float:
    """Linear interpolation between order statistics, `share` in [0, 1]; +inf once it touches a failure.

    With integer weights it equals repeating each value that often.
    """
    if len(values) == 0:
        return math.nan
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    counts = np.ones(len(values)) if weights is None else weights[order]
    upper = np.cumsum(counts)
    place = share * (upper[-1] - 1)
    low = ranked[np.searchsorted(upper, math.floor(place), side="right")]
    high = ranked[min(len(ranked) - 1, int(np.searchsorted(upper, math.ceil(place), side="right")))]
    part = place - math.floor(place)
    if part == 0 or low == high:
        return float(low)
    return float(low + (high - low) * part)


def _statistics(
    kind: str, sample: FloatArray, weights: FloatArray, requests: int, asked: Collection[str]
) -> dict[str, float]:
    values: dict[str, float] = {}
    finite = np.isfinite(sample)
    for statistic in STATISTICS:
        name = f"{kind}_{statistic}_ms"
        if statistic == "mean":
            if finite.any():
                values[name] = float(np.average(sample[finite], weights=weights[finite]))
            elif len(sample):
                values[name] = math.inf
        elif len(sample) and (statistic != "p99" or requests >= P99_NEEDS or name in asked):
            values[name] = percentile(sample, int(statistic[1:]) / 100, weights)
    return values


def _defined(sample: FloatArray) -> FloatArray:
    return sample[~np.isnan(sample)]


def _engine(parts: Sequence[tuple[Mapping[str, float | None], float]]) -> dict[str, float]:
    """Engine-side numbers of several slices: counters summed, means weighted by window, maxima maximal."""
    values: dict[str, float] = {}

    def known(name: str) -> list[tuple[float, float]]:
        return [(value, window) for engine, window in parts if (value := engine.get(name)) is not None]

    if preemptions := known("preemptions"):
        values["preemptions"] = sum(value for value, _ in preemptions)
    for name in ("kv_usage_mean", "queue_depth_mean", "batch_tokens_mean"):
        if (found := known(name)) and (total := sum(window for _, window in found)) > 0:
            values[name] = sum(value * window for value, window in found) / total
    for name in ("kv_usage_max", "queue_depth_max"):
        if found := known(name):
            values[name] = max(value for value, _ in found)
    hits, queries = known("prefix_hits"), known("prefix_queries")
    if hits and queries and (asked := sum(value for value, _ in queries)) > 0:
        values["prefix_hit_rate"] = sum(value for value, _ in hits) / asked
    return values


def _cost(values: Mapping[str, float], price: float | None, gpus: int) -> dict[str, float]:
    """Price of a million output tokens at this rate."""
    rate = values.get("output_tokens_per_s", 0.0)
    if price is None or rate <= 0:
        return {}
    return {"cost_per_million_tokens": price * gpus / 3600 / rate * 1e6}
