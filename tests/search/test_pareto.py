"""Fronts and volumes against small cases worked by hand and against brute force."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.search import world
from tuner.records import Candidate, Measurement, Slo, Trial, TrialState
from tuner.search import trial_view

PAIR = ("ttft_p95_ms", "goodput_rps")
SCALE = trial_view.scale(PAIR, [100.0, 10.0], Slo())


def measured(number: int, ttft: float, goodput: float, knobs: int = 1, **more: float) -> Trial:
    values = {"ttft_p95_ms": ttft, "goodput_rps": goodput, "slo_attainment": 1.0, **more}
    candidate = Candidate({f"knob{i}": number for i in range(knobs)})
    trial = world.trial(number, Candidate())
    return replace(trial, candidate=candidate, measurements=(Measurement(values=values),))


def test_front_holds_what_nothing_beats() -> None:
    trials = [measured(0, 100, 10), measured(1, 90, 9), measured(2, 110, 9), measured(3, 80, 8)]
    assert [t.number for t in trial_view.front(trials, PAIR)] == [0, 1, 3]


def test_front_leaves_out_screened_partial_and_unfinished() -> None:
    good = measured(0, 100, 10)
    others = [
        replace(measured(1, 1, 99), screened=True),
        replace(measured(2, 1, 99), state=TrialState.PRUNED),
        replace(measured(3, 1, 99), state=TrialState.RUNNING),
        replace(measured(4, 1, 99), measurements=(Measurement(values={"ttft_p95_ms": 1.0}),)),
        replace(measured(5, 1, 99), state=TrialState.ABORTED),
    ]
    assert trial_view.front([good, *others], PAIR) == (good,)


def test_an_infinite_percentile_never_hides_a_finite_one() -> None:
    trials = [measured(0, math.inf, 10), measured(1, 90, 9)]
    assert {t.number for t in trial_view.front(trials, PAIR)} == {0, 1}
    assert trial_view.hypervolume([[math.inf, 10.0]], SCALE) == 0.0


def test_hypervolume_by_hand() -> None:
    width = 2.0 - 50 / 100
    height = 2.0 - 1 / 2
    assert trial_view.hypervolume([[50.0, 20.0]], SCALE) == pytest.approx(width * height)
    assert trial_view.hypervolume([], SCALE) == 0.0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=8))
def test_volume_is_the_count_of_dominated_cells(rows: list[tuple[int, int, int]]) -> None:
    costs = np.array(rows, dtype=np.float64)
    cells = np.array(np.meshgrid(*[np.arange(6)] * 3)).reshape(3, -1).T
    brute = sum(bool(np.any(np.all(costs <= cell, axis=1))) for cell in cells)
    assert trial_view.volume(costs, np.full(3, 6.0)) == pytest.approx(brute)
