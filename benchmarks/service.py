"""Fills a history with a million trials, times what the service asks of it and shows the query plans; and
lets many writers write to PostgreSQL while their connections are cut at random.

python benchmarks/service.py fill --url sqlite:////tmp/big.db --trials 1000000
python benchmarks/service.py ask --url sqlite:////tmp/big.db
python benchmarks/service.py write --url postgresql://… --seconds 60 --writers 20
"""

import argparse
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from statistics import median, quantiles
from typing import Any

from sqlalchemy import Connection, event, func, insert, select, text

from tuner.history import tables
from tuner.history.best_per_night import nights
from tuner.history.store import Store
from tuner.profiles import registry
from tuner.records import Candidate, Measurement, Slo, Study, TrialState, digest_of

START = datetime(2025, 1, 1, 22, tzinfo=UTC)
MODEL = "Qwen/Qwen2.5-7B-Instruct"
NODES = 40
PER_RUN = 40
METRICS = ("ttft_p50_ms", "ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms", "goodput_rps", "output_tokens_per_s")
BATCH = 4_000


def a_study(node: int, week: int) -> Study:
    identity: dict[str, Any] = {"node": node, "week": week}
    return Study(
        id=digest_of(identity),
        name=f"chat-n{node}",
        model=MODEL,
        node=f"n{node}",
        gpu_class="h100-80x1",
        workload="chat",
        engine_version=f"0.{20 + week // 8}.0",
        trace_digest=digest_of(week // 4),
        space_digest="b" * 64,
        slices=(),
        objectives=("ttft_p95_ms", "goodput_rps"),
        slo=Slo(ttft_ms=500.0),
        seed=week,
        identity=identity,
        spec={},
        created_at=START + timedelta(weeks=week),
    )


def rows(trials: int) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Rows of one node's week at a time: seven runs of one study."""
    chance = random.Random(0)
    weeks = -(-trials // (NODES * 7 * PER_RUN))
    done = 0
    for week in range(weeks):
        for node in range(NODES):
            study = a_study(node, week)
            made: dict[str, list[dict[str, Any]]] = {
                "runs": [],
                "trials": [],
                "measurements": [],
                "run_bests": [],
            }
            for night in range(7):
                if done < trials:
                    some = min(PER_RUN, trials - done)
                    a_run(made, study, night, done, some, chance)
                    done += some
            yield {"study": [{"study": study}], **made}


def a_run(
    made: dict[str, list[dict[str, Any]]],
    study: Study,
    night: int,
    first: int,
    count: int,
    chance: random.Random,
) -> None:
    began = study.created_at + timedelta(days=night)
    run_id = f"{study.id[:12]}{night:02d}"
    made["runs"].append(
        {
            "id": run_id,
            "study_id": study.id,
            "state": "FINISHED",
            "started_at": began,
            "ended_at": began + timedelta(hours=6),
            "cancel_requested": False,
            "summary": {},
            "host": "h",
        }
    )
    measured: list[dict[str, float]] = []
    for each in range(count):
        trial_id = first + each + 1
        values = {name: round(chance.lognormvariate(4, 0.5), 3) for name in METRICS}
        measured.append(values)
        made["trials"].append(
            {
                "id": trial_id,
                "study_id": study.id,
                "run_id": run_id,
                "number": night * PER_RUN + each,
                "attempt": 0,
                "candidate": {"max_num_seqs": chance.randrange(16, 512), "block_size": 16},
                "state": "COMPLETE",
                "origin": "search" if each else "baseline",
                "seed": each,
                "screened": False,
                "violation": {"kv": None, "oom": None, "err": -0.01},
                "effective": {},
                "started_at": began + timedelta(minutes=each * 8),
                "ended_at": began + timedelta(minutes=each * 8 + 7),
                "gpu_seconds": 420.0,
            }
        )
        made["measurements"].append(
            {
                "trial_id": trial_id,
                "kind": "full",
                "purpose": "search",
                "repeat": 0,
                "values": values,
                "slices": [],
                "fidelity": {"values": {}, "failed": [], "warnings": []},
            }
        )
    for name in METRICS:
        best = min(range(count), key=lambda each: measured[each][name])
        value = measured[best][name]
        made["run_bests"].append(
            {
                "run_id": run_id,
                "metric": name,
                "trial_id": first + best + 1,
                "value": value,
                "low": value,
                "high": value,
                "repeats": 1,
                "confirmed": False,
                "trials": count,
                "baseline": measured[0][name],
            }
        )


def fill(store: Store, trials: int) -> None:
    """Fills a history, in transactions of a few thousand trials; goes on where an earlier call was ended."""
    began = time.perf_counter()
    newest = select(func.max(tables.trials.c.id))
    done = store.database.read(lambda connection: connection.execute(newest).scalar()) or 0
    held: dict[str, list[dict[str, Any]]] = {}
    studies: list[Study] = []

    def flush() -> None:
        for study in studies:
            store.add_study(study)

        def work(connection: Connection) -> None:
            for name in ("runs", "trials", "measurements", "run_bests"):
                if held.get(name):
                    connection.execute(insert(tables.metadata.tables[name]), held[name])

        store.database.write(work)
        held.clear()
        studies.clear()

    for part in rows(trials):
        if not part["trials"] or part["trials"][-1]["id"] <= done:
            continue
        studies.append(part.pop("study")[0]["study"])
        for name, some in part.items():
            held.setdefault(name, []).extend(some)
        if len(held["trials"]) >= BATCH:
            flush()
    flush()
    _profiles(store)
    print(f"{trials} trials in {time.perf_counter() - began:.0f} s")


def _profiles(store: Store) -> None:
    if not store.database.sqlite:
        sequence = "SELECT setval(pg_get_serial_sequence('trials', 'id'), (SELECT max(id) FROM trials))"
        store.database.write(lambda connection: connection.execute(text(sequence)).rowcount)
        with store.database.engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("ANALYZE"))
    for study in store.studies():
        profile = store.add_profile(
            key=registry.key_of(study),
            candidate=Candidate({"max_num_seqs": 128}),
            engine_version=study.engine_version,
            gpu_class=study.gpu_class,
            study_id=study.id,
            trial_id=None,
            argv=("--max-num-seqs", "128"),
            env={},
            evidence={"confirmed": True, "slo_met": True, "study": study.id},
            now=study.created_at,
        )
        registry.promote(store, profile, actor="bench", reason="", now=study.created_at)


def timed(name: str, ask: Callable[[], object], repeats: int) -> None:
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        ask()
        taken.append((time.perf_counter() - began) * 1000)
    print(f"{name}: median {median(taken):.2f} ms, p99 {quantiles(taken, n=100)[98]:.2f} ms, {repeats} times")


def questions(store: Store) -> dict[str, Callable[[], object]]:
    last = store.runs(limit=1)[0]
    study = store.study(last.study_id)
    month, season = (last.started_at - timedelta(days=days) for days in (30, 92))
    asked = {"model": MODEL, "metric": "ttft_p95_ms"}
    one, some = {**asked, "node": "n7"}, {**asked, "node": [f"n{n}" for n in range(5)]}
    resolved = {"model": MODEL, "workload": "chat", "node": "n7", "engine_version": None}
    return {
        "history, one node, 31 nights": lambda: nights(store.bests(**one, since=month)),  # type: ignore[arg-type]
        "history, one node, 93 nights": lambda: nights(store.bests(**one, since=season)),  # type: ignore[arg-type]
        "history, one node, all nights": lambda: nights(store.bests(**one)),  # type: ignore[arg-type]
        "history, five nodes, 93 nights": lambda: nights(store.bests(**some, since=season)),  # type: ignore[arg-type]
        "places of a model": lambda: store.places(MODEL),
        "resolve": lambda: registry.resolve(store, **resolved),  # type: ignore[arg-type]
        "alias generation": lambda: store.alias(registry.key_of(study), "champion"),
        "trials of a study": lambda: store.trials(study.id),
        "runs, newest 50": lambda: store.runs(limit=50),
        "orphans": store.orphans,
    }


def ask(store: Store, repeats: int) -> None:
    """Times every question, then shows the plan of each statement that it sent."""
    found = questions(store)
    for name, question in found.items():
        timed(name, question, repeats)
    for name, question in found.items():
        print(f"\n{name}")
        for plan in plans(store, question):
            print(f"  {plan}")


def plans(store: Store, question: Callable[[], object]) -> list[str]:
    sent: list[tuple[str, Any]] = []

    def note(_: Any, __: Any, statement: str, parameters: Any, ___: Any, ____: bool) -> None:
        sent.append((statement, parameters))

    engine = store.database.engine
    event.listen(engine, "before_cursor_execute", note)
    question()
    event.remove(engine, "before_cursor_execute", note)
    prefix = "EXPLAIN QUERY PLAN " if store.database.sqlite else "EXPLAIN "
    told: list[str] = []
    with engine.connect() as connection:
        for statement, parameters in {s: p for s, p in sent if s.startswith("SELECT")}.items():
            for row in connection.exec_driver_sql(prefix + statement, parameters):
                told.append(str(row[-1]))
    return [line for line in told if "SCAN" in line or "SEARCH" in line or "Scan" in line]


def write(store: Store, seconds: float, writers: int) -> None:
    """Writers start and finish trials while connections are cut; then every row is counted."""
    study = store.add_study(a_study(999, 0))
    run = store.open_run(study.id, trials_limit=None, deadline=None, now=START, pid=None, host="")
    until = time.monotonic() + seconds
    wrote: list[int] = []

    def writer(first: int) -> None:
        number = first
        while time.monotonic() < until:
            trial = store.start_trial(
                study_id=study.id,
                run_id=run.id,
                candidate=Candidate({"max_num_seqs": number}),
                number=number,
                attempt=0,
                seed=number,
                origin="search",
                now=START,
                directory=None,
            )
            measured = Measurement(values={"ttft_p95_ms": float(number)})
            store.finish_trial(replace(trial, state=TrialState.COMPLETE, measurements=(measured,)))
            wrote.append(number)
            number += writers

    threads = [threading.Thread(target=writer, args=(first,)) for first in range(writers)]
    for thread in threads:
        thread.start()
    cuts = _cut(store, until)
    for thread in threads:
        thread.join()
    kept = store.trials(study.id)
    lost = set(wrote) - {trial.number for trial in kept}
    doubled = sum(len(trial.measurements) != 1 for trial in kept)
    print(f"{len(wrote)} trials by {writers} writers in {seconds:.0f} s, {cuts} connections cut")
    print(f"kept {len(kept)}, lost {len(lost)}, with doubled or missing measurements {doubled}")


def _cut(store: Store, until: float) -> int:
    chance, cuts = random.Random(1), 0
    killer = Store(store.database.url.render_as_string(hide_password=False), check=False)
    query = text(
        "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " ORDER BY random() LIMIT :some) AS chosen"
    )
    while time.monotonic() < until:
        time.sleep(chance.uniform(0.05, 0.5))
        some = chance.randint(1, 5)
        cuts += killer.database.read(lambda c: int(c.execute(query, {"some": some}).scalar() or 0))  # noqa: B023
    killer.close()
    return cuts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["fill", "ask", "write"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--trials", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--writers", type=int, default=20)
    given = parser.parse_args()
    store = Store(given.url, patience_s=300)
    if given.what == "fill":
        fill(store, given.trials)
    elif given.what == "ask":
        ask(store, given.repeats)
    else:
        write(store, given.seconds, given.writers)
    store.close()


if __name__ == "__main__":
    main()
