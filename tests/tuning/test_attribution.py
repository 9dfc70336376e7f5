"""Which knobs of a planted winner are left out of its profile, and how that is told."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attribution import measured
from tests.report.test_report import said as example
from tests.tuning.studies import SPACE, tuner
from tests.tuning.test_confirm import NOW, Closed, Night, quiet
from tuner.conclusions import Attribution, Conclusion, Judgement, KnobGain, RunCost, node_seconds
from tuner.records import Candidate, Launch, Prediction, Run, RunState, Trial, TrialState, measures_again
from tuner.report.explain import gave, knob_line, lines, mechanism, why_none
from tuner.report.words import change, cost, seconds
from tuner.search.acquisition import Predict
from tuner.service.pages.compare import CompareQuery, compare
from tuner.service.pages.overview import card_of_profile, newest_card
from tuner.tuning.context import LaunchJob, Measured, Note, budget_of
from tuner.tuning.ending import Ending
from tuner.tuning.virtual import HIDDEN


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Attribution]:
    """Two cases of the benchmark: one with a simulator and two limits that do one work, one without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HIDDEN, json.dumps([{"launch_noise": 0.01}]))
        folder = tmp_path_factory.mktemp("cases")
        made = {number: asyncio.run(measured(number, folder / str(number)))[0] for number in (2, 10)}
    return {number: one for number, one in made.items() if one is not None}


@pytest.mark.slow
def test_inert_knobs_are_left_out_and_one_of_two_that_do_the_same_is_kept(
    found: Mapping[int, Attribution],
) -> None:
    one = found[2]
    kept = [g.name for g in one.knobs if g.kept]
    assert one.published
    assert len(kept) == 1
    assert kept[0] in ("max_num_batched_tokens", "max_num_scheduled_tokens")
    assert "gives a part of the gain if" in next(g.why for g in one.knobs if g.kept)
    assert not [d for d in one.last if d.word == "worse"]


@pytest.mark.slow
def test_without_a_simulator_knobs_are_measured(found: Mapping[int, Attribution]) -> None:
    one = found[10]
    assert {g.how for g in one.knobs} <= {"measured", "not asked"}
    (pays,) = [g for g in one.knobs if g.kept and g.gains]
    assert pays.name == "max_num_batched_tokens"
    assert pays.gains[0].word == "better"


@pytest.mark.slow
def test_it_costs_at_most_thirty_per_cent_of_the_search_and_is_told_in_sentences(
    found: Mapping[int, Attribution],
) -> None:
    for one in found.values():
        assert 0 < one.seconds <= 0.3 * one.search_s
        text = "\n".join(lines(one, gpus=False))
        assert "left out" in text
        assert set(gave(one)) == {g.name for g in one.knobs}
        assert Attribution.from_json(one.to_json()) == one


def slowed(
    made: Sequence[Measured], factor: float = 1.5, names: Sequence[str] = ("ttft_p95_ms",)
) -> list[Measured]:
    """The measurements with `factor` times the first one's values of these names."""
    slower = {name: factor * made[0].measurement.values[name] for name in names}
    return [
        replace(m, measurement=replace(m.measurement, values={**m.measurement.values, **slower}))
        for m in made
    ]


class Padded(Night):
    """A night whose trials also set a watermark, which does nothing at its load."""

    padding: Mapping[str, float] = {"watermark": 0.01}

    def search(self, run: Run, seqs: Sequence[int] = (4, 16, 64, *[8] * 21)) -> None:
        begun = self.store.start_trial

        def start(**given: Any) -> Trial:
            more = {} if given["origin"] == "baseline" else self.padding
            return begun(**{**given, "candidate": given["candidate"].with_values(**more)})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.store, "start_trial", start)
            super().search(run, seqs)

    def attributed(
        self, run: Run | None = None, predict: Predict | None = None
    ) -> tuple[Conclusion, Attribution | None]:
        """The end of a run, as the loop has it; `run`: one that was interrupted."""
        if run is None:
            run = self.run()
            self.search(run)
        budget = budget_of(replace(run, trials_limit=24), self.bench.launches())
        context = replace(self.bench, budget=budget)
        ending = Ending(context, run)

        async def go() -> None:
            await ending.what_is_pending()
            assert await ending.confirm() is None
            await ending.attribute(predict)

        asyncio.run(go())
        said = ending.conclusion()
        assert said is not None
        return said, self.store.attribution(run.id)


