"""A history of some nights with known numbers, served on loopback; what the pages are looked at with."""

import math
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import uvicorn

from tuner.conclusions import (
    Arm,
    Conclusion,
    Difference,
    Judgement,
    PublishedProfile,
    RunCost,
    Where,
    Word,
    saving,
)
from tuner.history.entities import Schedule
from tuner.history.store import Store
from tuner.profiles import registry
from tuner.records import (
    JSON,
    Candidate,
    Fidelity,
    Launch,
    Measurement,
    Node,
    Outcome,
    Profile,
    Purpose,
    Run,
    RunState,
    Slice,
    SliceMeasurement,
    Slo,
    Study,
    Trial,
    TrialState,
    digest_of,
)
from tuner.replay import outcomes
from tuner.report import words
from tuner.service.app import create
from tuner.service.runner import Controllers
from tuner.settings import Settings

NOW = datetime(2026, 3, 6, 9, 30, tzinfo=UTC)
MODEL = "Qwen/Qwen2.5-7B-Instruct"
OBJECTIVES = ("ttft_p95_ms", "tpot_p95_ms", "goodput_rps")
WINDOW_S = 60.0
COST = RunCost(search_s=1400.0, confirm_s=560.0, gpus=1)
PLACES: tuple[Where, ...] = ("confirm", "held_out")
SPREAD = 0.06
"""Half the width of every interval."""


def study(name: str = "chat-h100", *, node: str = "gpu-01", engine: str = "0.32.0", day: int = 1) -> Study:
    identity: dict[str, JSON] = {"name": name, "node": node, "engine": engine}
    return Study(
        id=digest_of(identity), name=name, model=MODEL, node=node, gpu_class="h100-80x1", workload="chat",
        engine_version=engine, trace_digest="ab" * 32, space_digest="cd" * 32,
        slices=(
            Slice(name="peak", start_s=1200.0, duration_s=WINDOW_S),
            Slice(name="calm", start_s=0.0, duration_s=WINDOW_S, held_out=True),
        ),
        objectives=OBJECTIVES, slo=Slo(ttft_ms=500.0, tpot_ms=50.0), seed=7, identity=identity,
        spec={"name": name, "slices": "auto", "price_per_gpu_hour": 2.5},
        created_at=datetime(2026, 3, day, 21, tzinfo=UTC),
    )  # fmt: skip


