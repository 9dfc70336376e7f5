"""Curves and timelines hold against numbers that can be counted by hand."""

import math
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from tests.browser import world
from tests.history.records import a_study
from tests.report.test_report import TRIALS, data, said
from tuner.conclusions import Difference
from tuner.metrics import LATENCY_MS
from tuner.records import Candidate, Fidelity, Launch, Measurement, Purpose, Trial, TrialState
from tuner.replay import outcomes
from tuner.report import evidence
from tuner.report.board import beliefs, board, failures, spent, warnings, worst_lateness
from tuner.report.charts import MARKED
from tuner.report.document import markdown, render
from tuner.report.words import difference, measured, pass_name, seconds, step, unit

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def test_the_share_of_requests_at_most_so_slow() -> None:
    values = np.array([1.0, 2.0, 3.0, math.inf])
    found = evidence.cumulative(values, np.array([0.5, 1.0, 2.5, 99.0]))
    assert found.tolist() == [0.0, 0.25, 0.5, 0.75]


def sample(latency: list[float], at: list[float]) -> evidence.PassLatencies:
    numbers = np.array(latency)
    return evidence.PassLatencies(scheduled_s=np.array(at), latency=dict.fromkeys(LATENCY_MS, numbers))


def test_bands_span_repeats_or_blocks_or_are_left_out() -> None:
    at = np.array([15.0])
    two = evidence.band([sample([10, 20], [0, 1]), sample([10, 11], [0, 1])], "ttft", at)
    assert two is not None
    assert (two[0].tolist(), two[1].tolist()) == ([0.5], [1.0])
    assert evidence.band([sample([10.0] * 9, list(range(9)))], "ttft", at) is None
    times = [float(t) for t in range(100)]
    mixed = evidence.band([sample([10.0 if t < 50 else 20.0 for t in times], times)], "ttft", at)
    assert mixed is not None
    assert 0.0 <= mixed[0][0] < 0.5 < mixed[1][0] <= 1.0


def test_the_caption_says_how_many_repeats_the_bands_of_each_trial_span() -> None:
    one = sample([1.0, 2.0], [0.0, 1.0])
    assert "Bands span 2 to 4 repeats." in evidence._caption("ttft", [[one] * 4, [one] * 2])
    assert "Bands span 3 repeats." in evidence._caption("ttft", [[one] * 3, [one] * 3])


def test_the_launches_of_an_attribution_are_named_apart_and_are_in_no_band(tmp_path: Path) -> None:
    def repeat(folder: str, purpose: Purpose, number: int) -> Measurement:
        made = world.measured(world.numbers(128, 8192), tmp_path / folder)
        return replace(made, purpose=purpose, repeat=number)

    first = [repeat(f"0001-confirm-aaaaaaaa-{n}-0", "confirm", n) for n in (1, 2, 3)]
    compared = [repeat(f"0001-confirm-aaaaaaaa.3-{n}-0", "confirm", n) for n in (1, 2)]
    later = [repeat(f"0001-confirm-bbbbbbbb-{n}-0", "confirm", n) for n in (1, 2)]
    assert [pass_name(m, a_study()) for m in (*first[:1], *compared)] == [
        "confirmation 1", "last comparison 1", "last comparison 2",
    ]  # fmt: skip
    own = repeat("0001-confirm-aaaaaaaa.4-1-0", "search", 0)
    unseen = repeat("0001-confirm-aaaaaaaa.4-1-0", "held_out", 1)
    assert pass_name(own, a_study()) == "attribution"
    assert pass_name(unseen, a_study()) == "held-out slice 1 of the last comparison"
    assert pass_name(repeat("0001-0", "search", 0), a_study()) == "search"
    for rows, bands in ((first + compared, 3), (first + compared + later, 2), ([own, *compared], 2)):
        assert len(evidence.samples(replace(TRIALS[1], measurements=tuple(rows)))) == bands


def shown(trial: Trial) -> evidence.Named:
    return evidence.Named(name=f"trial {trial.number}", kind="front", trial=trial)


def test_I27_2_timelines_of_two_trials_have_one_scale(tmp_path: Path) -> None:
    trials = []
    for number, sequences in enumerate((16, 256)):
        made = world.measured(world.numbers(sequences, 8192), tmp_path / str(number))
        trials.append(
            Trial(
                id=number, study_id="s", run_id="r", number=number, candidate=Candidate(),
                state=TrialState.COMPLETE, started_at=NOW, measurements=(made,),
            )
        )  # fmt: skip
    together = [
        re.findall(r'text-anchor="end">([^<]*)', drawn)
        for _, drawn in evidence.timelines([*map(shown, trials)])
    ]
    assert together[0] == together[1], "the same ticks on every strip"
    apart = [re.findall(r'text-anchor="end">([^<]*)', evidence.timelines([shown(t)])[0][1]) for t in trials]
    assert apart[0] != apart[1], "alone, each would have its own"


