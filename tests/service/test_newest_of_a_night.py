"""Two nights of one place, the second with three runs: every surface shows that night by the same run."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.commands.test_care import call
from tests.history.records import NOW, a_conclusion, a_measurement, a_run, a_study, finished, start
from tests.service.surfaces import plain
from tests.service.world import World
from tuner.conclusions import Arm, Difference, Judgement, Word
from tuner.fleet.notify import regressions
from tuner.measures import is_maximized
from tuner.records import Candidate, Run, RunState
from tuner.report import words
from tuner.report.words import number

HOUR = timedelta(hours=1)
METRICS = ("ttft_p95_ms", "goodput_rps", "tpot_p95_ms")
VALUES = {
    "before": ((200.0, 3.0, 40.0), (150.0, 4.0, 30.0)),
    "first": ((210.0, 3.1, 41.0), (90.0, 4.9, 11.0)),
    "newest": ((220.0, 3.2), (70.0, 3.5)),
}
"""Per run the values of today's configuration and of its winner; the newest run measured two metrics."""
Shown = dict[str, Run]


def a_night(world: World, name: str, hours: float) -> Run:
    """A run of a study of that name with a clear winner; it ends an hour after it began."""
    study, store = a_study(name if name != "before" else "first"), world.store
    run = a_run(store, study, now=NOW + hours * HOUR)
    begin, arms = 10 * len(store.trials(study.id)), []
    measured = [dict(zip(METRICS, values, strict=False)) for values in VALUES[name]]
    for place, values in enumerate(measured):
        trial = start(store, run, begin + place, origin="search" if place else "baseline")
        finished(store, trial, replace(a_measurement(), values=values))
        store.add_measurement(trial.id, replace(a_measurement(purpose="confirm", repeat=1), values=values))
        changes = tuple(a_change(each, measured[0][each], values[each]) for each in values) if place else ()
        arms.append(Arm(trial=trial.number, candidate=Candidate(), confirmed=values, changes=changes))
    end = replace(run, state=RunState.FINISHED, ended_at=run.started_at + HOUR)
    said = a_conclusion(
        end, at=end.ended_at, outcome=Judgement.CLEAR_WINNER, sentence=f"The {name} one.", baseline=arms[0],
        winner=arms[1].trial, finalists=(arms[1],), profiles={},
    )  # fmt: skip
    return store.save_run(end, said)


def a_change(metric: str, before: float, after: float) -> Difference:
    made = (after - before) / before
    word: Word = "better" if (made > 0) == is_maximized(metric) else "worse"
    return Difference(metric=metric, before=before, after=after, change=made, low=made - 0.05,
                      high=made + 0.05, word=word, repeats=3)  # fmt: skip


@pytest.fixture
def runs(world: World) -> Shown:
    """The last run of the second night is cancelled, after its trial was better than all others."""
    made = {"before": a_night(world, "before", 0), "first": a_night(world, "first", 24)}
    made["newest"] = a_night(world, "newest", 27)
    cut = a_run(world.store, a_study("first"), now=NOW + 29 * HOUR)
    best = dict(zip(METRICS, (5.0, 9.0, 1.0), strict=True))
    finished(world.store, start(world.store, cut, 90), replace(a_measurement(), values=best))
    made["cut"] = world.store.save_run(
        replace(cut, state=RunState.CANCELLED, ended_at=cut.started_at + HOUR, reason="cancelled")
    )
    return made


def browser(world: World) -> TestClient:
    client = world.client("read")
    client.post("/login", data={"token": world.token("read")})
    client.headers["accept"] = "text/html"
    return client


def changes_of(world: World, run: Run) -> dict[str, Difference]:
    said = world.store.conclusion(run.id)
    winner = said.arm(said.winner) if said is not None else None
    assert winner is not None
    return {made.metric: made for made in winner.changes}


def test_one_truth_of_a_night_with_several_runs_in_the_api(world: World, runs: Shown) -> None:
    wanted, client = changes_of(world, runs["newest"]), world.client("read")
    others = [runs["first"].id, runs["cut"].id]
    for metric in METRICS:
        asked = {"model": a_study().model, "metric": metric, "since": f"{NOW:%Y-%m-%dT00:00:00Z}"}
        (place,) = client.get("/v1/history", params=asked).json()["places"]
        nights = {row["run_id"]: row for row in place["nights"]}
        assert [row["run_id"] for row in place["other_runs"]] == others, metric
        if metric not in wanted:
            assert list(nights) == [runs["before"].id], "no other run fills the gap"
            continue
        assert list(nights) == [runs["before"].id, runs["newest"].id], metric
        row, made = nights[runs["newest"].id], wanted[metric]
        assert (row["value"], row["baseline"]) == (made.after, made.before)
        assert row["from_baseline"]["change"] == made.change
        assert row["date"] == f"{NOW + 24 * HOUR:%Y-%m-%d}"


def test_one_truth_of_a_night_with_several_runs_on_the_pages(world: World, runs: Shown) -> None:
    wanted, client = changes_of(world, runs["newest"]), browser(world)
    for metric in METRICS:
        page = client.get(f"/history?metric={metric}&since=2026-03-01").text
        top, table = page.split('<table class="nights stack">')
        assert "The newest one." in plain(top), "the card"
        for each in ("first", "cut"):
            assert f"The {each} one." not in plain(page)
            assert runs[each].id in table
        title = f"{NOW + 24 * HOUR:%Y-%m-%d}: "
        assert (title in top) == (metric in wanted), (metric, top)
        if metric in wanted:
            assert words.change(wanted[metric]) in plain(top)
            assert words.change(wanted[metric]) in plain("<h1>" + table)
            assert words.change(changes_of(world, runs["first"])[metric]) not in plain(top)
    compared = plain(client.get(f"/compare?node=n1&run={runs['before'].id}").text)
    assert f"{NOW:%Y-%m-%d}, ended 23:00, trial" in compared
    for metric, made in wanted.items():
        assert number(made.after) in compared, metric
    assert number(changes_of(world, runs["first"])["ttft_p95_ms"].after) not in compared


