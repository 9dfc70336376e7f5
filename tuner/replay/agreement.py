"""Do our numbers and the engine's own agree? The same requests, told by both sides.

The engine sees a request from its arrival there to its last token; we from the send to the last byte. What
lies between is the network and the HTTP server: small, and never negative.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from tuner.metrics import tpot_ms
from tuner.replay.bodies import Bodies
from tuner.replay.fidelity import ttft_gaps_ms
from tuner.replay.jobs import Job, Sent
from tuner.replay.observe import Observer
from tuner.replay.plan import Load
from tuner.replay.prepare import EngineHandle
from tuner.replay.sender import Sender
from tuner.replay.wire import Pool
from tuner.traffic.trace import Trace

PAIRS = ("requests", "input_tokens", "output_tokens", "ttft_mean_ms", "e2e_mean_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Both sides' numbers by name, and per request the differences (ours − the engine's, ms).

    Per-request differences exist where the engine reports metrics per request (vLLM 0.30 and later with
    --enable-per-request-metrics).
    """

    ours: dict[str, float]
    engine: dict[str, float | None]
    ttft_gaps_ms: NDArray[np.float64]
    tpot_gaps_ms: NDArray[np.float64]

    def differences(self, *, relative: float = 0.05, absolute_ms: float = 10.0) -> tuple[str, ...]:
        """What does not agree. Counts must be equal; times within `relative` or `absolute_ms`."""
        found = []
        for name in PAIRS:
            ours, theirs = self.ours[name], self.engine[name]
            if theirs is None:
                continue
            slack = max(relative * theirs, absolute_ms) if name.endswith("_ms") else 0.0
            if abs(ours - theirs) > slack:
                found.append(f"{name}: we say {ours:.2f}, the engine says {theirs:.2f}")
        return tuple(found)


async def agree(server: EngineHandle, trace: Trace, load: Load) -> Agreement:
    """Send a whole trace to an otherwise idle engine and ask both sides. Raises nothing of its own."""
    bodies, pool, sent = Bodies(trace, load), Pool(server.host, server.port), list[Sent]()
    sender = Sender(pool, sent.append)
    observer = Observer(server, 1.0)
    zero = perf_counter_ns()
    await observer.scrape(zero)

    async def jobs() -> AsyncIterator[Job]:
        for row in range(len(trace)):
            yield bodies.job(row, row, float(trace.arrival_s[row]))

    start = perf_counter_ns()
    await sender.play(jobs(), start)
    await sender.settle(load.deadline)
    await sender.cut_all("not waited for")
    sender.close()
    await observer.scrape(zero)
    await pool.close()
    return _compare(sent, await observer.conclude())


def _compare(sent: list[Sent], engine: dict[str, float | None]) -> Agreement:
    answered = [s.outcome for s in sent if s.outcome.ok]
    spans = [
        (o.first_token_s - o.sent_s, o.last_token_s - o.sent_s)
        for o in answered
        if o.first_token_s is not None and o.last_token_s is not None and o.sent_s is not None
    ]
    first, last = np.array(spans or [(np.nan, np.nan)]).T * 1000
    ours = {
        "requests": float(len(answered)),
        "input_tokens": float(sum(o.input_tokens for o in answered)),
        "output_tokens": float(sum(o.output_tokens for o in answered)),
        "ttft_mean_ms": float(first.mean()),
        "e2e_mean_ms": float(last.mean()),
    }
    theirs = {
        "requests": engine.get("finished"),
        "input_tokens": engine.get("prompt_tokens"),
        "output_tokens": engine.get("generation_tokens"),
        "ttft_mean_ms": _mean_ms(engine, "ttft"),
        "e2e_mean_ms": _mean_ms(engine, "e2e"),
    }
    whole = [s for s in sent if s.outcome.ok]
    told = [s for s in whole if "mean_itl_ms" in s.engine]
    tpot = [tpot_ms(s.outcome) - s.engine["mean_itl_ms"] for s in told]
    return Agreement(ours=ours, engine=theirs, ttft_gaps_ms=ttft_gaps_ms(whole), tpot_gaps_ms=np.array(tpot))


def _mean_ms(engine: dict[str, float | None], name: str) -> float | None:
    total, count = engine.get(f"{name}_seconds_sum"), engine.get(f"{name}_seconds_count")
    return total / count * 1000 if total is not None and count else None
