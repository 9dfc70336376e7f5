"""The answer card: winner or none, gains, SLO, confidence, what changed, how to pull it, and the cost."""

import math
from dataclasses import replace

import pytest

from tests.report.test_report import NOW, RUN, data, said
from tuner.conclusions import Attribution, Difference, Judgement, KnobGain, Noise, PublishedProfile, RunCost
from tuner.measures import many
from tuner.records import RunState
from tuner.report.card import card, card_of_run, confidence_of, lines, run_lines
from tuner.report.document import markdown, render
from tuner.report.words import cost, headline


def won(**changes: object):  # type: ignore[no-untyped-def]
    """A winner that changed one knob, keeps the SLO and was published."""
    found = said()
    base = replace(found.baseline, attainment=0.8, misses_slo_by=0.15) if found.baseline else None
    arm = replace(
        found.finalists[0], changed={"max_num_seqs": (None, 8)}, attainment=0.97, misses_slo_by=0.0
    )  # fmt: skip
    fields = {
        "baseline": base, "finalists": (arm,), "attainment": 0.95,
        "profiles": {"challenger": PublishedProfile(id=4, version=2)},
    }  # fmt: skip
    return replace(found, **(fields | changes))  # type: ignore[arg-type]


def gain(**changes: object) -> KnobGain:
    found = KnobGain(name="max_num_seqs", before=None, value=8, how="measured", kept=True)
    return replace(found, **changes)  # type: ignore[arg-type]


def attributed(*knobs: KnobGain, **changes: object) -> Attribution:
    found = Attribution(run_id="r", study_id="s", at=NOW, winner=1, knobs=knobs)
    return replace(found, **changes)  # type: ignore[arg-type]


def test_a_value_that_the_engine_cut_stands_beside_the_one_that_was_asked_for() -> None:
    arm = replace(
        won().finalists[0], candidate={"max_cudagraph_capture_size": 2048, "block_size": 32},
        changed={"max_cudagraph_capture_size": (48, 512), "block_size": (16, 32)},
    )  # fmt: skip
    told = "\n".join(lines(card(won(finalists=(arm,)))))
    assert "max_cudagraph_capture_size 48 → 512 (asked for 2048), block_size 16 → 32" in told
    page = render(data(won(finalists=(arm,))))
    assert "(asked for 2048)" in page


def test_the_card_of_a_profile_that_leaves_knobs_out_shows_the_winner_and_says_so() -> None:
    found = attributed(gain(kept=False), reduced=7, published=True)
    made = PublishedProfile(id=4, version=2)
    for shown in (
        card(won(), trial=7, profile=made, attribution=found),
        card(won(), attribution=found),
    ):
        assert shown.rows == card(won()).rows
        assert shown.title == "Trial 1 is better than today's configuration"
        assert shown.slo_met
        told = "\n".join(lines(shown))
        assert "changed: max_num_seqs not set → 8 (nothing, left out)" in told
        assert "The published profile is trial 7: it leaves out the knobs that give nothing." in told
    assert "1.5 GPU-hours of attribution" in "\n".join(
        lines(card(won(cost=RunCost(gpus=1)), attribution=replace(found, seconds=5400.0)))
    )
    other = card(won(), trial=7, attribution=attributed(gain(), reduced=7))
    assert not other.rows
    assert not other.left_out


def test_the_card_shows_the_gain_for_which_a_knob_was_kept() -> None:
    row = said().finalists[0].changes[0]
    lost = replace(row, metric="ttft_p95_ms", change=0.24, low=0.14, high=0.34, word="worse")
    won_ = replace(row, metric="tpot_p95_ms", change=-0.13, low=-0.17, high=-0.09, word="better")
    found = card(won(), attribution=attributed(gain(gains=(lost, won_), how="predicted")))
    assert found.changed[0].gave == "tpot_p95_ms −13 % (−17 … −9, better), predicted"


