"""`tuner db upgrade` killed (SIGKILL) at random moments: on a history with rows, and where there is none yet.

The next release is this one, copied, with one more revision, which rewrites a table, fills a column and makes
an index. `TUNER_KILLS` sets how many moments there are on each database (1 by default, 25 by hand),
`TUNER_SEED` which ones.
"""

import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import MetaData, insert, select, text

from tests.fleet.production import Production
from tests.history.fill import fill
from tests.history.postgres import Server
from tests.history.records import a_measurement
from tests.history.released import tables
from tests.tuning.studies import WATCHDOG_S, environment
from tuner.errors import Conflict
from tuner.fleet.handover import handed_over
from tuner.history.base import row_of
from tuner.history.database import Database
from tuner.history.store import Store
from tuner.history.tables import REVISIONS, measurements, trials
from tuner.records import Node

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("TUNER_KILLS", "1"))
SEED = int(os.environ.get("TUNER_SEED", "5"))
ROWS = 2_000 if KILLS == 1 else 20_000
ROOT = Path(__file__).parents[2]
NODE = Node(name="gpu-1", gpu_class="h100-80x1", gpus=(), gpu_memory_gib=79.6)
NEXT = f'''
"""What a next release might change"""
import os
import pathlib

import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "9001", "{REVISIONS[-1]}", None, None


def upgrade() -> None:
    pathlib.Path(os.environ["TUNER_HOME"], "begun").touch()
    op.add_column("trials", sa.Column("cost", sa.Double(), nullable=True))
    op.execute("UPDATE trials SET cost = gpu_seconds * 2.5")
    with op.batch_alter_table("measurements") as batch:
        batch.add_column(sa.Column("host", sa.Text(), nullable=False, server_default="h"))
        batch.alter_column("kind", type_=sa.Text(), existing_nullable=False)
    op.create_index("ix_trials_cost", "trials", ["cost"])
'''


