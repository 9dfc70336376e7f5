"""What is proposed, and why it can be screened: on histories made by the predictor; nothing is launched."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.tuning.studies import write
from tuner.adapters import adapter_of
from tuner.errors import BadInput
from tuner.knobs.space import Condition
from tuner.records import Candidate, Measurement, Trial, TrialState, Value
from tuner.replay.plan import slice_rows
from tuner.search import trial_view
from tuner.search.trial_view import encode
from tuner.tuning.attempt import fits, widest
from tuner.tuning.context import RELAUNCHED, launch_cost, screens
from tuner.tuning.early_stopping import expected_gain, judge_of
from tuner.tuning.next_trial import (
    StudyPredictor,
    Suggestion,
    around,
    at_levels,
    best,
    better,
    card_for,
    first_candidates,
    minimal,
    propose,
    view_of,
)
from tuner.tuning.predicted_night import forecast
from tuner.tuning.run import summary_of
from tuner.tuning.study import Prepared, load
from tuner.tuning.winner import winner

SPACE = """\
about: Three knobs for tests, two of them limits.
vllm: ">=0.10"
knobs:
  max_num_seqs: [4, 16, 64, 256]
  max_num_batched_tokens: [512, 2048, 8192]
  block_size: [16, 32]
"""
NOW = datetime(2026, 1, 1, tzinfo=UTC)
EFFECTIVE = {"max_num_seqs": 4, "max_num_batched_tokens": 8192, "block_size": 16}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return load(write(tmp_path_factory.mktemp("study"), space=SPACE), store=None, now=NOW)


def measured(number: int, candidate: Candidate, values: dict[str, float], **more: object) -> Trial:
    plain = Trial(
        id=number + 1, study_id="s", run_id="r", number=number, candidate=candidate, started_at=NOW,
        ended_at=NOW + timedelta(seconds=30), state=TrialState.COMPLETE, gpu_seconds=30.0,
        effective={**EFFECTIVE, **candidate}, measurements=(Measurement(values=values),),
        origin="baseline" if number == 0 else "tpe",
    )  # fmt: skip
    return replace(plain, **more)  # type: ignore[arg-type]


def values(ttft: float, tpot: float = 10.0, goodput: float = 5.0, slo: float = 1.0) -> dict[str, float]:
    found = {"ttft_p50_ms": ttft / 2, "ttft_p95_ms": ttft, "tpot_p95_ms": tpot, "e2e_p95_ms": 100 * tpot}
    return {**found, "goodput_rps": goodput, "slo_attainment": slo, "requests": 8.0, "failed": 0.0}


@pytest.fixture(scope="module")
def history(prepared: Prepared) -> list[Trial]:
    """Eight trials, each what was proposed after those before it, each measured as it was predicted."""
    predictor = StudyPredictor(prepared=prepared)
    trials = [measured(0, prepared.baseline, values(900.0, slo=0.4))]
    for number in range(1, 8):
        found = propose(prepared, trials, predictor=predictor)
        assert found is not None
        known = predictor.calibrated(trials)
        assert known is not None
        (prediction,) = known.predict([found.candidate])
        trials.append(
            measured(
                number, found.candidate, dict(prediction.values), origin=found.origin, screened=number > 0
            )
        )
    return trials


def test_the_first_proposal_is_the_baseline(prepared: Prepared) -> None:
    found = propose(prepared, ())
    assert found is not None
    assert (found.origin, found.candidate) == ("baseline", prepared.baseline)


def test_every_proposal_is_a_function_of_the_history_before_it(
    prepared: Prepared, history: list[Trial]
) -> None:
    for trial in history[1:]:
        found = propose(prepared, history[: trial.number])
        assert found is not None
        assert (found.candidate, found.origin) == (trial.candidate, trial.origin)


def test_the_calibrated_simulator_proposes_first_and_the_heuristics_where_there_is_none(
    prepared: Prepared, history: list[Trial]
) -> None:
    assert history[1].origin.startswith("simulator")
    other = unpredictable(prepared)
    found = [o for o, _ in first_candidates(StudyPredictor(prepared=other), history[:1])]
    assert [o.partition(":")[0] for o in found] == ["heuristic", "heuristic", "traffic"]


def test_what_would_widen_the_relaunched_front_most_is_relaunched_now_and_then(prepared: Prepared) -> None:
    """After three screened trials; trials with a launch between them change nothing."""
    base = measured(0, prepared.baseline, values(900.0, slo=0.4))
    one = measured(1, Candidate({"max_num_seqs": 16}), values(870.0, 9.5, 5.1), screened=True)
    two = measured(2, Candidate({"max_num_seqs": 64}), values(820.0, 7.8, 5.2), screened=True)
    own = measured(3, Candidate({"block_size": 32}), values(1100.0, 12.0, 4.6))
    three = measured(4, Candidate({"max_num_seqs": 256}), values(880.0, 9.8, 5.0), screened=True)
    early, due = propose(prepared, (base, one, two, own)), propose(prepared, (base, one, two, own, three))
    assert early is not None
    assert early.origin != RELAUNCHED
    assert due is not None
    assert (due.origin, due.candidate) == (RELAUNCHED, two.candidate)
    again = measured(5, two.candidate, values(830.0, 7.9, 5.1), origin=RELAUNCHED)
    after = propose(prepared, (base, one, two, own, three, again))
    assert after is not None
    assert after.origin != RELAUNCHED


def test_what_widens_the_front_by_a_quarter_is_relaunched_at_once(prepared: Prepared) -> None:
    base = measured(0, prepared.baseline, values(900.0, slo=0.4))
    much = measured(1, Candidate({"max_num_seqs": 16}), values(800.0, 8.0, 5.5), screened=True)
    found = propose(prepared, (base, much))
    assert found is not None
    assert (found.origin, found.candidate) == (RELAUNCHED, much.candidate)


def test_where_nothing_else_is_left_what_adds_less_is_relaunched_too(prepared: Prepared) -> None:
    base = measured(0, prepared.baseline, values(900.0, slo=0.4))
    good = Candidate({"max_num_seqs": 16})
    screened = measured(1, good, values(850.0, 8.0), screened=True)
    early = propose(prepared, (base, screened))
    assert early is not None
    assert early.origin != RELAUNCHED
    trials, view = [base, screened], view_of(prepared, (base, screened))
    for point in np.ndindex(*view.encoding.sizes):
        candidate = view.encoding.candidate(point)
        if view.is_new(candidate, prepared.known_failure):
            trials.append(measured(len(trials), candidate, values(1500.0, 15.0, 3.0)))
    found = propose(prepared, trials)
    assert found is not None
    assert (found.origin, found.candidate) == (RELAUNCHED, good)
    own = measured(len(trials), good, values(850.0, 8.0), origin=RELAUNCHED)
    assert propose(prepared, [*trials, own]) is None


def test_a_lucky_screened_trial_counts_no_more_once_it_was_relaunched(prepared: Prepared) -> None:
    """Neither as a part of the front nor as one that stops others early."""
    good = Candidate({"max_num_seqs": 16})
    base = measured(0, prepared.baseline, values(900.0, slo=0.4))
    lucky = measured(1, good, values(400.0, 5.0, 9.0), screened=True)
    own = measured(2, good, values(700.0, 8.0, 6.0), origin=RELAUNCHED)
    names = prepared.study.objectives
    assert trial_view.measured((base, lucky), names) == (base, lucky)
    assert trial_view.measured((base, lucky, own), names) == (base, own)
    problem = view_of(prepared, (base, lucky, own)).problem(None)
    assert problem is not None
    assert len(problem.known) == 3  # the model of the errors still learns from both
    assert len(problem.measured) == 2
    judge = judge_of(prepared, (base, lucky, own), screened=True)
    assert judge is not None
    assert {rival.label for rival in judge.case.rivals} == {"2"}


def test_what_may_still_be_gained_is_told_by_a_trusted_predictor(
    prepared: Prepared, history: list[Trial]
) -> None:
    predictor = StudyPredictor(prepared=prepared)
    found = expected_gain(prepared, history, predictor)
    assert found is not None
    assert 0 <= found < 5
    other = unpredictable(prepared)
    assert expected_gain(other, history, StudyPredictor(prepared=other)) is None
    assert expected_gain(prepared, (), predictor) is None


def group(prepared: Prepared, candidate: Mapping[str, Value], defaults: Mapping[str, Value]) -> str:
    """Equal for candidates that one running engine can serve: all knobs but the limits, with defaults."""
    whole = encode(prepared.space, defaults).completed(candidate)
    return Candidate(
        {
            name: value
            for name, value in whole.items()
            if name not in adapter_of(prepared.facts.kind).live_knobs
        }
    ).digest


def test_one_running_engine_can_screen_all_early_proposals(prepared: Prepared, history: list[Trial]) -> None:
    groups = {group(prepared, t.candidate, trial_view.defaults_of(history)) for t in history[1:]}
    assert len(groups) == 1


def test_limits_do_not_make_a_group_and_other_knobs_do(prepared: Prepared) -> None:
    one = Candidate({"max_num_seqs": 4, "block_size": 16})
    assert group(prepared, one, {}) == group(prepared, one.with_values(max_num_seqs=64), {})
    assert group(prepared, one, {}) != group(prepared, one.with_values(block_size=32), {})
    assert group(prepared, Candidate({}), {"block_size": 32}) == group(
        prepared, one.with_values(block_size=32), {"block_size": 32}
    )


def test_the_widest_engine_has_the_largest_sizes_and_the_candidate_s_other_knobs(prepared: Prepared) -> None:
    asked = Candidate({"max_num_seqs": 4, "max_num_batched_tokens": 512, "block_size": 32})
    first = widest(prepared, asked)[0]
    assert first == Candidate({"max_num_seqs": 256, "max_num_batched_tokens": 8192, "block_size": 32})


def test_what_can_be_screened_keeps_the_best_candidate_s_other_knobs(
    prepared: Prepared, history: list[Trial]
) -> None:
    near, everything = around(prepared, best(prepared, history), history), prepared.space
    assert near.levels["block_size"] == (best(prepared, history)["block_size"],)
    assert {n: near.levels[n] for n in near.levels if n in adapter_of("vllm").live_knobs} == {
        n: everything.levels[n] for n in everything.levels if n in adapter_of("vllm").live_knobs
    }


def test_a_launch_is_proposed_if_it_is_worth_more_in_a_second(
    prepared: Prepared, history: list[Trial]
) -> None:
    """A launch and a replay take `launch_cost` times as long as the replay of a screened trial."""
    cost = launch_cost(prepared, history)
    assert cost > 2
    screened = Suggestion(candidate=Candidate({"max_num_seqs": 16}), origin="gp", seed=1, gain=0.1)
    worth = replace(screened, candidate=Candidate({"block_size": 32}), gain=0.1 * cost * 1.01)
    dear = replace(worth, gain=0.1 * cost * 0.99)
    assert better(prepared, history, [screened, worth]) == worth
    assert better(prepared, history, [screened, dear]) == screened
    assert better(prepared, history, [None, dear]) == dear
    assert better(prepared, history, [screened, None]) == screened
    assert better(prepared, history, [None, None]) is None


@pytest.mark.parametrize(("number", "whole"), [(8, False), (9, True), (10, False), (14, True)])
def test_a_sampler_that_tells_no_gain_turns_everything_now_and_then(
    prepared: Prepared, number: int, whole: bool
) -> None:
    plain = replace(prepared, file=prepared.file.model_copy(update={"sampler": "tpe"}))
    narrow = Suggestion(candidate=Candidate({"max_num_seqs": 16}), origin="tpe", seed=1)
    wide = replace(narrow, candidate=Candidate({"block_size": 32}))
    tried = [measured(n, plain.baseline, values(900.0)) for n in range(number)]
    assert better(plain, tried, [narrow, wide]) == (wide if whole else narrow)


def test_a_candidate_is_screened_only_where_a_launch_takes_longer_than_a_replay(prepared: Prepared) -> None:
    """Both as the trials took them; the baseline's launch, which compiles, does not count, but its replay."""

    def spent(number: int, candidate: Candidate, launch: float, replay: float) -> Trial:
        found = {**values(400.0), "ready_s": launch}
        return measured(number, candidate, found, ended_at=NOW + timedelta(seconds=launch + replay))

    def screened(replay: float, launch: float) -> bool:
        base = spent(0, prepared.baseline, 300.0, replay)
        return screens(prepared, [base, spent(1, Candidate({"max_num_seqs": 16}), launch, replay)])

    assert screened(replay=30.0, launch=57.0)
    assert not screened(replay=80.0, launch=57.0)
    assert screened(replay=80.0, launch=120.0)
    assert not screens(prepared, [spent(0, prepared.baseline, 300.0, 80.0)])