def test_I27_1_the_card_answers_in_the_order_in_which_people_ask() -> None:
    found = card(won(), attribution=attributed(gain(why="about two thirds of it")))
    assert (found.title, found.tone) == ("Trial 1 is better than today's configuration", "better")
    row = found.rows[0]
    assert (row.before, row.after, row.word) == (410.0, 102.5, "better")
    assert row.held_out is not None
    assert row.bar is not None
    assert -100 <= row.bar[0] < row.bar[1] < row.bar[2] < 0, (
        "the whole interval is on the better side of zero"
    )
    assert found.slo == "yes (97 % of requests keep it, today 80 %; 95 % are required)"
    assert found.confidence == "medium"
    assert "nothing is clearly better" in found.because
    assert found.changed[0].gave == "about two thirds of it"
    assert found.pull == "tuner profile export 4 --format vllm-yaml", "not whatever an alias names later"
    told = "\n".join(lines(found, "bin/tuner"))
    for part in (
        "p95 of the time to the first token (ttft_p95_ms): 410 → 102.5 ms, −75 % (−80 … −70, better)",
        "keeps the SLO: yes", "confidence: medium", "max_num_seqs not set → 8 (about two thirds of it)",
        "pull the winner: bin/tuner profile export 4", "GPU-hours",
    ):  # fmt: skip
        assert part in told


def test_I27_1_report_and_markdown_have_the_same_card() -> None:
    html, text = render(data(won())), markdown(data(won()))
    for part in ("Trial 1 is better than today's configuration", "p95 of the time to the first token"):
        assert part.replace("'", "&#39;") in html
        assert part in text
    assert html.index('class="answer better"') < html.index("<h2>The front")
    assert "<svg" in html.partition('class="bar"')[2][:900]


NONE: dict[str, object] = {"winner": None, "profiles": {}}
OUTCOMES = [
    (Judgement.NO_CLEAR_WINNER, NONE, "No clear winner over today's configuration", "none"),
    (Judgement.BASELINE_STAYS, NONE, "Today's configuration stays the best choice", "none"),
    (Judgement.SLO_MISSED, NONE, "No configuration meets the SLO", "doubt"),
    (Judgement.SLO_MISSED, {"nearest": 1}, "No configuration meets the SLO; trial 1 is nearer", "doubt"),
    (Judgement.SLO_MISSED, {"nearest": 0}, "No configuration meets the SLO", "doubt"),
    (Judgement.SLO_MISSED, {"nearest": None}, "No configuration meets the SLO", "doubt"),
    (Judgement.NOT_TRUSTED, NONE, "No result: the machine changed during the run", "doubt"),
    (
        Judgement.NOT_CONFIRMED,
        NONE | {"repeats": 0, "cost": RunCost()},
        "No result yet: this run measured no trial again",
        "doubt",
    ),
    (Judgement.NOTHING_SERVED, NONE | {"finalists": ()}, "No candidate served this traffic", "failed"),
    (Judgement.TRADE_OFF, {}, "Trial 1 is better in some objectives and worse in others", "better"),
    (Judgement.BASELINE_FAILED, {}, "Trial 1 serves this traffic; today's configuration does not", "better"),
]


@pytest.mark.parametrize(("outcome", "changes", "title", "tone"), OUTCOMES)
def test_I27_1_every_outcome_has_a_title(
    outcome: Judgement, changes: dict[str, object], title: str, tone: str
) -> None:
    found = card(won(outcome=outcome, **changes))
    assert (found.title, found.tone) == (title, tone)
    assert bool(found.pull) == (found.profile is not None)
    assert headline(won(outcome=outcome, **changes)) == next(iter(lines(found)))
    assert {judgement for judgement, *_ in OUTCOMES} | {Judgement.CLEAR_WINNER} == set(Judgement)


