"""A month of a fleet: thirty nights of six nodes for each seed, and forty planted faults (`make test-month`,
`make test-sabotage`).
"""

import os
from pathlib import Path

import pytest

from tests.lived import rates
from tests.lived.life import live
from tests.lived.sabotage import SABOTAGES, Sabotage, caught, story

NIGHTS = int(os.environ.get("TUNER_TEST_NIGHTS", "30"))
SEEDS = [int(each) for each in os.environ.get("TUNER_TEST_SEEDS", "7,8").split(",")]
"""`make test-month` takes new ones; a failure names its seed in the test's id."""

MISSABLE = 4
"""Of the planted faults so many may go unnoticed."""


@pytest.mark.month
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_month_holds_every_invariant(tmp_path: Path, seed: int) -> None:
    world = live(tmp_path, seed, nights=NIGHTS, whole_every=5)
    found = {
        count.__name__: count(world) for count in (rates.regressions, rates.missed, rates.growing_regret)
    }
    print(f"seed {seed}: {len(world.nights)} nights, rates {found}")
    assert all(each.holds or each.bad <= 1 for each in found.values()), (seed, found)


def test_the_list_of_planted_faults_is_long_enough() -> None:
    names = [each.name for each in SABOTAGES]
    assert len(names) == len(set(names)) >= 40


@pytest.mark.month
@pytest.mark.timeout(3600)
def test_the_story_holds_without_a_planted_fault(tmp_path: Path) -> None:
    story(tmp_path)


UNNOTICED = frozenset[str]()
"""Planted faults that the month is known not to notice; docs/results/month.md says why."""


@pytest.mark.month
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("planted", SABOTAGES, ids=lambda each: each.name)
def test_a_planted_fault_is_noticed(tmp_path: Path, planted: Sabotage) -> None:
    found = caught(planted, tmp_path)
    print(f"{planted.name}: {found}")
    assert (found is not None) == (planted.name not in UNNOTICED), found
    assert len(UNNOTICED) <= MISSABLE
