"""What to try first where nobody predicts: what every guide advises."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tuner.records import Candidate, Value
from tuner.search.encoding import Space, encode

LEAN: Mapping[str, Mapping[str, float]] = {
    "latency": {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "max_num_active_seqs": 64},
    "throughput": {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.95},
}
"""Knob → where the guides put it, for latency and for throughput; the nearest level is taken."""

CARDS: Mapping[str, tuple[str, ...]] = {
    "latency": ("tensor_parallel_size", "data_parallel_size"),
    "throughput": ("data_parallel_size", "tensor_parallel_size"),
}
"""Which layout is to use all cards, the first that is turned: steps split over them, or a replica on each.
The levels of a space that was restricted to a node end at its number of GPUs."""


def heuristics(
    space: Space, baseline: Candidate, known: Callable[[Candidate], str | None] = lambda candidate: None
) -> tuple[tuple[str, Candidate], ...]:
    """The latency-lean and the throughput-lean variant of the baseline, with their origin; where the space
    turns the layout, on as many cards as are not `known` to fail.
    """
    encoding = encode(space, {})
    found = []
    for name, targets in LEAN.items():
        moved: dict[str, Value] = {}
        for knob, target in targets.items():
            levels = [v for v in space.levels.get(knob, ()) if _number(v)]
            if levels:
                moved[knob] = min(levels, key=lambda v: abs(np.log(float(v or 0) / target)))
        kept = {k: v for k, v in baseline.items() if k in encoding.names}
        layouts = _layouts(space, CARDS[name])
        if moved or any(layouts):
            tried = [space.canonical(Candidate({**kept, **moved, **layout})) for layout in layouts]
            works = (candidate for candidate in tried if known(candidate) is None)
            found.append((f"heuristic: {name}", next(works, tried[-1])))
    return tuple(found)


def _layouts(space: Space, knobs: Sequence[str]) -> list[dict[str, Value]]:
    """Sizes of the first of these knobs that is turned, the largest first, all others at their smallest."""
    turned = [knob for knob in knobs if any(_number(v) for v in space.levels.get(knob, ()))]
    if not turned:
        return [{}]
    first, *others = turned
    small = {knob: next(v for v in space.levels[knob] if _number(v)) for knob in others}
    return [{first: size, **small} for size in reversed(space.levels[first]) if _number(size)]


def _number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
