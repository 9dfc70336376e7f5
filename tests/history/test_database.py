"""How a database is opened, upgraded, refused, copied and backed up; and what its faults are called."""

import os
import resource
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Table, insert, text

from tests.history.fill import fill, snapshot
from tests.history.records import NOW, a_measurement, a_run, a_study, finished, start
from tests.history.released import dump, load, tables, taken_over
from tests.tuning.studies import tuner
from tuner.errors import BadInput, Conflict, NotFound, Unavailable
from tuner.history.database import Database
from tuner.history.maintenance import backup, copy
from tuner.history.store import Store
from tuner.history.tables import REVISIONS, metadata
from tuner.records import JSON, RunState
from tuner.settings import shipped


def url(path: Path) -> str:
    return f"sqlite:///{path}"


def test_the_revisions_known_are_those_of_the_migrations() -> None:
    config = Config()
    config.set_main_option("script_location", str(shipped("migrations")))
    found = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    assert tuple(reversed(found)) == REVISIONS


def test_the_migrations_make_the_tables_of_the_code(tmp_path: Path) -> None:
    store = Store(url(tmp_path / "a.db"))
    with store.database.engine.connect() as connection:
        options = {"version_table": "tuner_alembic_version", "compare_type": False}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []
    store.close()


def test_a_new_database_is_made_with_its_folder(tmp_path: Path) -> None:
    store = Store(url(tmp_path / "deep" / "er" / "a.db"))
    assert store.studies() == ()
    assert store.upgrade() == (REVISIONS[-1], REVISIONS[-1])
    store.close()


def test_nothing_is_made_without_create(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no database"):
        Store(url(tmp_path / "no" / "a.db"), create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_database_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    Store(url(tmp_path / "a.db")).close()
    with sqlite3.connect(tmp_path / "a.db") as raw:
        raw.execute("UPDATE tuner_alembic_version SET version_num = '9999'")
    raw.close()
    with pytest.raises(Conflict, match=r"newer release .revision 9999"):
        Store(url(tmp_path / "a.db"))
    with pytest.raises(Conflict, match="newer release"):
        Store(url(tmp_path / "a.db"), check=False).upgrade()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("nonsense", "is not a database URL"),
        ("mysql://u@h/x", "'mysql' is not supported"),
        ("sqlite:////proc/no/such/a.db", "folder"),
    ],
)
def test_a_wrong_url_is_one_sentence(wrong: str, told: str) -> None:
    with pytest.raises((BadInput, Unavailable), match=told):
        Store(wrong)


def test_a_password_is_not_told() -> None:
    with pytest.raises(Unavailable) as told:
        Store("postgresql://me:hunter2@127.0.0.1:9/x", patience_s=0.0)
    assert "hunter2" not in str(told.value)
    with pytest.raises(BadInput) as told_too:
        Store("://me:hunter2@h/x")
    assert "hunter2" not in str(told_too.value)


def test_another_file_is_not_taken_for_a_database(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_text("hello, this is text and nothing else" * 100)
    with pytest.raises(BadInput, match="is not an SQLite database"):
        Store(url(tmp_path / "a.db"))


def test_a_locked_database_is_a_clear_error_and_nothing_is_lost(tmp_path: Path) -> None:
    store = Store(url(tmp_path / "a.db"), patience_s=0.05)
    run = a_run(store, a_study())
    other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match=r"a\.db is locked by another process"):
        start(store, run)
    assert store.trials(run.study_id) == ()
    other.execute("ROLLBACK")
    other.close()
    assert start(store, run).number == 0
    store.close()


FULL = """
import resource, signal, sys
from tests.history.records import a_run, a_study, start, finished, a_measurement
from tuner.errors import Unavailable
from tuner.history.store import Store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = Store(sys.argv[1])
run = a_run(store, a_study())
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
for number in range(10_000):
    try:
        finished(store, start(store, run, number), a_measurement())
    except Unavailable as error:
        print(error)
        break
"""


def test_a_disk_that_fills_is_a_clear_error_and_what_was_written_stays(tmp_path: Path) -> None:
    # A limit on the size of a file stands for a full disk: the write fails at the same place.
    root = Path(__file__).parents[2]
    told = subprocess.run(
        [sys.executable, "-c", FULL, url(tmp_path / "a.db")],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=300,
        check=True,
    )
    assert "disk" in told.stdout, told
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 400_000
    store = Store(url(tmp_path / "a.db"))
    trials = store.trials(a_study().id)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert trials
    assert start(store, store.runs()[0], len(trials)).number == len(trials)
    store.close()