def test_a_knob_that_gives_nothing_is_not_in_the_published_profile(tmp_path: Path) -> None:
    night = Padded(tmp_path)
    said, found = night.attributed()
    assert found is not None
    assert [(g.name, g.kept, g.how) for g in found.knobs] == [
        ("max_num_seqs", True, "measured"), ("watermark", False, "measured"),
    ]  # fmt: skip
    assert found.published
    assert found.seconds <= 0.3 * found.search_s
    profile = night.store.profile(said.profiles["challenger"].id)
    assert profile.candidate == Candidate({"max_num_seqs": 16})
    assert profile.evidence["confirmed"] is True
    assert profile.evidence["attribution"] == found.to_json(), "what was left out stays in the evidence"
    done = tuner(tmp_path, "explain", profile.id)
    assert done.returncode == 0, done.stderr
    assert "watermark 0.01: no gain, left out (nothing is worse without it)" in done.stdout
    assert "max_num_seqs 16: ttft_p95_ms −50 %" in done.stdout
    given = gave(found)
    assert set(given) == {"max_num_seqs", "watermark"}
    study, run = night.store.study(profile.study_id), night.store.runs(profile.study_id)[0]
    night.store.save_run(replace(run, state=RunState.FINISHED, ended_at=said.at), said)
    told = tuner(tmp_path, "front", study.name)
    assert given["max_num_seqs"] in " ".join(told.stdout.split()), told.stderr
    written = tmp_path / "report.md"
    assert tuner(tmp_path, "report", study.name, "-o", written, "--format", "md").returncode == 0
    assert given["max_num_seqs"] in written.read_text().replace("\\", "")
    shown = newest_card(night.store, [study])
    assert shown is not None
    assert {knob.name: knob.gave for knob in shown[0].changed} == given
    says = f"The published profile is trial {found.reduced}: it leaves out the knobs that give nothing."
    status = tuner(tmp_path, "run", "status", run.id)
    assert given["max_num_seqs"] in " ".join(status.stdout.split()), status.stderr
    assert says in status.stdout
    assert says in told.stdout
    made = [t for t in night.store.trials(said.study_id) if measures_again(t.directory)]
    assert f"({len(made)} of the attribution" in status.stdout
    (row,) = night.store.bests(model=study.model, metric="ttft_p95_ms")
    searched = [t for t in night.store.trials(said.study_id) if not measures_again(t.directory)]
    assert row.trials == len([t for t in searched if t.state is TrialState.COMPLETE and not t.screened])
    assert f"{seconds(found.seconds)} of attribution" in status.stdout
    evidence = tuner(tmp_path, "profile", "show", profile.id).stdout
    for knob in found.knobs:
        assert knob_line(knob) in evidence
    for one in found.last:
        assert change(one) in evidence
    assert f"attribution.took {seconds(found.seconds)}" in " ".join(evidence.split())
    assert "within" not in evidence.replace("the same within", "")
    (best,) = night.store.bests(model=study.model, metric="ttft_p95_ms")
    won = said.arm(said.winner)
    assert won is not None
    assert (best.number, best.repeats) == (said.winner, said.repeats), "not those of the last comparison"
    timed = tuner(tmp_path, "front", study.name, "--timings").stdout
    confirmed = [line.split()[0] for line in timed.splitlines() if " confirmation 1 " in line]
    assert len(set(confirmed)) == len(confirmed), "one confirmation has one first repeat of each trial"
    assert "last comparison 1" in timed
    assert "last comparison 2" in timed
    own = card_of_profile(night.store, profile, "challenger")
    assert own is not None
    assert (own.rows, own.title, own.left_out) == (shown[0].rows, shown[0].title, says)
    today = night.store.profile(said.profiles["baseline"].id)
    sides = compare(night.store, CompareQuery(profiles=(today.id, profile.id))).sides
    assert sides[1].candidate == profile.candidate
    assert sides[0].outcome == f"{said.outcome.value}: trial {said.winner}", (
        "today's configuration did not win"
    )
    assert dict(won.confirmed).items() <= dict(sides[1].confirmed).items()
    assert sides[1].outcome == (
        f"{said.outcome.value}: trial {said.winner}, here without the knobs that give nothing"
    )