def test_a_proposal_says_only_what_the_engine_would_not_do_of_its_own_accord(history: list[Trial]) -> None:
    own = trial_view.defaults_of(history[:1])
    for trial in history[1:]:
        assert trial.candidate
        kept = {name for name in trial.candidate if name not in history[0].candidate}
        assert not [name for name in kept if own.get(name) == trial.candidate[name]]


def test_a_study_that_never_screened_is_searched_as_a_whole(prepared: Prepared) -> None:
    """What did nothing should have been screened; three that were not tell that nothing can be."""
    base = measured(0, prepared.baseline, values(900.0))
    tried = [measured(n, Candidate({"max_num_seqs": n}), values(900.0), screened=True) for n in range(1, 8)]
    alone = [replace(t, screened=False) for t in tried]
    assert screens(prepared, [base, *tried])
    assert not screens(prepared, [base, *alone])


def test_a_screened_trial_may_win_until_it_was_relaunched_even_in_fewer_words(prepared: Prepared) -> None:
    good = Candidate({"block_size": 16, "max_num_seqs": 64})
    base = measured(0, prepared.baseline, values(900.0))
    trials = [
        measured(1, Candidate({"max_num_seqs": 16}), values(400.0, goodput=6.0)),
        measured(2, good, values(200.0, goodput=9.0), screened=True),
    ]
    key = view_of(prepared, [base, *trials]).key
    assert winner(prepared, trials, key) == trials[1]
    short = minimal(prepared.space, [base], good)
    assert short == Candidate({"max_num_seqs": 64})
    again = [*trials, measured(3, short, values(700.0, goodput=4.0), origin=RELAUNCHED)]
    assert winner(prepared, again, key) == again[0]