def numbers(sequences: int, tokens: int, night: int = 0) -> dict[str, float]:
    """What a pair of limits gives: few sequences queue, many tokens per step slow every answer down."""
    queue = 900.0 / (1 + (sequences / 24) ** 2)
    ttft = 70.0 + queue + 40_000.0 / tokens - 2.0 * night
    tpot = 9.0 + tokens / 700.0 + sequences / 60.0
    good = 14.0 / (1 + math.exp((ttft - 480.0) / 90.0)) / (1 + math.exp((tpot - 45.0) / 4.0))
    return {
        "ttft_p95_ms": ttft, "tpot_p95_ms": tpot, "goodput_rps": good, "slo_attainment": good / 14.5,
        "request_rps": 13.9, "failed": 0.0, "requests": 870.0, "preemptions": float(sequences // 40),
        "prefix_hit_rate": 0.31, "ready_s": 41.5, "gpu_seconds": 140.0, "kv_usage_mean": sequences / 300,
    }  # fmt: skip


def answered(values: Mapping[str, float], seed: int) -> list[Outcome]:
    """Requests whose latencies are drawn around the numbers; two in a hundred fail."""
    rng = np.random.default_rng(seed)
    at = np.sort(rng.uniform(0, WINDOW_S, 500))
    first = rng.lognormal(math.log(values["ttft_p95_ms"] / 2500), 0.5, 500)
    rest = rng.normal(values["tpot_p95_ms"] / 1200, 0.002, 500).clip(0.002)
    found = []
    for row, (due, wait, step) in enumerate(zip(at, first, rest, strict=True)):
        stamps = due + wait + step * np.arange(40)
        error = "HTTP 500" if row % 50 == 49 else None
        found.append(
            Outcome(
                row=row,
                scheduled_s=float(due),
                sent_s=float(due),
                first_token_s=float(stamps[0]),
                last_token_s=float(stamps[-1]),
                end_s=float(stamps[-1]),
                input_tokens=400,
                expected_input=400,
                output_tokens=40,
                expected_output=40,
                chunk_s=stamps,
                chunk_tokens=np.ones(40, np.int32),
                error=error,
            )
        )
    return found


def scraped(values: Mapping[str, float]) -> dict[str, list[float | None]]:
    """What the engine would have told every two seconds."""
    at = np.arange(0, WINDOW_S + 1, 2.0)
    usage = 0.2 + 0.6 * np.sin(at / WINDOW_S * np.pi) ** 2
    return {
        "at_s": at.tolist(),
        "waiting": (4 * usage).round().tolist(),
        "running": (30 * usage).round().tolist(),
        "kv_usage": usage.tolist(),
        "preemptions": np.linspace(0, values["preemptions"], len(at)).round().tolist(),
    }


def measured(
    values: Mapping[str, float], folder: Path | None = None, *, purpose: Purpose = "search", repeat: int = 0
) -> Measurement:
    """A measurement; with a folder its outcomes lie there."""
    path = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{purpose}-{repeat}-peak.parquet"
        outcomes.write(path, answered(values, repeat))
        outcomes.write_series(path, scraped(values))
    fidelity = Fidelity(values={"lateness_p50_ms": 0.1, "lateness_p99_ms": 1.4, "lateness_allowed_ms": 9.0})
    part = SliceMeasurement(
        name="peak", window_s=WINDOW_S, values=dict(values), outcomes_file=str(path) if path else None
    )
    return Measurement(values=dict(values), slices=(part,), purpose=purpose, repeat=repeat, fidelity=fidelity)


LEVELS = ((28, 2048), (64, 2048), (256, 2048), (128, 8192), (32, 512), (128, 1024), (256, 8192), (64, 512))


def begin(store: Store, run: Run, number: int, candidate: Candidate, origin: str = "tpe") -> Trial:
    return store.start_trial(
        study_id=run.study_id, run_id=run.id, candidate=candidate, number=number, attempt=0, seed=number,
        origin=origin, now=run.started_at + timedelta(minutes=4 * number), directory=None,
    )  # fmt: skip


def end(store: Store, trial: Trial, *found: Measurement, **changes: object) -> Trial:
    ended = replace(
        trial, state=TrialState.COMPLETE, measurements=found, effective=dict(trial.candidate),
        ended_at=trial.started_at + timedelta(seconds=140), gpu_seconds=140.0,
    )  # fmt: skip
    return store.finish_trial(replace(ended, **changes))  # type: ignore[arg-type]


def complete(store: Store, run: Run, number: int, folder: Path | None = None, night: int = 0) -> Trial:
    """One more measured trial."""
    sequences, tokens = LEVELS[number % 10 % len(LEVELS)]
    chosen = Candidate({"max_num_seqs": sequences, "max_num_batched_tokens": tokens})
    trial = begin(store, run, number, chosen, "baseline" if number == 0 else "tpe")
    values = numbers(sequences, tokens, night)
    return end(store, trial, measured(values, folder / str(number) if folder else None))


LOG = """\
INFO 03-01 22:32:07 [gpu_model_runner.py:2338] Starting to load model Qwen/Qwen2.5-7B-Instruct...
INFO 03-01 22:32:31 [gpu_model_runner.py:2392] Model loading took 14.2717 GiB and 22.916 seconds
ERROR 03-01 22:32:44 [core.py:710] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB.
"""


def a_night(store: Store, made: Study, folder: Path, night: int) -> Profile:
    """A run with a front, two failures, a confirmation and a challenger."""
    store.add_study(made)
    started = made.created_at + timedelta(days=night, hours=1)
    run = store.open_run(made.id, trials_limit=10, deadline=None, now=started, pid=None, host="gpu-01")
    first = len(store.trials(made.id))
    trials = [complete(store, run, first + n, folder / f"n{night}", night) for n in range(len(LEVELS))]
    number = first + len(LEVELS)
    memory = begin(store, run, number, Candidate({"gpu_memory_utilization": 0.98, "max_num_seqs": 512}))
    reason = "CUDA out of memory while the KV cache was made: 1.2 GiB were asked for, 0.4 GiB were free"
    place = folder / f"n{night}" / "oom"
    place.mkdir(parents=True)
    (place / "engine.log").write_text(LOG)
    end(store, memory, state=TrialState.INFEASIBLE, reason=reason, cause="oom", effective={},
        directory=str(place))  # fmt: skip
    port = begin(store, run, number + 1, Candidate({"max_num_seqs": 96}))
    end(store, port, state=TrialState.ABORTED, reason="port 8001 was taken", cause="port", effective={})
    base = next(trial for trial in store.trials(made.id) if trial.is_baseline)
    winner = trials[(5, 1, 2)[night]]
    for repeat in (1, 2):
        for trial in (base, winner):
            values = trial.measurement.values if trial.measurement else {}
            again = {name: value * (1 + 0.02 * repeat) for name, value in values.items()}
            place = folder / f"n{night}" / str(trial.number)
            store.add_measurement(trial.id, measured(again, place, purpose="confirm", repeat=repeat))
    _launches(store, made, run, number + 2)
    said = _conclusion(run, winner, base, started + timedelta(hours=2))
    evidence: dict[str, JSON] = {
        "run": run.id, "verdict": said.outcome.value, "sentence": said.sentence, "confirmed": night != 2,
        "slo_met": True, "repeats": 2,
    }  # fmt: skip
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in winner.candidate.items()]
    made_profile = registry.publish(
        store, study=made, trial=winner, argv=[*argv, "--max-model-len=16384"], env={}, evidence=evidence,
        now=started + timedelta(hours=2),
    )  # fmt: skip
    published = PublishedProfile(id=made_profile.id, version=made_profile.version)
    ended = replace(run, state=RunState.FINISHED, ended_at=said.at, reason="10 trials are done")
    store.save_run(ended, replace(said, profiles={"challenger": published}))
    return made_profile


