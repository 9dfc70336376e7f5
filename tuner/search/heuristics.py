"""What to try first where nobody predicts: what every guide advises."""

from collections.abc import Mapping

import numpy as np

from tuner.records import Candidate, Value
from tuner.search.encoding import Space, encode

LEAN: Mapping[str, Mapping[str, float]] = {
    "latency": {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "max_num_active_seqs": 64},
    "throughput": {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.95},
}
"""Knob → where the guides put it, for latency and for throughput; the nearest level is taken."""


def heuristics(space: Space, baseline: Candidate) -> tuple[tuple[str, Candidate], ...]:
    """The latency-lean and the throughput-lean variant of the baseline, with their origin."""
    encoding = encode(space, {})
    found = []
    for name, targets in LEAN.items():
        moved: dict[str, Value] = {}
        for knob, target in targets.items():
            levels = [v for v in space.levels.get(knob, ()) if _number(v)]
            if levels:
                moved[knob] = min(levels, key=lambda v: abs(np.log(float(v or 0) / target)))
        kept = {k: v for k, v in baseline.items() if k in encoding.names}
        if moved:
            found.append((f"heuristic: {name}", space.canonical(Candidate({**kept, **moved}))))
    return tuple(found)


def _number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
