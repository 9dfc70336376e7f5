"""What was best on which night, and why."""

import math
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import event

from tests.history.records import NOW, a_conclusion, a_launch, a_measurement, a_run, a_study, finished, start
from tuner.conclusions import Arm, Conclusion, Difference, Judgement, RunCost, Word, saving
from tuner.errors import BadInput
from tuner.history import best_per_night as queries
from tuner.history.entities import RunBest
from tuner.history.store import Store
from tuner.records import Candidate, Run, RunState, Study, Trial, TrialState
from tuner.report import words

DAY = timedelta(days=1)


def a_best(night: int, value: float, **changes: object) -> RunBest:
    best = RunBest(
        run_id=f"r{night}",
        study_id="s",
        model="m",
        node="n1",
        gpu_class="h100-80x1",
        workload="chat",
        engine_version="0.32.0",
        trace_digest="a" * 64,
        started_at=NOW + night * DAY,
        ended_at=None,
        metric="ttft_p95_ms",
        trial_id=night,
        number=night,
        candidate=Candidate({"max_num_seqs": 64}),
        value=value,
        low=value,
        high=value,
        repeats=1,
        confirmed=False,
        trials=10,
        baseline=200.0,
    )
    fields = {name: getattr(best, name) for name in RunBest.__dataclass_fields__}
    return RunBest(**(fields | changes))


def ended(
    store: Store,
    study: Study,
    night: int,
    *values: float,
    confirm: tuple[float, ...] = (),
    state: RunState = RunState.FINISHED,
    **said: object,
) -> Run:
    """A run whose first trial is the baseline and whose last one is measured again by some repeats; then it
    is the winner of a conclusion, unless that says otherwise.
    """
    run = a_run(store, study, now=NOW + night * DAY)
    first = len(store.trials(study.id))
    for number, value in enumerate(values):
        origin = "baseline" if number == 0 else "search"
        trial = finished(store, start(store, run, first + number, origin=origin), a_measurement(value))
    again(store, trial, *confirm)
    end = replace(run, state=state, ended_at=run.started_at + timedelta(hours=3))
    return store.save_run(end, won(end, first, trial.number, **said) if confirm or said else None)


def again(store: Store, trial: Trial, *values: float, launch_id: str | None = None) -> None:
    """The repeats of a confirmation."""
    for repeat, value in enumerate(values):
        store.add_measurement(
            trial.id, a_measurement(value, purpose="confirm", repeat=repeat, launch_id=launch_id)
        )


def won(run: Run, base: int, number: int, **changes: object) -> Conclusion:
    """Trial `number` halved the TTFT of the baseline."""
    half = Difference(
        metric="ttft_p95_ms", before=190.0, after=95.0, change=-0.5, low=-0.6, high=-0.4, word="better",
        repeats=3,
    )  # fmt: skip
    today = Arm(trial=base, candidate=Candidate(), confirmed={"ttft_p95_ms": 190.0})
    best = Arm(trial=number, candidate=Candidate(), confirmed={"ttft_p95_ms": 95.0}, changes=(half,))
    fields: dict[str, object] = {"outcome": Judgement.CLEAR_WINNER, "winner": number, "finalists": (best,)}
    return a_conclusion(run, **({"baseline": today} | fields | changes))


TTFT: dict[str, Any] = {"model": a_study().model, "metric": "ttft_p95_ms"}
GOODPUT: dict[str, Any] = TTFT | {"metric": "goodput_rps"}


def test_each_run_shows_what_it_concluded(tmp_path: Path) -> None:
    """The conclusion's own numbers and words; the span is that of the repeats."""
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    study = a_study()
    ended(store, study, 0, 200.0, 120.0, 150.0)
    ended(store, study, 1, 190.0, 100.0, 110.0, confirm=(93.0, 118.0, 95.0))
    running = a_run(store, study, now=NOW + 2 * DAY)
    finished(store, start(store, running, 99), a_measurement(90.0))
    found = store.bests(**TTFT, node="n1", workload="chat")
    assert [(b.value, b.baseline, b.confirmed, b.outcome) for b in found] == [
        (120.0, None, False, Judgement.NOT_CONFIRMED),
        (95.0, 190.0, True, Judgement.CLEAR_WINNER),
        (90.0, None, False, None),
    ]
    assert (found[1].low, found[1].high, found[1].repeats) == (93.0, 118.0, 3)
    assert found[1].change is not None
    assert (found[1].change.change, found[1].change.word) == (-0.5, "better")
    assert store.bests(**TTFT, since=NOW + DAY, until=NOW + 2 * DAY) == (found[1],)
    assert store.bests(model="other", metric="ttft_p95_ms") == ()
    assert [best.value for best in store.bests(model=study.model, metric="goodput_rps")] == [3.5] * 3
    with pytest.raises(BadInput, match="did you mean 'ttft_p95_ms'"):
        store.bests(model=study.model, metric="ttft_p95")
    store.close()


