"""Our times beside the engine's own, on the same requests: the simulated engine and a real vLLM on this CPU.

    python -m benchmarks.replay_agreement --python PYTHON

PYTHON is that of the CPU build of vLLM; without it the real engine is left out. Mean TTFT and E2E by both,
and per request what ours is above the engine's (it sees a request from its arrival there to its last token).
Exits with 1 where counts differ, or times by more than 5 % and 10 ms (`Agreement.differences`).
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from benchmarks.tiny import launch, write
from tuner.engine.server import serve
from tuner.metrics import tpot_ms
from tuner.records import Slo
from tuner.replay.feeder import Bodies
from tuner.replay.fidelity import ttft_gaps_ms
from tuner.replay.plan import Load
from tuner.replay.prepare import EngineHandle, Observer
from tuner.replay.sender import Job, Sender, Sent
from tuner.replay.wire import Pool
from tuner.traffic import trace as traffic
from tuner.traffic.trace import Trace

PAIRS = ("requests", "input_tokens", "output_tokens", "ttft_mean_ms", "e2e_mean_ms")
COUNT, INPUT, OUTPUT = 60, 100, 16


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


def requests(rate: float) -> Trace:
    """Requests at a constant rate, one size."""
    columns = {name: np.full(COUNT, value, dtype=kind) for name, (kind, value) in traffic.COLUMNS.items()}
    columns["arrival_s"] = np.arange(COUNT) / rate
    columns["input_len"][:], columns["output_len"][:] = INPUT, OUTPUT
    none = np.zeros(COUNT + 1, dtype=np.int64)
    return Trace(**columns, block_size=0, block_offsets=none, blocks=none[:0])


async def told(python: str | None, rates: list[float]) -> list[Agreement]:
    """What both sides say at each rate, after one round that nobody counts."""
    with tempfile.TemporaryDirectory() as directory:
        model = write(Path(directory) / "model")
        metrics = ("--enable-per-request-metrics",) if python else ()
        async with serve(launch(python, model, Path(directory), *metrics)) as server:
            found = []
            for number, rate in enumerate([rates[0], *rates]):
                load = Load(seed=1, number=number, model="study", vocabulary=2000, isolated=True, slo=Slo())
                found.append(await agree(server, requests(rate), load))
    return found[1:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", help="of the CPU build of vLLM")
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 5.0, 10.0, 20.0])
    given = parser.parse_args()
    differences: list[str] = []
    head = "TTFT ms, ours / engine's | E2E ms, ours / engine's | difference of TTFT in ms, p50 / p99"
    print(f"| engine | req/s | {head} | within the limit |")
    print("|---|--:|--:|--:|--:|---|")
    for python in (None, given.python) if given.python else (None,):
        for rate, found in zip(given.rates, asyncio.run(told(python, given.rates)), strict=True):
            ours, its = found.ours, found.engine
            times = [f"{ours[n]:.1f} / {its[n] or np.nan:.1f}" for n in ("ttft_mean_ms", "e2e_mean_ms")]
            gaps = found.ttft_gaps_ms[np.isfinite(found.ttft_gaps_ms)]
            apart = f"{np.percentile(gaps, 50):.1f} / {np.percentile(gaps, 99):.1f}" if len(gaps) else "-"
            differences += (said := found.differences())
            kind = "vLLM" if python else "simulated"
            print(
                f"| {kind} | {rate:g} | {' | '.join(times)} | {apart} | {'no' if said else 'yes'} |",
                flush=True,
            )
    print("\n".join(differences), file=sys.stderr)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
