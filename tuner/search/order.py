"""In which order to launch, and when to look at the baseline again."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from tuner.records import Candidate, Trial
from tuner.search import trial_view

DRIFT_EVERY = 24
"""Trials between two looks at the baseline."""


def by_group(
    candidates: Sequence[Candidate],
    group: Callable[[Candidate], str],
    *,
    compile_s: float,
    late_s: float = 0.0,
) -> list[Candidate]:
    """Candidates with one compile group together.

    Moving one forward saves a compilation only where its group would else be compiled twice (a cache that
    holds one group), and costs `late_s` for each better-ranked candidate that it delays; where that is more
    than `compile_s` the given order stands.
    """
    groups = [group(c) for c in candidates]
    first = {name: groups.index(name) for name in groups}
    order = sorted(range(len(groups)), key=lambda i: (first[groups[i]], i))
    delayed = sum(max(order.index(i) - i, 0) for i in range(len(groups)))
    saved = (_switches(groups) - _switches([groups[i] for i in order])) * compile_s
    return [candidates[i] for i in order] if saved > delayed * late_s else list(candidates)


def _switches(groups: Sequence[str]) -> int:
    return sum(a != b for a, b in pairwise(groups))


def drift_due(trials: Sequence[Trial], every: int = DRIFT_EVERY) -> bool:
    """Whether the baseline is to be measured again: `every` finished trials since it last was."""
    finished = [t for t in trial_view.latest(trials) if t.ended_at is not None]
    looks = [i for i, t in enumerate(finished) if t.is_baseline or t.origin == "drift"]
    return bool(looks) and len(finished) - 1 - looks[-1] >= every
