"""Which trial a policy picks."""

from dataclasses import replace

import pytest

from tests.search import world
from tests.search.test_pareto import PAIR, measured
from tests.search.world import OBJECTIVES
from tuner.errors import NotFound
from tuner.records import Candidate, Slo
from tuner.tuning.winner import pick


def test_slo_policy_takes_goodput_then_the_tail_then_the_simpler() -> None:
    slow = measured(0, 90, 30, slo_attainment=0.5, e2e_p95_ms=1.0)
    most = measured(1, 100, 20.0, e2e_p95_ms=900.0)
    level = measured(2, 100, 19.9, e2e_p95_ms=500.0, knobs=3)
    simple = measured(3, 100, 19.8, e2e_p95_ms=505.0, knobs=1)
    less = measured(4, 50, 15.0, e2e_p95_ms=10.0)
    members = [slow, most, level, simple, less]
    assert pick(members, "slo", Slo(attainment=0.95), PAIR) is simple
    assert pick([slow, replace(slow, number=9)], "slo", Slo(), PAIR).number == 0


def test_knee_and_weights() -> None:
    members = [measured(0, 50, 10), measured(1, 60, 19), measured(2, 110, 20)]
    assert pick(members, "knee", Slo(), PAIR).number == 1
    assert pick(members, {"ttft_p95_ms": 1}, Slo(), PAIR).number == 0
    assert pick(members, {"goodput_rps": 1.0}, Slo(), PAIR).number == 2


def test_nothing_to_choose_from() -> None:
    with pytest.raises(NotFound, match="no trial"):
        pick([world.trial(0, Candidate({"block_size": 8}))], "slo", Slo(), OBJECTIVES)