def test_what_the_baseline_was_asked_for_stays(prepared: Prepared) -> None:
    base = measured(0, Candidate({"max_num_seqs": 4}), values(900.0))
    asked = Candidate({"max_num_seqs": 4, "block_size": 16, "max_num_batched_tokens": 512})
    assert minimal(prepared.space, [base], asked) == Candidate(
        {"max_num_seqs": 4, "max_num_batched_tokens": 512}
    )


def test_a_default_that_follows_other_knobs_is_not_taken_from_the_baseline(prepared: Prepared) -> None:
    """512 captured tokens are the baseline's own, but not those of an engine with 16 sequences."""
    levels = {**prepared.space.levels, "max_cudagraph_capture_size": (None, 512, 2048)}
    space, base = replace(prepared.space, levels=levels), measured(0, Candidate(), values(900.0))
    base = replace(base, effective={**base.effective, "max_cudagraph_capture_size": 512})
    asked = Candidate({"max_num_seqs": 16, "max_cudagraph_capture_size": 512})
    assert minimal(space, [base], asked) == asked
    assert "max_cudagraph_capture_size" not in trial_view.defaults_of([base])


def test_what_turns_another_knob_on_is_said_though_the_engine_does_it_anyway(prepared: Prepared) -> None:
    condition: dict[str, Condition] = {
        "max_num_batched_tokens": {"block_size": (16,)},
        "block_size": {"max_num_seqs": (4, 16)},
    }
    space = replace(prepared.space, conditions=condition)
    base = measured(0, Candidate(), values(900.0))
    asked = Candidate({"max_num_seqs": 4, "block_size": 16, "max_num_batched_tokens": 512})
    assert minimal(space, [base], asked) == asked
    assert space.canonical(minimal(space, [base], asked)) == asked
    assert minimal(space, [base], Candidate({"max_num_seqs": 16, "block_size": 16})) == Candidate(
        {"max_num_seqs": 16}
    )


