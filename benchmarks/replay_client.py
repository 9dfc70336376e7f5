"""Our client in `benchmarks/replay.py`: the product's own `replay` on a trace of constant arrivals.

python -m benchmarks.replay_client PORT RATE TOKENS SECONDS PROMPT OUT.npz
"""

import dataclasses
import sys
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import uvloop

from tuner.errors import EngineError
from tuner.metrics import e2e_ms, tpot_ms, ttft_ms
from tuner.records import Slice, Value
from tuner.replay.plan import PLANS, Load
from tuner.replay.timeline import replay
from tuner.traffic import trace as traffic


class Reset:
    """The known server has no cache."""

    proved, how = True, "nothing to reset"


class Known:
    """The known server as an engine."""

    host, alive, kv_tokens = "127.0.0.1", True, None
    effective: Mapping[str, Value] = MappingProxyType({})

    def __init__(self, port: int) -> None:
        self.port = port

    async def reset_cache(self) -> Reset:
        return Reset()

    async def fault(self, phase: str) -> EngineError | None:
        return None

    kind = "vllm"

    def heard(self) -> None:
        return


def constant(rate: float, tokens: int, seconds: float, prompt: int) -> traffic.Trace:
    """A trace of requests at equal distances."""
    count = round(rate * seconds)
    columns = {name: np.full(count, unknown, kind) for name, (kind, unknown) in traffic.COLUMNS.items()}
    columns["arrival_s"] = np.arange(count) / rate
    columns["input_len"][:], columns["output_len"][:] = prompt, tokens
    return traffic.Trace(**columns, block_offsets=np.zeros(count + 1, np.int64))  # type: ignore[arg-type]


async def outcomes(port: int, rate: float, tokens: int, seconds: float, prompt: int) -> dict[str, np.ndarray]:
    """Replay; per answered request in order of sending: ttft, tpot, e2e (ms) and when it was sent."""
    plan = dataclasses.replace(
        PLANS["standard"], warmup_waves=0, load_warmup_s=0.0, tail_limit_s=20.0, scrape_s=1e9
    )
    load = Load(seed=0, number=0, model="known", vocabulary=2000, isolated=True)
    whole = Slice(name="all", start_s=0.0, duration_s=seconds)
    replayed = await replay(Known(port), constant(rate, tokens, seconds, prompt), [whole], plan, load)
    print(dict(replayed.fidelity.values), replayed.fidelity.failed)
    kept = sorted((o for o in replayed.slices[0].outcomes if o.ok), key=lambda o: o.sent_s or 0.0)
    return {
        "ttft": np.array([ttft_ms(o) for o in kept]),
        "tpot": np.array([tpot_ms(o) for o in kept]),
        "e2e": np.array([e2e_ms(o) for o in kept]),
        "started": np.array([o.sent_s or 0.0 for o in kept]),
    }


if __name__ == "__main__":
    port, rate, tokens, seconds, prompt, out = sys.argv[1:]
    found = uvloop.run(outcomes(int(port), float(rate), int(tokens), float(seconds), int(prompt)))
    np.savez(out, **found)  # type: ignore[arg-type]
