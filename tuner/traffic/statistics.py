"""What a trace is like: rates, burstiness, lengths, concurrency, reuse; and what follows for the knobs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tuner.records import JSON
from tuner.traffic.advice import advise
from tuner.traffic.reuse import reuse_by_capacity
from tuner.traffic.structure import new_tokens, prefers_live_history
from tuner.traffic.trace import STATUSES, Trace

PERCENTILES = (1, 10, 50, 90, 95, 99, 100)
WINDOWS_S = (1, 10, 60)
CAPACITIES = (100_000, 400_000, 1_600_000, 6_400_000, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTimes:
    """A rough time per request where the trace did not observe one: seconds per input and output token."""

    prefill_s: float = 1 / 8000
    decode_s: float = 0.025


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The numbers of `trace show`. `dispersion`: variance / mean of arrival counts (1 = Poisson) per window.

    `concurrency` are time-weighted percentiles of requests in flight; `concurrency_source` says from what.
    `reuse` maps KV tokens ("any" = unlimited) to the share of input tokens found; None: no block ids known.
    `new_tokens` is what each turn adds to the conversation; None: no turns known. `total_len` is prompt and
    answer of one request together. Rates are None where all requests arrive at one moment, a peak where the
    trace is shorter than its window.
    """

    requests: int
    duration_s: float
    request_rps: float | None
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    peak_rps: Mapping[str, float | None]
    arrival_cv: float | None
    dispersion: Mapping[str, float | None]
    input_len: Mapping[str, float]
    output_len: Mapping[str, float]
    total_len: Mapping[str, float]
    max_tokens: Mapping[str, float] | None
    concurrency: Mapping[str, float]
    concurrency_source: str
    observed_ttft_ms: Mapping[str, float] | None
    observed_e2e_ms: Mapping[str, float] | None
    statuses: Mapping[str, int]
    clients: int
    sessions: int
    multi_turn_share: float
    new_tokens: Mapping[str, float] | None
    prefers_live_history: bool
    priorities: Mapping[str, int]
    parallel_share: float
    beam_share: float
    adapters: int
    block_size: int
    reuse: Mapping[str, float] | None
    observed_cached_share: float | None
    resolution_s: float
    quality: Mapping[str, JSON] = field(default_factory=dict)
    advice: tuple[str, ...] = ()

    def as_json(self) -> dict[str, JSON]:
        """All fields as plain JSON."""
        return cast(dict[str, JSON], asdict(self) | {"advice": list(self.advice)})


def describe(trace: Trace, *, service: ServiceTimes | None = None, speed: float = 1.0) -> Statistics:
    """Every number, for the trace replayed at `speed`."""
    arrival, span = trace.arrival_s / speed, trace.duration_s / speed
    in_flight, source = concurrency(trace, service or ServiceTimes(), speed)
    reuse = _reuse(trace)
    known_cached, added = trace.obs_cached >= 0, new_tokens(trace)
    numbers = Statistics(
        requests=len(trace),
        duration_s=trace.duration_s / speed,
        request_rps=len(trace) / span if span else None,
        input_tokens_per_s=float(trace.input_len.sum(dtype=np.int64)) / span if span else None,
        output_tokens_per_s=float(trace.output_len.sum(dtype=np.int64)) / span if span else None,
        peak_rps={f"{window}s": _peak(arrival, window) for window in WINDOWS_S},
        arrival_cv=_cv(np.diff(arrival)),
        dispersion={f"{window}s": dispersion(arrival, window) for window in WINDOWS_S},
        input_len=percentiles(trace.input_len),
        output_len=percentiles(trace.output_len),
        total_len=percentiles(trace.input_len.astype(np.int64) + trace.output_len),
        max_tokens=_known(trace.max_tokens, trace.max_tokens >= 0),
        concurrency=in_flight,
        concurrency_source=source,
        observed_ttft_ms=_known(trace.obs_ttft_s * 1e3, ~np.isnan(trace.obs_ttft_s)),
        observed_e2e_ms=_known(trace.obs_e2e_s * 1e3, ~np.isnan(trace.obs_e2e_s)),
        statuses={name: int((trace.status == code).sum()) for code, name in enumerate(STATUSES)},
        clients=len(np.unique(trace.client[trace.client >= 0])),
        sessions=len(np.unique(trace.session[trace.session >= 0])),
        multi_turn_share=_share(trace.parent >= 0),
        new_tokens=_known(added, added >= 0),
        prefers_live_history=prefers_live_history(trace),
        priorities={str(one): int((trace.priority == one).sum()) for one in np.unique(trace.priority)},
        parallel_share=_share(trace.n > 1),
        beam_share=_share(trace.beam > 0),
        adapters=len(np.unique(trace.lora[trace.lora >= 0])),
        block_size=trace.block_size,
        reuse=reuse,
        observed_cached_share=_cached_share(trace) if known_cached.any() else None,
        resolution_s=cast(float, trace.meta.get("resolution_s", 0.0)),
        quality=cast(Mapping[str, JSON], trace.meta.get("quality", {})),
    )
    return replace(numbers, advice=advise(numbers))


