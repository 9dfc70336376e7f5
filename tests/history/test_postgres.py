"""The Store over a real PostgreSQL: the same suite, and what only a server that many write to can do."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from tests.history.conformance import StoreConformance
from tests.history.conformance_service import ServiceConformance
from tests.history.fill import fill, snapshot
from tests.history.postgres import Server, serving
from tests.history.records import NOW, a_measurement, a_run, a_study, finished, start
from tests.history.released import taken_over
from tuner.errors import Conflict, Unavailable
from tuner.history.maintenance import copy
from tuner.history.store import Store
from tuner.history.tables import REVISIONS
from tuner.records import Run, Trial, TrialState

pytestmark = pytest.mark.postgres
WRITERS = 20


@pytest.fixture
def url(postgres: Server) -> str:
    return postgres.url()


def name_of(url: str) -> str:
    return str(make_url(url).database)


def together(work: Callable[[int], None], count: int) -> None:
    """Runs work in threads and raises what one of them raised."""
    failed: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


class TestPostgres(StoreConformance, ServiceConformance):
    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        store = Store(url)
        yield store
        store.close()


def write(store: Store, run: Run, numbers: range) -> None:
    for number in numbers:
        finished(store, start(store, run, number), a_measurement(float(number)))


def test_writers_whose_connections_are_cut_lose_and_double_nothing(postgres: Server, url: str) -> None:
    store = Store(url, patience_s=300)
    run = a_run(store, a_study())
    each = 15
    done = threading.Event()
    cuts: list[int] = []
    chance = random.Random(7)

    def cutter() -> None:
        while not done.wait(chance.uniform(0.02, 0.2)):
            cuts.append(postgres.cut(name_of(url), at_most=chance.randint(1, 6)))

    cutting = threading.Thread(target=cutter)
    cutting.start()
    try:
        together(
            lambda w: write(store, run, range(w, WRITERS * each, WRITERS)),
            WRITERS,
        )
    finally:
        done.set()
        cutting.join()
    trials = store.trials(run.study_id)
    assert [trial.number for trial in trials] == list(range(WRITERS * each))
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert [[m.values["ttft_p95_ms"] for m in trial.measurements] for trial in trials] == [
        [float(number)] for number in range(WRITERS * each)
    ]
    assert sum(cuts) > 0
    store.close()


def test_a_commit_whose_answer_was_lost_is_not_done_twice(postgres: Server, url: str) -> None:
    store = Store(url, patience_s=60)
    run = a_run(store, a_study())
    trial = start(store, run)
    calls: list[int] = []
    engine = store.database.engine
    real = engine.dialect.do_commit

    def commit_then_lose(connection: object) -> None:
        real(connection)  # type: ignore[arg-type]
        calls.append(1)
        if len(calls) == 1:
            # The server has committed; the client never hears of it.
            postgres.cut(name_of(url))
            connection.execute("SELECT 1")  # type: ignore[attr-defined]

    engine.dialect.do_commit = commit_then_lose  # type: ignore[method-assign, assignment]
    try:
        back = store.add_measurement(trial.id, a_measurement())
    finally:
        engine.dialect.do_commit = real  # type: ignore[method-assign]
    assert len(back.measurements) == len(store.trial(trial.id).measurements) == 1
    store.close()


def test_a_server_that_went_away_is_a_clear_error_and_one_that_comes_back_is_used(tmp_path: Path) -> None:
    with serving() as server:
        store = Store(server.url(), patience_s=0.2)
        run = a_run(store, a_study())
        server.stop()
        with pytest.raises(Unavailable, match="failed"):
            start(store, run)
        server.start()
        assert start(store, run).number == 0
        store.close()


def test_one_of_many_writers_opens_the_run_and_gets_the_lease_and_the_alias(url: str) -> None:
    store = Store(url, patience_s=300)
    fill(store)
    study = store.add_study(a_study("another"))
    key = store.profile_keys()[0]
    runs: set[str] = set()
    won: list[str] = []

    def race(number: int) -> None:
        runs.add(a_run(store, study).id)
        for what, take in (
            ("alias", lambda: store.move_alias(key, "x", 1, expected=0, actor="t", reason="", now=NOW)),
            ("lease", lambda: store.acquire_lease("n9", str(number), now=NOW, ttl_s=60)),
        ):
            try:
                take()
                won.append(what)
            except Conflict:
                pass

    together(race, WRITERS)
    assert len(runs) == 1
    assert sorted(won) == ["alias", "lease"]
    store.close()


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not what():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.01)


def test_the_pulse_changes_with_what_anybody_writes_and_else_stays(url: str) -> None:
    store, other = Store(url), Store(url)
    wait_for(lambda: store.change_token() >= 0)
    # What the server itself writes from time to time (statistics) may count too; questions do not.
    seen = {store.change_token() for _ in range(500) if store.studies() == ()}
    assert len(seen) < 50
    before = store.change_token()
    other.add_audit(actor="a", action="b", target="c", reason="", now=NOW)
    wait_for(lambda: store.change_token() not in (before, *seen) and store.change_token() >= 0)
    other.close()
    store.close()


def test_a_server_that_cannot_be_asked_counts_as_changed(tmp_path: Path) -> None:
    with serving() as server:
        store = Store(server.url(), patience_s=0.2)
        wait_for(lambda: store.change_token() >= 0)
        server.stop()
        wait_for(lambda: store.change_token() < 0)
        server.start()
        wait_for(lambda: store.change_token() >= 0)
        store.close()


def test_many_open_an_empty_database_at_once(url: str) -> None:
    together(lambda _: Store(url, patience_s=300).close(), 8)
    store = Store(url)
    assert store.upgrade() == (REVISIONS[-1], REVISIONS[-1])
    store.close()


def test_a_copy_from_sqlite_is_the_same_history_and_goes_on(tmp_path: Path, url: str) -> None:
    source, target = Store(f"sqlite:///{tmp_path}/a.db"), Store(url)
    fill(source)
    copy(source.database, target.database)
    assert snapshot(target) == snapshot(source)
    with pytest.raises(Conflict, match="not empty"):
        copy(source.database, target.database)
    run = next(each for each in target.runs() if each.ended_at is None)
    new: Trial = start(target, run, 50)
    assert new.id == max(trial.id for trial in source.trials(run.study_id)) + 1
    source.close()
    target.close()


@pytest.mark.parametrize("revision", REVISIONS)
def test_what_a_release_wrote_is_taken_over(url: str, revision: str) -> None:
    taken_over(url, revision)