def test_one_truth_of_a_night_with_several_runs_in_the_metrics(world: World, runs: Shown) -> None:
    told = [line for line in world.client("read").get("/metrics").text.splitlines() if line[0] != "#"]
    gains = {line.split('measurement="')[1].split('"')[0]: float(line.split()[-1])
             for line in told if line.startswith("tuner_gain_ratio{")}  # fmt: skip
    wanted = changes_of(world, runs["newest"])
    assert gains == {metric: pytest.approx(made.change) for metric, made in wanted.items()}
    values = [float(line.split()[-1]) for line in told if line.startswith("tuner_confirmed_value{")]
    assert sorted(values) == sorted([70.0, 3.5, 220.0, 3.2]), "of VALUES"


def test_one_truth_of_a_night_with_several_runs_on_the_command_line(
    world: World, runs: Shown, tmp_path: Path
) -> None:
    for metric, made in changes_of(world, runs["newest"]).items():
        rows = call(tmp_path, "history", "--metric", metric).output.splitlines()[1:]
        assert len(rows) == len(runs), "a row for each run"
        (row,) = [each for each in rows if f"{runs['newest'].ended_at:%Y-%m-%d %H:%M}" in each]
        for part in (number(made.after), number(made.before), words.change(made)):
            assert part in row, (part, row)
    for given in (("front",), ("report", "-o", "-"), ("report", "--format", "md", "-o", "-")):
        shown = plain(call(tmp_path, given[0], a_study("newest").id, *given[1:]).output)
        for made in changes_of(world, runs["newest"]).values():
            assert words.change(made) in shown, given


LEFT_OUT = {"ttft_p95_ms": 0, "tpot_p95_ms": 1, "gpu_seconds": 4}
"""How many of the four runs ended without a metric: tpot_p95_ms is not in VALUES["newest"]."""


@pytest.mark.parametrize("metric", LEFT_OUT)
def test_runs_without_a_metric_are_counted_everywhere(
    metric: str, world: World, runs: Shown, tmp_path: Path
) -> None:
    count = LEFT_OUT[metric]
    asked = {"model": a_study().model, "metric": metric, "since": f"{NOW:%Y-%m-%dT00:00:00Z}"}
    assert world.client("read").get("/v1/history", params=asked).json()["without_value"] == count
    page, said = plain(browser(world).get(f"/history?metric={metric}").text), words.no_value(count, metric)
    told = call(tmp_path, "history", "--metric", metric).output
    for text in (page, told):
        assert ("left out" in text) == bool(count)
        assert said in text
    assert told.count("\n2026-") == len(runs) - count


def test_a_chart_whose_nights_have_other_runs_with_the_metric_says_so(world: World) -> None:
    """It said that no night had measured this, above a table with a value."""
    old = a_run(world.store, a_study("first"), now=NOW)
    values = {"tpot_p95_ms": 40.0, "goodput_rps": 3.0}
    finished(world.store, start(world.store, old, 90), replace(a_measurement(), values=values))
    world.store.save_run(replace(old, state=RunState.FINISHED, ended_at=NOW + HOUR))
    a_night(world, "newest", 3)
    page = plain(browser(world).get("/history?metric=tpot_p95_ms").text)
    assert "The chart shows one run of each night. None of these runs measured this." in page
    assert "→ 40" in page
    assert "left out: 1 ended run without tpot_p95_ms in the result" in page


def test_a_night_whose_baseline_is_0_was_compared(world: World) -> None:
    """The chart said that no night had been compared, beside the card of the comparison."""
    run = a_night(world, "before", 0)
    said = world.store.conclusion(run.id)
    assert said is not None
    later = a_run(world.store, a_study("first"), now=NOW + HOUR)
    made = tuple(replace(c, before=0.0, change=None, low=None, high=None) for c in said.finalists[0].changes)
    won = replace(said.finalists[0], changes=made)
    end = replace(later, state=RunState.FINISHED, ended_at=later.started_at + HOUR)
    world.store.save_run(end, replace(said, run_id=later.id, at=NOW + 2 * HOUR, finalists=(won,)))
    page = plain(browser(world).get("/history?metric=goodput_rps").text)
    assert "The baseline of each night is 0 or infinite, so no change in per cent can be drawn." in page
    assert "better)" in page


def test_one_truth_of_a_night_with_several_runs_in_the_notices(world: World, runs: Shown) -> None:
    """Its goodput is worse than the night before; the run that was better earlier that night says nothing."""
    for name, study, expected in (
        ("newest", a_study("newest"), ["goodput_rps"]),
        ("first", a_study("first"), []),
        ("cut", a_study("first"), []),
    ):
        found = regressions(world.store, study, runs[name], NOW + 40 * HOUR)
        assert [notice.facts["metric"] for notice in found] == expected, name
        for notice in found:
            assert notice.facts["value"] == changes_of(world, runs["newest"])["goodput_rps"].after
            assert notice.facts["change"] == pytest.approx((3.5 - 4.0) / 4.0)
