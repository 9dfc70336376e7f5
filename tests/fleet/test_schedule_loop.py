"""The loop with a clock of its own: what is due starts once, ends in its window; a refusal says why."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.history import records
from tuner.errors import BadInput, Unavailable
from tuner.fleet import schedule as schedules
from tuner.fleet.schedule import CLOSING, Firing, Happening, Keeper, claim, loop, nothing_begun, trial_times
from tuner.history.entities import Schedule
from tuner.history.store import Store
from tuner.records import JSON, Launch, Run, RunState

MADE = datetime(2026, 11, 27, 12, tzinfo=UTC)
DUE = datetime(2026, 11, 28, 1, tzinfo=UTC)
END = datetime(2026, 11, 28, 5, 30, tzinfo=UTC)
STUDY = "a" * 64


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    yield made
    made.close()


def nightly(name: str = "nightly", node: str = "gpu-1", **more: JSON) -> Schedule:
    return with_spec(more, name, node)


def with_spec(more: dict[str, JSON], name: str = "nightly", node: str = "gpu-1") -> Schedule:
    whole: dict[str, JSON] = {"study": "chat", "until": "05:30", **more}
    return Schedule(name=name, node=node, cron="0 1 * * *", timezone="UTC", spec=whole, created_at=MADE)


@dataclass
class World:
    """A clock that only moves when told, and runs that end when told."""

    store: Store
    now: datetime = MADE
    started: list[Firing] = field(default_factory=list)
    said: list[Happening] = field(default_factory=list)
    gates: dict[str, "asyncio.Future[Run]"] = field(default_factory=dict)
    closed: list[datetime] = field(default_factory=list)

    def keeper(self, resumes: int = 3) -> Keeper:
        return Keeper(
            self.store, clock=lambda: self.now, start_run=self.run, tell=self.said.append, resumes=resumes
        )

    async def run(self, firing: Firing) -> Run | None:
        self.started.append(firing)
        gate = self.gates[firing.schedule.name] = asyncio.get_running_loop().create_future()
        try:
            run: Run = await gate
            return run
        except asyncio.CancelledError as end:
            if end.args == (CLOSING,):
                self.closed.append(self.now)
            raise

    def kinds(self) -> list[str]:
        return [each.kind for each in self.said]


def run_of(state: RunState = RunState.FINISHED, at: datetime = DUE) -> Run:
    return Run(id="r1", study_id=STUDY, state=state, started_at=at, reason="the budget is spent")


def audited(store: Store) -> list[str]:
    return [entry.action for entry in reversed(store.audit())]


async def at_moments(world: World, *moments: datetime) -> Keeper:
    keeper = world.keeper()
    for moment in moments:
        world.now = moment
        await keeper.tick()
        await asyncio.sleep(0)
    return keeper


def test_a_night_starts_once_and_its_end_is_told(store: Store) -> None:
    store.put_schedule(nightly())
    world = World(store)

    async def night() -> None:
        keeper = await at_moments(world, MADE, DUE - timedelta(seconds=1), DUE, DUE + timedelta(minutes=1))
        world.gates["nightly"].set_result(run_of())
        await asyncio.sleep(0)
        world.now = DUE + timedelta(hours=2)
        await keeper.tick()
        await keeper.close()

    asyncio.run(night())
    (firing,) = world.started
    assert (firing.window.due, firing.window.end) == (DUE, END)
    assert firing.deadline == END - timedelta(seconds=60)
    assert world.kinds() == ["start", "ended"]
    assert audited(store) == ["schedule.start", "schedule.ended"]
    assert store.schedule("nightly").last_due == DUE


def test_25_3_a_due_time_without_anything_new_ends_and_no_process_begins_it_again(store: Store) -> None:
    store.put_schedule(nightly(upgrade={"to": "next"}))
    world = World(store)

    async def night() -> None:
        keeper = await at_moments(world, DUE)
        nothing_begun(store, world.started[0])
        world.gates["nightly"].set_result(None)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await keeper.tick()
        await keeper.close()

    asyncio.run(night())
    assert world.kinds() == ["start", "ended"]
    assert world.said[-1].sentence == "there is no new version of the engine"
    assert store.schedule("nightly").last_run_id is None
    again = World(store, now=DUE + timedelta(minutes=5))
    asyncio.run(at_moments(again, again.now))
    assert not again.started


def test_what_still_runs_when_the_window_closes_is_cancelled_before_its_end(store: Store) -> None:
    store.put_schedule(nightly())
    world = World(store)

    async def night() -> None:
        keeper = await at_moments(world, DUE, END - timedelta(minutes=5), END - timedelta(seconds=30))
        await keeper.close()

    asyncio.run(night())
    assert world.closed == [END - timedelta(seconds=30)]
    assert world.kinds() == ["start", "failed"]
    assert "end of its window" in world.said[-1].sentence


def test_the_loop_wakes_at_the_due_time_and_leaves_runs_their_own_end(store: Store) -> None:
    store.put_schedule(nightly())
    world = World(store)
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        world.now += timedelta(seconds=seconds)
        await asyncio.sleep(0)
        if world.started:
            raise asyncio.CancelledError

    world.now = DUE - timedelta(seconds=50)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(loop(store, clock=lambda: world.now, start_run=world.run, wait=wait))
    assert waits[:3] == [20.0, 20.0, 10.0]
    assert [firing.window.due for firing in world.started] == [DUE]
    assert world.closed == []


@pytest.mark.parametrize(
    ("spec", "now", "kind"),
    [
        ({}, DUE + timedelta(hours=3), "start"),
        ({"missed": "skip"}, DUE + timedelta(minutes=4), "start"),
        ({"missed": "skip"}, DUE + timedelta(minutes=6), "missed"),
        ({"missed": "skip", "grace_s": 7200}, DUE + timedelta(minutes=90), "start"),
        ({}, END, "missed"),
        ({}, END - timedelta(seconds=59), "missed"),
        ({"blackout": ["2026-11-28"]}, DUE, "blackout"),
    ],
)
def test_a_start_that_was_missed_follows_the_policy(
    store: Store, spec: dict[str, JSON], now: datetime, kind: str
) -> None:
    store.put_schedule(with_spec(spec))
    found = claim(store, store.schedule("nightly"), now)
    assert (found.kind if isinstance(found, Happening) else "start") == kind
    assert claim(store, store.schedule("nightly"), now) is None


def test_nights_that_were_missed_are_one_start(store: Store) -> None:
    store.put_schedule(nightly())
    later = DUE + timedelta(days=9, hours=1)
    found = claim(store, store.schedule("nightly"), later)
    assert isinstance(found, Firing)
    assert found.window.due == DUE + timedelta(days=9)


def test_a_due_time_is_claimed_by_one_of_two_services(store: Store) -> None:
    store.put_schedule(nightly())
    row = store.schedule("nightly")
    assert isinstance(claim(store, row, DUE), Firing)
    assert claim(store, row, DUE) is None


def test_a_disabled_schedule_does_nothing(store: Store) -> None:
    store.put_schedule(replace(nightly(), enabled=False))
    assert claim(store, store.schedule("nightly"), DUE) is None


def test_a_node_has_one_run(store: Store) -> None:
    store.put_schedule(nightly("a"))
    store.put_schedule(nightly("b"))
    store.put_schedule(nightly("c", node="gpu-2"))
    world = World(store)

    async def night() -> None:
        await (await at_moments(world, DUE)).close()

    asyncio.run(night())
    assert [(h.schedule, h.kind) for h in world.said] == [("a", "start"), ("b", "overlap"), ("c", "start")]


def test_a_node_that_somebody_tunes_is_not_taken(store: Store) -> None:
    store.put_schedule(nightly())
    store.acquire_lease("gpu-1", "somebody", now=DUE, ttl_s=60)
    found = claim(store, store.schedule("nightly"), DUE)
    assert isinstance(found, Happening)
    assert found.kind == "overlap"
    assert "somebody" in found.sentence


def launches(store: Store, seconds: float, count: int = 3) -> None:
    """A history in which a trial takes so long on gpu-1."""
    study = records.a_study(node="gpu-1")
    store.add_study(study)
    for n in range(count):
        begun = MADE + timedelta(hours=n)
        store.add_launch(Launch(id=f"l{n}", study_id=study.id, argv=(), started_at=begun))
        store.finish_launch(
            Launch(
                id=f"l{n}", study_id=study.id, argv=(), started_at=begun,
                ended_at=begun + timedelta(seconds=seconds), timeline={"ready_s": seconds / 4},
            )
        )  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "min_trials", "now", "kind"),
    [
        (600.0, 3, DUE, "start"),
        (600.0, 26, DUE, "start"),
        (600.0, 27, DUE, "too short"),  # 4 h 29 min hold 26 trials of 10 min
        (600.0, 3, END - timedelta(minutes=40), "start"),
        (600.0, 3, END - timedelta(minutes=30), "too short"),
        (600.0, 0, END - timedelta(minutes=2), "start"),
    ],
)
def test_a_window_must_hold_the_minimum_of_trials(
    store: Store, seconds: float, min_trials: int, now: datetime, kind: str
) -> None:
    launches(store, seconds)
    store.put_schedule(nightly(min_trials=min_trials))
    found = claim(store, store.schedule("nightly"), now)
    assert (found.kind if isinstance(found, Happening) else "start") == kind
    if isinstance(found, Happening):
        assert "One trial takes 600 s (150 s of it to relaunch; median of 3 launches" in found.sentence


def test_what_a_trial_takes_is_the_median_of_launches_that_ended_well(store: Store) -> None:
    launches(store, 100.0, count=5)
    study = records.a_study(node="gpu-1")
    bad = Launch(id="bad", study_id=study.id, argv=(), started_at=MADE)
    store.add_launch(bad)
    store.finish_launch(replace(bad, ended_at=MADE + timedelta(hours=9), verdict="frozen: no answer"))
    found = trial_times(store, "gpu-1")
    assert found is not None
    assert (found.launches, found.trial_s, found.relaunch_s) == (5, 100.0, 25.0)
    assert trial_times(store, "gpu-2") is None


def begun(store: Store, started: datetime = DUE) -> Run:
    """A run of the night whose controller is gone."""
    study = records.a_study(node="gpu-1")
    store.add_study(study)
    run = store.open_run(study.id, trials_limit=None, deadline=END, now=started, pid=None, host="")
    store.fire_schedule("nightly", DUE)
    store.scheduled_run("nightly", run.id)
    return run


def resumed(world: World, *moments: datetime, resumes: int = 3) -> list[str]:
    async def night() -> None:
        keeper = world.keeper(resumes)
        for moment in moments:
            world.now = moment
            await keeper.tick()
            await asyncio.sleep(0)
        await keeper.close()

    asyncio.run(night())
    return world.kinds()


def test_a_run_whose_process_died_is_resumed_in_its_window(store: Store) -> None:
    store.put_schedule(nightly())
    begun(store)
    assert resumed(World(store), DUE + timedelta(hours=1)) == ["resume"]


@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.CANCELLED, RunState.FAILED])
def test_a_run_that_ended_is_not_resumed(store: Store, state: RunState) -> None:
    store.put_schedule(nightly())
    run = begun(store)
    store.save_run(replace(run, state=state, ended_at=DUE))
    assert resumed(World(store), DUE + timedelta(hours=1)) == []


def test_a_run_of_another_night_is_not_resumed(store: Store) -> None:
    store.put_schedule(nightly())
    begun(store, started=DUE - timedelta(hours=20))
    assert resumed(World(store), DUE + timedelta(hours=1)) == []


def test_after_the_window_or_without_leave_nothing_is_resumed(store: Store) -> None:
    store.put_schedule(nightly())
    begun(store)
    assert resumed(World(store), END) == []
    assert resumed(World(store), DUE + timedelta(hours=1), resumes=0) == []


def test_a_start_that_was_claimed_and_never_began_is_made_up_for(store: Store) -> None:
    store.put_schedule(nightly())
    assert isinstance(claim(store, store.schedule("nightly"), DUE), Firing)  # and then the power went
    assert resumed(World(store), DUE + timedelta(minutes=9)) == ["resume"]


def failing(error: Exception) -> Callable[[Firing], object]:
    async def run(firing: Firing) -> Run | None:
        raise error

    return run


def test_a_run_that_cannot_begin_is_told_once(store: Store) -> None:
    store.put_schedule(nightly())
    said: list[Happening] = []
    moments = [DUE + timedelta(seconds=20 * n) for n in range(8)]
    now = [moments[0]]

    async def night() -> None:
        keeper = Keeper(
            store, clock=lambda: now[0], start_run=failing(BadInput("there is no study file")),  # type: ignore[arg-type]
            tell=said.append, resumes=3,
        )  # fmt: skip
        for now[0] in moments:
            await keeper.tick()
            await asyncio.sleep(0)

    asyncio.run(night())
    assert [each.kind for each in said] == ["start", "failed"]
    assert "there is no study file" in said[-1].sentence


def test_a_schedule_that_cannot_be_read_does_not_stop_the_others(store: Store) -> None:
    store.put_schedule(replace(nightly("broken"), spec={"study": "chat"}))
    store.put_schedule(nightly("well", node="gpu-2"))
    world = World(store)
    asyncio.run(at_moments(world, DUE, DUE + timedelta(seconds=20)))
    assert [(each.schedule, each.kind) for each in world.said] == [("broken", "failed"), ("well", "start")]


def test_resuming_ends_after_its_tries(store: Store) -> None:
    store.put_schedule(nightly())
    world = World(store)
    study = records.a_study(node="gpu-1")
    store.add_study(study)

    async def run(firing: Firing) -> Run | None:
        made = store.open_run(study.id, trials_limit=None, deadline=END, now=world.now, pid=None, host="")
        store.scheduled_run("nightly", made.id)
        raise OSError("killed")

    async def night() -> None:
        keeper = Keeper(
            store, clock=lambda: world.now, start_run=run, tell=world.said.append, resumes=schedules.RESUMES
        )
        for n in range(20):
            world.now = DUE + timedelta(seconds=20 * n)
            await keeper.tick()
            await asyncio.sleep(0)

    asyncio.run(night())
    assert world.kinds().count("start") == 1
    assert world.kinds().count("resume") == schedules.RESUMES


class Away(Store):
    """A database that does not answer the first two questions."""

    asked = 0

    def schedules(self) -> tuple[Schedule, ...]:
        self.asked += 1
        if self.asked < 3:
            raise Unavailable("the database does not answer")
        return super().schedules()


def test_a_database_that_is_away_for_a_while_does_not_end_the_loop(tmp_path: Path) -> None:
    store = Away(f"sqlite:///{tmp_path / 'tuner.db'}")
    store.put_schedule(nightly())
    world = World(store, now=DUE)

    async def wait(seconds: float) -> None:
        world.now += timedelta(seconds=seconds)
        await asyncio.sleep(0)
        if world.started:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(loop(store, clock=lambda: world.now, start_run=world.run, wait=wait))
    assert store.asked == 3
    assert [firing.window.due for firing in world.started] == [DUE]
    store.close()