def test_I27_1_confidence_is_a_word_with_its_reason() -> None:
    better = replace(won().finalists[0].changes[1], word="better")
    agreed = replace(won().finalists[0], changes=(won().finalists[0].changes[0], better))
    assert confidence_of(won(finalists=(agreed,)))[0] == "high"
    assert confidence_of(won(finalists=(agreed,), demonstration=True))[0] == "low"
    assert confidence_of(won(finalists=(agreed,), repeats=2))[0] == "medium"
    assert confidence_of(won(finalists=(agreed,), repeats=1))[0] == "low"
    noise = (Noise(metric="ttft_p95_ms", share=0.2, launches=6, repeats_needed=9),)
    none = won(winner=None, outcome=Judgement.NO_CLEAR_WINNER, noise=noise)
    assert confidence_of(none) == (
        "low",
        "measured 3 times in turns with today's configuration; this node needs at least 9 repeats to show a"
        " difference of 10 %",
    )
    unseen = replace(none, noise=(replace(noise[0], repeats_needed=None),), repeats=2)
    assert confidence_of(unseen) == (
        "low",
        "measured 2 times in turns with today's configuration; this node needs more than 100 repeats to show"
        " a difference of 10 %",
    )
    assert confidence_of(won(outcome=Judgement.NOT_CONFIRMED))[0] == "none"


def test_I27_1_without_a_comparison_the_rows_say_so_and_show_no_change() -> None:
    arm = replace(
        won().finalists[0], changes=(), confirmed={}, searched={"goodput_rps": 1.0, "ttft_p95_ms": 100.0},
        attainment=None, misses_slo_by=None,
    )  # fmt: skip
    unconfirmed = won(
        winner=None, outcome=Judgement.NOT_CONFIRMED, finalists=(arm,), profiles={}, repeats=0,
        cost=RunCost(), baseline=replace(won().baseline, confirmed={}, misses_slo_by=None),
    )  # fmt: skip
    found = card(unconfirmed)
    assert found.first_only
    assert [row.metric for row in found.rows] == ["ttft_p95_ms", "goodput_rps"], "as the catalogue has them"
    assert (found.rows[0].after, found.rows[0].change, found.rows[0].bar) == (100.0, None, None)
    assert "this run measured no trial again" in "\n".join(lines(found))


def test_I27_1_an_interval_without_an_end_reaches_the_edge() -> None:
    endless = Difference(
        metric="ttft_p95_ms", before=1.0, after=1.1, change=0.1, low=-0.9, high=None, word="open", repeats=1
    )
    arm = replace(won().finalists[0], changes=(endless,))
    row = card(won(finalists=(arm,))).rows[0]
    assert row.bar is not None
    assert row.bar[2] == 100.0
    assert row.bar[0] < 0 < row.bar[1]


def test_I27_1_a_comparison_has_a_card_for_each_arm_below_its_sentence() -> None:
    base = replace(won().baseline, name="old", engine="0.32.0")
    arm = replace(won().finalists[0], name="new", engine="0.33.0", changed={})
    gone = replace(arm, name="newest", trial=9, dropped="it does not start", changes=())
    found = won(baseline=base, finalists=(arm, gone), winner=None, profiles={}, sentence="Advice: move.")
    text = list(run_lines(found))
    assert (text[0], text[1]) == (headline(found), "new is better than old")
    assert text[0].endswith("Advice: move.")
    assert "newest did not serve this traffic" in text
    assert "confidence: none (it does not start)" in text
    assert "changed: engine 0.32.0 → 0.33.0" in text
    page = render(data(found))
    assert page.index("Advice: move.") < page.index("old → new")
    assert "published winner" not in page


def test_I27_1_a_run_without_a_conclusion_has_a_card_once_it_ended() -> None:
    assert card_of_run(replace(RUN, state=RunState.RUNNING)) is None
    failed = card_of_run(replace(RUN, state=RunState.FAILED, reason="the model is missing", ended_at=NOW))
    assert failed is not None
    assert (failed.title, failed.tone, failed.sentence) == (
        "The run failed",
        "failed",
        "the model is missing",
    )


