"""What tuning guides advise: lean variants of the baseline, and a ladder of one knob."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.records import Candidate, Trial, TrialState, Value
from tuner.search import trial_view
from tuner.search.trial_view import Space, encode

# Knob → the value that tuning guides advise for latency and for throughput; the nearest level is taken.
LEAN: Mapping[str, Mapping[str, float]] = {
    "latency": {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "max_num_active_seqs": 64},
    "throughput": {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.95},
}

# Knobs that put all GPUs to use, in order of preference: steps split over them, or a replica on each.
# The levels of a space that was restricted to a node end at its number of GPUs.
CARDS: Mapping[str, tuple[str, ...]] = {
    "latency": ("tensor_parallel_size", "data_parallel_size"),
    "throughput": ("data_parallel_size", "tensor_parallel_size"),
}


def heuristics(
    space: Space, baseline: Candidate, known: Callable[[Candidate], str | None] = lambda candidate: None
) -> tuple[tuple[str, Candidate], ...]:
    """The latency-lean and the throughput-lean variant of the baseline, with their origin. If the space
    changes the layout, they use as many cards as are not `known` to fail.
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
    return trial_view.is_number(value) and float(value or 0) > 0


# The ladder (`sampler: ladder`) doubles one knob until p95 end-to-end time worsens, then bisects between the
# best level and the next one above, as the tuning guides advise. All other knobs stay as in the baseline.
LADDER_KNOB = "max_num_seqs"
LADDER = "ladder"
# A rung is worse when its p95 is this share above the best one's: more than the noise of one measurement.
LADDER_WORSE = 0.1
LADDER_TAIL = "e2e_p95_ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One level that was tried, and its tail in milliseconds (+inf: it did not serve the traffic)."""

    level: int
    tail: float
    trial: Trial


def rungs(trials: Sequence[Trial]) -> tuple[Rung, ...]:
    """What the ladder has tried, in the order of the levels."""
    found: dict[int, Rung] = {}
    for trial in trial_view.latest(trials):
        level = trial.candidate.get(LADDER_KNOB)
        if trial.origin == LADDER and isinstance(level, int) and trial.state is not TrialState.RUNNING:
            served = trial.measurement if trial.state is TrialState.COMPLETE else None
            values = served.values if served else {}
            found[level] = Rung(level=level, tail=values.get(LADDER_TAIL, math.inf), trial=trial)
    return tuple(found[level] for level in sorted(found))


def next_rung(levels: Sequence[int], tried: Sequence[Rung]) -> int | None:
    """The level to try next, of `levels` in ascending order; None if the ladder is at its end.

    As long as no level above the best one is worse, the next level is at least twice the highest one. Then
    it is halfway between the best level and the next higher level that was tried.
    """
    if not tried:
        return levels[0] if levels else None
    best = min(tried, key=lambda rung: (rung.tail, rung.level))
    limit = best.tail * (1 + LADDER_WORSE)
    above_best = [r for r in tried if r.level > best.level]
    if all(r.tail <= limit for r in above_best):
        top = tried[-1].level
        above = [level for level in levels if level > top]
        return next((level for level in above if level >= 2 * top), above[-1] if above else None)
    between = [level for level in levels if best.level < level < above_best[0].level]
    return between[len(between) // 2] if between else None
