"""What to try first: the spread of a predictor's front, and what every guide advises."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tuner.records import Candidate, Prediction, Value
from tuner.search import pareto, proposals, told
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


def predicted(
    space: Space,
    predictor: Callable[[Sequence[Candidate]], Sequence[Prediction]],
    *,
    seed: int,
    objectives: Sequence[str],
    baseline: Candidate,
    known: Callable[[Candidate], str | None],
    count: int = 4,
) -> tuple[tuple[str, Candidate], ...]:
    """Up to `count` proposals that greedily cover most of the predicted front, with their origin."""
    pool = proposals.pool(encode(space, {}), seed)
    pool = [c for c in pool if space.contains(c) and known(c) is None]
    base, *rest = predictor([baseline, *pool])
    values = [base.values.get(n, np.nan) for n in objectives]
    if not np.all(np.isfinite(values)):
        return ()
    scale = told.scale(objectives, values)
    works = [(c, p) for c, p in zip(pool, rest, strict=True) if p.feasible]
    costs = scale.costs([[p.values.get(n, np.inf) for n in objectives] for _, p in works])
    chosen: list[int] = []
    for _ in range(min(count, len(works))):
        gains = [
            pareto.volume(costs[[*chosen, i]], np.array(scale.reference)) if i not in chosen else -1.0
            for i in range(len(works))
        ]
        best = int(np.argmax(gains))
        if gains[best] <= (pareto.volume(costs[chosen], np.array(scale.reference)) if chosen else 0.0):
            break
        chosen.append(best)
    return tuple(("simulator", works[i][0]) for i in chosen)
