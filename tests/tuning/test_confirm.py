"""Finalists against the baseline: how sure a conclusion is, who falls out, what an interruption leaves."""

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.commands.test_care import call
from tests.history.records import a_study, newest_conclusion
from tests.service.surfaces import plain
from tests.service.world import World
from tests.tuning.studies import SPACE, STUDY, answer, tuner, write
from tests.tuning.test_reconcile import HERE, left
from tuner.commands.progress import describe
from tuner.conclusions import Conclusion, Judgement
from tuner.errors import Aborted, Infeasible
from tuner.history.store import Store
from tuner.knobs.catalogue import CATALOGUE
from tuner.profiles.export import provenance
from tuner.records import (
    Candidate,
    Fidelity,
    Launch,
    Measurement,
    Purpose,
    Run,
    RunState,
    Trial,
    TrialState,
    Value,
    Violation,
)
from tuner.report.board import board_of
from tuner.report.card import card, lines
from tuner.report.words import no_trial
from tuner.service.pages.compare import CompareQuery, compare
from tuner.service.runner import Controllers
from tuner.settings import Settings
from tuner.tuning.attempt import failing, retries_of
from tuner.tuning.concluding import Repeats, arms_of, changed, mean_of, spreads_of
from tuner.tuning.confirm import asked_of, not_serving, pending, repeats_for_ten_percent
from tuner.tuning.context import LaunchJob, Measured, Note, RunContext, RunEvent, Serving, Tell
from tuner.tuning.ending import Ending, unproved_of
from tuner.tuning.finalists import finalists
from tuner.tuning.now import Pace
from tuner.tuning.run import RunLimits, tune
from tuner.tuning.study import load, prepare, read
from tuner.tuning.survey import EngineFile, Surveyed, survey

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

    space, launch_s = SPACE, 60.0

    def __init__(self, folder: Path, speed: Speed = quiet, plan: str = "brief", extra: str = "") -> None:
        self.speed, self.now, self.launched = speed, NOW, list[tuple[int, int]]()
        text = STUDY.replace("plan: quick", f"plan: {plan}") + extra
        self.url = f"sqlite:///{folder / 'tuner.db'}"
        self.store = Store(self.url)
        path = write(folder, text, self.space)
        self.prepared = prepare(
            read(path), name="study.yaml", base=folder, store=self.store, now=NOW, surveyed=asked_once()
        )
        self.store.add_study(self.prepared.study)
        self.home, self.news = folder, list[str]()
        self.cut_after: int | None = None
        self.cut_by: Exception = Closed()
        self.screened: Sequence[int] = ()  # the numbers of sequences that a search only screens
        self.lost = False  # whether a run ends without its process

    def run(self, deadline: datetime | None = None) -> Run:
        return self.store.open_run(
            self.prepared.study.id, trials_limit=3, deadline=deadline, now=self.now, pid=1, host="here"
        )

    def search(self, run: Run, seqs: Sequence[int] = SEQS) -> None:
        """One trial for each, as a search leaves them. One that was aborted is tried again."""
        before = [t.number for t in self.store.trials(run.study_id)]
        first = sum(t.state is not TrialState.ABORTED for t in self.store.trials(run.study_id))
        for number, value in enumerate(seqs, start=first):
            trial = self.store.start_trial(
                study_id=run.study_id, run_id=run.id, candidate=Candidate({"max_num_seqs": value}),
                number=number, attempt=before.count(number), seed=0, now=self.now,
                origin="search" if number else "baseline",
                directory=str(self.bench.directory(number, str(before.count(number)))),
            )  # fmt: skip
            made = Launch(
                id=f"{run.id[:8]}-{number}", study_id=run.study_id, argv=(), started_at=self.now,
                directory=trial.directory,
            )  # fmt: skip
            self.store.add_launch(made)
            self.store.finish_launch(replace(made, ended_at=self.now + timedelta(minutes=1)))
            ended = replace(
                trial, state=TrialState.COMPLETE, effective=dict(trial.candidate),
                screened=value in self.screened,
            )  # fmt: skip
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
        note(
            Serving(effective=dict(order.spec.asked), timeline={"ready_s": self.launch_s / 2}, kv_tokens=None)
        )
        self.now += timedelta(seconds=self.launch_s)
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
        said = None if self.lost else ending.conclusion(why)
        self.store.save_run(replace(run, state=RunState.FINISHED, ended_at=self.now), said)
        said = self.store.conclusion(run.id)
        assert said is not None
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
    assert said.cost.gpus == 0
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