def percentiles(values: NDArray[np.generic]) -> dict[str, float]:
    """mean and p1 ... p100, linear interpolation; empty when there is no value."""
    if not len(values):
        return {}
    found = np.percentile(values.astype(np.float64), PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(values.astype(np.float64).mean()), **named}


def dispersion(arrival_s: NDArray[np.float64], window_s: float) -> float | None:
    """Variance / mean of arrival counts in whole windows; None with fewer than two windows."""
    counts = _counts(arrival_s, window_s)
    if len(counts) < 2 or not counts.mean():
        return None
    return float(counts.var() / counts.mean())


def in_flight(
    trace: Trace, service: ServiceTimes, speed: float = 1.0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(edges in seconds, requests in flight after each edge) of the whole trace."""
    took = service_times(trace, service)
    starts = trace.arrival_s / speed
    times = np.concatenate([starts, starts + took])
    steps = np.concatenate([np.ones(len(starts), np.int64), -np.ones(len(starts), np.int64)])
    order = np.lexsort((steps, times))
    return times[order], np.cumsum(steps[order])


def service_times(trace: Trace, service: ServiceTimes) -> NDArray[np.float64]:
    """Seconds each request was in the engine: observed where known, else estimated from its lengths."""
    estimate = trace.input_len * service.prefill_s + trace.output_len * service.decode_s
    return np.asarray(np.where(np.isnan(trace.obs_e2e_s), estimate, trace.obs_e2e_s))


def concurrency(trace: Trace, service: ServiceTimes, speed: float = 1.0) -> tuple[dict[str, float], str]:
    """Time-weighted percentiles of requests in flight while requests arrive, and the source of times.

    Where all arrive at one moment, the time until the last one has ended counts.
    """
    if len(trace) < 2:
        return {}, "none"
    times, level = in_flight(trace, service, speed)
    until = np.append(times[1:], times[-1])
    end = trace.duration_s / speed or float(times[-1])
    inside = np.clip(until, None, end) - np.clip(times, None, end)
    order = np.argsort(level, kind="stable")
    weight = np.cumsum(inside[order])
    found = {}
    for percent in PERCENTILES:
        place = np.searchsorted(weight, weight[-1] * percent / 100)
        found[f"p{percent}"] = float(level[order][min(int(place), len(level) - 1)])
    found["p100"] = float(level.max())
    mean = float((level * inside).sum() / max(inside.sum(), 1e-12))
    known = _share(~np.isnan(trace.obs_e2e_s))
    source = (
        "observed" if known == 1 else "estimated" if known == 0 else f"{known:.0%} observed, rest estimated"
    )
    return {"mean": mean, **found}, source


def _reuse(trace: Trace) -> dict[str, float] | None:
    if not len(trace.blocks):
        return None
    found = reuse_by_capacity(trace, CAPACITIES)
    return {"any" if size is None else str(size): share for size, share in found.items()}


def _counts(arrival_s: NDArray[np.float64], window_s: float) -> NDArray[np.int64]:
    whole = int(arrival_s[-1] // window_s) if len(arrival_s) else 0
    inside = arrival_s[arrival_s < whole * window_s]
    return np.bincount((inside / window_s).astype(np.int64), minlength=whole).astype(np.int64)


def _peak(arrival_s: NDArray[np.float64], window_s: float) -> float | None:
    counts = _counts(arrival_s, window_s)
    return float(counts.max() / window_s) if len(counts) else None


def _cv(gaps: NDArray[np.float64]) -> float | None:
    return float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else None


def _known(values: NDArray[np.generic], known: NDArray[np.bool_]) -> dict[str, float] | None:
    return percentiles(values[known]) if known.any() else None


def _share(mask: NDArray[np.bool_]) -> float:
    return float(mask.mean()) if len(mask) else 0.0


def _cached_share(trace: Trace) -> float:
    known = trace.obs_cached >= 0
    return float(trace.obs_cached[known].sum() / max(1, trace.input_len[known].sum(dtype=np.int64)))


def series(trace: Trace, *, bins: int = 240, service: ServiceTimes | None = None) -> dict[str, list[float]]:
    """What a picture of the trace is drawn from, per equal span of time: `start_s`, `request_rps`,
    `input_tokens_per_s`, `output_tokens_per_s`, and `concurrency` at the end of each span.
    """
    edges = np.linspace(0.0, max(trace.duration_s, 1e-9), bins + 1)
    span = edges[1] - edges[0]
    times, level = in_flight(trace, service or ServiceTimes())
    at = np.searchsorted(times, edges[1:], side="right") - 1
    drawn = {
        "request_rps": np.histogram(trace.arrival_s, edges)[0] / span,
        "input_tokens_per_s": np.histogram(trace.arrival_s, edges, weights=trace.input_len)[0] / span,
        "output_tokens_per_s": np.histogram(trace.arrival_s, edges, weights=trace.output_len)[0] / span,
        "concurrency": np.where(at >= 0, level[at], 0) if len(level) else np.zeros(bins),
    }
    return {"start_s": edges[:-1].tolist()} | {name: values.tolist() for name, values in drawn.items()}