def test_a_timeline_shows_what_outcomes_and_scrapes_tell(tmp_path: Path) -> None:
    values = world.numbers(128, 8192)
    made = world.measured(values, tmp_path)
    trial = Trial(
        id=1, study_id="s", run_id="r", number=1, candidate=Candidate(), state=TrialState.COMPLETE,
        started_at=NOW, measurements=(made,),
    )  # fmt: skip
    ((caption, drawing),) = evidence.timelines([shown(trial)])
    assert caption == "Trial 1: slice peak, 60 s of replay, 500 requests"
    for name in ("arrivals (requests/s)", "KV cache in use (%)", "preemptions since the slice began"):
        assert name in drawing
    assert drawing.count('class="cross"') == 10
    (tmp_path / "search-0-peak.engine.json").unlink()
    assert "KV cache" not in evidence.timelines([shown(trial)])[0][1]
    (tmp_path / "search-0-peak.parquet").unlink()
    assert evidence.timelines([shown(trial)]) == []


def test_scrapes_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "search-0-peak.parquet"
    outcomes.write_series(path, {"at_s": [0.0, 1.0], "kv_usage": [0.5, None]})
    found = outcomes.read_series(path)
    assert found["at_s"] == [0.0, 1.0]
    assert math.isnan(found["kv_usage"][1])
    outcomes.series_path(path).write_text("{broken")
    assert outcomes.read_series(path) == {}


def test_thousands_of_points_are_one_path(tmp_path: Path) -> None:
    there = world.fill(tmp_path)
    made = there.study
    one = there.store.trials(made.id)[1]
    values = [
        {"ttft_p95_ms": n + 2.0, "tpot_p95_ms": 9.0 + n % 7, "goodput_rps": 1.0} for n in range(MARKED + 1)
    ]
    values[0] |= {"ttft_p95_ms": 1.0, "tpot_p95_ms": 1.0, "goodput_rps": 9.0}
    trials = [
        replace(one, id=n + 1, number=n + 1, measurements=(replace(one.measurements[0], values=v),))
        for n, v in enumerate(values)
    ]
    drawing = board(made, trials, []).drawing("ttft_p95_ms", "tpot_p95_ms", lambda t: f"#{t.number}")
    assert drawing.count("<circle") == 1, "only the front has a mark of its own"
    spots = re.findall(r"M[\d.]+ [\d.]+h0", drawing)
    assert len(spots) == len(set(spots)) > MARKED / 2
    assert f"<title>{MARKED + 1} trials</title>" in drawing
    assert drawing.count("<a ") == 1
    few = board(made, trials[:3], []).drawing("ttft_p95_ms", "tpot_p95_ms", lambda t: "#x")
    assert few.count('<a href="#x"') == 3
    there.store.close()


def test_budget_failures_and_belief_add_up(tmp_path: Path) -> None:
    there = world.fill(tmp_path)
    made, store = there.study, there.store
    trials, launches = store.trials(made.id), store.launches(made.id)
    found = spent(trials, launches)
    assert found.trials == {"COMPLETE": 24, "INFEASIBLE": 3, "ABORTED": 3}
    assert found.trial_seconds["COMPLETE"] == 24 * 140
    assert found.launches == len(launches)
    killed = replace(launches[0], ended_at=launches[0].started_at + timedelta(seconds=18), timeline={})
    assert killed.whole_s == 18
    assert spent(trials, [*launches, killed]).measuring_s == found.measuring_s, "it never became ready"
    assert [(c.cause, len(c.trials)) for c in failures(trials)] == [("oom", 3), ("port", 3)]
    assert worst_lateness(beliefs(a_study(), trials)) == 1.4
    store.close()


