"""What a night begins with: winner, front and calibration of the one before, and of other nodes (M37).

Histories are written as runs leave them; nothing is launched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.tuning.studies import STUDY, write
from tuner.conclusions import Conclusion, Judgement
from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.records import Candidate, Measurement, RunState, Study, Trial, TrialState, Value, digest_of
from tuner.simulator.cost import Coefficients, coefficients_of
from tuner.traffic.statistics import describe, sequences_for
from tuner.tuning.next_trial import (
    StudyPredictor,
    by_concurrency,
    first_candidates,
    fronts_of,
    last_calibration,
    minimal,
    propose,
)
from tuner.tuning.study import Prepared, load

NIGHT = datetime(2026, 3, 1, 22, 0, tzinfo=UTC)
TEN = """\
about: Ten knobs for tests.
vllm: ">=0.10"
knobs:
  max_num_seqs: [4, 16, 64, 256]
  max_num_batched_tokens: [512, 2048, 8192]
  block_size: [16, 32]
  gpu_memory_utilization: [0.8, 0.9]
  watermark: [0.0, 0.05]
  scheduler_reserve_full_isl: [true, false]
  enable_chunked_prefill: [true]
  long_prefill_token_threshold: {values: [0, 512], when: {enable_chunked_prefill: true}}
  enable_prefix_caching: [true, false]
  async_scheduling: [default, false, true]
"""
EFFECTIVE: dict[str, Value] = {
    "max_num_seqs": 256, "max_num_batched_tokens": 8192, "block_size": 16, "gpu_memory_utilization": 0.9,
    "watermark": 0.0, "enable_chunked_prefill": True, "long_prefill_token_threshold": 0,
    "enable_prefix_caching": True, "async_scheduling": True, "scheduler_reserve_full_isl": True,
}  # fmt: skip
FITTED = Coefficients(compute=0.5, memory=0.7, step_s=0.004)
POINTS: tuple[dict[str, Value], ...] = (
    {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "async_scheduling": False},
    {"max_num_seqs": 16, "watermark": 0.05, "enable_prefix_caching": False},
)
"""What the search proposed of a whole space, named by what differs from the engine's own: the winner, and
another member of the front."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(f"sqlite:///{tmp_path / 'history.db'}")
    found.upgrade()
    return found