def test_the_judge_knows_the_baseline_and_the_plan(prepared: Prepared, history: list[Trial]) -> None:
    assert judge_of(prepared, (), screened=True) is None
    judge = judge_of(prepared, history, screened=True)
    assert judge is not None
    assert judge.case.corner["ttft_p95_ms"] == 1800.0
    searched = [s for s in prepared.study.slices if not s.held_out]
    assert judge.case.planned == sum(len(slice_rows(prepared.trace, s)) for s in searched) > 0


def unpredictable(prepared: Prepared) -> Prepared:
    """The study on a card that the simulator does not know."""
    engine = prepared.file.engine.model_copy(update={"kind": "vllm", "python": "python"})
    return replace(
        prepared,
        file=prepared.file.model_copy(update={"engine": engine}),
        facts=replace(prepared.facts, kind="vllm", gpu_name="NVIDIA Z9"),
    )


def test_an_unknown_card_is_said(prepared: Prepared) -> None:
    other = unpredictable(prepared)
    assert card_for(other) == "the simulator does not know the card 'NVIDIA Z9'"
    predictor = StudyPredictor(prepared=other)
    base = measured(0, other.baseline, values(900.0))
    assert predictor.calibrated((base,)) is None
    assert predictor.why_not == card_for(other)
    with pytest.raises(BadInput, match="NVIDIA Z9"):
        forecast(other, (base,), count=2)


