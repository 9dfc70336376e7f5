"""What a run may spend: N trial numbers (the baseline's included), and 2 N launches beside them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.engine.boots import FIRST_S
from tuner.errors import Aborted
from tuner.records import Launch, Run, Trial

BESIDE = 2
"""Launches per trial number that may be retries, discarded boots and the confirmation."""


def most_launches(trials: int | None) -> float:
    """How many engines a run of so many trials may start; infinite without a limit."""
    return math.inf if trials is None else trials * (1 + BESIDE)


def numbers_of(trials: Sequence[Trial], run_id: str) -> set[int]:
    """The trial numbers that a run began, whatever became of them."""
    return {t.number for t in trials if t.run_id == run_id}


@dataclass(slots=True, kw_only=True)
class LaunchBudget:
    """Counts the engines that a run starts; the one over the limit is Aborted before it exists."""

    most: float = math.inf
    begun: int = 0

    @property
    def left(self) -> float:
        """How many more may be started."""
        return self.most - self.begun

    def take(self) -> None:
        """Count one more. Aborted (cause `budget`) when none is left."""
        if self.left < 1:
            sentence = f"the budget of {self.most:.0f} launches is spent: one per trial and two beside it"
            raise Aborted(sentence, cause="budget")
        self.begun += 1


def budget_of(run: Run, launches: Sequence[Launch]) -> LaunchBudget:
    """The budget of a run that begins or goes on, with what it started before."""
    ours = [each for each in launches if each.started_at >= run.started_at]
    begun = sum(1 + (FIRST_S in each.timeline) for each in ours)
    return LaunchBudget(most=most_launches(run.trials_limit), begun=begun)