def test_a_run_whose_baseline_stays_shows_the_baseline(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    ended(store, a_study(), 0, 190.0, 9.0, confirm=(9.0,), winner=None, outcome=Judgement.NO_CLEAR_WINNER)
    (found,) = store.bests(**TTFT)
    assert (found.number, found.value, found.change, found.confirmed) == (0, 190.0, None, False)
    assert queries.nights([found])[0].sure.startswith("measured again")
    store.close()


def test_a_baseline_that_stays_without_repeats_is_the_row_of_every_metric(tmp_path: Path) -> None:
    """Trial 1 has the better TTFT, and was no finalist: nothing was measured again."""
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    today = Arm(trial=0, candidate=Candidate(), searched={"ttft_p95_ms": 190.0})
    ended(
        store, a_study(), 0, 190.0, 100.0, outcome=Judgement.BASELINE_STAYS, winner=None, baseline=today,
        finalists=(), repeats=0,
    )  # fmt: skip
    for metric, value in (("ttft_p95_ms", 190.0), ("goodput_rps", 3.5)):
        (found,) = store.bests(model=a_study().model, metric=metric)
        assert (found.number, found.value, found.repeats, found.trials) == (0, value, 1, 2)
    store.close()


def test_a_night_that_is_not_to_be_trusted_shows_how_the_machine_was(tmp_path: Path) -> None:
    """Also one that had nothing left to try."""
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    study = a_study()
    ended(store, study, 0, 190.0, 9.0, confirm=(9.0,))
    later = a_run(store, study, now=NOW + DAY)
    end = replace(later, state=RunState.FINISHED, ended_at=later.started_at + timedelta(hours=1))
    slow = Arm(trial=0, candidate=Candidate(), confirmed={"ttft_p95_ms": 400.0})
    store.save_run(end, won(end, 0, 1, outcome=Judgement.NOT_TRUSTED, winner=None, baseline=slow))
    first, second = queries.nights(store.bests(**TTFT))
    assert (first.best.value, second.best.value, second.best.number) == (95.0, 400.0, 0)
    assert (second.best.change, second.best.confirmed, second.compared) == (None, False, "not comparable")
    assert second.sure == "not to be trusted, 1 repeat, 400 to 400"
    store.close()


@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.CANCELLED, RunState.FAILED])
def test_a_run_whose_confirmation_did_not_end_is_not_confirmed(tmp_path: Path, state: RunState) -> None:
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    study = a_study()
    run = a_run(store, study)
    finished(store, start(store, run, 0, origin="baseline"), a_measurement(190.0))
    again(store, finished(store, start(store, run, 1), a_measurement(50.0)), 9.0)
    store.save_run(replace(run, state=state, ended_at=NOW + DAY, reason="its window closed"))
    (found,) = store.bests(**TTFT)
    assert (found.value, found.change, found.confirmed) == (50.0, None, False)
    assert found.outcome is Judgement.NOT_CONFIRMED
    assert queries.nights([found])[0].sure == "not confirmed, one measurement"
    said = store.conclusion(run.id)
    assert said is not None
    assert said.sentence == "Not confirmed: its window closed."
    store.close()