@pytest.mark.parametrize("seqs", SEQS[1:])
def test_the_card_shows_the_trial_that_the_sentence_is_about(tmp_path: Path, seqs: int) -> None:
    """Of two finalists without a clear winner, whichever the policy chooses."""

    def leans(asked: int, purpose: str, repeat: int) -> Mapping[str, float]:
        share = 0.93 if asked == seqs else 1.0
        found = noisy(asked, purpose, repeat)
        return {n: v / share if n == "goodput_rps" else v * share for n, v in found.items()}

    said = Night(tmp_path, leans).whole()
    assert said.winner is None
    assert said.finalists[0].candidate["max_num_seqs"] == seqs
    assert said.sentence.startswith(f"Trial {card(said).trial} against the baseline")


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


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("launches", [0, 1, 4])
def test_the_card_of_a_run_that_confirmed_nothing_says_what_this_run_measured(
    tmp_path: Path, launches: int, lost: bool
) -> None:
    """Whether the run ends by itself or has lost its process. The run before it confirmed the same trial."""
    night = Night(tmp_path)
    assert night.whole().winner == 1
    night.now += timedelta(minutes=1)
    run = night.run()
    night.search(run, (16, 64))
    night.cut_after = len(night.launched) + launches
    night.lost = lost
    said = night.end(run)
    assert said.outcome is Judgement.NOT_CONFIRMED
    found = card(said)
    text = "\n".join(lines(found))
    why = {0: "this run measured no trial again", 1: "the confirmation did not end"}
    told = why.get(launches, "the confirmation ended after 1 repeat")
    assert (found.confidence, found.because) == ("none", told)
    assert "measured once" not in text
    assert launches == 0 or found.title == "No result yet: the confirmation did not end"
    assert not found.rows or found.uncompared == f"these are first measurements; {told}"


def test_a_run_ends_after_its_launches_whatever_the_clock_of_who_ends_it_says(tmp_path: Path) -> None:
    """A killed run on the virtual clock is cancelled by the clock of the host, which is behind it."""
    night = Night(tmp_path)
    first = night.whole()
    run = night.run()
    night.search(run, (16, 64))
    night.store.save_run(replace(run, state=RunState.CANCELLED, ended_at=NOW))
    ended = night.store.run(run.id)
    assert (
        ended.ended_at == night.store.launches(run.study_id)[-1].ended_at == night.now + timedelta(minutes=1)
    )
    assert [said.run_id for said in night.store.conclusions()] == [first.run_id, run.id]
    assert board_of(night.store, night.prepared.study).conclusion != first
    night.now += timedelta(minutes=2)
    again = night.run()
    night.store.cancel_run(again.id)
    night.now = NOW
    night.run()
    assert night.store.run(again.id).ended_at == again.started_at


def test_two_nights_beside_each_other_have_the_repeats_of_their_own(tmp_path: Path) -> None:
    night = Night(tmp_path)
    first = night.whole()
    night.now += timedelta(minutes=1)
    run = night.run()
    second = night.end(run)
    assert [said.winner for said in (first, second)] == [1, 1]
    folders = {each.id: each.directory for each in night.store.launches(run.study_id)}
    sides = compare(night.store, CompareQuery(runs=(first.run_id, second.run_id))).sides
    for side, said in zip(sides, (first, second), strict=True):
        assert side.trial is not None
        last = [m for m in side.trial.measurements if m.purpose == "confirm"][-said.repeats :]
        assert [m.repeat for m in last] == [*range(1, said.repeats + 1)]
        assert all(f"-confirm-{said.run_id[:8]}-" in (folders[m.launch_id or ""] or "") for m in last)


