"""The corner of hypervolume: one for search, early stop and pictures, and fair to a winner on a real card."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.search import world
from tuner.records import Candidate, Measurement, Slo, Trial, TrialState
from tuner.search import trial_view

RECORDED = Path(__file__).parents[2] / "docs/results/h100"
STUDY_A = ("ttft_p95_ms", "e2e_p95_ms", "goodput_rps")
SLO_A = Slo(ttft_ms=5000, tpot_ms=50)


def recorded(number: int) -> Trial:
    row = json.loads((RECORDED / f"sixth-a-trial-{number}.json").read_text())
    return Trial(
        id=number + 1, study_id="a", run_id="a", number=number, candidate=Candidate(row["candidate"]),
        state=TrialState(row["state"]), origin=row["origin"], started_at=datetime(2026, 11, 27, tzinfo=UTC),
        measurements=(Measurement(values=row["measurements"][0]["values"]),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("objectives", "share"), [(STUDY_A, 0.39), (("e2e_p95_ms", "tpot_p95_ms", "goodput_rps"), 0.76)]
)
def test_study_as_confirmed_winner_on_the_h100_is_worth_volume(
    objectives: tuple[str, ...], share: float
) -> None:
    """By its own objectives it gives up time to first token, within the SLO, for end-to-end latency and
    goodput. So it covers a little more than the default, and more than four times as much by those of the
    benchmark.
    """
    trials = [recorded(number) for number in range(3)]
    scale = trial_view.scale_of(trials, objectives, SLO_A)
    assert scale is not None
    default, winner, both = (trial_view.covered(trials[a:b], scale) for a, b in ((0, 1), (1, 2), (0, 2)))
    assert (both - default) / both == pytest.approx(share, abs=0.01)
    assert winner > (1.0 if objectives is STUDY_A else 4.0) * default > 0


def test_the_corner_is_the_looser_of_the_limit_and_twice_the_baseline_and_half_its_goodput() -> None:
    names = ("ttft_p95_ms", "e2e_p99_ms", "tpot_p50_ms", "goodput_rps", "cost_per_million_tokens")
    found = trial_view.corner_of(
        names, (100.0, 9000.0, 20.0, 8.0, 0.5), Slo(ttft_ms=500, e2e_ms=10_000, tpot_ms=30)
    )
    assert found == (500.0, 18_000.0, 40.0, 4.0, 1.0)


def test_the_corner_stays_where_the_first_baseline_put_it() -> None:
    """Later repeats of the baseline and better trials do not move it; a run that begins with the baseline
    again does. A baseline of which too many requests failed sets it too.
    """
    base = world.trial(0, Candidate(), origin="baseline")
    first = trial_view.scale_of([base], world.OBJECTIVES, Slo())
    again = world.trial(2, Candidate(), origin="baseline", noise=0.3)
    better = world.trial(1, Candidate({"max_num_batched_tokens": 2048, "max_num_seqs": 128}))
    assert trial_view.scale_of([base, better, again], world.OBJECTIVES, Slo()) == first
    fresh = replace(again, run_id="a run that begins with the baseline again")
    assert trial_view.scale_of([base, better, fresh], world.OBJECTIVES, Slo()) == trial_view.scale_of(
        [fresh], world.OBJECTIVES, Slo()
    )
    failing = replace(base, state=TrialState.INFEASIBLE, cause="errors")
    assert trial_view.scale_of([failing, better], world.OBJECTIVES, Slo()) == first
    dead = replace(failing, measurements=())
    assert trial_view.scale_of([dead, better], world.OBJECTIVES, Slo()) == trial_view.scale_of(
        [better], world.OBJECTIVES, Slo()
    )
    assert trial_view.scale_of([dead], world.OBJECTIVES, Slo()) is None