def test_a_forecast_puts_the_predicted_front_beside_what_was_measured(
    prepared: Prepared, history: list[Trial]
) -> None:
    found = forecast(prepared, history, count=12)
    assert found.calibration is not None
    assert found.front
    assert [t.number for t, _ in found.measured] == [t.number for t in history]
    assert forecast(prepared, (), count=2).calibration is None


def test_a_card_of_the_simulated_engine_is_checked_when_the_study_is_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text().replace("kind: simulated", "kind: simulated\n  card: h100-8"))
    with pytest.raises(BadInput, match="did you mean 'h100-80'"):
        load(path, store=None, now=NOW)


def test_a_plan_may_be_changed_and_is_part_of_the_identity(tmp_path: Path, prepared: Prepared) -> None:
    path = write(tmp_path, space=SPACE)
    path.write_text(path.read_text().replace("plan: quick", "plan: {base: quick, load_warmup_s: 0.2}"))
    changed = load(path, store=None, now=NOW)
    assert (changed.plan.load_warmup_s, changed.plan.repeats) == (0.2, prepared.plan.repeats)
    assert changed.study.id != prepared.study.id
    path.write_text(path.read_text().replace("load_warmup_s", "load_warmup"))
    with pytest.raises(BadInput, match="load_warmup_s"):
        load(path, store=None, now=NOW)


def test_where_the_baseline_cannot_serve_the_datasheet_proposes(prepared: Prepared) -> None:
    broken = replace(measured(0, prepared.baseline, {}), state=TrialState.INFEASIBLE, measurements=())
    found = propose(prepared, (broken,))
    assert found is not None
    assert found.origin.startswith("simulator")


def test_M2_recompute_is_the_engine_s_default_and_is_launched_no_second_time(prepared: Prepared) -> None:
    """Also where the engine's version says nothing of it, and where the baseline did not serve."""
    space = replace(
        prepared.space, levels={**prepared.space.levels, "preemption": ("recompute", "offload:8")}
    )
    wider = replace(prepared, space=space)
    asked = Candidate({"max_num_seqs": 4, "preemption": "recompute"})
    served = measured(0, prepared.baseline, values(900.0))
    broken = replace(served, state=TrialState.INFEASIBLE, cause="errors")
    for base in (served, broken):
        assert minimal(space, [base], asked) == Candidate({"max_num_seqs": 4})
        key = view_of(wider, [base]).key
        assert key(asked) == key(prepared.baseline)
        assert key(asked.with_values(preemption="offload:8")) != key(prepared.baseline)
    held = measured(0, Candidate({"preemption": "offload:8"}), values(900.0))
    assert minimal(space, [held], asked) == Candidate({"preemption": "recompute"})


