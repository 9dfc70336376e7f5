"""A/A: where nothing differs but launches, a run crowns no winner; and it finds a gain that is there."""

import pytest

from benchmarks.aa import Truth, night


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.03, 0.10, 0.20])
def test_nights_without_a_difference_crown_no_winner(noise: float) -> None:
    said = [night(seed, Truth(noise)) for seed in range(6)]
    assert sum(c.winner is not None for c in said) <= 1
    assert sum(bool(c.drift) for c in said) <= 1


def test_a_gain_of_thirty_per_cent_is_found_at_three_per_cent_noise() -> None:
    said = [night(seed, Truth(0.03, gain=0.3)) for seed in range(4)]
    assert all(c.winner is not None for c in said), [c.sentence for c in said]
    assert all(c.repeats == 3 for c in said), "the answer is settled after the first rounds"
