"""When to stop, and the words for it."""

from dataclasses import replace
from datetime import timedelta

from tests.search import world
from tests.search.world import OBJECTIVES
from tuner.records import Candidate, Measurement, Slo, Trial, TrialState
from tuner.tuning.early_stopping import reason_to_stop


def flat(length: int) -> list[Trial]:
    """A baseline and trials that are all the same to a hair."""
    base = world.trial(0, Candidate(), origin="baseline")
    assert base.measurement is not None
    rest = []
    for number in range(1, length):
        values = {n: v * (1 + 1e-6 * number) for n, v in base.measurement.values.items()}
        rest.append(replace(base, number=number, origin="tpe", measurements=(Measurement(values=values),)))
    return [base, *rest]


def test_budget_and_window() -> None:
    assert reason_to_stop([], OBJECTIVES, Slo(), done=4, limit=4) == "the budget of 4 trials is spent"
    assert reason_to_stop([], OBJECTIVES, Slo(), done=3, limit=4) is None
    said = reason_to_stop([], OBJECTIVES, Slo(), done=3, kept=1, limit=4)
    assert said == "the budget of 4 trials is spent (1 kept to relaunch screened finalists)"
    end = world.START + timedelta(minutes=10)
    early = reason_to_stop([], OBJECTIVES, Slo(), done=0, now=world.START, deadline=end, needed_s=300)
    late = reason_to_stop([], OBJECTIVES, Slo(), done=0, now=world.START, deadline=end, needed_s=601)
    assert early is None
    assert late is not None
    assert "window ends at 00:10" in late


def test_nothing_more_to_gain_stops_but_not_too_early() -> None:
    found = reason_to_stop(flat(14), OBJECTIVES, Slo(), done=14)
    assert found is not None
    assert "less than the noise" in found
    assert reason_to_stop(flat(12), OBJECTIVES, Slo(), done=12) is None


def test_a_predicted_gain_keeps_the_search_going() -> None:
    assert reason_to_stop(flat(14), OBJECTIVES, Slo(), done=14, expected_gain=lambda: 10.0) is None
    said = reason_to_stop(flat(14), OBJECTIVES, Slo(), done=14, expected_gain=lambda: 1e-6)
    assert said is not None
    assert "no other candidate is expected" in said


def test_progress_keeps_the_search_going() -> None:
    trials = flat(14)
    values = {**world.truth({"max_num_batched_tokens": 2048, "max_num_seqs": 128}).values}
    better = replace(trials[13], measurements=(Measurement(values=values),))
    assert reason_to_stop([*trials[:13], better], OBJECTIVES, Slo(), done=14) is None


def test_a_baseline_that_cannot_serve_does_not_end_the_search() -> None:
    dead = replace(flat(1)[0], state=TrialState.INFEASIBLE, measurements=())
    failing = [replace(dead, number=n, origin="tpe", cause="oom") for n in range(1, 30)]
    assert reason_to_stop([dead, *failing], OBJECTIVES, Slo(), done=30) is None
    served = [dead, *flat(14)[1:]]
    assert reason_to_stop(served, OBJECTIVES, Slo(), done=14) is not None
    values = {**world.truth({"max_num_batched_tokens": 2048, "max_num_seqs": 128}).values}
    better = replace(served[13], measurements=(Measurement(values=values),))
    assert reason_to_stop([*served[:13], better], OBJECTIVES, Slo(), done=14) is None
