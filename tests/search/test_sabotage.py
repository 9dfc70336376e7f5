"""A wrong simulator costs little: no more than a quarter over the same search without one."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.search.queue_world import LAUNCH_S, REPLAY_S, SABOTAGE, TRUTHS, Predict, Study, calibrated

pytestmark = pytest.mark.slow
SEEDS = range(3)
BUDGET = 30 * (LAUNCH_S + REPLAY_S)


def spent(sabotage: Callable[[Predict], Predict] | None) -> float:
    """GPU-seconds to 80 % of the best volume, over truths and seeds together."""
    found = 0.0
    for truth in TRUTHS.values():
        right = calibrated(truth).predict
        predict = None if sabotage is None else sabotage(right)
        for seed in SEEDS:
            found += Study(truth=truth, predict=predict, seed=seed, goal=0.8, budget=BUDGET).run()
    return found


@cache
def without_a_simulator() -> float:
    return spent(None)


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_sabotaged_simulator_costs_at_most_a_quarter_more_than_none(name: str) -> None:
    assert spent(SABOTAGE[name]) <= 1.25 * without_a_simulator()


def test_a_simulator_that_is_about_right_pays() -> None:
    assert spent(lambda right: right) <= 0.5 * without_a_simulator()
