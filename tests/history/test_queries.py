"""What was best on which night, and why."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import event

from tests.history.records import NOW, a_measurement, a_run, a_study, finished, start
from tuner.errors import BadInput
from tuner.history import cost, queries
from tuner.history.entities import RunBest
from tuner.history.store import Store
from tuner.records import JSON, Candidate, Measurement, RunState, Study, TrialState

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
    summary: Mapping[str, JSON] | None = None,
    state: RunState = RunState.FINISHED,
) -> str:
    """A run whose trial 0 is the baseline and whose last trial is confirmed by some repeats."""
    run = a_run(store, study, now=NOW + night * DAY)
    first = len(store.trials(study.id))
    for number, value in enumerate(values):
        origin = "baseline" if number == 0 else "search"
        trial = start(store, run, first + number, origin=origin)
        finished(store, trial, a_measurement(value))
    for repeat, value in enumerate(confirm):
        confirming: Measurement = a_measurement(value, purpose="confirm", repeat=repeat)
        store.add_measurement(trial.id, confirming)
    end = run.started_at + timedelta(hours=3)
    store.save_run(replace(run, state=state, ended_at=end, summary=summary or {}))
    return run.id


def test_what_a_demonstration_or_a_run_without_an_end_measured_again_is_not_confirmed(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    study = a_study()
    told: list[dict[str, JSON]] = [
        {"sentence": 'says "demonstration":true', "demonstration": False},
        {"verdict": "clear winner", "demonstration": True},
        {"verdict": "clear winner", "demonstration": True},
    ]
    for night, (summary, confirm) in enumerate(zip(told, [(9.0, 8.0), (9.0, 8.0), (9.0,)], strict=True)):
        ended(store, study, night, 200.0, 9.0, confirm=confirm, summary=summary)
    ended(store, study, 3, 200.0, 9.0, confirm=(9.0, 8.0), state=RunState.CANCELLED)
    running = a_run(store, study, now=NOW + 4 * DAY)
    again = a_measurement(7.0, purpose="confirm", repeat=0), a_measurement(6.0, purpose="confirm", repeat=1)
    finished(store, start(store, running, 99), a_measurement(6.0), *again)
    found = store.bests(model=study.model, metric="ttft_p95_ms")
    assert [(best.confirmed, best.demonstration) for best in found] == [
        (True, False),
        (False, True),
        (False, True),
        (False, False),
        (False, False),
    ]
    assert [night.sure for night in queries.nights(found)] == [
        "confirmed, 2 repeats, 8 to 9",
        "not confirmed (a demonstration), 2 repeats, 8 to 9",
        "one measurement (a demonstration)",
        "not confirmed, 2 repeats, 8 to 9",
        "not confirmed, 2 repeats, 6 to 7",
    ]
    store.close()


def test_a_winner_that_no_baseline_was_measured_beside_is_not_confirmed(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    study = a_study()
    run = a_run(store, study)
    again = a_measurement(9.0, purpose="confirm", repeat=0), a_measurement(8.0, purpose="confirm", repeat=1)
    finished(store, start(store, run, 1), a_measurement(9.0), *again)
    store.save_run(replace(run, state=RunState.FINISHED, ended_at=run.started_at + timedelta(hours=3)))
    (found,) = store.bests(model=study.model, metric="ttft_p95_ms")
    assert (found.value, found.baseline, found.confirmed) == (8.5, None, False)
    store.close()


def test_each_run_gives_its_best_beside_its_baseline(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    study = a_study()
    ended(store, study, 0, 200.0, 120.0, 150.0)
    ended(store, study, 1, 190.0, 100.0, 110.0, confirm=(112.0, 118.0, 115.0))
    running = a_run(store, study, now=NOW + 2 * DAY)
    finished(store, start(store, running, 99), a_measurement(90.0))
    found = store.bests(model=study.model, metric="ttft_p95_ms", node="n1", workload="chat")
    assert [(best.value, best.baseline, best.confirmed) for best in found] == [
        (120.0, 200.0, False),
        (115.0, 190.0, True),
        (90.0, 190.0, False),
    ]
    assert (found[1].low, found[1].high, found[1].repeats) == (112.0, 118.0, 3)
    assert store.bests(model=study.model, metric="ttft_p95_ms", since=NOW + DAY, until=NOW + 2 * DAY) == (
        found[1],
    )
    assert store.bests(model="other", metric="ttft_p95_ms") == ()
    assert [best.value for best in store.bests(model=study.model, metric="goodput_rps")] == [3.5] * 3
    with pytest.raises(BadInput, match="did you mean 'ttft_p95_ms'"):
        store.bests(model=study.model, metric="ttft_p95")
    store.close()


def test_a_later_night_of_a_study_gains_over_the_baseline_that_was_measured_before(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    study = a_study()
    ended(store, study, 0, 200.0, 120.0)
    later = a_run(store, study, now=NOW + DAY)
    finished(store, start(store, later, 10), a_measurement(100.0))
    assert [b.baseline for b in store.bests(model=study.model, metric="ttft_p95_ms")] == [200.0, 200.0]
    store.save_run(replace(later, state=RunState.FINISHED, ended_at=NOW + DAY))
    found = queries.nights(store.bests(model=study.model, metric="ttft_p95_ms"))
    assert [night.best.value for night in found] == [120.0, 100.0]
    assert [night.gain for night in found] == pytest.approx([200 / 120 - 1, 1.0])
    store.close()


def test_of_equal_trials_the_winner_of_the_run_is_told(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/tuner.db")
    run = a_run(store, a_study())
    for number, origin in enumerate(("baseline", "search", "search")):
        finished(store, start(store, run, number, origin=origin), a_measurement(100.0))
    ended = replace(run, state=RunState.FINISHED, ended_at=NOW, summary={"winner": 2})
    store.save_run(ended)
    (best,) = store.bests(model=a_study().model, metric="ttft_p95_ms")
    assert (best.number, best.value, best.baseline) == (2, 100.0, 100.0)
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
        store.bests(model=a_study().model, metric="ttft_p95_ms", **where)
    event.remove(store.database.engine, "before_cursor_execute", note)
    plans: list[str] = []
    with store.database.engine.connect() as connection:
        for statement, parameters in sent:
            if statement.startswith("SELECT"):
                rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
                plans += [str(row[-1]) for row in rows]
    assert len(plans) > 20
    assert [plan for plan in plans if plan.startswith("SCAN")] == []
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
    assert [night.judgement for night in found] == ["first", "better", "worse", "not comparable"]
    assert [night.regression for night in found] == [False, False, True, False]
    assert found[1].best.run_id == "again"
    assert found[1].runs == 2
    assert found[1].step == pytest.approx(0.25)
    assert found[1].gain == pytest.approx(1.5)
    assert [(c.kind, c.name, c.before, c.after) for c in found[1].changes] == [
        ("knob", "max_num_seqs", "64", "128")
    ]
    assert [change.kind for change in found[3].changes] == ["engine", "traffic", "knob"]


def test_noise_is_not_a_regression() -> None:
    noisy = {"repeats": 3, "confirmed": True}
    bests = [a_best(0, 100.0, low=90.0, high=112.0, **noisy), a_best(1, 110.0, low=99.0, high=120.0, **noisy)]
    assert [night.judgement for night in queries.nights(bests)] == ["first", "same"]
    assert "confirmed, 3 repeats, 90 to 112" in queries.nights(bests)[0].sure
    assert [night.judgement for night in queries.nights([a_best(0, 100.0), a_best(1, 104.0)])][1] == "same"


def test_nodes_are_not_compared_with_each_other() -> None:
    found = queries.nights([a_best(0, 100.0), a_best(1, 10.0, node="n2"), a_best(2, 99.0)])
    assert [(night.best.node, night.judgement) for night in found] == [
        ("n1", "first"),
        ("n2", "first"),
        ("n1", "same"),
    ]


def test_the_trend_of_the_comparable_nights() -> None:
    growing = [a_best(night, 100.0 * 0.9**night) for night in range(5)]
    assert queries.trend(queries.nights(growing)) == pytest.approx(1 / 0.9 - 1)
    other = [a_best(night, 500.0, engine_version="0.31.0") for night in range(-4, 0)]
    assert queries.trend(queries.nights(other + growing)) == pytest.approx(1 / 0.9 - 1)
    assert queries.trend(queries.nights(growing[:2])) is None


def test_cost() -> None:
    assert cost.cost_per_million_tokens(3.6, 2, 1000.0) == pytest.approx(2.0)
    assert cost.cost_per_million_tokens(3.6, 2, 0.0) == float("inf")
    saved = cost.saving(baseline_rate=4.0, rate=5.0, price_per_gpu_hour=2.5, gpus=8, tuning_gpu_hours=6.0)
    assert saved.fraction == pytest.approx(0.2)
    assert saved.monthly == pytest.approx(0.2 * 2.5 * 8 * 730)
    assert saved.nights_to_repay == pytest.approx(15.0 / (4.0 * 24))
    worse = cost.saving(baseline_rate=5.0, rate=4.0, price_per_gpu_hour=2.5, gpus=8, tuning_gpu_hours=6.0)
    assert (worse.fraction, worse.nights_to_repay) == (0.0, None)
    with pytest.raises(BadInput):
        cost.cost_per_million_tokens(-1.0, 1, 1.0)
