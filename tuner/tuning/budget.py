"""What a run may spend: N trial numbers (the baseline's included), and 2 N launches beside them."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tuner.engine.boots import FIRST_S
from tuner.errors import Aborted
from tuner.history.store import Store
from tuner.records import Launch, Run, RunState, Trial
from tuner.tuning.study import Clock

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


def hours_left(store: Store, study_id: str, hours: float | None, now: datetime) -> float | None:
    """What is left of a run's hours: those that its engines ran before it was interrupted are spent."""
    open_runs = [run for run in store.runs(study_id) if run.state is RunState.RUNNING]
    if hours is None or not open_runs:
        return hours
    begun = open_runs[0].started_at
    ours = [each for each in store.launches(study_id) if each.started_at >= begun]
    spent = sum(max(0.0, ((each.ended_at or now) - each.started_at).total_seconds()) for each in ours)
    return max(hours - spent / 3600, 1 / 3600)


def steady(clock: Clock) -> Clock:
    """A clock that goes on from now on at an even pace, whatever is done to the host's meanwhile."""
    begun, mark = clock(), time.monotonic()
    return lambda: begun + timedelta(seconds=time.monotonic() - mark)