def _launches(store: Store, made: Study, run: Run, count: int) -> None:
    for n in range(count):
        at = run.started_at + timedelta(minutes=4 * n)
        launch = Launch(
            id=f"{run.id}-{n}", study_id=made.id, argv=(), started_at=at,
            ended_at=at + timedelta(seconds=140), timeline={"ready_s": 41.5},
            verdict="oom: out of memory" if n == count - 2 else None,
        )  # fmt: skip
        store.add_launch(launch)
        store.finish_launch(launch)


def _conclusion(run: Run, winner: Trial, base: Trial, at: datetime) -> Conclusion:
    """What a night found, by what was measured: values of the confirmation, 3 % above the search's."""
    mine, theirs = (
        {name: 1.03 * value for name, value in t.measurement.values.items()} if t.measurement else {}
        for t in (winner, base)
    )
    rows: list[Difference] = []
    for where in PLACES:
        for name in OBJECTIVES:
            change = (mine[name] - theirs[name]) / theirs[name]
            better = change > 0 if name == "goodput_rps" else change < 0
            word: Word = "open" if abs(change) < SPREAD else "better" if better else "worse"
            rows.append(
                Difference(
                    metric=name, where=where, before=theirs[name], after=mine[name], change=change,
                    low=change - SPREAD, high=change + SPREAD, word=word, repeats=2,
                )
            )  # fmt: skip
    told = ", ".join(words.difference(r) for r in rows[: len(OBJECTIVES)])
    traded = any(row.word == "worse" for row in rows)
    outcome = Judgement.TRADE_OFF if traded else Judgement.CLEAR_WINNER
    knobs = {name: (base.candidate[name], value) for name, value in winner.candidate.items()}
    arms = [
        Arm(trial=t.number, candidate=t.candidate, attainment=min(1.0, values["slo_attainment"]),
            misses_slo_by=max(0.0, 0.95 - values["slo_attainment"]),
            confirmed={name: values[name] for name in OBJECTIVES},
            changed={} if t is base else {k: pair for k, pair in knobs.items() if pair[0] != pair[1]},
            changes=() if t is base else tuple(rows))
        for t, values in ((base, theirs), (winner, mine))
    ]  # fmt: skip
    return Conclusion(
        run_id=run.id, study_id=run.study_id, at=at, winner=winner.number,
        outcome=outcome,
        sentence=f"A {outcome.value}: trial {winner.number} against the baseline: {told}. It meets the SLO.",
        baseline=arms[0], finalists=(arms[1],), attainment=0.95, repeats=2,
        cost=COST, saving=saving(arms[1], 2.5, COST),
    )  # fmt: skip


def living_run(store: Store, made: Study, trials: int, deadline: datetime | None = None) -> Run:
    """A run whose process, on its node, holds the lease."""
    store.acquire_lease(made.node, "gpu-01 pid 17", now=NOW, ttl_s=30 * 86400)
    return store.open_run(made.id, trials_limit=trials, deadline=deadline, now=NOW, pid=17, host="gpu-01")