def test_the_last_knob_needs_no_launch_where_all_others_give_nothing(tmp_path: Path) -> None:
    """Without the watermark the winner differs from today in one knob, which the confirmation measured."""

    class Hinted(Padded):
        """The search came near to the winner without the watermark."""

        def search(self, run: Run, seqs: Sequence[int] = (4, 16, 64, *[8] * 21)) -> None:
            super().search(run, seqs)
            self.padding = {}
            super().search(run, (15,))

    def speed(seqs: int, purpose: str, repeat: int) -> Mapping[str, float]:
        return {"ttft_p95_ms": 0.6, "e2e_p95_ms": 0.95} if seqs == 15 else quiet(seqs, purpose, repeat)

    night = Hinted(tmp_path, speed)
    said, found = night.attributed()
    assert found is not None
    assert found.published, found.sentence
    assert found.knobs[0].why == "it is the only difference from today's configuration"
    assert found.knobs[0].gains[0].word == "better"
    told = [t.origin for t in night.store.trials(said.study_id) if "without" in (t.origin or "")]
    assert told == ["without watermark"]


def test_two_knobs_that_do_the_same_are_told_apart_by_launches(tmp_path: Path) -> None:
    class Twins(Padded):
        """The winner is slow without the watermark and the threshold; either one is enough."""

        padding: Mapping[str, float] = {"watermark": 0.01, "long_prefill_token_threshold": 16000}
        space = SPACE + "  watermark: [0.0, 0.01]\n  long_prefill_token_threshold: [0, 16000]\n"

        async def work(self, order: LaunchJob, note: Note) -> list[Measured]:
            made = await super().work(order, note)
            if order.number < 3 or set(order.spec.asked) & set(self.padding):
                return made
            return slowed(made)

    night = Twins(tmp_path)
    run = night.run()
    night.search(run, (4, 16, 64, *[8] * 30))
    _, found = night.attributed(run)
    assert found is not None
    assert found.published, found.sentence
    assert [(g.name, g.kept) for g in found.knobs] == [
        ("long_prefill_token_threshold", False), ("max_num_seqs", True), ("watermark", True),
    ]  # fmt: skip


def test_a_reduced_configuration_that_is_worse_is_not_published(tmp_path: Path) -> None:
    class Together(Padded):
        """The watermark matters only where both are measured in the last comparison."""

        async def work(self, order: LaunchJob, note: Note) -> list[Measured]:
            made = await super().work(order, note)
            if "watermark" in order.spec.asked or order.number < 3 or ".3-1-" in order.spec.directory:
                return made
            return slowed(made)

    night = Together(tmp_path)
    said, found = night.attributed()
    assert found is not None
    assert not found.published
    assert all(g.kept for g in found.knobs)
    profile = night.store.profile(said.profiles["challenger"].id)
    assert profile.candidate == Candidate({"max_num_seqs": 16, "watermark": 0.01})
    assert "published unchanged" in found.sentence


def test_a_knob_for_which_there_was_no_room_is_not_said_to_pay(tmp_path: Path) -> None:
    class Crowded(Padded):
        padding: Mapping[str, float] = {"watermark": 0.01, "long_prefill_token_threshold": 16000}
        space = SPACE + "  watermark: [0.0, 0.01]\n  long_prefill_token_threshold: [0, 16000]\n"

    night = Crowded(tmp_path)
    run = night.run()
    night.search(run, (4, 16, 64, *[8] * 15))
    _, found = night.attributed(run)
    assert found is not None
    assert found.published, found.sentence
    assert [g.how for g in found.knobs] == ["measured", "measured", "not asked"]
    assert found.sentence.startswith(
        "max_num_seqs gives the gain; long_prefill_token_threshold gives nothing"
    )
    assert found.sentence.endswith("Not tested: watermark.")