def test_23_a_knob_that_today_sets_and_a_candidate_leaves_open_has_the_engine_s_value_not_today_s(
    prepared: Prepared,
) -> None:
    levels = {**prepared.space.levels, "max_num_seqs": (None, 4, 16, 64)}
    asked = replace(prepared, space=replace(prepared.space, levels=levels))
    left, wide = (Candidate({"block_size": size, "max_num_batched_tokens": 512}) for size in (16, 32))
    today = left.with_values(max_num_seqs=16)
    base = measured(0, today, values(900.0))
    view = view_of(asked, [base])
    new = {c: view.is_new(c, lambda candidate: None) for c in (today, left, left.with_values(max_num_seqs=4))}
    assert list(new.values()) == [False, True, True]
    assert view.key(left) != view.key(today)
    assert view.encoding.first == view.encoding.point(today) != view.encoding.point(left)
    unset = measured(1, wide, values(800.0), effective={**EFFECTIVE, **wide, "max_num_seqs": 64})
    both = view_of(asked, [base, unset])
    assert not both.is_new(wide, lambda candidate: None)
    assert not both.is_new(wide.with_values(max_num_seqs=64), lambda candidate: None)


def test_23_a_mode_or_limit_of_today_that_is_left_open_tells_no_derived_limit(prepared: Prepared) -> None:
    levels: dict[str, tuple[Value, ...]] = {**prepared.space.levels, "enable_chunked_prefill": (None, False)}
    levels["max_num_seqs"] = (None, 4, 16)
    space = replace(prepared.space, levels=levels)
    base = ran(0, 16, 2048)
    held = replace(
        base,
        candidate=Candidate({"max_num_seqs": 16, "enable_chunked_prefill": False}),
        effective={**base.effective, "enable_chunked_prefill": False},
    )
    encoding = encode(space, trial_view.defaults_of([held]))
    assert encoding.budget(held.candidate) == 2048
    assert encoding.budget({"max_num_seqs": 16}) is None
    assert encoding.budget({"enable_chunked_prefill": False}) is None


def test_23_a_seed_leaves_open_what_it_left_open(prepared: Prepared) -> None:
    levels = {**prepared.space.levels, "max_num_batched_tokens": (None, 512, 1024)}
    asked = replace(prepared, space=replace(prepared.space, levels=levels))
    seed = Candidate({"max_num_seqs": 16, "block_size": 16})
    assert at_levels(asked, [ran(0, 16, 2048)], seed) == seed


def test_layout_knobs_that_one_card_leaves_at_one_do_not_end_predictions(prepared: Prepared) -> None:
    """On a node with one GPU only the levels 1 of a parallel space are left."""
    engine = prepared.file.engine.model_copy(update={"kind": "vllm"})
    facts = replace(prepared.facts, platform="cuda", gpu_name="NVIDIA H200")
    for levels, card in (((1,), "h200"), ((1, 2), None)):
        space = replace(prepared.space, levels={**prepared.space.levels, "pipeline_parallel_size": levels})
        made = replace(
            prepared, space=space, facts=facts, file=prepared.file.model_copy(update={"engine": engine})
        )
        found = card_for(made)
        assert (found if isinstance(found, str) else found.name) == (
            card or "the simulator does not predict pipeline parallel engines"
        )


def ran(number: int, seqs: int, budget: int, **more: object) -> Trial:
    """A trial that left max_num_batched_tokens to an engine with max_model_len 1024."""
    own = {"max_model_len": 1024, "max_num_seqs": seqs, "max_num_batched_tokens": budget, "block_size": 16}
    asked = Candidate({"max_num_seqs": seqs})
    return measured(number, asked, values(900.0), **{"effective": own, **more})


WIDE = Candidate({"max_num_seqs": 64, "max_num_batched_tokens": 8192, "block_size": 16})


def test_A10_a_limit_that_the_engine_derives_is_screened_as_a_launch_would_have_it(
    prepared: Prepared,
) -> None:
    asked, today = Candidate({"max_num_seqs": 16}), replace(prepared, baseline=Candidate({"max_num_seqs": 1}))
    cut = trial_view.defaults_of([ran(0, 1, 1024)])  # cut to one prompt: what 16 have is not known
    assert fits(today, WIDE, asked, cut) is None
    assert fits(today, WIDE, asked.with_values(max_num_batched_tokens=2048), cut) is not None
    screened = ran(1, 16, 1024, screened=True)  # an engine whose limits were set shows nothing of a launch
    assert fits(today, WIDE, asked, trial_view.defaults_of([ran(0, 1, 1024), screened])) is None
    for later in (ran(1, 16, 2048), ran(1, 64, 2048)):  # of the same sequences, or one that was not cut
        found = fits(today, WIDE, asked, trial_view.defaults_of([ran(0, 1, 1024), later]))
        assert found is not None
        assert found["max_num_batched_tokens"] == 2048
    own = Candidate({"max_num_seqs": 16})  # an engine of its own that left it open, too
    assert fits(today, own, Candidate({"max_num_seqs": 4}), cut, {"max_num_batched_tokens": 2048}) is None
    fewer = trial_view.defaults_of([ran(0, 16, 2048), ran(1, 1, 1024)])
    found = fits(today, own, Candidate({"max_num_seqs": 1}), fewer, {"max_num_batched_tokens": 2048})
    assert found is not None
    assert found["max_num_batched_tokens"] == 1024


