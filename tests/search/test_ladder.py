"""The ladder (M11): which level comes next, and what its table says, on known curves."""

import math
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from tuner.commands.run import LADDER_COLUMNS, ladder_table
from tuner.records import Candidate, Measurement, Trial, TrialState
from tuner.search.guides import LADDER, LADDER_KNOB, next_rung, rungs

LEVELS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)


def climbed(tail: Callable[[int], float], levels: tuple[int, ...] = LEVELS) -> list[Trial]:
    """All trials of a ladder over an engine whose tail is known."""
    trials: list[Trial] = []
    while (level := next_rung(levels, rungs(trials))) is not None:
        assert len(trials) < len(levels)
        trials.append(trial(len(trials), level, tail(level)))
    return trials


def trial(number: int, level: int, tail: float) -> Trial:
    served = math.isfinite(tail)
    values = {"e2e_p50_ms": tail / 2, "e2e_p95_ms": tail, "e2e_p99_ms": tail * 2, "kv_usage_max": 0.5,
              "goodput_rps": 3.0, "output_tokens_per_s": 90.0, "preemptions": 4.0}  # fmt: skip
    return Trial(
        id=number + 1, study_id="s", run_id="r", number=number, candidate=Candidate({LADDER_KNOB: level}),
        origin=LADDER, state=TrialState.COMPLETE if served else TrialState.INFEASIBLE,
        reason=None if served else "out of memory",
        measurements=(Measurement(values=values),) if served else (),
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip


def order(trials: list[Trial]) -> list[object]:
    return [t.candidate[LADDER_KNOB] for t in trials]


def test_M11_it_doubles_until_the_tail_worsens_and_then_bisects() -> None:
    """As a translation service did it: 8 is good, 16 best, 32 worse."""
    trials = climbed(lambda n: 4000 / n if n <= 16 else 250 * (1 + (n - 16) / 16))
    assert order(trials) == [1, 2, 4, 8, 16, 32, 24]
    best = min(rungs(trials), key=lambda rung: rung.tail)
    assert best.level == 16


def test_M11_a_best_level_between_two_doublings_is_found() -> None:
    trials = climbed(lambda n: 100 + abs(n - 24) * 10)
    assert order(trials) == [1, 2, 4, 8, 16, 32, 64, 24]


def test_M11_a_level_that_did_not_serve_is_worse() -> None:
    trials = climbed(lambda n: math.inf if n > 12 else 1000 / n)
    assert order(trials) == [1, 2, 4, 8, 16, 12]
    assert ladder_table(trials)[-1][-1] == "out of memory"


def test_M11_it_goes_on_while_small_levels_do_not_serve_and_ends_at_the_top() -> None:
    assert order(climbed(lambda n: math.inf if n < 8 else 1000 / n)) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert order(climbed(lambda n: 1000 / n, (3, 5, 7))) == [3, 7]
    assert climbed(lambda n: 1.0, ()) == []


def test_M11_the_table_tells_each_rung() -> None:
    rows = ladder_table(climbed(lambda n: 4000 / n if n <= 16 else 250 * (1 + (n - 16) / 16)))
    assert [row[0] for row in rows] == [1, 2, 4, 8, 16, 24, 32]
    assert rows[4][1:] == (125.0, 250.0, 500.0, 3.0, 90.0, 50.0, 4.0, "lowest p95")
    assert [row[-1] for row in rows[5:]] == ["worse by more than 10%"] * 2
    assert len(rows[0]) == len(LADDER_COLUMNS)


@pytest.mark.parametrize("origin", ["baseline", "gp"])
def test_M11_only_rungs_are_on_the_ladder(origin: str) -> None:
    from dataclasses import replace

    assert rungs([replace(trial(0, 8, 10.0), origin=origin)]) == ()