@dataclass
class Upgrading:
    """The next release, and what makes a history of this one anew for it to upgrade, and gives its URL."""

    release: Path
    home: Path
    copy: Callable[[], str]
    production: Production

    def start(self, url: str, *words: str) -> "subprocess.Popen[bytes]":
        env = environment(self.home, {"TUNER_DATABASE_URL": url, "PYTHONPATH": str(self.release)})
        return subprocess.Popen(
            [sys.executable, "-m", "tuner", *words], env=env, cwd=self.release, stderr=subprocess.PIPE
        )

    def whole(self, url: str, *words: str) -> float:
        """Runs a command to its end; seconds that it took."""
        began = time.perf_counter()
        process = self.start(url, *words)
        _, said = process.communicate(timeout=WATCHDOG_S)
        assert process.returncode == 0, said.decode()
        return time.perf_counter() - began

    @property
    def begun(self) -> Path:
        """A file that the migration makes once it is at work."""
        return self.home / "begun"

    def measured(self, url: str) -> float:
        """Upgrades; seconds from the migration's begin to the end of its process."""
        self.whole(url, "db", "upgrade")
        return time.time() - self.begun.stat().st_mtime

    def killed(self, url: str, after_s: float, *, begun: bool) -> None:
        """Kills an upgrade so many seconds after its process began, or after its migration did."""
        self.begun.unlink(missing_ok=True)
        process = self.start(url, "db", "upgrade")
        while begun and process.poll() is None and not self.begun.exists():
            time.sleep(0.001)
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The next release, importable from a folder of its own."""
    folder = tmp_path_factory.mktemp("next")
    plain = shutil.ignore_patterns("__pycache__", "data")
    shutil.copytree(ROOT / "tuner", folder / "tuner", ignore=plain)
    shutil.copytree(ROOT / "migrations", folder / "migrations", ignore=plain)
    (folder / "migrations" / "versions" / "9001_next.py").write_text(NEXT)
    table = folder / "tuner" / "history" / "tables.py"
    said = f"REVISIONS = {REVISIONS!r}".replace("'", '"')
    assert said in table.read_text()
    table.write_text(table.read_text().replace(said, f"REVISIONS = {(*REVISIONS, '9001')!r}"))
    return folder


def filled(url: str, home: Path, production: Production) -> None:
    """A row in every table, thousands of trials, and a node whose controller died with production drained."""
    store = Store(url)
    fill(store)
    one = store.trials(store.studies()[0].id)[0]
    first = {**row_of(one, "id", "measurements"), "attempt": 9}
    made = [{**first, "id": 1000 + n, "number": n} for n in range(ROWS)]
    measured = [{**row_of(a_measurement(float(n))), "trial_id": 1000 + n} for n in range(ROWS)]
    store.database.write(lambda connection: connection.execute(insert(trials), made).rowcount)
    store.database.write(lambda connection: connection.execute(insert(measurements), measured).rowcount)
    store.add_node(NODE)
    with handed_over(store, NODE, home=home, clock=lambda: datetime.now(UTC)):
        journal = store.handover(NODE.name)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert isinstance(journal, dict)
    holder = f"{socket.gethostname()} pid {gone.pid} since 1"
    store.set_handover(NODE.name, {**journal, "holder": holder})
    (production.place / "state").write_text("down")
    store.close()


def content(url: str) -> tuple[str | None, dict[str, tuple[int, str]]]:
    """The revision, and per table how many rows, and their digest, in the columns that this release knows."""
    database = Database(url)
    revision = database.revision()
    known: MetaData = trials.metadata
    found: dict[str, tuple[int, str]] = {}
    with database.engine.connect() as connection:
        if database.sqlite:
            assert connection.execute(text("PRAGMA integrity_check")).scalars().all() == ["ok"]
        there = tables(connection).tables
        for name in there:
            columns = [there[name].c[column.name] for column in known.tables[name].columns]
            digest, rows = hashlib.sha256(), 0
            for row in connection.execute(
                select(*columns).order_by(*there[name].primary_key.columns, *columns)
            ):
                digest.update(repr(tuple(row)).encode())
                rows += 1
            found[name] = rows, digest.hexdigest()
    database.close()
    return revision, found


def survives(upgrading: Upgrading, capsys: pytest.CaptureFixture[str]) -> None:
    """After each kill the old history or the new one, whole; then the upgrade, and production is back."""
    chance, url = random.Random(SEED), upgrading.copy()
    before = content(url)
    assert before[0] == REVISIONS[-1]
    span = upgrading.measured(url)
    after = content(url)
    assert after == ("9001", before[1])
    told = {REVISIONS[-1]: 0, "9001": 0}
    for _ in range(KILLS):
        url = upgrading.copy()
        upgrading.killed(url, chance.uniform(0, span), begun=True)
        revision, rows = content(url)
        assert revision in told
        assert rows == before[1]
        told[revision] += 1
        # Machines are now slow, now fast: about half of the moments shall come before the commit.
        span *= 0.7 if revision == "9001" else 1.4
        old = Store(url, check=False)
        if revision == "9001":
            with pytest.raises(Conflict, match="newer release"):
                old.database.check()
        else:
            old.database.check()
            assert old.handover(NODE.name)
        old.close()
        upgrading.whole(url, "db", "upgrade")
        assert content(url) == after
        restored(upgrading, url)
    with capsys.disabled():
        print(f"\n{KILLS} kills in migrations of {ROWS} trials, revisions found: {told}; nothing lost")


def restored(upgrading: Upgrading, url: str) -> None:
    """What was to be undone before the upgrade is undone after it."""
    production = upgrading.production
    (production.place / "log").write_text("")
    (production.place / "state").write_text("down")
    upgrading.whole(url, "node", "restore", NODE.name)
    assert (production.log, production.up) == (["restore"], True)


@pytest.fixture
def sqlite(release: Path, tmp_path: Path) -> Upgrading:
    home, numbers = tmp_path / "home", iter(range(10_000))
    production = Production(tmp_path / "production")
    production.register(home, NODE.name)
    filled(f"sqlite:///{tmp_path / 'old.db'}", home, production)

    def copy() -> str:
        path = tmp_path / f"copy-{next(numbers)}.db"
        shutil.copy(tmp_path / "old.db", path)
        return f"sqlite:///{path}"

    return Upgrading(release, home, copy, production)


@pytest.fixture
def server(release: Path, tmp_path: Path, postgres: Server) -> Upgrading:
    home, url = tmp_path / "home", postgres.url()
    name = url.partition("@/")[2].partition("?")[0]
    production = Production(tmp_path / "production")
    production.register(home, NODE.name)
    filled(url, home, production)

    def copy() -> str:
        made = f"{name}c{time.monotonic_ns()}"
        with postgres.connect() as connection:
            connection.execute(f'CREATE DATABASE "{made}" TEMPLATE "{name}"'.encode())
        return url.replace(f"@/{name}?", f"@/{made}?")

    return Upgrading(release, home, copy, production)


def test_an_sqlite_history_is_old_or_new_and_whole(
    sqlite: Upgrading, capsys: pytest.CaptureFixture[str]
) -> None:
    survives(sqlite, capsys)


@pytest.mark.postgres
def test_a_history_on_a_server_is_old_or_new_and_whole(
    server: Upgrading, capsys: pytest.CaptureFixture[str]
) -> None:
    survives(server, capsys)


def test_a_first_database_is_whole_or_not_there(sqlite: Upgrading, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    longest = sqlite.whole(f"sqlite:///{tmp_path / 'first.db'}", "db", "upgrade")
    for moment in range(KILLS):
        url = f"sqlite:///{tmp_path / f'first-{moment}.db'}"
        # The first third is Python loading its modules.
        sqlite.killed(url, chance.uniform(longest / 3, longest), begun=False)
        assert content(url)[0] in (None, "9001")
        sqlite.whole(url, "db", "upgrade")
        revision, rows = content(url)
        assert revision == "9001"
        assert set(rows) == set(trials.metadata.tables)