def test_I27_7_the_report_s_details_come_after_the_card_and_the_front() -> None:
    """The card is the first thing under the heading; the pictures of the front follow, then all else."""
    text = render(data(won()))
    card_at, front, details = (
        text.index(part) for part in ('class="answer', "<h2>The front", 'id="details"')
    )
    assert text.index("<h1>") < card_at < front < details
    assert text[card_at:details].count("<table") == 1, "only the card's own table stands before the details"
    assert text.index("Cost of the study") > details


@pytest.mark.parametrize("outcome", [Judgement.BASELINE_STAYS, Judgement.NO_CLEAR_WINNER])
def test_a_trial_that_did_not_win_differs_and_nothing_is_called_changed(outcome: Judgement) -> None:
    found = won(outcome=outcome, **NONE)
    assert "trial 1 differs in: max_num_seqs not set → 8" in list(lines(card(found)))
    for page in (render(data(found)), markdown(data(found))):
        assert "rial 1 differs in" in page
        assert "changed:" not in page
        assert "<dt>Changed" not in page
    assert "changed: max_num_seqs not set → 8" in list(lines(card(won())))
    assert "<dt>Changed</dt>" in render(data(won()))
    other = card(won(winner=2), trial=1)
    assert other.changed_title == "trial 1 differs in", "shown beside the winner"
    assert card(won(winner=2), trial=1, profile=PublishedProfile(id=9, version=1)).changed_title == "changed"


def test_what_a_run_took_is_time_without_gpus() -> None:
    short = RunCost(search_s=76.7, confirm_s=8.2)
    assert "took 1 min 17 s of search, 8.2 s of confirmation" in list(lines(card(won(cost=short))))
    assert cost(replace(short, gpus=2)) == "0.0213 GPU-hours of search, 0.00228 GPU-hours of confirmation"


def unserved(**changes: object):  # type: ignore[no-untyped-def]
    """Today's configuration did not serve in the search; trial 1, the nearest, was measured twice more."""
    found = won()
    base = replace(
        found.baseline, dropped="12 of 27 requests", confirmed={}, attainment=None, misses_slo_by=None,
        searched={"ttft_p95_ms": None, "goodput_rps": 0.1},
    )  # fmt: skip
    arm = replace(
        found.finalists[0], changes=(), attainment=0.63, misses_slo_by=0.32,
        searched={"ttft_p95_ms": 502.1, "goodput_rps": 2.7},
        confirmed={"ttft_p95_ms": 1275.0, "goodput_rps": 1.652},
    )  # fmt: skip
    fields = {
        "baseline": base, "finalists": (arm,), "outcome": Judgement.SLO_MISSED, "nearest": 1, "repeats": 2,
        "sentence": "No trial meets the SLO: trial 1 comes nearest.",
    }  # fmt: skip
    return replace(found, **(fields | changes))


def test_a_pair_never_mixes_first_and_confirmed_values() -> None:
    """The baseline was measured only in the search, the finalist again: no surface shows 0.1 → 1.652."""
    found = unserved()
    assert [(row.before, row.after) for row in card(found).rows] == [(None, 1275.0), (None, 1.652)]
    texts = ["\n".join(run_lines(found)), render(data(found)), markdown(data(found)).replace("\\", "")]
    for text in texts:
        assert "– → 1.652 requests/s" in text
        assert "0.1 →" not in text
    again = replace(found.baseline, dropped=None, confirmed={"ttft_p95_ms": 410.0, "goodput_rps": 0.2})
    dropped = replace(found.finalists[0], confirmed={}, misses_slo_by=None, dropped="it died")
    first = card(unserved(baseline=again, finalists=(dropped,))).rows
    assert [(row.before, row.after) for row in first] == [(math.inf, 502.1), (0.1, 2.7)], (
        "both are first ones"
    )
    half = replace(found.finalists[0], confirmed={"goodput_rps": 1.652})
    assert card(unserved(finalists=(half,))).rows[0].after is None, "the repeats of a failed request: none"