def test_an_attempt_has_one_name_on_every_surface(tmp_path: Path) -> None:
    """Trial 1 was interrupted and tried again. `1` is its first attempt, and `1.1` the one that won."""
    night = Night(tmp_path)
    run = night.run()
    night.search(run, SEQS[:1])
    cut = night.store.start_trial(
        study_id=run.study_id, run_id=run.id, candidate=Candidate({"max_num_seqs": 16}), number=1, attempt=0,
        seed=0, origin="search", now=night.now, directory=str(night.bench.directory(1, "0")),
    )  # fmt: skip
    night.store.finish_trial(
        replace(cut, state=TrialState.ABORTED, reason="it died", cause="controller", ended_at=night.now)
    )
    night.search(run, SEQS[1:])
    said = night.end(run)
    assert (said.winner, said.finalists[0].label) == (1, "1.1")
    texts = {
        name: plain(call(tmp_path, *words, run.study_id).output)
        for name, words in {
            "front": ("front",), "timings": ("front", "--timings"), "study show": ("study", "show"),
            "report": ("report", "-o", "-"), "markdown": ("report", "--format", "md", "-o", "-"),
        }.items()
    }  # fmt: skip
    texts["run status"] = plain(call(tmp_path, "run", "status", run.id).output)
    (row,) = night.store.bests(model=night.prepared.study.model, metric="ttft_p95_ms")
    assert row.label == "1.1"
    assert provenance(night.store.profile(said.profiles["challenger"].id))["trial"] == "1.1"
    told = answer(tmp_path, "tune", tmp_path / "study.yaml", "--confirm-only", "--dry-run", "--json")
    assert list(told["commands"]) == ["baseline", "trial 1.1", "trial 2"]  # type: ignore[call-overload]
    world = World(tmp_path)
    texts["page"] = plain(
        TestClient(world.app, base_url="http://localhost").get(f"/studies/{run.study_id}").text
    )
    world.store.close()
    for name, text in texts.items():
        assert "rial 1.1" in text, (name, text)
        of_the_first = re.findall(r"(?<![\w.])[Tt]rials? 1\b(?!\.\d)[^,;]{0,10}", text)
        assert all(re.match("trial 1 ?: it died", found) for found in of_the_first), (name, of_the_first)


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


def cut(night: Night, after: int, run: Run | None = None) -> Run:
    """A run that dies in its confirmation once so many launches were made. Its row stays open."""
    night.cut_after, run = after, run or night.run()
    if not night.store.trials(run.study_id):
        night.search(run)
    ending = Ending(night.bench, run)

    async def go() -> None:
        await ending.what_is_pending()
        await ending.confirm()

    with pytest.raises(Closed):
        asyncio.run(go())
    night.cut_after = None
    return run


def cancelled(night: Night, run: Run) -> None:
    """`tuner run cancel` of a run without a process."""
    settings = Settings(home=night.home, database_url=night.url)
    Controllers(night.store, settings, lambda: night.now).cancel(run.id)


def cancelled_here(night: Night, run: Run) -> None:
    cancelled(night, night.store.save_run(replace(run, host=HERE)))


def given_up(night: Night, run: Run) -> None:
    """The request to cancel came, but nobody ended the run: the next `tuner tune` does."""
    night.store.cancel_run(run.id)


def lost(night: Night, run: Run) -> None:
    """It lost its process too often, or a fault in the tuner broke it."""
    night.store.save_run(replace(run, state=RunState.FAILED, reason="it broke", ended_at=night.now, pid=None))