class Misled(Padded):
    """The winner is slow without the watermark; `first`: how much in the first launch without it."""

    padding: Mapping[str, float] = {"watermark": 0.01, "long_prefill_token_threshold": 16000}
    space = SPACE + "  watermark: [0.0, 0.01]\n  long_prefill_token_threshold: [0, 16000]\n"
    first = 1.5

    async def work(self, order: LaunchJob, note: Note) -> list[Measured]:
        made = await super().work(order, note)
        if order.number < 3 or "watermark" in order.spec.asked:
            return made
        factor = self.first if ".3-1-" in order.spec.directory else 1.5
        return slowed(made, factor, ("ttft_p95_ms", "e2e_p95_ms"))


def expecting(watermark: float) -> Predict:
    """The threshold does nothing, and the winner is slower without the watermark by this factor."""

    def predict(candidates: Sequence[Candidate]) -> list[Prediction]:
        return [
            Prediction(values={
                "ttft_p95_ms": (100.0 if c.get("max_num_seqs") == 16 else 200.0)
                * (1.0 if "watermark" in c else watermark),
            })
            for c in candidates
        ]  # fmt: skip

    return predict


UNSURE = 1.012
"""A factor that the simulator leaves to a launch."""


def test_what_one_launch_said_is_not_left_out_after_the_last_comparison_was_lost(tmp_path: Path) -> None:
    class Lucky(Misled):
        first = 1.02

    night = Lucky(tmp_path)
    run = night.run()
    night.search(run, (4, 16, 64, *[8] * 45))
    said, found = night.attributed(run, expecting(UNSURE))
    assert found is not None
    assert found.published, found.sentence
    assert [(g.name, g.kept, g.how) for g in found.knobs] == [
        ("long_prefill_token_threshold", False, "predicted"), ("max_num_seqs", True, "predicted"),
        ("watermark", True, "measured"),
    ]  # fmt: skip
    assert "it is not certain that the reduced configuration is as good" in found.knobs[2].why
    profile = night.store.profile(said.profiles["challenger"].id)
    assert profile.candidate == Candidate({"max_num_seqs": 16, "watermark": 0.01})
    launches = {each.id: each.directory or "" for each in night.store.launches(profile.study_id)}
    reduced = next(t for t in night.store.trials(profile.study_id) if t.number == found.reduced)
    assert all(".4-" in launches[m.launch_id or ""] for m in reduced.measurements)
    assert found.seconds <= 0.3 * found.search_s


@pytest.mark.parametrize("later", [1.005, UNSURE])
def test_a_later_run_does_not_lose_the_same_comparison_again(tmp_path: Path, later: float) -> None:
    """The simulator expected nothing of a knob that matters, and still does, or is not sure any more."""
    night = Misled(tmp_path)
    run = night.run()
    night.search(run)
    said, found = night.attributed(run, expecting(1.005))
    assert found is not None
    assert not found.published, "there is no room for a second comparison"
    assert [g.how for g in found.knobs] == ["predicted"] * 3
    night.store.save_run(replace(run, state=RunState.FINISHED, ended_at=said.at), said)
    again_run = night.run()
    night.search(again_run, [8] * 24)
    made = len(night.launched)
    said, again = night.attributed(again_run, expecting(later))
    assert again is not None
    assert again.published, again.sentence
    assert [g.name for g in again.knobs if not g.kept] == ["long_prefill_token_threshold"]
    watermark = again.knobs[2]
    assert watermark.how == "measured"
    assert watermark.gains[0].word == "better"
    assert "long_prefill_token_threshold" in watermark.why
    asked = [number for number, _ in night.launched[made:]]
    assert found.reduced not in asked