@pytest.fixture(scope="module")
def tonight(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The study of the second night: another trace than the first one's."""
    text = STUDY.replace("baseline: {max_num_seqs: 4}", "baseline: {}")
    found = load(write(tmp_path_factory.mktemp("study"), text, TEN), store=None, now=NIGHT)
    return replace(found, study=replace(found.study, created_at=NIGHT + timedelta(days=1)))


@dataclass(frozen=True)
class Night:
    """A study that was tuned before tonight."""

    study: Study
    trials: Sequence[Trial]


def night(
    store: Store, tonight: Prepared, *, name: str = "first", ended: bool = True, **changes: object
) -> Night:
    """A night as a run leaves it: a baseline, a winner and one more of the front."""
    identity = {**tonight.study.identity, "night": name}
    study = replace(tonight.study, name=name, identity=identity, created_at=NIGHT)
    study = replace(study, **changes)  # type: ignore[arg-type]
    study = store.add_study(replace(study, id=digest_of([name, study.node])))
    run = store.open_run(study.id, trials_limit=3, deadline=None, now=NIGHT, pid=1, host="h")
    rows = [({}, 900.0, 50.0), (POINTS[0], 100.0, 9.0), (POINTS[1], 90.0, 12.0)]
    for number, (knobs, ttft, tpot) in enumerate(rows):
        trial = store.start_trial(
            study_id=study.id, run_id=run.id, candidate=Candidate({**knobs, **tonight.space.inherited}),
            number=number, attempt=0, seed=number, origin="baseline" if number == 0 else "gp",
            now=NIGHT, directory=None,
        )  # fmt: skip
        values = {
            "ttft_p95_ms": ttft, "tpot_p95_ms": tpot, "goodput_rps": 1.0 + (number == 1),
            "slo_attainment": 1.0, "requests": 8.0, "failed": 0.0,
        }  # fmt: skip
        store.finish_trial(
            replace(
                trial, state=TrialState.COMPLETE, measurements=(Measurement(values=values),),
                effective={**EFFECTIVE, **knobs}, ended_at=NIGHT + timedelta(minutes=number + 1),
            )
        )  # fmt: skip
    if ended:
        summary = {"calibration": {"coefficients": FITTED.to_json(), "error": 0.1}}
        store.save_run(
            replace(run, state=RunState.FINISHED, ended_at=NIGHT + timedelta(hours=1), summary=summary),  # type: ignore[arg-type]
            Conclusion(run_id=run.id, study_id=run.study_id, at=NIGHT + timedelta(hours=1),
                       outcome=Judgement.CLEAR_WINNER, sentence="Trial 1 is better.", winner=1),
        )  # fmt: skip
    return Night(study, store.trials(study.id))


def baseline(tonight: Prepared) -> Trial:
    values = {"ttft_p95_ms": 950.0, "tpot_p95_ms": 40.0, "goodput_rps": 1.0, "requests": 8.0, "failed": 0.0}
    return Trial(
        id=1, study_id=tonight.study.id, run_id="r", number=0, candidate=tonight.baseline, origin="baseline",
        state=TrialState.COMPLETE, measurements=(Measurement(values=values),), effective=EFFECTIVE,
        started_at=NIGHT, ended_at=NIGHT,
    )  # fmt: skip


def first_proposals(tonight: Prepared, store: Store, count: int) -> list[tuple[str, Candidate]]:
    """What is measured after the baseline."""
    begun = tonight.study.created_at
    seeds = fronts_of(store, tonight, begun)
    trials, found = [baseline(tonight)], []
    for number in range(1, count + 1):
        proposed = propose(tonight, trials, seeds)
        assert proposed is not None
        found.append((proposed.origin, proposed.candidate))
        ended = replace(
            trials[0], id=number + 1, number=number, candidate=proposed.candidate, origin=proposed.origin
        )
        trials.append(replace(ended, effective={**EFFECTIVE, **proposed.candidate}))
    return found


def test_M37_a_second_night_begins_with_the_winner_and_the_front_of_the_first(
    store: Store, tonight: Prepared
) -> None:
    night(store, tonight)
    found = first_proposals(tonight, store, 2)
    assert found == [
        ("same node: first/1", Candidate(POINTS[0])),
        ("same node: first/2", Candidate(POINTS[1])),
    ]


def test_M37_two_nodes_with_ten_knobs_seed_each_other(store: Store, tonight: Prepared) -> None:
    night(store, tonight, node="other", gpu_class="another")
    night(store, tonight, node="alike")
    origins = [origin for origin, _ in fronts_of(store, tonight)]
    assert origins == [
        "node alike: first/1",
        "node alike: first/2",
        "node other: first/1",
        "node other: first/2",
    ]
    found = first_proposals(tonight, store, 2)
    assert found == [
        ("node alike: first/1", Candidate(POINTS[0])),
        ("node alike: first/2", Candidate(POINTS[1])),
    ]


def test_this_node_comes_first_and_a_node_at_work_says_nothing_yet(store: Store, tonight: Prepared) -> None:
    night(store, tonight, node="alike")
    night(store, tonight, node="at work", ended=False)
    night(store, tonight, ended=False)  # killed and never resumed
    origins = [origin for origin, _ in fronts_of(store, tonight)]
    assert [origin.partition(":")[0] for origin in origins] == ["same node"] * 2 + ["node alike"] * 2


@pytest.mark.parametrize("differs", ["model", "engine_version", "workload"])
def test_what_serves_something_else_seeds_nothing(store: Store, tonight: Prepared, differs: str) -> None:
    night(store, tonight, **{differs: "another"})  # type: ignore[arg-type]
    assert fronts_of(store, tonight) == ()


def test_what_ended_later_is_not_known_yet(store: Store, tonight: Prepared) -> None:
    night(store, tonight, node="alike")
    assert fronts_of(store, tonight, NIGHT) == ()
    assert fronts_of(store, tonight, NIGHT + timedelta(minutes=30)) == ()
    assert len(fronts_of(store, tonight, NIGHT + timedelta(hours=2))) == 2


def test_a_seed_states_what_its_engine_ran_where_tonight_s_baseline_differs(
    store: Store, tonight: Prepared
) -> None:
    """The winner left block_size to its engine; today's baseline asks for another."""
    night(store, tonight)
    today = replace(tonight, baseline=Candidate({"block_size": 32}))
    (_, first), *_ = fronts_of(store, today)
    assert first["block_size"] == 16
    base = replace(baseline(tonight), candidate=today.baseline, effective={**EFFECTIVE, "block_size": 32})
    assert minimal(today.space, [base], first)["block_size"] == 16


def test_M37_a_second_night_begins_with_the_calibration_of_the_first(store: Store, tonight: Prepared) -> None:
    assert last_calibration(store, tonight, None) is None
    night(store, tonight, node="alike", gpu_class="another")
    assert last_calibration(store, tonight, None) is None
    night(store, tonight)
    found = last_calibration(store, tonight, NIGHT + timedelta(days=1))
    assert found == FITTED
    assert last_calibration(store, tonight, NIGHT) is None
    known = StudyPredictor(prepared=tonight, start=found).calibrated((baseline(tonight),))
    fresh = StudyPredictor(prepared=tonight).calibrated((baseline(tonight),))
    assert known is not None
    assert known.calibration is not None
    assert fresh is not None
    assert fresh.calibration is not None
    assert known.calibration.coefficients != fresh.calibration.coefficients


def test_a_broken_baseline_is_predicted_by_the_last_calibration(tonight: Prepared) -> None:
    broken = replace(baseline(tonight), state=TrialState.INFEASIBLE, measurements=())
    asked = [Candidate({"max_num_seqs": 64})]
    with_it = StudyPredictor(prepared=tonight, start=FITTED).calibrated((broken,))
    without = StudyPredictor(prepared=tonight).calibrated((broken,))
    assert with_it is not None
    assert without is not None
    assert with_it.predict(asked)[0].values != without.predict(asked)[0].values


@pytest.mark.parametrize(
    "kept",
    [None, "x", {}, {**FITTED.to_json(), "step_s": "fast"}, {**FITTED.to_json(), "compute": float("inf")}],
)
def test_coefficients_that_cannot_be_read_are_none(kept: object) -> None:
    assert coefficients_of(FITTED.to_json()) == FITTED
    assert coefficients_of(kept) is None


def test_M12_the_concurrency_of_the_trace_seeds_the_search(tonight: Prepared) -> None:
    ((origin, candidate),) = by_concurrency(tonight)
    enough = sequences_for(describe(tonight.trace))
    assert enough is not None
    assert origin == f"traffic: {enough} at once are enough"
    levels = [int(v or 0) for v in tonight.space.levels["max_num_seqs"]]
    assert candidate["max_num_seqs"] == min(v for v in levels if v >= enough)
    assert "traffic" in {
        o.partition(":")[0]
        for o, _ in first_candidates(StudyPredictor(prepared=tonight), [baseline(tonight)])
    }


def test_M11_the_ladder_turns_one_knob_over_today_s_configuration(tonight: Prepared) -> None:
    """From the lowest level, doubled; a space without max_num_seqs is refused."""
    today = replace(tonight, baseline=Candidate({"block_size": 32}))
    climbs = replace(today, file=today.file.model_copy(update={"sampler": "ladder"}))
    first = propose(climbs, ())
    assert first is not None
    assert (first.origin, first.candidate) == ("baseline", climbs.baseline)
    trials = [replace(baseline(tonight), candidate=climbs.baseline)]
    for number, level in enumerate((4, 16), start=1):
        found = propose(climbs, trials)
        assert found is not None
        assert (found.origin, found.candidate) == (
            "ladder",
            Candidate({"block_size": 32, "max_num_seqs": level}),
        )
        values = {"e2e_p95_ms": 1000.0 / level}
        measured = (Measurement(values=values),)
        trials.append(
            replace(
                trials[0],
                id=number + 1,
                number=number,
                candidate=found.candidate,
                origin=found.origin,
                measurements=measured,
            )
        )


def test_M11_a_ladder_needs_the_knob_that_it_climbs(tmp_path: Path) -> None:
    path = write(tmp_path, STUDY + "sampler: ladder\n", "knobs: {block_size: [16, 32]}")
    with pytest.raises(BadInput, match="sampler: ladder changes max_num_seqs"):
        load(path, store=None, now=NIGHT)