def asked_to_stop(night: Night, run: Run) -> None:
    """Cancelled while its process was there."""
    ending = Ending(night.bench, run)
    night.cut_after = len(night.launched)
    with pytest.raises(Closed):
        asyncio.run(ending.what_is_pending())
    night.cut_after = None
    ended = replace(run, state=RunState.CANCELLED, ended_at=night.now)
    night.store.save_run(ended, ending.conclusion("cancelled on request"))


def left_open(night: Night, run: Run) -> None:
    """Nobody ended it: the next `tuner tune` resumes it."""


ENDED = (cancelled, cancelled_here, given_up, lost, asked_to_stop, left_open)


def next_run(night: Night, trials: int = 4, tell: Tell | None = None, minutes: float | None = None) -> Run:
    """The whole next `tuner tune`, with a window of some minutes."""
    end = None if minutes is None else night.now + timedelta(minutes=minutes)
    work = tune(
        night.prepared, night.store, home=night.home, clock=lambda: night.now, work=night.work,
        limits=RunLimits(trials=trials, deadline=end, early=False),
        tell=tell or (lambda event: night.news.append(event.text)),
    )  # fmt: skip
    return asyncio.run(work)


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDED)
@pytest.mark.parametrize("after", [1, 2, 5])
def test_the_next_run_first_ends_a_confirmation_however_it_was_ended(
    tmp_path: Path, end: Callable[[Night, Run], None], after: int
) -> None:
    """Also one that was cut before each finalist was launched once. Repeats that were measured are kept."""
    night = Night(tmp_path)
    run = cut(night, after)
    end(night, run)
    done = next_run(night, trials=5)
    assert sorted(night.launched[:9]) == [(n, r) for n in (0, 1, 2) for r in (1, 2, 3)]
    searched = [t for t in night.store.trials(run.study_id) if t.number > 2]
    assert searched, "new trials come after it"
    said = night.store.conclusion(done.id)
    assert said is not None
    assert (said.outcome, said.winner) == (Judgement.CLEAR_WINNER, 1)
    rows = night.store.bests(model=night.prepared.study.model, metric="ttft_p95_ms")
    assert [row.repeats for row in rows if row.run_id == done.id] == [said.repeats]
    if done.id != run.id:
        before = night.store.conclusion(run.id)
        assert before is not None
        assert (before.outcome, before.repeats) == (Judgement.NOT_CONFIRMED, after // 3)
        assert "The next run first" in before.sentence


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDED)
def test_a_confirmation_that_was_cut_twice_is_ended_by_the_run_after(
    tmp_path: Path, end: Callable[[Night, Run], None]
) -> None:
    """The second run has no trial of its own: its conclusion is not that nothing served."""
    night = Night(tmp_path)
    lost(night, cut(night, 4))
    second = cut(night, 6, night.run())
    end(night, second)
    done = next_run(night)
    assert sorted(night.launched[:9]) == [(n, r) for n in (0, 1, 2) for r in (1, 2, 3)]
    said = night.store.conclusion(second.id)
    assert said is not None
    assert said.outcome is (Judgement.NOT_CONFIRMED if done.id != second.id else Judgement.CLEAR_WINNER)


@pytest.mark.parametrize("end", ENDED)
def test_a_continued_confirmation_is_in_the_cost_of_each_run_by_its_own_launches(
    tmp_path: Path, end: Callable[[Night, Run], None]
) -> None:
    night = Night(tmp_path)
    first = cut(night, 4)
    end(night, first)
    second = night.run()
    night.end(second)
    told = {said.run_id: said.cost.confirm_s for said in night.store.conclusions()}
    again = first.id == second.id
    assert told == ({first.id: 9 * 60.0} if again else {first.id: 4 * 60.0, second.id: 5 * 60.0})


def dry_run(night: Night, *words: str) -> tuple[str, dict[str, object]]:
    """(what `tuner tune --dry-run` prints, the same as JSON)."""
    asked = ("tune", night.home / "study.yaml", "--trials", 8, "--dry-run", *words)
    return " ".join(tuner(night.home, *asked).stdout.split()), answer(night.home, *asked, "--json")