def test_threads_write_at_once_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    store = Store(url(tmp_path / "a.db"), patience_s=120)
    run = a_run(store, a_study())

    def writer(first: int) -> None:
        for number in range(first, 80, 8):
            finished(store, start(store, run, number), a_measurement(float(number)))

    threads = [threading.Thread(target=writer, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trials = store.trials(run.study_id)
    assert [trial.number for trial in trials] == list(range(80))
    assert [trial.measurements[0].values["ttft_p95_ms"] for trial in trials] == [float(n) for n in range(80)]
    store.close()


def test_only_one_of_many_moves_of_an_alias_wins(tmp_path: Path) -> None:
    store = Store(url(tmp_path / "a.db"), patience_s=120)
    fill(store)
    key = store.profile_keys()[0]
    won: list[int] = []

    def mover() -> None:
        try:
            store.move_alias(key, "canary", 1, expected=0, actor="t", reason="", now=NOW)
            won.append(1)
        except Conflict:
            pass

    threads = [threading.Thread(target=mover) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [1]
    store.close()


def test_a_document_comes_back_as_it_was(tmp_path: Path) -> None:
    store = Store(url(tmp_path / "a.db"))
    detail: dict[str, JSON] = {
        "half": "\ud800",
        "large": 2**80,
        "small": 5e-324,
        "exact": 0.1,
        "deep": [[{"a": None}]],
    }
    store.add_audit(actor="me", action="x", target="y", reason="", now=NOW, detail=detail)
    assert store.audit()[0].detail == detail
    store.close()


def test_a_copy_is_the_same_history(tmp_path: Path) -> None:
    source, target = Store(url(tmp_path / "a.db")), Store(url(tmp_path / "b.db"))
    fill(source)
    rows = copy(source.database, target.database)
    assert rows["trials"] == len(source.trials(a_study().id))
    assert snapshot(target) == snapshot(source)
    with pytest.raises(Conflict, match="not empty"):
        copy(source.database, target.database)
    source.close()
    target.close()


def test_an_upgrade_backs_the_database_up_before_it_migrates(tmp_path: Path) -> None:
    """A history of the release before (with rows), upgraded by the command, and its copy as it was."""
    path = tmp_path / "tuner.db"
    old = Database(url(path))
    load(old, "0001")
    before = dump(old)
    old.close()
    done = tuner(tmp_path, "db", "upgrade")
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.glob("tuner-0001-*.db")
    kept = Database(url(made))
    assert (kept.revision(), dump(kept)) == ("0001", before)
    kept.close()
    now = Database(url(path))
    assert now.revision() == REVISIONS[-1]
    assert {name: rows for name, rows in dump(now).items() if name in before} == before
    now.close()
    assert tuner(tmp_path, "db", "upgrade").returncode == 0
    assert len(list(tmp_path.glob("tuner-*.db"))) == 1, "nothing to migrate, nothing to back up"


def test_no_upgrade_under_a_run_of_the_release_before(tmp_path: Path) -> None:
    path = tmp_path / "tuner.db"
    old = Database(url(path))
    load(old, "0001")
    soon = (datetime.now(UTC) + timedelta(hours=1)).replace(tzinfo=None)
    row = {"node": "gpu-9", "holder": "host:1", "fence": 1, "acquired_at": soon, "expires_at": soon}
    old.write(lambda c: c.execute(insert(Table("leases", tables(c))).values(**row, released=False)).rowcount)
    old.close()
    done = tuner(tmp_path, "db", "upgrade")
    assert (done.returncode, "node 'gpu-9' is leased to 'host:1'" in done.stderr) == (5, True), done.stderr
    still = Database(url(path))
    assert still.revision() == "0001"
    still.write(lambda c: c.execute(text("UPDATE leases SET released = 1")).rowcount)
    still.close()
    assert tuner(tmp_path, "db", "upgrade").returncode == 0


def test_a_backup_is_a_database_of_its_own(tmp_path: Path) -> None:
    store = Store(url(tmp_path / "a.db"))
    fill(store)
    (tmp_path / "backups").mkdir()
    written = backup(store.database, tmp_path / "backups", now=NOW)
    assert written.name == "tuner-20260301T220000Z.db"
    with pytest.raises(BadInput, match="exists"):
        backup(store.database, written, now=NOW)
    again = Store(url(written))
    assert snapshot(again) == snapshot(store)
    store.save_run(replace(store.runs()[0], state=RunState.FINISHED, ended_at=NOW))
    assert snapshot(again) != snapshot(store)
    again.close()
    store.close()


def test_a_backup_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = Store(url(tmp_path / "a.db"))
    with pytest.raises(Unavailable, match="could not be written"):
        backup(store.database, tmp_path / "no" / "b.db", now=NOW)
    store.close()


@pytest.mark.parametrize("revision", REVISIONS)
def test_what_a_release_wrote_is_taken_over(tmp_path: Path, revision: str) -> None:
    taken_over(url(tmp_path / "a.db"), revision)
