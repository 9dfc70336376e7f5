"""Rows as a release wrote them, one file per revision, to prove that every later release can take them over.

`python -m tests.history.released` writes the file of the newest revision; a released one is never rewritten.
"""

import json
import math
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Boolean, Connection, DateTime, MetaData, insert, select, text

from tests.history.fill import fill, snapshot
from tests.history.records import a_measurement, finished, start
from tuner.history.database import Database
from tuner.history.maintenance import upgrade
from tuner.history.store import Store
from tuner.history.tables import REVISIONS, VERSION_TABLE
from tuner.records import JSON

COUNTED = ("trials", "measurements", "profiles", "alias_events", "audit")
FOLDER = Path(__file__).parent / "released"


def tables(connection: Connection) -> MetaData:
    """The tables as the database itself describes them, without the code's."""
    found = MetaData()
    found.reflect(connection, only=lambda name, _: name != VERSION_TABLE)
    return found


def dump(database: Database) -> dict[str, JSON]:
    def work(connection: Connection) -> dict[str, JSON]:
        told: dict[str, JSON] = {}
        for table in tables(connection).sorted_tables:
            rows = connection.execute(select(table)).mappings()
            told[table.name] = [{name: plain(value) for name, value in row.items()} for row in rows]
        return told

    return database.read(work)


def plain(value: object) -> JSON:
    if isinstance(value, datetime):
        return value.isoformat()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(value)


def load(database: Database, revision: str) -> None:
    """Makes an empty database one of an old release, with its rows."""
    upgrade(database, revision)
    rows: dict[str, list[dict[str, object]]] = json.loads((FOLDER / f"{revision}.json").read_text())

    def work(connection: Connection) -> None:
        for table in tables(connection).sorted_tables:
            for row in rows.get(table.name, []):
                values = {
                    name: stored(table.c[name].type, value, database.sqlite) for name, value in row.items()
                }
                connection.execute(insert(table).values(**values))
            if not database.sqlite and table.name in COUNTED:
                sequence = f"pg_get_serial_sequence('{table.name}', 'id')"
                connection.execute(text(f"SELECT setval({sequence}, (SELECT max(id) FROM {table.name}))"))

    database.write(work)


def stored(kind: object, value: object, sqlite: bool) -> object:
    if isinstance(kind, DateTime) and value is not None:
        moment = datetime.fromisoformat(str(value)).replace(tzinfo=UTC)
        return moment.replace(tzinfo=None) if sqlite else moment
    if isinstance(kind, Boolean):
        return bool(value)
    return value


def taken_over(url: str, revision: str) -> None:
    """Loads an old release's rows, upgrades, reads everything back and goes on writing."""
    old = Database(url)
    load(old, revision)
    old.close()
    store = Store(url, check=False)
    assert store.upgrade() == (revision, REVISIONS[-1])
    store.database.check()
    rows = json.loads((FOLDER / f"{revision}.json").read_text())
    study = store.study("chat")
    trials = store.trials(study.id)
    assert len(trials) == len(rows["trials"]) == 4
    assert math.isinf(trials[1].measurements[0].values["ttft_p95_ms"])
    assert [best.value for best in store.bests(model=study.model, metric="ttft_p95_ms")] == [95.0]
    champion = store.alias(store.profile_keys()[0], "champion")
    assert champion is not None
    assert (champion.generation, champion.to_version) == (2, 2)
    assert snapshot(store)
    running = next(run for run in store.runs() if run.ended_at is None)
    assert finished(store, start(store, running, 4), a_measurement()).id > trials[-1].id
    store.close()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"sqlite:///{folder}/a.db")
        fill(store)
        path = FOLDER / f"{REVISIONS[-1]}.json"
        path.write_text(json.dumps(dump(store.database), indent=1, sort_keys=True) + "\n")
        store.close()


if __name__ == "__main__":
    main()