@pytest.mark.slow
@pytest.mark.parametrize("end", [cancelled, left_open])
def test_the_dry_run_tells_the_confirmation_that_comes_first(
    tmp_path: Path, end: Callable[[Night, Run], None]
) -> None:
    night = Night(tmp_path)
    end(night, cut(night, 4))
    said, told = dry_run(night)
    assert (
        "The run first finishes the interrupted confirmation of trials 1, 2. This takes 5 launches," in said
    )
    assert "launches, about 5 min 0 s." in said
    assert "If the search finds other finalists, another confirmation launches the baseline and" in said
    assert list(told["commands"]) == ["baseline", "trial 1", "trial 2"]  # type: ignore[call-overload]
    assert told["first_confirms"] == {"trials": [1, 2], "launches": 5}
    if end is cancelled:  # a new run of 1 trial may make 3 launches
        fewer = answer(night.home, "tune", night.home / "study.yaml", "--trials", 1, "--dry-run", "--json")
        assert fewer["first_confirms"] == {"trials": [1, 2], "launches": 2}
    done = next_run(night)
    assert night.store.conclusion(done.id) is not None
    said, told = dry_run(night)
    assert "The run first" not in said
    assert told["first_confirms"] is None
    assert list(told["commands"]) == ["baseline", "next"]  # type: ignore[call-overload]


def test_the_dry_run_calls_a_confirmation_interrupted_only_if_it_had_begun(tmp_path: Path) -> None:
    night = Night(tmp_path)
    assert night.whole(NOW + timedelta(minutes=2)).outcome is Judgement.NOT_CONFIRMED
    why = "first confirms trials 1, 2; this confirmation has not begun yet"
    said, _ = dry_run(night)
    assert f"The run {why}. This takes 9 launches" in said
    night.news.clear()
    night.end(night.run(NOW + timedelta(hours=1)))
    assert f"the run {why}" in night.news


def test_the_dry_run_does_not_count_a_baseline_that_did_not_serve(tmp_path: Path) -> None:
    night = Night(tmp_path)
    run = night.run()
    base = night.store.start_trial(
        study_id=run.study_id, run_id=run.id, candidate=Candidate({"max_num_seqs": 4}), number=0, attempt=0,
        seed=0, origin="baseline", now=night.now, directory=str(night.bench.directory(0, "0")),
    )  # fmt: skip
    night.store.finish_trial(
        replace(base, state=TrialState.INFEASIBLE, reason="no memory", ended_at=night.now)
    )
    night.search(run, (16, 64))
    cut(night, 1, run)
    said, told = dry_run(night)
    assert "of trials 1, 2. This takes 5 launches, about 5 min 0 s." in said
    assert "another confirmation launches at most 2 finalists, 3 times each." in said
    assert (
        "This takes about 6 min 0 s. So far the baseline has not served the traffic; if it does, it" in said
    )
    assert list(told["commands"]) == ["trial 1", "trial 2"]  # type: ignore[call-overload]
    night.end(run)
    assert len(night.launched) == 6


def test_the_dry_run_and_the_run_count_the_same_repeats(tmp_path: Path) -> None:
    """Two trials leave four launches: one finalist and the baseline, twice each."""
    night = Night(tmp_path, lambda seqs, purpose, repeat: {"ttft_p95_ms": 1.0 if seqs == 4 else 0.5})
    said = " ".join(
        tuner(tmp_path, "tune", tmp_path / "study.yaml", "--trials", 2, "--dry-run").stdout.split()
    )
    assert "the baseline and at most 1 finalist, 2 times each." in said
    next_run(night, 2)
    assert "confirmation: launch 1 of 4, repeat 1 of 2" in night.news
    assert [repeat for number, repeat in night.launched if repeat] == [1, 1, 2, 2]