@pytest.mark.parametrize(
    ("value", "said"), [(0.4, "0.4 s"), (42.0, "42 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (None, "–")]
)
def test_durations(value: float | None, said: str) -> None:
    assert seconds(value) == said


def test_units_are_told() -> None:
    assert measured("ttft_p95_ms", 123.45) == "123.5 ms"
    assert measured("goodput_rps", 2.0) == "2 requests/s"
    assert unit("output_tokens_per_s") == "tokens/s"
    fields = {"metric": "ttft_p95_ms", "before": 100.0, "after": 52.0, "change": -0.48, "repeats": 3}
    row = Difference(**fields, low=-0.52, high=None, word="better")  # type: ignore[arg-type]
    assert difference(row) == "ttft_p95_ms −48 % (−52 … +∞, better)"
    row = Difference(**fields, low=-1.0, high=None, word="open")  # type: ignore[arg-type]
    assert difference(row) == "ttft_p95_ms −48 % (interval not known, open)"
    row = Difference(**fields, low=-0.1, high=0.2, word="open")  # type: ignore[arg-type]
    assert difference(row) == "ttft_p95_ms −48 % (−10 … +20, open)"
    nothing = replace(row, metric="goodput_rps", before=0.0, after=0.0, change=None)
    assert difference(nothing) == "goodput_rps 0 on both sides (open)"


@pytest.mark.parametrize(
    ("metric", "change", "said"),
    [
        ("ttft_p95_ms", 0.5, "+50 % (worse)"),
        ("goodput_rps", 0.5, "+50 % (better)"),
        ("goodput_rps", -0.89, "−89 % (worse)"),
        ("goodput_rps", 0.0, "0 %"),
        ("goodput_rps", -0.004, "0 %"),
        ("goodput_rps", 12.99, "+1,299 % (better)"),
        ("goodput_rps", None, ""),
    ],
)
def test_a_change_is_signed_and_says_which_way_is_better(
    metric: str, change: float | None, said: str
) -> None:
    assert step(metric, change) == said


def test_the_lateness_of_every_replay_counts_also_of_the_confirmation() -> None:
    def replay(purpose: Purpose, late: float, *warnings: str, launch: str | None = None) -> Measurement:
        kept = Fidelity(values={"lateness_p99_ms": late}, warnings=warnings)
        repeat = 0 if purpose == "search" else 1
        return Measurement(values={}, purpose=purpose, repeat=repeat, fidelity=kept, launch_id=launch)

    made = (replay("search", 34.9), replay("confirm", 12.0), replay("held_out", 44.6, "it was late"))
    trials = (replace(TRIALS[1], measurements=made), replace(TRIALS[2], measurements=made[:1]))
    given = replace(data(said()), trials=trials)
    for text in (render(given), markdown(given)):
        assert "The p99 lateness of sending was at most 44.6 ms in 4 replays." in " ".join(text.split())
    assert "<li>it was late (1 replay: trial 1 (held-out slice 1))</li>" in render(given)
    one = replace(given, trials=trials[1:])
    assert "34.9 ms in 1 replay." in " ".join(render(one).split())
    twice = (replay("search", 3.0, launch="a"), replay("confirm", 3.0, launch="a"))
    assert len(beliefs(a_study(), [replace(TRIALS[1], measurements=twice)])) == 1, (
        "one replay that counts for both"
    )


def test_the_report_leaves_no_warning_out_and_says_the_time_of_a_replay_that_two_nights_made() -> None:
    def replay(repeat: int, *told: str, launch: str = "") -> Measurement:
        purpose: Purpose = "confirm" if repeat else "search"
        kept = Fidelity(values={"lateness_p99_ms": 1.0}, warnings=told)
        return Measurement(values={}, purpose=purpose, repeat=repeat, fidelity=kept, launch_id=launch or None)

    late = "requests were sent {} ms late at p99".format
    searched = [replace(TRIALS[1], number=n, measurements=(replay(0, late(n / 2)),)) for n in range(1, 31)]
    nights = (replay(1, late(40.5), "it drifted", launch="a"), replay(1, late(3), launch="b"))
    again = replace(TRIALS[2], number=31, attempt=1, measurements=nights)
    begun = [
        Launch(id=name, study_id="s", argv=(), started_at=datetime(2026, 11, day, 21, 5, tzinfo=UTC))
        for name, day in (("a", 29), ("b", 30))
    ]
    first, second = warnings(beliefs(a_study(), [*searched, again], begun))
    names = [
        "trial 31.1 (confirmation 1, 2026-11-29 21:05 UTC)",
        "trial 31.1 (confirmation 1, 2026-11-30 21:05 UTC)",
    ]
    names += [f"trial {n}" for n in range(30, 12, -1)]
    told = "requests were sent 0.5 to 40.5 ms late at p99"
    assert first == f"{told} (32 replays: {', '.join(names)} and 12 more)"
    assert second == f"it drifted (1 replay: {names[0]})"
    given = replace(data(said()), trials=[*searched, again], launches=begun)
    for text in (render(given), markdown(given)):
        for each in (first, second):
            assert each in " ".join(text.split())