@pytest.mark.slow
@pytest.mark.parametrize("more", range(5))
def test_a_run_that_is_stopped_while_it_asks_goes_on_where_it_was(tmp_path: Path, more: int) -> None:
    """Two launches without a knob (one is the reduced configuration), the winner, then both again."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = Padded(tmp_path / "whole")
    _, expected = whole.attributed()
    assert expected is not None
    night = Padded(tmp_path / "cut")
    run = night.run()
    night.search(run)
    night.cut_after = len(whole.launched) - 5 + more
    with pytest.raises(Closed):
        night.attributed(run)
    night.cut_after = None
    said, found = night.attributed(run)
    assert found is not None
    assert len(night.launched) == len(whole.launched), "nothing is launched twice"
    assert said.confirmed
    assert [(g.name, g.kept) for g in found.knobs] == [(g.name, g.kept) for g in expected.knobs]
    assert found.published
    assert found.search_s == expected.search_s == said.cost.search_s, "its launches are none of the search"


@pytest.mark.parametrize("launches", [0, 1, 5])
def test_a_winner_that_a_later_run_confirms_is_asked_by_the_search_that_found_it(
    tmp_path: Path, launches: int
) -> None:
    night = Padded(tmp_path)
    first = night.run()
    night.search(first)
    night.cut_after = launches
    assert not night.end(first).confirmed
    night.cut_after = None
    night.now += timedelta(minutes=1)
    said, found = night.attributed(night.run())
    assert said.confirmed
    assert said.cost.search_s == 0
    assert found is not None
    assert found.published, found.sentence
    assert [(g.name, g.kept) for g in found.knobs] == [("max_num_seqs", True), ("watermark", False)]
    assert (found.search_s, found.earlier_search_s) == (0, 24 * 60.0), "the first run searched"
    assert 0 < found.seconds <= 0.3 * found.earlier_search_s
    told = "\n".join(lines(found, gpus=False))
    assert "% of the time of the search and the earlier search together" in told


def test_the_time_of_an_attribution_is_rounded_once_and_has_the_unit_of_the_cost() -> None:
    took = [
        Launch(
            id=str(number), study_id="s", argv=("-tp", "2"), started_at=NOW,
            ended_at=NOW + timedelta(seconds=span),
        )
        for number, span in enumerate((5.73, 5.73))
    ]  # fmt: skip
    found = Attribution(run_id="r", study_id="s", at=NOW, winner=1, search_s=100.0)
    for gpus, said in ((False, "11 s"), (True, "0.00637 GPU-hours")):
        whole = replace(found, seconds=node_seconds(took, gpus=gpus))
        assert f"this took {said}, " in "\n".join(lines(whole, gpus=gpus))
        assert f"{said} of attribution" in cost(RunCost(search_s=100.0, gpus=2 * gpus), whole)


def test_a_search_pays_for_one_attribution(tmp_path: Path) -> None:
    night = Padded(tmp_path)
    said, found = night.attributed()
    assert found is not None
    assert found.published
    run = night.store.run(found.run_id)
    night.store.save_run(replace(run, state=RunState.FINISHED, ended_at=said.at), said)
    before = len(night.bench.launches())
    told, again = night.attributed(night.run())
    assert again is not None
    assert (again.search_s, again.earlier_search_s, again.seconds) == (0, 0, 0), "it may make no launch"
    assert again.sentence == "Every knob of the winner gives a part of the gain: max_num_seqs."
    made = night.bench.launches()[before:]
    assert len(made) == (1 + len(told.finalists)) * told.repeats, "those of the confirmation"


def test_it_is_not_asked_where_the_search_was_too_short_or_the_plan_says_so(tmp_path: Path) -> None:
    class Short(Padded):
        def search(self, run: Run, seqs: Sequence[int] = (4, 16, 64)) -> None:
            super().search(run, seqs)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, found = Short(tmp_path / "a").attributed()
    assert found is not None
    assert "it may make 0 launches, but it needs 4; the limit is the plan's attribution (" in found.sentence
    assert "% of the search's time)" in found.sentence
    _, none = Padded(tmp_path / "b", plan="{base: brief, attribution: 0}").attributed()
    assert none is None


def test_the_only_knob_of_a_winner_needs_no_launch(tmp_path: Path) -> None:
    class Bare(Padded):
        def search(self, run: Run, seqs: Sequence[int] = (4, 16, 64)) -> None:
            Night.search(self, run, seqs)

    _, found = Bare(tmp_path).attributed()
    assert found is not None
    (knob,) = found.knobs
    assert (knob.name, knob.kept, knob.how) == ("max_num_seqs", True, "measured")
    assert knob.why == "it is the only difference from today's configuration"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"queue_depth_mean": 3.3}, {"queue_depth_mean": 0.1}, "fewer requests wait in the queue"),
        ({"preemptions": 12.0}, {"preemptions": 0.0}, "preemptions 12 → 0"),
        (
            {"batch_tokens_mean": 900.0, "tpot_p95_ms": 20.0},
            {"batch_tokens_mean": 400.0, "tpot_p95_ms": 12.0},
            "prefills disturb decoding less (tokens in a step, on average 900 → 400)",
        ),
        ({"kv_usage_max": 0.99}, {"kv_usage_max": 0.4}, "filled to 40% at most instead of 99%"),
        ({"tpot_p50_ms": 12.0}, {"tpot_p50_ms": 10.0}, "steps wait less for the host"),
        ({"tpot_p50_ms": 10.0}, {"tpot_p50_ms": 10.0}, ""),
    ],
)
def test_the_mechanism_is_told_from_what_the_simulator_counts(
    before: Mapping[str, float], after: Mapping[str, float], said: str
) -> None:
    told = mechanism(before, after)
    assert said in told
    assert bool(said) == bool(told)
    gain = KnobGain(name="watermark", before=0, value=1, how="measured", kept=True, mechanism=told)
    assert knob_line(gain) == f"watermark 1: kept{told and '; simulated: '}{told}", "it was not measured"


def test_explain_says_the_one_reason_where_nobody_asked(tmp_path: Path) -> None:
    """Today's configuration fails when it is measured again, and the winner is published all the same."""
    night = Night(tmp_path, lambda seqs, purpose, _: {"failed": 5.0 * (purpose == "confirm" and seqs == 4)})
    said = night.whole()
    made = said.profiles["challenger"].id
    done = tuner(tmp_path, "explain", made)
    assert done.returncode == 4
    assert done.stderr.strip().endswith(
        "did not find out which knobs give the gain: today's configuration did not serve this traffic, so"
        " there is no gain to attribute"
    ), done.stderr
    today = tuner(tmp_path, "explain", said.profiles["baseline"].id)
    assert (
        f"did not find out which of its knobs give the gain; `tuner explain {made}` says why." in today.stdout
    )


