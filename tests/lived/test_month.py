"""A month of a fleet: thirty nights of six nodes for each seed, and forty planted faults (`make test-month`,
`make test-sabotage`).
"""

import json
import math
import os
import re
import time
from pathlib import Path

import pytest

from tests.lived import rates
from tests.lived.life import live
from tests.lived.sabotage import SABOTAGES, Sabotage, caught, story

ROOT = Path(__file__).resolve().parents[2]
NIGHTS = int(os.environ.get("TUNER_TEST_NIGHTS", "30"))
SEEDS = [int(each) for each in os.environ.get("TUNER_TEST_SEEDS", "7,8").split(",")]
"""`make test-month` takes new ones; a failure names its seed in the test's id."""

KEPT = ROOT / "build" / "month.jsonl"
"""What each seed came to; the rows to keep go into docs/results/month.jsonl."""

MISSABLE = 4
"""Of the planted faults so many may go unnoticed: a tenth."""


@pytest.mark.month
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_month_holds_every_invariant(tmp_path: Path, seed: int) -> None:
    begun = time.monotonic()
    world = live(tmp_path, seed, nights=NIGHTS, whole_every=5)
    found = {
        count.__name__: count(world) for count in (rates.regressions, rates.missed, rates.growing_regret)
    }
    told = {name: [each.bad, each.of] for name, each in found.items()}
    row = {"seed": seed, "nights": len(world.nights), "seconds": round(time.monotonic() - begun), **told}
    KEPT.parent.mkdir(exist_ok=True)
    with KEPT.open("a") as kept:
        kept.write(json.dumps(row) + "\n")
    assert all(each.holds or each.bad <= 1 for each in found.values()), (seed, found)


@pytest.mark.parametrize(
    ("before", "after", "maximized", "wanted"),
    [
        (100.0, 50.0, False, 1.0), (50.0, 100.0, False, -0.5), (math.inf, 50.0, False, math.inf),
        (50.0, math.inf, False, -1.0), (math.inf, math.inf, False, 0.0), (2.0, 3.0, True, 0.5),
        (0.0, 3.0, True, math.inf), (3.0, 0.0, True, -1.0), (0.0, 0.0, True, 0.0),
    ],
)  # fmt: skip
def test_a_true_gain_counts_what_was_never_served(
    before: float, after: float, maximized: bool, wanted: float
) -> None:
    assert rates.gain(before, after, maximized) == pytest.approx(wanted)


def test_a_later_winner_is_worse_by_goodput_and_then_by_its_slowest_requests() -> None:
    first = {"goodput_rps": 10.0, rates.E2E: 1000.0}
    assert not rates.is_worse(first, first)
    assert not rates.is_worse(first, {"goodput_rps": 12.0, rates.E2E: 2000.0})
    assert rates.is_worse(first, {"goodput_rps": 9.0, rates.E2E: 500.0})
    assert rates.is_worse(first, {"goodput_rps": 10.0, rates.E2E: 1100.0})
    assert rates.is_worse(first, {})


def test_no_rate_over_the_seeds_that_were_lived_is_above_one_in_twenty() -> None:
    """docs/results/month.jsonl has what each seed of a month came to; a seed is not taken twice."""
    lived = [json.loads(line) for line in (ROOT / "docs/results/month.jsonl").read_text().splitlines()]
    assert len({each["seed"] for each in lived}) == len(lived) > 0
    for name in ("regressions", "missed", "growing_regret"):
        total = sum((rates.Count(of=each[name][1], bad=each[name][0]) for each in lived), rates.Count())
        assert total.holds, (name, total)


def test_the_list_of_planted_faults_is_long_enough() -> None:
    names = [each.name for each in SABOTAGES]
    assert len(names) == len(set(names)) >= 40


def test_the_stories_on_the_real_clock_are_there() -> None:
    """Each of the process faults that the results name is a test; they are at least twenty."""
    told = (ROOT / "docs/results/month.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", told)
    assert len(set(named)) >= 20
    for path, name in named:
        assert re.search(rf"^ *(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (path, name)


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