def test_a_demonstration_confirms_nothing(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    ended(store, a_study(), 0, 200.0, 9.0, confirm=(9.0, 8.0), demonstration=True)
    (found,) = store.bests(**TTFT)
    assert (found.confirmed, found.demonstration) == (False, True)
    assert queries.nights([found])[0].sure == "measured again (a demonstration), 2 repeats, 8 to 95"
    store.close()


def test_a_later_run_changes_no_earlier_row(tmp_path: Path) -> None:
    """It measures the earlier winner and the earlier baseline again, and reaches another end."""
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    study = a_study()
    first = ended(store, study, 0, 190.0, 100.0, confirm=(93.0, 95.0))
    before = {name: store.bests(model=study.model, metric=name) for name in ("ttft_p95_ms", "goodput_rps")}
    later = a_run(store, study, now=NOW + DAY)
    store.add_launch(replace(a_launch(study, "later"), started_at=later.started_at + timedelta(hours=1)))
    for trial in store.trials(study.id):
        again(store, trial, 20.0 + trial.number, launch_id="later")
    end = replace(later, state=RunState.FINISHED, ended_at=later.started_at + timedelta(hours=2))
    store.save_run(end, won(end, 0, 1, outcome=Judgement.NO_CLEAR_WINNER, winner=None))
    store.save_run(store.run(first.id))
    for name, rows in before.items():
        assert store.bests(model=study.model, metric=name, until=NOW + DAY) == rows, name
    mine = store.bests(**TTFT, since=NOW + DAY)
    assert [(b.number, b.value, b.low) for b in mine] == [(0, 190.0, 20.0)]
    store.close()


def test_history_reads_by_index_alone(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    ended(store, a_study(), 0, 200.0, 120.0)
    a_run(store, a_study(), now=NOW + DAY)
    sent: list[tuple[str, Any]] = []

    def note(_: object, __: object, statement: str, parameters: Any, ___: object, ____: bool) -> None:
        sent.append((statement, parameters))

    event.listen(store.database.engine, "before_cursor_execute", note)
    store.places(a_study().model)
    for where in (
        {},
        {"node": "n1"},
        {"node": ["n1", "n2"], "since": NOW},
        {"node": "n1", "workload": "chat"},
    ):
        store.bests(model=a_study().model, metric="ttft_p95_ms", absent=True, **where)
    store.last_conclusions("n1")
    event.remove(store.database.engine, "before_cursor_execute", note)
    plans: list[str] = []
    with store.database.engine.connect() as connection:
        for statement, parameters in sent:
            if statement.startswith("SELECT"):
                rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
                plans += [str(row[-1]) for row in rows]
    assert len(plans) > 20
    # `last_conclusions` goes along the runs from the newest one until it has enough.
    assert [plan for plan in plans if plan.startswith("SCAN")] == ["SCAN runs USING INDEX ix_runs_started_at"]
    assert [plan for plan in plans if plan.startswith("SEARCH") and " USING " not in plan] == []
    store.close()


def test_the_places_where_something_was_tuned(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    study = a_study()
    for number, node in enumerate(("n2", "n1", "n1")):
        store.add_study(replace(study, id=str(number) * 64, node=node))
    store.add_study(replace(study, id="9" * 64, model="other"))
    found = [(place.model, place.target) for place in store.places()]
    assert found == [(study.model, "n1"), (study.model, "n2"), ("other", study.node)]
    assert [place.target for place in store.places(study.model)] == ["n1", "n2"]
    store.close()


def test_only_complete_full_finite_relaunched_measurements_compete(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    run = a_run(store, a_study())
    finished(store, start(store, run, 0), a_measurement(1.0), state=TrialState.PRUNED)
    finished(store, start(store, run, 1), a_measurement(2.0, kind="partial"))
    finished(store, start(store, run, 2), a_measurement(float("inf")))
    store.finish_trial(
        replace(
            start(store, run, 3), state=TrialState.COMPLETE, screened=True, measurements=(a_measurement(3.0),)
        )
    )
    finished(store, start(store, run, 4), a_measurement(40.0))
    for _ in range(2):
        assert [best.value for best in store.bests(model=a_study().model, metric="ttft_p95_ms")] == [40.0]
        if store.run(run.id).state == RunState.RUNNING:
            store.save_run(replace(run, state=RunState.CANCELLED, ended_at=NOW))
    store.close()


def test_a_night_goes_from_noon_to_noon() -> None:
    late = a_best(0, 100.0, started_at=NOW + timedelta(hours=4))
    assert queries.night_of(late) == date(2026, 3, 1)
    assert queries.night_of(late, ZoneInfo("Asia/Tokyo")) == date(2026, 3, 1)
    assert queries.night_of(replace(late, started_at=NOW + timedelta(hours=14))) == date(2026, 3, 2)


def test_the_best_of_a_night_and_what_changed() -> None:
    bests = [
        a_best(0, 100.0),
        a_best(1, 90.0, candidate=Candidate({"max_num_seqs": 96, "block_size": 32})),
        a_best(1, 80.0, run_id="again", candidate=Candidate({"max_num_seqs": 128})),
        a_best(2, 120.0, candidate=Candidate({"max_num_seqs": 128})),
        a_best(3, 60.0, engine_version="0.33.0", trace_digest="b" * 64),
    ]
    found = queries.nights(bests)
    assert [night.compared for night in found] == ["first", "better", "worse", "not comparable"]
    assert [night.regression for night in found] == [False, False, True, False]
    assert found[1].best.run_id == "again"
    assert found[1].runs == 2
    assert found[1].step == pytest.approx(-0.2)
    assert [(c.kind, c.name, c.before, c.after) for c in found[1].changes] == [
        ("knob", "max_num_seqs", "64", "128")
    ]
    assert [change.kind for change in found[3].changes] == ["engine", "traffic", "knob"]


def test_all_metrics_of_a_night_are_of_the_newest_run_that_concluded() -> None:
    """Run 1 has the better goodput, run 2 the better TTFT; a third is cancelled, a fourth goes on."""
    said = {"outcome": Judgement.SLO_MISSED, "repeats": 2}
    for metric, one, two in (("goodput_rps", 1.65, 1.56), ("ttft_p95_ms", 1275.0, 738.0)):
        runs = [
            a_best(0, value, metric=metric, run_id=f"r{hour}", started_at=NOW + timedelta(hours=hour),
                   ended_at=NOW + timedelta(hours=hour + 1), **said)
            for hour, value in enumerate((one, two))
        ]  # fmt: skip
        cut = replace(runs[1], run_id="cut", value=9e9, outcome=Judgement.NOT_CONFIRMED,
                      ended_at=NOW + timedelta(hours=4))  # fmt: skip
        going = replace(cut, run_id="going", outcome=None, ended_at=None)
        for others in ([], [cut], [cut, going]):
            (night,) = queries.nights([*runs, *others])
            assert (night.best, night.runs) == (runs[1], 2 + len(others)), metric
            assert {row.best.run_id for row in queries.rows([*runs, *others])} == {
                each.run_id for each in (*runs, *others)
            }


def test_a_night_whose_newest_run_lacks_a_metric_has_no_point_of_it(tmp_path: Path) -> None:
    """Its other metrics are that run's; the night before the next one is the last that showed the metric."""
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    one, two = a_study("one"), a_study("two")
    for night in (0, 1):
        ended(store, one, night, 190.0, 100.0, confirm=(95.0 + night,))
    later = a_run(store, two, now=NOW + DAY + timedelta(hours=4))
    for number in range(2):
        finished(store, start(store, later, number), a_measurement(math.inf, 3.9))
    end = replace(later, state=RunState.FINISHED, ended_at=later.started_at + timedelta(hours=1))
    arms = [Arm(trial=n, candidate=Candidate(), confirmed={"goodput_rps": 3.0 + 0.9 * n}) for n in range(2)]
    store.save_run(end, won(end, 0, 1, baseline=arms[0], finalists=(arms[1],)))
    ended(store, one, 2, 190.0, 100.0, confirm=(99.0,))
    running = a_run(store, two, now=NOW + 3 * DAY)
    finished(store, start(store, running, 7), a_measurement(math.inf, 4.0))

    def shown(metric: dict[str, Any]) -> list[tuple[int, bool, float]]:
        rows = queries.rows(store.bests(**metric, absent=True))
        return [((row.date - NOW.date()).days, row.newest, row.best.value) for row in rows]

    assert shown(TTFT) == [(0, True, 95.0), (1, False, 95.0), (2, True, 95.0)]
    assert shown(GOODPUT) == [(0, True, 3.5), (1, False, 3.5), (1, True, 3.9), (2, True, 3.5), (3, True, 4.0)]
    nights = queries.nights(store.bests(**TTFT, absent=True))
    assert [(night.compared, night.step) for night in nights] == [("first", None), ("same", 0.0)]
    newest = [[best.run_id for best in queries.newest_runs(store.bests(**each, absent=True))]
              for each in (TTFT, GOODPUT)]  # fmt: skip
    assert newest[0] == newest[1]
    assert newest[0][1::2] == [later.id, running.id]
    assert all(math.isfinite(best.value) for best in store.bests(**TTFT))
    store.close()


def test_a_run_that_was_continued_days_later_belongs_to_the_night_in_which_it_ended(tmp_path: Path) -> None:
    """Until then it stands in the night in which it began, and no ended run is compared with it."""
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    one, two = a_study("one"), a_study("two")
    stopped = a_run(store, two)
    finished(store, start(store, stopped, attempt=1), a_measurement(400.0))
    ended(store, one, 1, 190.0, 100.0, confirm=(95.0,))
    found = store.bests(**TTFT)
    assert [best.label for best in found if best.run_id == stopped.id] == ["0.1"]
    assert [best.run_id == stopped.id for best in found] == [False, True], "what has no end yet comes last"
    before = queries.rows(found)
    assert [(row.best.run_id == stopped.id, row.compared) for row in before] == [
        (True, "first"),
        (False, "first"),
    ]
    again = store.open_run(two.id, trials_limit=9, deadline=None, now=NOW + 4 * DAY, pid=18, host="here")
    assert again.id == stopped.id
    store.save_run(replace(again, state=RunState.FINISHED, ended_at=NOW + 4 * DAY + timedelta(hours=3)))
    after = queries.rows(store.bests(**TTFT))
    assert [(row.date - NOW.date()).days for row in after] == [1, 4]
    assert after[0] == before[1]
    assert (after[1].best.run_id, after[1].compared) == (stopped.id, "worse")
    assert [best.run_id for best in store.bests(**TTFT, since=NOW + 2 * DAY)] == [stopped.id]
    assert stopped.id not in [best.run_id for best in store.bests(**TTFT, until=NOW + 2 * DAY)]
    store.close()


def test_no_row_of_a_past_night_changes_when_a_later_run_ends() -> None:
    """Not a second run of its night, nor one of the night before that was continued and ended later."""
    ended = {"outcome": Judgement.CLEAR_WINNER, "repeats": 3}
    first = a_best(0, 100.0, ended_at=NOW + timedelta(hours=1), **ended)
    second = a_best(1, 120.0, ended_at=NOW + DAY + timedelta(hours=1), **ended)
    before = queries.rows([first, second])
    again = replace(second, run_id="again", value=50.0, started_at=NOW + DAY + timedelta(hours=2),
                    ended_at=NOW + DAY + timedelta(hours=3))  # fmt: skip
    late = replace(
        first, run_id="late", value=10.0, started_at=NOW + timedelta(hours=2), ended_at=NOW + 2 * DAY
    )
    for later in ([again], [late], [again, late]):
        after = {
            row.best.run_id: row
            for row in queries.rows(sorted([first, second, *later], key=lambda b: b.started_at))
        }
        for row in before:
            now = after[row.best.run_id]
            assert (now.best, now.step, now.compared) == (row.best, row.step, row.compared)
    assert before[1].compared == "worse"


def test_noise_is_not_a_regression() -> None:
    noisy = {"repeats": 3, "confirmed": True, "outcome": Judgement.CLEAR_WINNER}
    bests = [a_best(0, 100.0, low=90.0, high=112.0, **noisy), a_best(1, 110.0, low=99.0, high=120.0, **noisy)]
    assert [night.compared for night in queries.nights(bests)] == ["first", "same"]
    assert queries.nights(bests)[0].sure == "confirmed, 3 repeats, 90 to 112"
    slow = [a_best(0, 20000.0, low=16012.0, high=32914.0, **noisy)]
    assert queries.nights(slow)[0].sure == "confirmed, 3 repeats, 16,012 to 32,914"
    assert [night.compared for night in queries.nights([a_best(0, 100.0), a_best(1, 104.0)])][1] == "same"


def test_one_measurement_has_no_spread_that_could_overlap() -> None:
    once, again = a_best(0, 100.0, low=90.0, high=120.0), {"repeats": 3, "confirmed": True}
    assert queries.nights([once, a_best(1, 110.0, low=99.0, high=120.0, **again)])[1].compared == "worse"
    assert (
        queries.nights(
            [a_best(0, 110.0, low=99.0, high=120.0, **again), replace(once, started_at=NOW + DAY)]
        )[1].compared
        == "better"
    )


def test_a_moment_is_utc_where_it_names_no_zone() -> None:
    assert queries.moment("2026-03-01") == datetime(2026, 3, 1, tzinfo=UTC)
    assert queries.moment("2026-03-01T02:00+02:00") == datetime(2026, 3, 1, tzinfo=UTC)
    assert queries.moment("2026-03-01T02:00+02:00").utcoffset() == timedelta(hours=2)


def test_arguments_are_compared_only_where_both_sides_know_theirs() -> None:
    best = a_best(0, 100.0)
    known = queries.Configuration(
        engine_version=best.engine_version, trace_digest=best.trace_digest, gpu_class=best.gpu_class,
        candidate=best.candidate, arguments={"max-model-len": "4096"}, environment={"A": "1"},
    )  # fmt: skip
    assert queries.changes(best, known) == queries.changes(known, best) == ()
    other = replace(known, arguments={"max-model-len": "8192"}, environment={})
    assert [(each.kind, each.name) for each in queries.changes(known, other)] == [
        ("argument", "max-model-len"),
        ("environment", "A"),
    ]


def test_a_night_that_is_not_to_be_trusted_is_compared_with_none() -> None:
    doubted = a_best(1, 150.0, outcome=Judgement.NOT_TRUSTED)
    found = queries.nights([a_best(0, 100.0), doubted, a_best(2, 100.0)])
    assert [night.compared for night in found] == ["first", "not comparable", "not comparable"]


def test_nodes_are_not_compared_with_each_other() -> None:
    found = queries.nights([a_best(0, 100.0), a_best(1, 10.0, node="n2"), a_best(2, 99.0)])
    assert [(night.best.node, night.compared) for night in found] == [
        ("n1", "first"),
        ("n2", "first"),
        ("n1", "same"),
    ]


def test_the_trend_of_the_comparable_nights() -> None:
    growing = [a_best(night, 100.0 * 0.9**night) for night in range(5)]
    assert queries.trend(queries.nights(growing)) == pytest.approx(-0.1)
    other = [a_best(night, 500.0, engine_version="0.31.0") for night in range(-4, 0)]
    assert queries.trend(queries.nights(other + growing)) == pytest.approx(-0.1)
    assert queries.trend(queries.nights(growing[:2])) is None


def test_what_the_winner_saves_and_when_the_tuning_is_repaid() -> None:
    rate = Difference(
        metric="goodput_rps", before=4.0, after=5.0, change=0.25, low=0.2, high=0.3, word="better", repeats=3
    )
    winner = Arm(trial=1, candidate=Candidate(), changes=(rate,))
    spent = RunCost(search_s=5 * 3600.0, confirm_s=3600.0, gpus=8)
    saved = saving(winner, 2.5, spent)
    assert saved is not None
    assert saved.fraction == pytest.approx(0.2)
    assert saved.monthly == pytest.approx(0.2 * 2.5 * 8 * 730)
    assert saved.nights_to_repay == pytest.approx(15.0 / (4.0 * 24))
    assert words.saving(saved).startswith("at 2.5 per GPU-hour the winner saves 2,920 a month (20 % of")
    faster = replace(rate, metric="max_speed", before=1.0, after=2.0)
    by_speed = saving(replace(winner, changes=(rate, faster)), 2.5, spent)
    assert by_speed is not None
    assert (by_speed.metric, by_speed.fraction) == ("max_speed", 0.5)


@pytest.mark.parametrize(
    ("word", "price", "gpus", "known"),
    [("open", 2.5, 8, 4.0), ("worse", 2.5, 8, 4.0), ("better", None, 8, 4.0), ("better", 2.5, 0, 4.0),
     ("better", 2.5, 8, None)],
)  # fmt: skip
def test_no_saving_is_told_that_was_not_measured_on_gpus(
    word: Word, price: float | None, gpus: int, known: float | None
) -> None:
    rate = Difference(
        metric="goodput_rps", before=known, after=5.0, change=0.25, low=0.2, high=0.3, word=word, repeats=3
    )
    winner = Arm(trial=1, candidate=Candidate(), changes=(rate,))
    assert saving(winner, price, RunCost(search_s=1.0, gpus=gpus)) is None
    assert saving(None, 2.5, RunCost(search_s=1.0, gpus=8)) is None
