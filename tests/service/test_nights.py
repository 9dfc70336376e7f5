"""Issue 20.1 and 20.2: what counts as a success, whom a schedule alarms, and whose a running trial is."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.history.records import NOW, a_conclusion, a_run, a_study, start
from tests.service.world import Clock
from tuner.conclusions import Judgement
from tuner.history.entities import Schedule
from tuner.history.store import Store
from tuner.records import RunState
from tuner.service.metrics import Watcher, not_started
from tuner.service.runner import Controllers
from tuner.settings import Settings

USABLE = {
    Judgement.CLEAR_WINNER, Judgement.TRADE_OFF, Judgement.BASELINE_FAILED, Judgement.SLO_MISSED,
    Judgement.BASELINE_STAYS, Judgement.NO_CLEAR_WINNER,
}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"sqlite:///{tmp_path / 'a.db'}")


def metrics(store: Store, home: Path, clock: Clock) -> dict[str, dict[tuple[str, ...], float]]:
    watcher = Watcher(store, clock, Controllers(store, Settings(home=home, database_url=""), clock))
    return {
        metric.name: {tuple(sample.labels.values()): sample.value for sample in metric.samples}
        for metric in watcher.collect()
    }


@pytest.mark.parametrize("outcome", list(Judgement))
def test_20_1_a_success_is_a_conclusion_that_a_pipeline_can_use(store: Store, outcome: Judgement) -> None:
    """A night in which nothing served is FINISHED and no success."""
    run = a_run(store, store.add_study(a_study()))
    ended = replace(run, state=RunState.FINISHED, ended_at=NOW + timedelta(hours=2))
    store.save_run(ended, a_conclusion(ended, outcome=outcome))
    node = store.study(run.study_id).node
    assert store.last_success() == ({node: ended.ended_at} if outcome in USABLE else {})
    assert store.last_end() == {node: ended.ended_at}


@pytest.mark.parametrize(
    ("outcome", "change"),
    [(Judgement.SLO_MISSED, {"winner": None}), (Judgement.BASELINE_FAILED, {"winner": None}),
     (Judgement.BASELINE_STAYS, {"winner": None, "baseline": None}),
     (Judgement.NO_CLEAR_WINNER, {"winner": None, "baseline": None})],
)  # fmt: skip
def test_20_1_without_winner_or_measured_baseline_there_is_nothing_to_use(
    store: Store, outcome: Judgement, change: dict[str, None]
) -> None:
    run = a_run(store, store.add_study(a_study()))
    ended = replace(run, state=RunState.FINISHED, ended_at=NOW)
    store.save_run(ended, a_conclusion(ended, outcome=outcome, **change))
    assert store.last_success() == {}


def test_20_1_a_failed_run_ends_and_does_not_succeed(store: Store) -> None:
    run = a_run(store, store.add_study(a_study()))
    store.save_run(replace(run, state=RunState.FAILED, ended_at=NOW, reason="no driver"))
    assert store.last_success() == {}
    assert list(store.last_end().values()) == [NOW]


def nightly(**more: object) -> Schedule:
    made = Schedule(
        name="nightly", node="n1", cron="0 22 * * *", timezone="UTC", created_at=NOW - timedelta(days=9),
        spec={"study": "chat", "hours": 6},
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]


def test_20_1_a_scheduled_night_that_did_not_start_is_told(store: Store) -> None:
    study = store.add_study(a_study())
    due = (NOW - timedelta(days=1)).replace(hour=22, minute=0, second=0, microsecond=0)
    later = due + timedelta(hours=1)
    assert not not_started(store, nightly(created_at=due + timedelta(minutes=1)), later), "made since"
    assert not_started(store, nightly(), later), "nobody claimed it"
    assert not_started(store, nightly(last_due=due), later), "claimed, and refused"
    begun = a_run(store, study, now=due + timedelta(seconds=5))
    assert not not_started(store, nightly(last_due=due, last_run_id=begun.id), later)
    assert not_started(store, nightly(last_due=due - timedelta(days=1), last_run_id=begun.id), later)
    assert not not_started(store, nightly(last_due=due, last_run_id=begun.id), due + timedelta(minutes=5))
    store.save_run(replace(begun, state=RunState.FINISHED, ended_at=due + timedelta(minutes=9)))
    next_day = later + timedelta(days=1)
    claimed = nightly(last_due=due + timedelta(days=1), last_run_id=begun.id)
    assert not_started(store, claimed, next_day), "the run is the night before's"
    dark = {"study": "chat", "hours": 6, "blackout": [f"{due:%Y-%m-%d}"]}
    assert not not_started(store, nightly(spec=dark), later), "a blackout is no miss"


def test_20_1_only_nodes_with_a_schedule_alarm(store: Store, tmp_path: Path) -> None:
    told = metrics(store, tmp_path, Clock(at=NOW))
    assert told["tuner_schedules"] == {}
    store.put_schedule(nightly())
    store.put_schedule(nightly(name="off", enabled=False))
    told = metrics(store, tmp_path, Clock(at=NOW))
    assert told["tuner_schedules"] == {("n1",): 1.0}
    assert told["tuner_schedule_not_started"] == {("nightly", "n1"): 1.0}


def test_20_2_a_trial_of_another_host_is_no_orphan_while_its_node_is_leased(
    store: Store, tmp_path: Path
) -> None:
    study = store.add_study(a_study())
    run = store.save_run(replace(a_run(store, study), host="elsewhere", pid=1))
    start(store, run, 0)
    clock = Clock(at=NOW)
    assert metrics(store, tmp_path, clock)["tuner_orphan_trials"] == {(): 1.0}
    store.acquire_lease(study.node, "elsewhere/1", now=NOW, ttl_s=60)
    assert metrics(store, tmp_path, clock)["tuner_orphan_trials"] == {(): 0.0}
    clock.forward(minutes=2)
    assert metrics(store, tmp_path, clock)["tuner_orphan_trials"] == {(): 1.0}, "the lease ran out"