def upgrade_study() -> Study:
    made = study("chat-h100-upgrade", day=6)
    identity: dict[str, JSON] = {**made.identity, "compare": {"arms": [], "kind": "upgrade"}}
    return replace(made, id=digest_of(identity), identity=identity)


def an_upgrade_check(store: Store, folder: Path, at: datetime = NOW) -> Study:
    """A run that holds two engine versions against each other: the new one is a little slower."""
    made = upgrade_study()
    store.add_study(made)
    run = store.open_run(made.id, trials_limit=None, deadline=None, now=at, pid=None, host="gpu-01")
    chosen = Candidate({"max_num_seqs": 128, "max_num_batched_tokens": 1024})
    fast, found = numbers(128, 1024), []
    slow = {**fast, "ttft_p95_ms": 1.2 * fast["ttft_p95_ms"], "tpot_p95_ms": 1.25 * fast["tpot_p95_ms"]}
    for number, values in enumerate((fast, slow)):
        trial = begin(store, run, number, chosen, "compared" if number else "baseline")
        again = measured(values, folder / str(number), purpose="confirm", repeat=1)
        found.append(end(store, trial, measured(values, folder / str(number)), again))
    said = _conclusion(run, found[1], found[0], at + timedelta(minutes=20))
    assert said.baseline is not None
    old = replace(said.baseline, name="old version", engine="0.32.0")
    rows = tuple(row for row in said.finalists[0].changes if row.where == "confirm")
    new = replace(said.finalists[0], name="new version", engine="0.33.0", changed={}, changes=rows)
    told = (
        "Advice: stay. 0.33.0 is worse than 0.32.0 in tpot_p95_ms. The code is the cause: this"
        " configuration uses no default that has changed."
    )
    said = replace(
        said, outcome=Judgement.BASELINE_STAYS, winner=None, baseline=old, finalists=(new,), saving=None,
        sentence=told, cost=RunCost(confirm_s=1300.0, gpus=1),
    )  # fmt: skip
    store.save_run(replace(run, state=RunState.FINISHED, ended_at=said.at, reason="all is known"), said)
    return made


class Clock:
    """The service's time of day, moved by the test."""

    def __init__(self, now: datetime = NOW) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A filled history and the tokens to look at it with."""

    store: Store
    home: Path
    study: Study
    profiles: tuple[Profile, ...]
    tokens: Mapping[str, str]


def fill(home: Path) -> World:
    """Three nights on one node, a second node without a champion, a schedule, tokens of each scope."""
    store = Store(f"sqlite:///{home / 'tuner.db'}")
    for name in ("gpu-01", "gpu-02"):
        store.add_node(Node(name=name, gpu_class="h100-80x1", gpus=(f"GPU-{name}",), gpu_memory_gib=79.6))
    made = study()
    profiles = tuple(a_night(store, made, home / "trials", night) for night in range(3))
    registry.promote(
        store, profiles[0], actor="ana", reason="confirmed on the first night", now=NOW - timedelta(days=3)
    )
    newer = study("chat-h100", engine="0.33.0", day=5)
    store.add_study(newer)
    store.put_schedule(
        Schedule(
            name="nightly",
            node="gpu-01",
            cron="0 22 * * *",
            timezone="Europe/Berlin",
            created_at=NOW,
            spec={"study": "chat-h100.yaml", "until": "05:30", "blackout": ["2026-03-06"]},
        )
    )
    return World(
        store=store, home=home, study=made, profiles=profiles, tokens=tokens(store, NOW - timedelta(days=1))
    )


def tokens(store: Store, now: datetime) -> dict[str, str]:
    """A token of every scope, and one that expires an hour after `NOW`."""
    soon = NOW + timedelta(hours=1)
    scopes = {"read": ["read"], "promote": ["promote"], "admin": ["admin"]}
    found = {name: store.create_token(name, each, now=now)[1] for name, each in scopes.items()}
    found["soon"] = store.create_token("soon", ["read"], now=now, expires_at=soon)[1]
    return found


@contextmanager
def serve(store: Store, home: Path, clock: Clock) -> Iterator[str]:
    """The service on a free port of loopback; gives its address."""
    app = create(
        store, Settings(home=home), clock=clock, runner=Controllers(store, Settings(home=home), clock)
    )
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        listening.close()