def test_A10_it_holds_where_the_space_does_not_turn_the_derived_limit(prepared: Prepared) -> None:
    levels = {n: v for n, v in prepared.space.levels.items() if n != "max_num_batched_tokens"}
    small = replace(prepared, space=replace(prepared.space, levels=levels))
    wide, asked = Candidate({"max_num_seqs": 64}), Candidate({"max_num_seqs": 1})
    running = {"max_num_batched_tokens": 2048}
    assert fits(small, wide, asked, trial_view.defaults_of([ran(0, 4, 2048)]), running) is None
    found = fits(small, wide, asked, trial_view.defaults_of([ran(0, 1, 1024)]), running)
    assert found is not None
    assert found["max_num_batched_tokens"] == 1024
    by_hand = replace(small, fixed=("--max-num-batched-tokens", "2048"))
    assert fits(by_hand, wide, asked, trial_view.defaults_of([ran(0, 4, 2048)]), running) is not None


def test_A10_a_limit_that_goes_back_to_the_engine_s_own_value_needs_a_launch(prepared: Prepared) -> None:
    marked = Candidate({"max_num_seqs": 64, "long_prefill_token_threshold": 256})
    levels = {**prepared.space.levels, "long_prefill_token_threshold": (None, 256)}
    wider = replace(prepared, space=replace(prepared.space, levels=levels))
    plain = Candidate({"max_num_seqs": 64})
    assert fits(wider, marked, plain, {}) is None
    assert fits(wider, marked, plain, {"long_prefill_token_threshold": 0}) is not None
    today = replace(wider, baseline=marked)  # that value is today's, not the engine's own
    assert fits(today, marked, plain, {"long_prefill_token_threshold": 256}) is None


def test_A10_what_an_engine_ran_counts_as_measured_however_it_was_asked_for(prepared: Prepared) -> None:
    history = [ran(0, 1, 1024), ran(1, 16, 2048)]
    for name, value in (("max_num_batched_tokens", 2048), ("block_size", 16)):
        same = Candidate({"max_num_seqs": 16, name: value})
        whole = prepared.space.canonical({"max_num_batched_tokens": 2048, "block_size": 16, **same})
        assert not view_of(prepared, history).is_new(whole, lambda candidate: None)
        assert minimal(prepared.space, history, whole) == Candidate({"max_num_seqs": 16})
    other = prepared.space.canonical({"max_num_seqs": 16, "max_num_batched_tokens": 512, "block_size": 16})
    assert view_of(prepared, history).is_new(other, lambda candidate: None)
    unknown = Candidate({"max_num_seqs": 4, "max_num_batched_tokens": 1024})  # the baseline's own value
    assert minimal(prepared.space, history[:1], unknown) == unknown


def test_A6_the_summary_of_a_run_is_of_that_run_alone(prepared: Prepared) -> None:
    live = SimpleNamespace(failures=[])
    first = measured(1, Candidate({"max_num_seqs": 16}), values(400.0), screened=True, gpu_seconds=616.2)
    second = replace(first, number=2, run_id="later", screened=False, gpu_seconds=368.4)
    facts = replace(prepared.facts, kind="vllm", platform="cuda")
    found = summary_of(replace(prepared, facts=facts), "later", [first, second], live)  # type: ignore[arg-type]
    assert (found["gpu_seconds"], found["screened"], found["live_limits"]) == (368.4, 0, "not used")
    cpu = replace(prepared, facts=replace(facts, platform="cpu"))
    told = summary_of(cpu, "later", [first, second], live)  # type: ignore[arg-type]
    assert (told["gpu_seconds"], told["gpus"]) == (368.4, 0), "seconds as in its trials, of no GPU"
    assert found["gpus"] == 1
