"""Noise between launches: how it is pooled, what it hides, and what is more than noise."""

import math

import numpy as np
import pytest

from tuner.tuning import significance as noise
from tuner.tuning.significance import Spread, drifted, repeats_needed, spread_of, together


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (7, 2.365), (30, 2.042)]
)
def test_students_quantile_is_the_tables(freedom: int, quantile: float) -> None:
    assert noise.student(0.975, freedom) == pytest.approx(quantile, abs=1e-3)


def test_the_spread_is_pooled_within_configurations() -> None:
    found = spread_of([[100.0, 110.0], [10.0, 11.0, 10.5], [5.0]])
    assert found.freedom == 3
    assert 0.04 < found.share < 0.08
    assert spread_of([[3.0], [7.0]]) == Spread()
    assert spread_of([[1.0, math.inf], [0.0, 2.0]]) == Spread()


def test_unknown_noise_has_no_reach_and_no_drift() -> None:
    assert Spread().reach(0.05, 3) == math.inf
    assert drifted(100.0, [200.0, 200.0], Spread()) is None
    assert repeats_needed(Spread(), alpha=0.05) is None


def test_earlier_nights_help_a_quiet_one_and_do_not_hide_a_noisy_one() -> None:
    earlier = Spread(share=0.03, freedom=20)
    quiet, noisy = Spread(share=0.03, freedom=2), Spread(share=0.2, freedom=4)
    assert together(quiet, earlier).freedom == 22
    assert together(quiet, earlier).reach(0.01, 2) < quiet.reach(0.01, 2)
    assert together(noisy, earlier) == noisy
    assert together(Spread(), earlier) == earlier
    assert together(quiet, Spread()) == quiet


def test_a_noisier_node_needs_more_repeats_for_ten_per_cent() -> None:
    needed = [repeats_needed(Spread(share=s, freedom=6), alpha=0.01, arms=3) for s in (0.01, 0.03, 0.1)]
    assert all(n is not None for n in needed)
    assert needed == sorted(needed, key=lambda n: n or 0)
    assert needed[0] is not None and needed[0] <= 3  # noqa: PT018
    assert repeats_needed(Spread(share=0.5, freedom=6), alpha=0.01) is None


@pytest.mark.parametrize("speed", [0.6, 0.75, 1.4])
def test_a_machine_of_another_speed_is_drift(speed: float) -> None:
    again = [100.0 / speed, 101.0 / speed, 99.0 / speed]
    found = drifted(100.0, again, Spread(share=0.02, freedom=6), metrics=3)
    assert found == pytest.approx(1 / speed - 1, abs=0.02)


@pytest.mark.parametrize(("before", "share"), [(110.0, 0.01), (130.0, 0.1)])
def test_less_than_fifteen_per_cent_or_three_times_the_noise_is_no_drift(before: float, share: float) -> None:
    assert drifted(before, [100.0, 100.0, 100.0], Spread(share=share, freedom=6)) is None


@pytest.mark.parametrize("share", [0.03, 0.1, 0.2])
@pytest.mark.parametrize(("repeats", "arms"), [(2, 2), (3, 3)])
def test_at_most_two_of_a_hundred_nights_without_drift_are_marked(
    share: float, repeats: int, arms: int
) -> None:
    """Three objectives whose noise is independent: the hardest case for a rule that marks any of them."""
    rng, nights = np.random.default_rng(7), 1000
    marked = 0
    for _ in range(nights):
        hit = False
        for _ in range(3):
            rows = np.exp(share * rng.standard_normal((arms, repeats)))
            spread = spread_of(rows.tolist())
            before = math.exp(share * rng.standard_normal())
            hit |= drifted(before, rows[0].tolist(), spread, metrics=3) is not None
        marked += hit
    assert marked <= 0.02 * nights
