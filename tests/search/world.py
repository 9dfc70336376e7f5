"""A small world with a known truth: four knobs, two ways to run out of memory, one way to be refused."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import numpy as np

from tuner.records import Candidate, Measurement, Prediction, Trial, TrialState, Value, Violation

OBJECTIVES = ("ttft_p95_ms", "tpot_p95_ms", "goodput_rps")
START = datetime(2026, 1, 1, tzinfo=UTC)
LEVELS: Mapping[str, tuple[Value, ...]] = {
    "max_num_seqs": (16, 32, 64, 128, 256, 512, 1024),
    "max_num_batched_tokens": (512, 1024, 2048, 4096, 8192, 16384),
    "gpu_memory_utilization": (0.7, 0.75, 0.8, 0.85, 0.9, 0.95),
    "block_size": (8, 16, 32),
}
DEFAULTS: Mapping[str, Value] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.9,
    "block_size": 16,
}


@dataclass(frozen=True, slots=True)
class World:
    """A space and its truth; `inactive` knobs are dropped when their switch is off."""

    levels: Mapping[str, tuple[Value, ...]] = field(default_factory=lambda: LEVELS)
    inactive: Callable[[Candidate], Sequence[str]] = lambda candidate: ()

    def contains(self, candidate: Candidate) -> bool:
        return all(k in self.levels and v in self.levels[k] for k, v in candidate.items())

    def canonical(self, candidate: Candidate) -> Candidate:
        off = set(self.inactive(candidate))
        return Candidate({k: v for k, v in candidate.items() if k not in off})


def nothing_known(candidate: Candidate) -> str | None:
    return None


def seqs_above_tokens(candidate: Candidate) -> str | None:
    """A known constraint, as knobs state them."""
    ran = {**DEFAULTS, **candidate}
    too_many = float(ran["max_num_seqs"] or 0) > float(ran["max_num_batched_tokens"] or 0)
    return "max_num_seqs above max_num_batched_tokens" if too_many else None


def truth(candidate: Mapping[str, Value]) -> Prediction:
    """Latency against goodput with an optimum inside, and memory that runs out at two ends."""
    ran = {name: float(value or 0) for name, value in {**DEFAULTS, **candidate}.items()}
    seqs, tokens, memory = ran["max_num_seqs"], ran["max_num_batched_tokens"], ran["gpu_memory_utilization"]
    oom = (memory - 0.7) * 40 + tokens / 2048 + seqs / 256 - 17.0
    kv = 1.0 - (memory - 0.66) * 12 + tokens / 30000
    if ran["block_size"] == 8:
        return Prediction(values={}, feasible=False, violation=Violation())
    if oom > 0 or kv > 0:
        return Prediction(
            values={},
            feasible=False,
            violation=Violation(kv=kv if kv > 0 else None, oom=oom if oom > 0 else None),
        )
    tpot = 10 * (1 + tokens / 1500) * (1 + seqs / 2000)
    goodput = 20 * math.exp(-0.06 * (math.log2(seqs / 96)) ** 2 - 0.08 * (math.log2(tokens / 2048)) ** 2)
    ttft = 120 * (1 + 1200 / tokens) * (1 + 60 / seqs) * (20 / goodput) / memory
    return Prediction(
        values=dict(zip(OBJECTIVES, (ttft, tpot, goodput), strict=True)), violation=Violation(kv=kv, oom=oom)
    )


def trial(
    number: int, candidate: Candidate, *, origin: str = "tpe", noise: float = 0.0, seed: int = 0
) -> Trial:
    """The finished trial of a candidate in this world."""
    expected = truth(candidate)
    rng = np.random.default_rng((seed, number))
    common = {
        "id": number + 1,
        "study_id": "s",
        "run_id": "r",
        "number": number,
        "candidate": candidate,
        "origin": origin,
        "started_at": START + timedelta(minutes=number),
        "ended_at": START + timedelta(minutes=number + 1),
        "violation": expected.violation,
        "effective": {**DEFAULTS, **candidate},
    }
    if not expected.feasible:
        cause = "block_size" if not expected.violation.oom and not expected.violation.kv else "out_of_memory"
        return Trial(state=TrialState.INFEASIBLE, cause=cause, reason="it failed", **common)  # type: ignore[arg-type]
    values = {n: v * float(np.exp(noise * rng.standard_normal())) for n, v in expected.values.items()}
    values["slo_attainment"] = min(values["goodput_rps"] / 20, 1.0)
    return Trial(state=TrialState.COMPLETE, measurements=(Measurement(values=values),), **common)  # type: ignore[arg-type]