@pytest.mark.parametrize("outcome", [Judgement.SLO_MISSED, Judgement.BASELINE_FAILED])
@pytest.mark.parametrize("gone", [False, True], ids=["it did not serve", "it was never measured"])
def test_what_was_measured_again_is_never_called_a_first_measurement(outcome: Judgement, gone: bool) -> None:
    found = unserved(outcome=outcome, **({"baseline": None} if gone else {}))
    why = "was never measured" if gone else "did not serve this traffic"
    wanted = f"measured 2 times in this run, not compared, because today's configuration {why}"
    assert not card(found).first_only
    html = render(data(found)).replace("&#39;", "'")
    for text in ("\n".join(run_lines(found)), markdown(data(found)), html):
        assert wanted in text.replace("Measured 2", "measured 2")
        assert "this run measured no trial again" not in text
        assert "these are first measurements" not in text
        assert "first measurement, not compared" not in text
        assert "beside the baseline; the" not in text
    assert "measured again, not compared" in html
    assert '<td data-name="finalist">1.652</td>' in html
    assert "| goodput\\_rps | – | 1.652 | not compared | 2 |" in markdown(data(found))
    assert "measured once in this run" in "\n".join(run_lines(replace(found, repeats=1)))


def test_first_measurements_say_why_nothing_confirmed_them() -> None:
    first = replace(unserved().finalists[0], confirmed={}, misses_slo_by=None)
    base = replace(won().baseline, searched={"ttft_p95_ms": 1.0})
    dropped = unserved(baseline=base, finalists=(replace(first, dropped="it died"),))
    assert "first measurements; trial 1 failed when it was measured again" in card(dropped).uncompared
    ended = unserved(winner=None, finalists=(first,), outcome=Judgement.NOT_CONFIRMED, repeats=1)
    told = card(ended)
    assert told.title == "No result yet: the confirmation did not end"
    assert told.uncompared == "these are first measurements; the confirmation ended after 1 repeat"
    assert (told.confidence, told.because) == ("none", "the confirmation ended after 1 repeat")
    nearest = card(won(outcome=Judgement.SLO_MISSED, winner=None, nearest=0))
    assert nearest.uncompared == "measured 3 times in this run: it is today's configuration itself"
    assert nearest.because.startswith("measured 3 times in turns with the finalists")
    own = card(won(baseline=replace(base, confirmed={}, misses_slo_by=None)), trial=0)
    assert own.title == "Trial 0 is today's configuration"
    assert own.uncompared == "these are first measurements of today's configuration itself"
    assert nearest.confidence != "none", "another arm was compared with it"


@pytest.mark.parametrize("demonstration", [False, True])
@pytest.mark.parametrize("repeats", [1, 2, 3, 9])
def test_where_nothing_was_compared_the_confidence_is_none(repeats: int, demonstration: bool) -> None:
    for outcome in (Judgement.SLO_MISSED, Judgement.BASELINE_FAILED):
        found = unserved(outcome=outcome, repeats=repeats, demonstration=demonstration)
        why = "nothing was compared: today's configuration did not serve this traffic"
        assert confidence_of(found) == ("none", why)
        assert f"confidence: none ({why})" in list(run_lines(found))
    alone = won(outcome=Judgement.BASELINE_STAYS, finalists=(), repeats=0, **NONE)
    assert confidence_of(alone) == ("none", "nothing was compared: this run measured no trial again")


@pytest.mark.parametrize("outcome", list(Judgement))
def test_a_headline_says_its_outcome_once(outcome: Judgement) -> None:
    sentence = f"{outcome.value[0].upper()}{outcome.value[1:]}: trial 2."
    assert headline(won(outcome=outcome, sentence=sentence)) == sentence


def test_a_count_of_one_has_a_noun_without_s() -> None:
    assert [many(n, "trial") for n in (0, 1, 2)] == ["0 trials", "1 trial", "2 trials"]
    assert [many(n, "launch") for n in (1.0, 2000)] == ["1 launch", "2000 launches"]