@pytest.mark.parametrize("trials", [3, 6])
def test_the_time_left_counts_a_confirmation_that_comes_first_once(tmp_path: Path, trials: int) -> None:
    """The search follows it. Another confirmation follows only for other finalists, if launches are left."""
    night = Night(tmp_path)
    lost(night, cut(night, 4))
    begun, told = night.now, list[tuple[str, float, float]]()

    def passed() -> float:
        return (night.now - begun).total_seconds()

    pace = Pace(clock=passed)

    def tell(event: RunEvent) -> None:
        pace.take(event)
        left = pace.left_s()
        assert left is not None
        told.append((event.kind, passed(), left))

    next_run(night, trials, tell)
    first = [left for kind, at, left in told if kind == "confirm" and at < 300]
    trial_s = (first[0] - 5 * 60) / trials
    assert 0 < trial_s <= 60
    assert first == [trials * trial_s + launches * 60 for launches in (5, 4, 3, 2, 1)]
    assert next(left for kind, _, left in told if kind == "started") == pytest.approx(trials * trial_s)
    searched = 60.0 * (5 + trials)
    last = next(left for _, at, left in told if at == searched)
    assert searched + last == pytest.approx(passed())
    assert (last > 0) == (trials == 6), "three trials leave no launches for other finalists"


def test_a_run_that_had_no_time_for_it_leaves_a_confirmation_to_the_run_after(tmp_path: Path) -> None:
    """Whether it ended by itself or was cancelled in its search."""
    night = Night(tmp_path)
    lost(night, cut(night, 4))
    short = night.run(night.now + timedelta(minutes=1))
    assert night.end(short).outcome is Judgement.NOT_CONFIRMED
    hasty = night.run(night.now + timedelta(minutes=1))
    ending = Ending(night.bench, hasty)
    asyncio.run(ending.what_is_pending())
    said = ending.conclusion("cancelled on request")
    assert said is not None
    assert said.sentence.endswith("The next run first measures trials 1, 2 again.")
    lost(night, hasty)
    assert night.launched[4:] == []
    next_run(night)
    assert sorted(night.launched[:9]) == [(n, r) for n in (0, 1, 2) for r in (1, 2, 3)]


def test_only_what_is_new_is_said_to_be_left_unconfirmed(tmp_path: Path) -> None:
    """A run first finishes an older confirmation, and has no time left for a better trial that it found."""
    night = Night(
        tmp_path, lambda seqs, purpose, repeat: dict.fromkeys(("ttft_p95_ms", "e2e_p95_ms"), 4 / seqs)
    )
    lost(night, cut(night, 5))
    run = night.run(night.now + timedelta(hours=1))
    ending = Ending(night.bench, run)
    asyncio.run(ending.what_is_pending())
    night.search(run, (256,))
    night.now += timedelta(minutes=55)
    why = asyncio.run(ending.confirm())
    said = ending.conclusion(why)
    assert said is not None
    assert said.confirmed
    assert said.sentence.endswith(f" Trial 3 was not confirmed: {why}.")


def test_a_confirmation_is_begun_only_where_it_fits_and_the_next_run_does_it(tmp_path: Path) -> None:
    night = Night(tmp_path)
    said = night.whole(NOW + timedelta(minutes=2))
    assert (said.outcome, night.launched) == (Judgement.NOT_CONFIRMED, [])
    assert "it takes about 2 min 20 s, but only 2 min 0 s of the window are left" in said.sentence
    assert [arm.trial for arm in said.finalists] == [1, 2]
    for metric in ("ttft_p95_ms", "goodput_rps"):
        (row,) = night.store.bests(model=night.prepared.study.model, metric=metric)
        assert row.number == 1, "the history and the card are about one trial, whatever the metric"
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
    assert "(5 of 100 requests failed)" in said.sentence
    assert not said.confirmed


