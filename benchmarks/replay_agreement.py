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
from pathlib import Path

import numpy as np

from benchmarks.tiny import launch, write
from tuner.engine.server import serve
from tuner.records import Slo
from tuner.replay.agreement import Agreement, agree
from tuner.replay.plan import Load
from tuner.traffic import trace as traffic
from tuner.traffic.trace import Trace

COUNT, INPUT, OUTPUT = 60, 100, 16


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
    print("| engine | req/s | TTFT ms, ours / its | E2E ms, ours / its | TTFT apart ms, p50 / p99 | within |")
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
