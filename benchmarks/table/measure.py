"""Measure a table: a plan's configurations of vLLM on one card, under the plan's traffic.

    python -m benchmarks.table.measure PLAN.yaml OUT --python PY [--version 0.25.1] [--until HH:MM:SS]
    python -m benchmarks.table.measure PLAN.yaml OUT --gather FILES
    python -m benchmarks.table.measure PLAN.yaml OUT --scatter FILES

Each launch of the plan gives one relaunched row, and one screened row for each set of limits that is changed
in the running engine. A row is written as soon as it is measured (OUT/rows, OUT/outcomes); the same command
goes on where it was cut. An engine that refuses, crashes or serves nobody is a row too; what another process
spoilt is measured again. Without --python the simulated engine stands in. `--gather` puts all rows into
FILES/rows.parquet and FILES/outcomes.parquet, the format of README.md; `--scatter` puts them back into
OUT, to go on from there.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from benchmarks.simulator import BARE, trace_of
from tuner.engine import boots, limits, log
from tuner.engine.gpu import Gpus
from tuner.engine.server import Server, serve
from tuner.errors import Aborted, BadInput, EngineError
from tuner.knobs import model as models
from tuner.knobs.arguments import compile_candidate
from tuner.knobs.catalogue import read_back
from tuner.knobs.discover import facts_of_version
from tuner.records import Candidate, EngineFacts, LaunchSpec, Outcome, Slice, Slo, Value
from tuner.replay.plan import Load
from tuner.replay.timeline import measure, replay
from tuner.simulator.options import VERSION as SIMULATED
from tuner.traffic.trace import Trace

KEYS = ("table", "about", "model", "traffic", "requests", "speed", "slo", "args", "env", "launches")
LAUNCH_KEYS = ("knobs", "screened", "repeat", "of")
RULER = replace(BARE, name="table", tail_limit_s=180.0, warmup_waves=2, warmup_requests=8, warmup_limit_s=5.0,
                warmup_tokens=16, scrape_s=1.0, lateness_ms=20.0)  # fmt: skip
MEMORY = {
    "weights_gib": re.compile(r"Model loading took ([\d.]+) Gi?B"),
    "kv_gib": re.compile(r"Available KV cache memory: (-?[\d.]+) Gi?B"),
    "graphs_gib": re.compile(r"Graph capturing finished in .*? took (-?[\d.]+) Gi?B"),
}
"""What the engine's log says of its memory."""
OUTCOMES = (
    *("row", "scheduled_s", "sent_s", "first_token_s", "last_token_s", "end_s"),
    *("input_tokens", "output_tokens", "error"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One row to measure: the launched knobs, and the limits to change in that engine (None: as launched)."""

    launch: Candidate
    limits: Candidate | None = None
    repeat: int = 0

    @property
    def how(self) -> str:
        return "relaunched" if self.limits is None else "screened"

    @property
    def whole(self) -> Candidate:
        return Candidate({**self.launch, **(self.limits or {})})

    @property
    def key(self) -> str:
        """The name of the row's files; equal rows of one plan have one."""
        inside = "" if self.limits is None else f"-{self.limits.digest[:8]}"
        return f"{self.how}-{self.launch.digest[:8]}{inside}-{self.repeat}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan file as read. Each group is one engine: its own row first, then the screened ones."""

    table: str
    model: str
    trace: Trace
    speed: float
    slo: Slo
    args: tuple[str, ...]
    env: Mapping[str, str]
    groups: tuple[tuple[Asked, ...], ...]


def read_plan(path: Path) -> Plan:
    """A plan of a table. BadInput for a key that no plan has; paths are relative to the file."""
    raw = yaml.safe_load(path.read_text())
    _check(raw, KEYS, str(path))
    groups = []
    for number, launch in enumerate(raw["launches"]):
        _check(launch, LAUNCH_KEYS, f"{path}: launches[{number}]")
        knobs, repeat = Candidate(launch.get("knobs") or {}), int(launch.get("repeat", 0))
        inside = [Asked(launch=knobs, limits=Candidate(each)) for each in launch.get("screened") or ()]
        groups.append((Asked(launch=knobs, repeat=repeat), *inside))
    folder = path.parent / raw["model"]
    return Plan(
        table=raw["table"],
        model=str(folder.resolve()) if folder.exists() else raw["model"],
        trace=trace_of(path.parent / raw["traffic"], raw["requests"]),
        speed=float(raw["speed"]),
        slo=Slo(**raw["slo"]),
        args=tuple(str(word) for word in raw.get("args") or ()),
        env={str(name): str(value) for name, value in (raw.get("env") or {}).items()},
        groups=tuple(groups),
    )


def _check(raw: Mapping[str, object], known: Sequence[str], where: str) -> None:
    if unknown := sorted(set(raw) - set(known)):
        raise BadInput(f"{where}: unknown key '{unknown[0]}'; known are {', '.join(known)}")


@dataclass(slots=True, kw_only=True)
class Bench:
    """Where engines are launched and rows are written."""

    plan: Plan
    out: Path
    python: str | None
    facts: EngineFacts
    until: float = float("inf")
    isolated: bool = False
    gpus: Gpus = field(default_factory=lambda: Gpus.open(dict(os.environ)))

    @property
    def card(self) -> str:
        if self.python is None:
            return "simulated"
        names = [gpu.name for gpu in self.gpus.gpus]
        return names[0] if names else "cpu"

    def left(self, group: Sequence[Asked]) -> list[Asked]:
        """The rows of an engine that are still to be measured."""
        return [asked for asked in group if not (self.out / "rows" / f"{asked.key}.parquet").exists()]

    def spec(self, knobs: Candidate) -> LaunchSpec:
        """One launch whose limits can be changed. UnsupportedKnob for a knob that this engine lacks."""
        launch_id = f"table-{uuid.uuid4().hex[:12]}"
        compiled = compile_candidate(knobs, self.facts)
        real = (self.python or "", "-m", "vllm.entrypoints.openai.api_server")
        command = real if self.python else (sys.executable, "-m", "tuner.simulator.app")
        root = boots.cache_root(
            self.out, version=self.facts.version, platform=self.facts.platform, gpu_name=None, command=command
        )
        installed = limits.install(self.out, launch_id, os.environ.get("PYTHONPATH"))
        env = {**boots.cache_environment(root), "HF_HUB_OFFLINE": "1", **self.plan.env, **compiled.env}
        return LaunchSpec(
            read_back=read_back(),
            launch_id=launch_id,
            command=command,
            model=self.plan.model,
            argv=(*self.plan.args, *compiled.argv, *installed.argv),
            served_name="m",
            directory=str(self.out / "launches" / launch_id),
            env={**env, **installed.env},
            asked=knobs,
            ready_timeout_s=400.0,
        )

    def write(self, asked: Asked, row: Mapping[str, Any], outcomes: Sequence[Outcome] = ()) -> None:
        """The row and its requests on disk, the row last: a row that is there is whole."""
        for name in ("rows", "outcomes"):
            (self.out / name).mkdir(parents=True, exist_ok=True)
        name = f"{asked.key}.parquet"
        if outcomes:
            columns: dict[str, Any] = {"key": [asked.key] * len(outcomes)}
            columns |= {each: [getattr(o, each) for o in outcomes] for each in OUTCOMES}
            _put(pa.table(columns), self.out / "outcomes" / name)
        whole = {
            "table": self.plan.table, "key": asked.key, "how": asked.how, "repeat": asked.repeat,
            "card": self.card, "engine": self.facts.version,
            "launched": json.dumps(dict(asked.launch)), "knobs": json.dumps(dict(asked.whole)),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"), **row,
        }  # fmt: skip
        _put(pa.table({name: [value] for name, value in whole.items()}), self.out / "rows" / name)
        shown = {
            k: whole.get(k) for k in ("state", "ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms", "preemptions")
        }
        print(f"{asked.how} {whole['knobs']}: {json.dumps(shown)}", flush=True)


def _put(table: pa.Table, path: Path) -> None:
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial, compression="zstd")
    partial.replace(path)


async def run(bench: Bench) -> bool:
    """Measure what is missing; whether the plan is complete."""
    for group in bench.plan.groups:
        left = bench.left(group)
        if left and time.time() < bench.until:
            await _engine(bench, left)
    return not any(bench.left(group) for group in bench.plan.groups)


async def _engine(bench: Bench, left: Sequence[Asked]) -> None:
    """One engine and the rows it is to serve. Where it does not start, its own row says why."""
    spec, begun = bench.spec(left[0].launch), time.monotonic()
    Path(spec.directory).mkdir(parents=True, exist_ok=True)
    asked, served = left[0], False
    try:
        async with serve(spec, gpus=bench.gpus, settle=False) as server:
            served = True
            for asked in left:
                if time.time() >= bench.until:
                    return
                await _row(bench, asked, server)
    except Aborted as error:
        print(f"not measured: {error}", flush=True)
    except EngineError as error:
        if served or asked.how == "relaunched":
            said = _said(error) | {"seconds": time.monotonic() - begun, "launch": spec.launch_id}
            bench.write(asked, said | memory(Path(spec.directory) / "engine.log"))


def _said(error: EngineError) -> dict[str, Any]:
    state = type(error).__name__.upper()
    violation = getattr(error, "violation", None)
    found = {"state": state, "cause": error.cause, "reason": str(error)}
    return (
        found if violation is None else found | {"violated_kv": violation.kv, "violated_oom": violation.oom}
    )


async def _row(bench: Bench, asked: Asked, server: Server) -> None:
    """One replay in a running engine; a set of limits that it does not take is a row without numbers."""
    begun = time.monotonic()
    about = {"launch": server.spec.launch_id}
    if not await limits.change(server, asked.limits or {}, patience_s=20.0):
        said = await limits.ask(server, {"limits": dict(asked.limits or {})})
        bench.write(asked, about | {"state": "REFUSED", "cause": "live_limits", "reason": said.error or ""})
        return
    shape = models.read(bench.plan.model, env=dict(os.environ))
    number = int(asked.whole.digest[:6], 16)  # prompts of its own: no row finds another's in the prefix cache
    load = Load(
        seed=7, number=number, repeat=asked.repeat, speed=bench.plan.speed, model="m", slo=bench.plan.slo,
        vocabulary=shape.vocab_size, deadline_s=RULER.tail_limit_s, senders=2, isolated=bench.isolated,
    )  # fmt: skip
    whole = Slice(name="all", start_s=0.0, duration_s=bench.plan.trace.duration_s + 1e-3)
    done = await replay(server, bench.plan.trace, (whole,), RULER, load)
    values = measure(done, bench.plan.slo, asked=("ttft_p99_ms", "tpot_p99_ms", "e2e_p99_ms")).values
    effective: dict[str, Value] = {**server.effective, **(asked.limits or {})}
    bench.write(
        asked,
        {
            **about,
            "state": "COMPLETE",
            **{name: float(value) for name, value in values.items()},
            "effective": json.dumps({k: v for k, v in effective.items() if k != "cudagraph_capture_sizes"}),
            "failed_gates": "; ".join(done.fidelity.failed),
            "lateness_p99_ms": done.fidelity.values.get("lateness_p99_ms"),
            "ready_s": server.ready_s,
            "compiled": server.compiled_anew,
            "kv_tokens": server.kv_tokens,
            **{name: server.timeline.get(name) for name in ("compile_s", "capture_s", "init_s")},
            **memory(server.log),
            "seconds": time.monotonic() - begun + (server.ready_s if asked.how == "relaunched" else 0.0),
        },
        done.slices[0].outcomes,
    )


def memory(path: Path) -> dict[str, float]:
    """GiB of weights, KV cache and graphs, as far as the engine's log says them."""
    text = log.read(path)
    found = {name: pattern.search(text) for name, pattern in MEMORY.items()}
    return {name: float(match[1]) for name, match in found.items() if match}


def gather(out: Path, files: Path) -> None:
    """All rows and requests measured so far, as two files."""
    files.mkdir(parents=True, exist_ok=True)
    for name in ("rows", "outcomes"):
        parts = [pq.read_table(path) for path in sorted((out / name).glob("*.parquet"))]
        if parts:
            _put(pa.concat_tables(parts, promote_options="permissive"), files / f"{name}.parquet")


def scatter(files: Path, out: Path) -> None:
    """The rows and requests of two files, each in a file of its own again."""
    for name in ("outcomes", "rows"):
        (out / name).mkdir(parents=True, exist_ok=True)
        whole = pq.read_table(files / f"{name}.parquet")
        for key in whole["key"].unique().to_pylist():
            _put(whole.filter(pc.equal(whole["key"], key)), out / name / f"{key}.parquet")


def _until(text: str) -> float:
    """A time of day (UTC) as seconds since the epoch; the next one to come."""
    at = datetime.strptime(text, "%H:%M:%S").time()
    found = datetime.combine(datetime.now(UTC).date(), at, tzinfo=UTC).timestamp()
    return found if found > time.time() else found + 86400.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", help="has vLLM")
    parser.add_argument("--version", default=SIMULATED, help="of that vLLM")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--until", type=_until, default=float("inf"), help="start no row after HH:MM:SS, UTC")
    parser.add_argument("--isolated", action="store_true", help="beside other replays on this host")
    parser.add_argument("--gather", type=Path, metavar="FILES")
    parser.add_argument("--scatter", type=Path, metavar="FILES")
    given = parser.parse_args()
    if given.gather or given.scatter:
        if given.scatter:
            scatter(given.scatter, given.out)
        if given.gather:
            gather(given.out, given.gather)
        return 0
    kind = "vllm" if given.python else "simulated"
    facts = facts_of_version(given.version, given.platform, kind=kind)
    bench = Bench(
        plan=read_plan(given.plan), out=given.out.resolve(), python=given.python, facts=facts,
        until=given.until, isolated=given.isolated,
    )  # fmt: skip
    return 0 if asyncio.run(run(bench)) else 3


if __name__ == "__main__":
    sys.exit(main())