def test_a_repeat_says_that_it_failed_on_the_held_out_slice() -> None:
    values = {"failed": 5.0, "requests": 398.0}
    assert not_serving(Measurement(values=values, purpose="confirm")) == "5 of 398 requests failed"
    assert (
        not_serving(Measurement(values=values, purpose="held_out"))
        == "on the held-out slice 5 of 398 requests failed"
    )
    assert not_serving(Measurement(values={**values, "failed": 0.0}, purpose="held_out")) is None


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"k": 96}, {"k": 512}, {"k": (96, 512)}),  # cut by the engine
        ({"k": 512}, {"k": 512}, {}),  # cut to what it is today
        ({"k": 96}, {}, {"k": (96, 2048)}),  # one engine does not tell
        ({}, {}, {"k": (None, 2048)}),
    ],
)
def test_what_changed_is_told_by_values_in_effect(
    tmp_path: Path, before: dict[str, Value], after: dict[str, Value], told: dict[str, tuple[Value, Value]]
) -> None:
    night = Night(tmp_path)
    night.search(night.run())
    base, trial, _ = night.store.trials(night.prepared.study.id)
    asked = Candidate({"k": 2048})
    assert (
        changed(
            replace(base, candidate=Candidate({}), effective=before),
            replace(trial, candidate=asked, effective=after),
        )
        == told
    )


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


def screened_winner(night: Night, seconds: float) -> Run:
    """The whole night of a search that screened its only candidate, and then has some seconds left: a launch
    is expected to take 15.5 s.
    """
    night.screened, night.launch_s = (16,), 15.0
    night.search(night.run(), SEQS[:2])
    return next_run(night, 3, minutes=seconds / 60)


def test_a_screened_finalist_is_relaunched_where_the_confirmation_of_those_there_are_also_fits(
    tmp_path: Path,
) -> None:
    """Seven launches fit into the window; the ten that a second finalist would need do not."""
    night = Night(tmp_path)
    done = screened_winner(night, 150)
    said, trials = night.store.conclusion(done.id), night.store.trials(done.study_id)
    assert [t.origin for t in trials] == ["baseline", "search", "relaunched"]
    assert said is not None
    assert (said.winner, [arm.trial for arm in said.finalists]) == (2, [2])


def test_a_screened_finalist_that_was_not_relaunched_is_told_as_such_everywhere(tmp_path: Path) -> None:
    night = Night(tmp_path)
    done = screened_winner(night, 100)
    said, ref = night.store.conclusion(done.id), done.study_id[:16]
    assert said is not None
    assert said.winner == 1
    why = "trial 1 will not be relaunched before the confirmation: the window has no time for both"
    assert why in night.news
    shown = [row for row in board_of(night.store, night.prepared.study).rows() if row["trial"] == 1]
    assert [(row["role"], row["confirmed"] != {}) for row in shown] == [("winner", True)]
    world = World(tmp_path)
    client = world.client("read")
    client.post("/login", data={"token": world.token("read")})
    told = {
        "front": call(tmp_path, "front", ref).output,
        "markdown": call(tmp_path, "report", ref, "--format", "md", "-o", "-").output,
        "report": call(tmp_path, "report", ref, "-o", "-").output,
        "page": client.get(f"/studies/{ref}", headers={"accept": "text/html"}).text,
    }
    for name, text in told.items():
        words = plain(text)
        told_once = "Trial 1 was confirmed without a relaunch: the first values are from a running engine."
        assert told_once in words, name
        assert "only screened" not in words, name
        assert "Another run" not in words, name
        assert "policy chose it" not in words, name
    rows = night.store.bests(model=night.prepared.study.model, metric="ttft_p95_ms")
    assert [(row.number, row.confirmed, row.repeats, row.trials) for row in rows] == [(1, True, 3, 1)]


def test_the_search_keeps_no_time_for_a_confirmation_that_is_done(tmp_path: Path) -> None:
    """The finalists were confirmed first: the window has time for more trials."""
    night = Night(tmp_path, plan="quick")
    lost(night, cut(night, 3))
    done = next_run(night, 20, minutes=10)
    assert len([t for t in night.store.trials(done.study_id) if t.run_id == done.id]) > 6


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
