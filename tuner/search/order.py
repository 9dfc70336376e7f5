"""When to look at the baseline again."""

from collections.abc import Sequence

from tuner.records import Trial
from tuner.search import trial_view

DRIFT_EVERY = 24
"""Trials between two looks at the baseline."""


def drift_due(trials: Sequence[Trial], every: int = DRIFT_EVERY) -> bool:
    """Whether the baseline is to be measured again: `every` finished trials since it last was."""
    finished = [t for t in trial_view.latest(trials) if t.ended_at is not None]
    looks = [i for i, t in enumerate(finished) if t.is_baseline or t.origin == "drift"]
    return bool(looks) and len(finished) - 1 - looks[-1] >= every