@pytest.mark.parametrize("wins", [True, False])
def test_explain_of_todays_configuration_says_what_won_or_why_it_stayed(tmp_path: Path, wins: bool) -> None:
    """Never which knobs of the winner pay: they are not set in this profile."""
    night = (
        Padded(tmp_path)
        if wins
        else Padded(tmp_path, lambda seqs, *_: {"ttft_p95_ms": 4.0 * (seqs != 4) or 1})
    )
    run = night.run()
    night.search(run)
    said, found = night.attributed(run)
    night.store.save_run(replace(run, state=RunState.FINISHED, ended_at=said.at), said)
    assert [said.winner is not None, found is not None] == [wins, wins]
    done = tuner(tmp_path, "explain", said.profiles["baseline"].id)
    assert (done.returncode, done.stderr) == (0, "")
    told = " ".join(done.stdout.split())
    if wins:
        made = said.profiles["challenger"].id
        assert f"today's configuration. The winner of run {run.id} is profile {made}." in told
    else:
        assert f"published no other configuration. Its conclusion: {said.sentence}" in told
    found = json.loads(tuner(tmp_path, "explain", said.profiles["baseline"].id, "--json").stdout)
    assert (found["attribution"], found["said"]) == (None, told)
    assert "watermark" not in told


REASONS: list[tuple[dict[str, Any], Any, bool, str]] = [
    ({"winner": None, "outcome": Judgement.BASELINE_STAYS}, "brief", False, "nothing won (baseline stays)"),
    ({"baseline": None}, "brief", False, "today's configuration was never measured"),
    ({"demonstration": True}, "quick", False, "it was a demonstration"),
    ({}, "quick", False, "its plan has attribution: 0"),
    ({}, {"base": "brief", "attribution": 0}, False, "its plan has attribution: 0"),
    ({}, {"base": "quick", "attribution": None}, False, "its plan has attribution: 0"),
    ({}, {"base": "quick", "attribution": 1.0}, True, "the launches for this were not finished"),
    ({}, {"base": "brief"}, False, "an earlier release made this run"),
    ({}, {"base": "brief", "attribution": None}, False, "it ended too early"),
]


@pytest.mark.parametrize(("changes", "plan", "begun", "why"), REASONS)
def test_each_reason_why_nobody_asked_is_told_alone(
    changes: dict[str, Any], plan: Any, begun: bool, why: str
) -> None:
    told = why_none(example(**changes), plan, begun=begun)
    assert told.startswith(why)
    assert " or " not in told
    assert why_none(None, plan, begun=begun) == "it ended without a conclusion"
