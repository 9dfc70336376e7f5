"""Finalists against the baseline: how sure a conclusion is, who falls out, what an interruption leaves."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.history.records import a_study, newest_conclusion
from tests.tuning.studies import SPACE, STUDY, write
from tests.tuning.test_reconcile import left
from tuner.commands.progress import describe
from tuner.conclusions import Conclusion, Judgement
from tuner.errors import Aborted, Infeasible
from tuner.history.store import Store
from tuner.knobs.catalogue import CATALOGUE
from tuner.records import (
    Candidate,
    Fidelity,
    Measurement,
    Purpose,
    Run,
    RunState,
    Trial,
    TrialState,
    Violation,
)
from tuner.report.words import no_trial
from tuner.tuning.attempt import failing, retries_of
from tuner.tuning.concluding import Repeats, arms_of, mean_of, spreads_of
from tuner.tuning.confirm import asked_of, pending, repeats_for_ten_percent
from tuner.tuning.context import LaunchJob, Measured, Note, RunContext, RunEvent, Serving
from tuner.tuning.ending import Ending, unproved_of
from tuner.tuning.finalists import finalists
from tuner.tuning.run import RunLimits, tune
from tuner.tuning.study import Surveyed, load, prepare, survey
from tuner.tuning.studyfile import EngineFile, read

NOW = datetime(2026, 3, 1, tzinfo=UTC)
BASE = {"ttft_p95_ms": 200.0, "tpot_p95_ms": 10.0, "e2e_p95_ms": 900.0, "goodput_rps": 5.0}
SEQS = (4, 16, 64)
Speed = Callable[[int, str, int], Mapping[str, float]]
"""(max_num_seqs, purpose, repeat) → by what each number of the baseline is multiplied; `good`: the share."""


def quiet(seqs: int, purpose: str, repeat: int) -> Mapping[str, float]:
    """Launches that differ by 1 %; sixteen sequences answer twice as fast."""
    wobble = 1.0 + 0.01 * ((repeat * 7 + seqs) % 3 - 1)
    return {"ttft_p95_ms": (0.5 if seqs == 16 else 1.0) * wobble, "e2e_p95_ms": 0.9 if seqs == 16 else 1.0}


@cache
def asked_once() -> Surveyed:
    """What this host says of the simulated engine."""
    return survey(EngineFile(kind="simulated"), base=Path())


class Night:
    """A study whose launches are answered by a function, so that its truth is known. Each takes a minute."""

    space = SPACE

    def __init__(self, folder: Path, speed: Speed = quiet, plan: str = "brief", extra: str = "") -> None:
        self.speed, self.now, self.launched = speed, NOW, list[tuple[int, int]]()
        text = STUDY.replace("plan: quick", f"plan: {plan}") + extra
        self.store = Store(f"sqlite:///{folder / 'tuner.db'}")
        path = write(folder, text, self.space)
        self.prepared = prepare(
            read(path), name="study.yaml", base=folder, store=self.store, now=NOW, surveyed=asked_once()
        )
        self.store.add_study(self.prepared.study)
        self.home, self.news = folder, list[str]()
        self.cut_after: int | None = None
        self.cut_by: Exception = Closed()

    def run(self, deadline: datetime | None = None) -> Run:
        return self.store.open_run(
            self.prepared.study.id, trials_limit=3, deadline=deadline, now=self.now, pid=1, host="here"
        )

    def search(self, run: Run, seqs: Sequence[int] = SEQS) -> None:
        """One trial for each, as a search leaves them."""
        first = len(self.store.trials(run.study_id))
        for number, value in enumerate(seqs, start=first):
            trial = self.store.start_trial(
                study_id=run.study_id, run_id=run.id, candidate=Candidate({"max_num_seqs": value}),
                number=number, attempt=0, seed=0, origin="search" if number else "baseline", now=self.now,
                directory=str(self.bench.directory(number, "0")),
            )  # fmt: skip
            ended = replace(trial, state=TrialState.COMPLETE, effective=dict(trial.candidate))
            numbers = self.measurement(value, "search", 0)
            self.store.finish_trial(
                replace(ended, measurements=(numbers,), ended_at=self.now, gpu_seconds=60.0)
            )

    def measurement(self, seqs: int, purpose: Purpose, repeat: int) -> Measurement:
        factors = dict(self.speed(seqs, purpose, repeat))
        values = {name: value * factors.get(name, 1.0) for name, value in BASE.items()}
        values |= {"slo_attainment": factors.get("good", 1.0), "requests": 100.0}
        return Measurement(
            values={**values, "failed": factors.get("failed", 0.0)}, purpose=purpose, repeat=repeat
        )

    @property
    def bench(self) -> RunContext:
        return RunContext(
            prepared=self.prepared, store=self.store, home=self.home, clock=lambda: self.now,
            tell=lambda event: self.news.append(event.text), work=self.work,
        )  # fmt: skip

    async def work(self, order: LaunchJob, note: Note) -> list[Measured]:
        if self.cut_after is not None and len(self.launched) >= self.cut_after:
            raise self.cut_by
        seqs = order.spec.asked["max_num_seqs"]
        assert isinstance(seqs, int)
        note(Serving(effective=dict(order.spec.asked), timeline={"ready_s": 30.0}, kv_tokens=None))
        self.now += timedelta(minutes=1)
        self.launched.append((order.number, order.passes[0].repeat))
        made = [self.measurement(seqs, each.purpose, each.repeat) for each in order.passes]
        return [Measured(measurement=each, curtailed=None) for each in made]

    def end(self, run: Run) -> Conclusion:
        """What the loop does once the search is over."""
        ending, why = Ending(self.bench, run), None

        async def go() -> str | None:
            await ending.what_is_pending()
            return await ending.confirm()

        try:
            why = asyncio.run(go())
        except Closed:
            why = "the window closed"
        said = ending.conclusion(why)
        assert said is not None
        self.store.save_run(replace(run, state=RunState.FINISHED, ended_at=self.now), said)
        return said

    def whole(self, deadline: datetime | None = None) -> Conclusion:
        run = self.run(deadline)
        self.search(run)
        return self.end(run)


class Closed(Exception):
    """The window closed in the middle of a launch."""


def test_a_winner_is_confirmed_with_the_values_of_the_runs_own_repeats(tmp_path: Path) -> None:
    night = Night(tmp_path)
    said = night.whole()
    assert (said.outcome, said.winner, said.repeats) == (Judgement.CLEAR_WINNER, 1, 3)
    arm, base = said.arm(1), said.baseline
    assert arm is not None
    assert base is not None
    better = arm.change("ttft_p95_ms")
    assert better is not None
    assert better.before is not None
    assert better.after is not None
    assert better.change is not None
    assert better.before == base.confirmed["ttft_p95_ms"] == pytest.approx(200.0, rel=0.01)
    assert better.after == arm.confirmed["ttft_p95_ms"] == pytest.approx(100.0, rel=0.01)
    assert better.change == pytest.approx((better.after - better.before) / better.before)
    assert better.low is not None
    assert better.high is not None
    assert better.low < better.change < better.high < 0
    assert arm.changed == {"max_num_seqs": (4, 16)}
    assert arm.searched["ttft_p95_ms"] == pytest.approx(100.0, rel=0.02)
    assert said.cost.search_s == 180.0
    assert said.cost.confirm_s == 9 * 60.0
    assert (said.cost.gpus, said.cost.unit) == (0, "hours")
    assert said.profiles["challenger"].version == 2
    profile = night.store.profile(said.profiles["challenger"].id)
    assert profile.evidence["sentence"] == said.sentence
    assert profile.evidence["confirmed"] is True


def test_all_rounds_are_interleaved(tmp_path: Path) -> None:
    night = Night(tmp_path)
    night.whole()
    rounds = [sorted(n for n, repeat in night.launched if repeat == r) for r in (1, 2, 3)]
    assert rounds == [[0, 1, 2]] * 3
    assert [n for n, _ in night.launched[:3]] == [n for n, _ in reversed(night.launched[3:6])]


def noisy(seqs: int, purpose: str, repeat: int) -> Mapping[str, float]:
    """Nothing differs but launches, by 10 %."""
    rng = np.random.default_rng([seqs, repeat, len(purpose)])
    return {name: float(np.exp(0.1 * rng.standard_normal())) for name in BASE}


def test_repeats_are_added_while_the_answer_is_open_up_to_the_cap(tmp_path: Path) -> None:
    night = Night(tmp_path, noisy)
    said = night.whole()
    assert said.winner is None
    assert said.repeats == night.prepared.plan.most == 6


def test_repeats_are_added_only_while_the_window_lasts(tmp_path: Path) -> None:
    night = Night(tmp_path, noisy)
    said = night.whole(NOW + timedelta(minutes=13))
    assert said.repeats == 4


@pytest.mark.parametrize(("planned", "launches", "whole"), [(1, 5, 1), (1, 8, 2), (2, 7, 2), (1, 11, 3)])
def test_a_launch_over_the_budget_in_an_added_repeat_leaves_the_repeats_before_it(
    tmp_path: Path, planned: int, launches: int, whole: int
) -> None:
    night = Night(tmp_path, noisy, plan=f"{{base: brief, repeats: {planned}, most_repeats: 6}}")
    night.cut_after, night.cut_by = launches, Aborted("the budget of 9 launches is spent", cause="budget")
    said = night.whole()
    assert said.outcome in (Judgement.NO_CLEAR_WINNER, Judgement.BASELINE_STAYS)
    assert said.repeats == whole


def test_a_launch_over_the_budget_in_a_planned_repeat_leaves_the_answer_open(tmp_path: Path) -> None:
    night = Night(tmp_path, noisy, plan="{base: brief, repeats: 3, most_repeats: 6}")
    night.cut_after, night.cut_by = 8, Aborted("the budget of 9 launches is spent", cause="budget")
    run = night.run()
    night.search(run)
    with pytest.raises(Aborted):
        night.end(run)


def test_one_repeat_decides_nothing_on_a_node_whose_noise_is_not_known(tmp_path: Path) -> None:
    night = Night(tmp_path, plan="{base: brief, repeats: 1, most_repeats: 1}")
    said = night.whole()
    assert (said.outcome, said.winner, said.repeats) == (Judgement.NO_CLEAR_WINNER, None, 1)
    assert "not known yet" in said.sentence
    assert said.noise[0].share is None


def test_one_repeat_decides_where_earlier_nights_tell_the_noise(tmp_path: Path) -> None:
    first = Night(tmp_path)
    first.whole()
    again = Night(tmp_path, plan="{base: brief, repeats: 1, most_repeats: 1}")
    said = again.whole()
    assert (said.outcome, said.repeats) == (Judgement.CLEAR_WINNER, 1)
    assert said.noise[0].earlier == 6
    elsewhere = Night(tmp_path, plan="{base: brief, repeats: 1, most_repeats: 1}", extra="speed: 2.0\n")
    assert elsewhere.whole().outcome is Judgement.NO_CLEAR_WINNER, "other traffic has other noise"


def test_a_machine_that_slows_to_06_from_the_confirmation_on_is_not_to_be_trusted(tmp_path: Path) -> None:
    def slowing(seqs: int, purpose: str, repeat: int) -> Mapping[str, float]:
        factors = quiet(seqs, purpose, repeat)
        return {
            n: factors.get(n, 1.0) / (1.0 if purpose == "search" else 0.6) for n in BASE if n.endswith("_ms")
        }

    said = Night(tmp_path, slowing).whole()
    assert (said.outcome, said.winner) == (Judgement.NOT_TRUSTED, None)
    assert any("ttft_p95_ms was 200" in text and "+67%" in text for text in said.drift)
    assert "challenger" not in said.profiles


def test_drift_names_first_what_changed_most(tmp_path: Path) -> None:
    """Also where the noise of this objective is too large to call it drift by itself."""

    def moved(seqs: int, purpose: str, repeat: int) -> Mapping[str, float]:
        if purpose == "search":
            return quiet(seqs, purpose, repeat)
        return {"tpot_p95_ms": 1.7, "ttft_p95_ms": 2.0 if repeat % 2 else 0.05}

    said = Night(tmp_path, moved).whole()
    assert said.outcome is Judgement.NOT_TRUSTED
    first, *others = said.drift
    assert "ttft_p95_ms was 200" in first
    assert any("tpot_p95_ms" in text for text in others)
    assert said.sentence.index("ttft_p95_ms") < said.sentence.index("tpot_p95_ms")


def test_drift_is_told_with_clocks_and_throttling_where_a_gpu_tells(tmp_path: Path) -> None:
    class Hot(Night):
        def measurement(self, seqs: int, purpose: Purpose, repeat: int) -> Measurement:
            made = super().measurement(seqs, purpose, repeat)
            hot = purpose != "search"
            values = {**made.values, "ttft_p95_ms": made.values["ttft_p95_ms"] * (1.7 if hot else 1.0)}
            beside = {"gpu_clock_min_mhz": 1410.0 if hot else 1980.0, "gpu_throttled": 0.43 if hot else 0.0}
            return replace(made, values=values, fidelity=Fidelity(values=beside))

    said = Hot(tmp_path).whole()
    assert said.outcome is Judgement.NOT_TRUSTED
    assert "lowest clock 1,980 → 1,410 MHz, throttled 0 → 43 % of the time" in said.drift[0]


def trading(seqs: int, purpose: str, repeat: int) -> Mapping[str, float]:
    """Sixteen sequences halve TTFT and cost 30 % of the time per token, 64 gain less and cost nothing."""
    wobble = 1.0 + 0.01 * ((repeat * 7 + seqs) % 3 - 1)
    ttft = {4: 1.0, 16: 0.5, 64: 0.7}[seqs]
    return {"ttft_p95_ms": ttft * wobble, "tpot_p95_ms": 1.3 if seqs == 16 else 1.0, "e2e_p95_ms": ttft}


def test_a_winner_that_is_worse_in_one_objective_is_a_trade_off(tmp_path: Path) -> None:
    said = Night(tmp_path, trading).whole()
    assert (said.outcome, said.winner) == (Judgement.TRADE_OFF, 1)


def test_not_worse_is_honoured_by_the_choice_of_finalists(tmp_path: Path) -> None:
    night = Night(tmp_path, trading, extra="not_worse: {tpot_p95_ms: 10%}\n")
    said = night.whole()
    assert (said.outcome, said.winner) == (Judgement.CLEAR_WINNER, 2)
    assert said.arm(1) is None


def test_not_worse_is_honoured_by_the_winners_choice_after_the_confirmation(tmp_path: Path) -> None:
    def later(seqs: int, purpose: str, repeat: int) -> Mapping[str, float]:
        found = dict(trading(seqs, purpose, repeat))
        return found | ({"tpot_p95_ms": 1.0} if purpose == "search" else {})

    said = Night(tmp_path, later, extra="not_worse: {tpot_p95_ms: 0.1}\n").whole()
    assert (said.outcome, said.winner) == (Judgement.CLEAR_WINNER, 2)
    assert "Left out by not_worse: trial 1 (tpot_p95_ms +30 %" in said.sentence


def test_where_not_worse_leaves_nobody_todays_configuration_stays(tmp_path: Path) -> None:
    night = Night(tmp_path, trading, extra="not_worse: {tpot_p95_ms: 10%}\n")
    run = night.run()
    night.search(run, (4, 16))
    said = night.end(run)
    assert (said.outcome, said.winner, night.launched) == (Judgement.BASELINE_STAYS, None, [])
    assert "tpot_p95_ms +30% (not_worse: 10%)" in said.sentence


def test_where_no_trial_meets_the_slo_the_nearest_is_told_first(tmp_path: Path) -> None:
    def poor(seqs: int, purpose: str, repeat: int) -> Mapping[str, float]:
        return {**quiet(seqs, purpose, repeat), "good": {4: 0.5, 16: 0.81, 64: 0.7}[seqs]}

    said = Night(tmp_path, poor).whole()
    assert (said.outcome, said.nearest) == (Judgement.SLO_MISSED, 1)
    assert said.sentence.startswith("No trial meets the SLO: trial 1 comes nearest with 81.0% good requests")
    arm = said.arm(1)
    assert arm is not None
    assert arm.misses_slo_by == pytest.approx(0.14)
    assert arm.slo_met is False


def test_a_run_whose_confirmation_did_not_end_is_not_confirmed(tmp_path: Path) -> None:
    night = Night(tmp_path)
    night.cut_after = 5
    said = night.whole()
    assert (said.outcome, said.winner, said.repeats) == (Judgement.NOT_CONFIRMED, None, 1)
    assert "the window closed after 1 of 3 repeats" in said.sentence
    assert all(arm.changes == () for arm in said.finalists)
    assert said.profiles == {}


def test_the_next_run_ends_an_interrupted_confirmation_first(tmp_path: Path) -> None:
    night = Night(tmp_path)
    night.cut_after = 5
    first = night.whole()
    night.cut_after = None
    run = night.run()
    said = night.end(run)
    assert said.run_id == run.id
    assert (said.outcome, said.winner, said.repeats) == (Judgement.CLEAR_WINNER, 1, 3)
    assert len(night.launched) == 9, "what was measured is not measured again"
    assert night.store.conclusion(first.run_id) == first, "an earlier conclusion never changes"


def test_a_confirmation_is_begun_only_where_it_fits_and_the_next_run_does_it(tmp_path: Path) -> None:
    night = Night(tmp_path)
    said = night.whole(NOW + timedelta(minutes=2))
    assert (said.outcome, night.launched) == (Judgement.NOT_CONFIRMED, [])
    assert "it takes about" in said.sentence
    assert [arm.trial for arm in said.finalists] == [1, 2]
    run = night.run(NOW + timedelta(hours=1))
    assert night.end(run).outcome is Judgement.CLEAR_WINNER


def test_a_second_run_changes_no_earlier_conclusion(tmp_path: Path) -> None:
    night = Night(tmp_path)
    first = night.whole()
    kept = night.store.conclusion(first.run_id)
    night.speed = noisy
    run = night.run()
    second = night.end(run)
    assert second.run_id != first.run_id
    assert night.store.conclusion(first.run_id) == kept == first
    assert night.store.conclusions(first.study_id) == (first, second)
    assert newest_conclusion(night.store, first.study_id) == second


def test_everybody_who_fails_again_falls_out(tmp_path: Path) -> None:
    def failing_again(seqs: int, purpose: str, repeat: int) -> Mapping[str, float]:
        return {"failed": 5.0 if purpose == "confirm" and seqs != 4 else 0.0}

    said = Night(tmp_path, failing_again).whole()
    assert (said.outcome, said.winner) == (Judgement.NOTHING_SERVED, None)
    assert "5 of 100 requests failed" in said.sentence


def test_a_baseline_that_fails_again_is_told_and_nothing_is_compared(tmp_path: Path) -> None:
    def failing_again(seqs: int, purpose: str, repeat: int) -> Mapping[str, float]:
        return {"failed": 5.0 if purpose == "confirm" and seqs == 4 else 0.0}

    said = Night(tmp_path, failing_again).whole()
    assert said.outcome is Judgement.BASELINE_FAILED
    assert said.baseline is not None
    assert said.baseline.dropped == "5 of 100 requests failed"
    assert not said.confirmed


def test_each_run_relaunches_what_it_screened(tmp_path: Path) -> None:
    prepared = load(write(tmp_path), store=None, now=NOW)

    def trial(number: int, run: str, ttft: float, origin: str, screened: bool = False) -> Trial:
        values = {"ttft_p95_ms": ttft, "tpot_p95_ms": 9.0, "e2e_p95_ms": ttft, "goodput_rps": 5.0}
        return Trial(
            id=number + 1, study_id="s", run_id=run, number=number, origin=origin, screened=screened,
            candidate=Candidate({"max_num_seqs": (4, 16, 64)[number % 3], "max_num_batched_tokens": 512}),
            state=TrialState.COMPLETE, started_at=NOW,
            measurements=(Measurement(values={**values, "slo_attainment": 1.0}),),
        )  # fmt: skip

    first = [trial(0, "one", 100.0, "relaunched"), trial(1, "one", 90.0, "relaunched")]
    history = [*first, trial(2, "two", 50.0, "tpe", screened=True)]
    assert [t.number for t in finalists(prepared, history, "two")] == [2]
    assert [t.number for t in finalists(prepared, history, "one")] == [1]
    both = replace(prepared, plan=replace(prepared.plan, finalists=2))
    assert [t.number for t in finalists(both, history, "two")] == [2, 1]


def test_a_finalist_that_runs_otherwise_than_asked_falls_out(tmp_path: Path) -> None:
    class Deaf(Night):
        async def work(self, order: LaunchJob, note: Note) -> list[Measured]:
            made = await super().work(order, note)
            note(Serving(effective={"max_num_seqs": 4}, timeline={}, kv_tokens=None))
            return made

    said = Deaf(tmp_path).whole()
    assert said.outcome is Judgement.NOTHING_SERVED
    assert "the engine runs max_num_seqs = 4, not 16" in said.sentence


@pytest.mark.parametrize(("failed", "out"), [(0, False), (1, False), (2, True)])
def test_more_than_one_in_a_hundred_failed_requests_fall_out(failed: int, out: bool) -> None:
    assert (failing({"failed": failed, "requests": 100.0}) is not None) == out


def test_requests_that_the_plan_cut_are_told_apart() -> None:
    said = failing({"failed": 24.0, "unfinished": 23.0, "requests": 1000.0})
    assert said == (
        "24 of 1000 requests failed, 23 because they still ran at the end of the tail (plan: tail_limit_s)"
    )


def test_an_unready_engine_is_tried_again_and_a_lack_of_memory_is_not() -> None:
    assert retries_of(Infeasible("late", cause="init_timeout")) == 1
    assert retries_of(Infeasible("full", cause="oom")) == 0
    assert retries_of(Infeasible("full", cause="oom", violation=Violation(oom=1.5))) == 1


def test_M40_a_winner_names_what_nothing_shows_that_its_engine_took() -> None:
    asked = Candidate({"max_num_seqs": 16, "watermark": 0.05, "api_server_count": 2})
    trial = Trial(
        id=1, study_id="s", run_id="r", number=1, candidate=asked, effective={"max_num_seqs": 16},
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip
    assert unproved_of(trial) == {
        "api_server_count": CATALOGUE["api_server_count"].unproved,
        "watermark": "this engine does not report it",
    }


def test_only_to_confirm_makes_no_new_trials(tmp_path: Path) -> None:
    night = Night(tmp_path)
    night.cut_after = 5
    night.whole()
    night.cut_after = None
    limits, told = RunLimits(confirm_only=True), list[RunEvent]()
    left(night.store, replace(a_study("other"), node=night.prepared.study.node))
    run = asyncio.run(
        tune(
            night.prepared,
            night.store,
            home=tmp_path,
            limits=limits,
            clock=lambda: night.now,
            tell=told.append,
            work=night.work,
        )
    )
    notes = [describe(each, ()) for each in told if each.kind == "note"]
    assert "trial 0 of study other was interrupted: aborted" in notes
    assert run.reason in notes
    assert "the search ends" not in str(notes)
    assert (run.reason, no_trial(run)) == ("this run only confirms, without a search", "no new trials")
    said = night.store.conclusion(run.id)
    assert said is not None
    assert (run.state, said.outcome) == (RunState.FINISHED, Judgement.CLEAR_WINNER)
    assert len(night.store.trials(run.study_id)) == 3
    assert len(night.launched) == 9


def test_a_cancelled_run_that_measured_concludes_that_nothing_is_confirmed(tmp_path: Path) -> None:
    night = Night(tmp_path)
    run = night.run()
    night.search(run)
    said = Ending(night.bench, run).conclusion("cancelled on request")
    assert said is not None
    assert (said.outcome, said.winner, said.finalists) == (Judgement.NOT_CONFIRMED, None, ())
    assert said.sentence == "Not confirmed: cancelled on request."


def test_a_run_that_began_nothing_concludes_nothing(tmp_path: Path) -> None:
    night = Night(tmp_path)
    assert Ending(night.bench, night.run()).conclusion("cancelled on request") is None


def test_the_next_run_measures_nothing_again_where_a_run_was_cancelled_in_its_search(tmp_path: Path) -> None:
    night = Night(tmp_path)
    run = night.run()
    night.search(run)
    said = Ending(night.bench, run).conclusion("cancelled on request")
    night.store.save_run(replace(run, state=RunState.CANCELLED, ended_at=night.now), said)
    assert pending(night.bench) is None


def test_repeats_for_ten_per_cent_are_known_once_a_confirmation_was_measured(tmp_path: Path) -> None:
    night = Night(tmp_path)
    assert repeats_for_ten_percent(night.prepared, night.store) == {}
    night.whole()
    known = repeats_for_ten_percent(night.prepared, night.store)
    assert known["ttft_p95_ms"] in range(1, 4)
    (run,) = night.store.runs()
    said = night.store.conclusion(run.id)
    assert said is not None
    assert {each.metric: each.repeats_needed for each in said.noise} == known, "the same rule"
    assert repeats_for_ten_percent(Night(tmp_path, extra="speed: 2.0\n").prepared, night.store) == {}


def repeat_of(good: int, requests: int = 27, seconds: float = 10.0, **more: float) -> Measurement:
    values = {"slo_attainment": good / requests, "goodput_rps": good / seconds, "requests": float(requests)}
    return Measurement(values={**values, **more}, purpose="confirm")


@pytest.mark.parametrize("among", ["", "interactive."])
@pytest.mark.parametrize(
    ("before", "after"), [((21, 13), (9, 27)), ((20, 20), (1, 39)), ((5, 5, 20), (12, 12, 7)), ((3,), (4,))]
)
def test_A5_goodput_and_the_share_within_the_slo_move_the_same_way(
    before: tuple[int, ...], after: tuple[int, ...], among: str
) -> None:
    """The share of two repeats went from 63 to 66.7 % while their goodput fell from 1.65 to 1.56."""

    def of(name: str, goods: tuple[int, ...]) -> float:
        rows = [repeat_of(good, 40) for good in goods]
        rows = [replace(m, values={f"{among}{n}": v for n, v in m.values.items()}) for m in rows]
        found = mean_of(f"{among}{name}", rows)
        assert found is not None
        return found

    share, goodput = (of(n, after) / of(n, before) for n in ("slo_attainment", "goodput_rps"))
    assert share == pytest.approx(goodput)
    assert of("slo_attainment", after) == pytest.approx(sum(after) / 40 / len(after))


def test_A5_repeats_are_pooled_by_their_requests_and_latencies_are_not() -> None:
    rows = [repeat_of(10, 10, request_rps=1.0, ttft_p95_ms=100.0),
            repeat_of(0, 30, request_rps=3.0, ttft_p95_ms=400.0)]  # fmt: skip
    assert mean_of("slo_attainment", rows) == 10 / 40, "the longer repeat counts more"
    assert (mean_of("goodput_rps", rows), mean_of("request_rps", rows)) == (0.5, 2.0)
    assert mean_of("ttft_p95_ms", rows) == pytest.approx(200.0)


def test_A5_the_conclusion_s_goodput_is_its_share_of_the_requests(tmp_path: Path) -> None:
    """Baseline, finalist, change and interval: each by all requests of the repeats."""
    good = {4: (0.5, 0.6), 16: (0.2, 0.98), 64: (0.4, 0.4)}

    def speed(seqs: int, purpose: str, repeat: int) -> Mapping[str, float]:
        share = good[seqs][(repeat - 1) % 2] if purpose == "confirm" else 0.5
        return {"good": share, "goodput_rps": share}

    said = Night(tmp_path, speed, extra="objectives: [ttft_p95_ms, goodput_rps]\n").whole()
    assert said.baseline is not None
    for arm in (said.baseline, *said.finalists):
        assert arm.attainment is not None
        assert arm.confirmed["goodput_rps"] == pytest.approx(BASE["goodput_rps"] * arm.attainment)
        for change in (c for c in arm.changes if c.metric == "goodput_rps" and c.where == "confirm"):
            assert change.after == arm.confirmed["goodput_rps"]
            assert change.low is not None
            assert change.change is not None
            assert change.low < change.change < (change.high or math.inf)


def test_B7_a_conclusion_holds_what_the_held_out_slice_measured(tmp_path: Path) -> None:
    """Also where today's configuration did not serve, so that nothing was compared."""
    night = Night(tmp_path)
    run = night.run()
    night.search(run)
    trials = night.store.trials(run.study_id)
    again = [night.measurement(16, where, n) for n in (1, 2) for where in ("confirm", "held_out")]
    rows = [replace(m, values={**m.values, "slo_attainment": 0.9 if m.purpose == "confirm" else 0.25})
            for m in again]  # fmt: skip
    failed = replace(trials[0], state=TrialState.INFEASIBLE, measurements=())
    found = Repeats(base=failed, finalists=[trials[1]], measured={1: rows}, dropped={}, earlier={})
    asked = asked_of(night.prepared)
    arm = arms_of(asked, found, spreads_of(asked, found))[1][0]
    assert (arm.attainment, arm.held_out["slo_attainment"], arm.changes) == (0.9, 0.25, ())
    assert arm.held_out["ttft_p95_ms"] == arm.confirmed["ttft_p95_ms"] == pytest.approx(100.0, rel=0.02)
