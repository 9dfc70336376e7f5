"""The traffic that a configuration is held against: the busiest requests of a trace, or a steady rate."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInput
from tuner.measures import many
from tuner.records import Slice, Slo
from tuner.replay.plan import PLANS
from tuner.simulator.predict import Scene
from tuner.traffic.trace import Trace, build

MOST = 2000
"""Requests that are simulated."""
DEADLINE_S = 600.0
"""A simulated request counts as failed after so many seconds."""
_PLAN = replace(PLANS["standard"], load_warmup_s=0.0, tail_limit_s=0.0, priming_turnovers=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LintTraffic:
    """What is simulated, and in words what it is."""

    trace: Trace
    about: str


def window(arrival_s: NDArray[np.float64], most: int = MOST) -> tuple[int, int]:
    """The first row, and the one after the last, of the `most` successive requests that arrive within the
    shortest time. BadInput where there is no request.
    """
    if not len(arrival_s):
        raise BadInput("--trace: it has no request")
    count = min(most, len(arrival_s))
    start = int(np.argmin(arrival_s[count - 1 :] - arrival_s[: len(arrival_s) - count + 1]))
    return start, start + count


def busiest(trace: Trace, most: int = MOST) -> LintTraffic:
    """The `most` successive requests that arrive within the shortest time. BadInput: an empty trace."""
    return part(trace.take(np.arange(*window(trace.arrival_s, most))), len(trace))


def part(cut: Trace, whole: int) -> LintTraffic:
    """The busiest requests, already cut out of a trace that has `whole`."""
    which = f"the busiest {len(cut):,} of " if len(cut) < whole else "all " * (whole > 1)
    rate = len(cut) / max(cut.duration_s, 1e-9)
    return LintTraffic(
        trace=cut,
        about=f"{which}{many(whole, 'request', ',.0f')} ({cut.duration_s:,.0f} s, {rate:.3g} a second)",
    )


def steady(rate: float, inputs: int, outputs: int, count: int = MOST) -> LintTraffic:
    """Poisson arrivals at `rate` a second for a minute or more, at most `count`, all of one size, always the
    same ones. No prompt repeats another.
    """
    count = int(min(count, max(200, rate * 120)))
    gaps = np.random.default_rng(0).exponential(1 / rate, count)
    columns = {
        "arrival_s": np.cumsum(gaps),
        "input_len": np.full(count, inputs),
        "output_len": np.full(count, outputs),
    }
    about = f"{count:,} requests of {inputs:,} + {outputs:,} tokens, {rate:g} a second on average (Poisson)"
    return LintTraffic(trace=build(columns), about=about)


def p95s(values: Mapping[str, float]) -> str:
    """p95 TTFT, TPOT and E2E in words; infinite ones come from requests that are never answered."""
    if not np.isfinite(values.get("e2e_p95_ms", np.inf)):
        return f"more than one request in 20 gets no answer in {DEADLINE_S:.0f} s"
    return ", ".join(
        f"p95 {n.upper()} {values.get(f'{n}_p95_ms', 0):,.0f} ms" for n in ("ttft", "tpot", "e2e")
    )


def dealt(traffic: Trace, copies: int) -> Trace:
    """What one of several copies gets when requests are dealt in turns."""
    return traffic if copies < 2 else traffic.take(np.arange(0, len(traffic), copies))


def with_traffic(scene: Scene, trace: Trace, slo: Slo) -> Scene:
    """The scene with a trace as its one slice, every request measured to its end."""
    whole = Slice(name="busiest", start_s=0.0, duration_s=trace.duration_s + 1e-3)
    return replace(scene, trace=trace, slices=(whole,), plan=_PLAN, slo=slo, cut=False, deadline_s=DEADLINE_S)
