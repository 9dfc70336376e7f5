"""What only a GPU shows: memory given back, orphans, verdicts, first-boot drift; and a grid of limits.

    python benchmarks/gpu.py facts MODEL OUT.json             six launches of the model's shape
    python benchmarks/gpu.py grid MODEL TRACE.csv OUT.json    one launch; every limit changed inside it
    python benchmarks/gpu.py order MODEL TRACE.csv OUT.json   six pairs of limits in one engine; with
                                                              `--relaunch 0,1` those two each in its own

`--python` must have vLLM. `grid` finds the default's highest speed under TTFT ≤ 500 ms and TPOT ≤ 50 ms, then
asks at 1.3 × that speed whether any of 31 sets of limits meets them: 25 pairs, and six that bound long
prefills. A set that does is asked again with other prompts. A replay that fails a gate never counts as met.
With `--graphs N` the sets are asked in a second engine that captures graphs up to N tokens, and the three
that come closest get their own highest speed.
"""

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import psutil

from tuner.engine import boots, limits
from tuner.engine.gpu import Gpus
from tuner.engine.server import Server, serve
from tuner.errors import EngineError
from tuner.knobs import model as models
from tuner.knobs.catalogue import read_back
from tuner.records import JSON, LaunchSpec, Slice, Slo, Value
from tuner.replay.plan import PLANS, Load
from tuner.replay.timeline import measure, replay
from tuner.traffic import importers
from tuner.traffic.trace import Trace
from tuner.tuning.trial import MET, bisect, sure

SLO = Slo(ttft_ms=500, tpot_ms=50, attainment=0.95)
SLICE = Slice(name="minute-20", start_s=1200, duration_s=60)
PAIRS = ((1024, 8192), (1024, 1024), (256, 512), (256, 2048), (128, 4096), (64, 1024))
STRETCH = Slice(name="minute-20", start_s=1200, duration_s=120)
LONG = (
    (256, 2048, 512), (256, 4096, 1024), (512, 2048, 512),
    (512, 4096, 512), (1024, 8192, 512), (1024, 8192, 2048),
)  # fmt: skip
SEQS, TOKENS = (64, 128, 256, 512, 1024), (512, 1024, 2048, 4096, 8192)
# With captured graphs: steps that they cover, and one that they do not.
GRAPH_TOKENS = (640, 768, 1024, 2048, 8192)
GRAPH_LONG = (
    (256, 1024, 512), (256, 2048, 512), (512, 2048, 512),
    (512, 2048, 1024), (1024, 2048, 256), (1024, 8192, 2048),
)  # fmt: skip
FIXED = ("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "16384")
MIB = 1 << 20


class Host:
    """Where launches are made; `home` keeps their logs and the compile cache."""

    def __init__(self, python: str, model: str, home: Path) -> None:
        self.python, self.model, self.home, self.count = python, model, home, 0
        self.gpus = Gpus.open(dict(os.environ))

    def spec(self, argv: tuple[str, ...] = (), *, cache: str = "warm", live: bool = False) -> LaunchSpec:
        """One launch with these arguments; `cache` names its compile cache."""
        self.count += 1
        launch_id = f"gpu-{os.getpid()}-{self.count}"
        root = boots.cache_root(
            self.home / cache, version="any", platform="cuda", gpu_name=None, command=(self.python,)
        )
        env = {**boots.cache_environment(root), "HF_HUB_OFFLINE": "1"}
        if live:
            installed = limits.install(self.home, launch_id, os.environ.get("PYTHONPATH"))
            env, argv = {**env, **installed.env}, (*argv, *installed.argv)
        return LaunchSpec(
            read_back=read_back(),
            launch_id=launch_id,
            command=(self.python, "-m", "vllm.entrypoints.openai.api_server"),
            model=self.model,
            argv=(*FIXED, *argv),
            served_name="m",
            directory=str(self.home / f"launch-{self.count}"),
            env=env,
            ready_timeout_s=400,
        )

    def used_mib(self) -> float:
        """Memory in use on the GPU now, all processes together."""
        return sum(s.used_bytes for s in self.gpus.sample()) / MIB

    async def given_back_s(self, baseline_mib: float, limit_s: float = 60.0) -> float | None:
        """Seconds until the used memory is within 256 MiB of the baseline; None when the limit came first."""
        begun = time.monotonic()
        while time.monotonic() - begun < limit_s:
            if self.used_mib() <= baseline_mib + 256:
                return round(time.monotonic() - begun, 2)
            await asyncio.sleep(0.05)
        return None


def said(server: Server) -> dict[str, JSON]:
    """What a launch told of itself."""
    return {
        "ready_s": round(server.ready_s, 1),
        "kv_tokens": server.kv_tokens,
        "first_kv_tokens": server.first_kv_tokens,
        "compiled_anew": server.compiled_anew,
        "timeline": {k: round(v, 2) for k, v in server.timeline.items()},
    }


async def boot(host: Host, name: str, spec: LaunchSpec) -> dict[str, JSON]:
    """Launch, look, stop by the stop machine; how long the stop and the memory took."""
    before = host.used_mib()
    async with serve(spec, gpus=host.gpus) as server:
        row: dict[str, JSON] = {"name": name, **said(server), "gpu_mib": round(host.used_mib())}
        begun = time.monotonic()
    row["stop_s"] = round(time.monotonic() - begun, 2)
    row["memory_back_s"] = await host.given_back_s(before)
    return row


async def signalled(host: Host, name: str, number: signal.Signals) -> dict[str, JSON]:
    """A signal to the API server alone: who lives on, and when the memory is back (stopped after 10 s)."""
    before = host.used_mib()
    async with serve(host.spec(), gpus=host.gpus) as server:
        row: dict[str, JSON] = {"name": name, **said(server)}
        leader = psutil.Process(server.process.pid)
        family = [leader, *leader.children(recursive=True)]
        leader.send_signal(number)
        row["memory_back_alone_s"] = await host.given_back_s(before, 10.0)
        await asyncio.sleep(2)
        row["alive_after"] = [
            p.name() for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
        ]
        begun = time.monotonic()
    row["sweep_s"] = round(time.monotonic() - begun, 2)
    row["memory_back_after_sweep_s"] = await host.given_back_s(before)
    row["alive_at_last"] = [p.name() for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    return row


async def refused(host: Host, name: str, *argv: str) -> dict[str, JSON]:
    """A launch that ought to fail: the verdict, and whether the memory came back."""
    before, begun = host.used_mib(), time.monotonic()
    row: dict[str, JSON] = {"name": name, "argv": list(argv)}
    try:
        async with serve(host.spec(tuple(argv)), gpus=host.gpus) as server:
            row |= {"verdict": "served", **said(server)}
    except EngineError as error:
        row |= {"verdict": type(error).__name__, "cause": error.cause, "reason": str(error)}
        violation = getattr(error, "violation", None)
        row["violation"] = None if violation is None else {"kv": violation.kv, "oom": violation.oom}
    row["seconds"] = round(time.monotonic() - begun, 1)
    row["memory_back_s"] = await host.given_back_s(before)
    return row


async def facts(host: Host, keep: Path) -> None:
    """Every fact, written down as it comes."""
    rows: list[JSON] = []
    steps: tuple[Callable[[], Awaitable[dict[str, JSON]]], ...] = (
        lambda: boot(host, "cold compile cache", host.spec(cache="cold")),
        lambda: boot(host, "the same again, warm", host.spec(cache="cold")),
        lambda: signalled(host, "SIGKILL to the API server", signal.SIGKILL),
        lambda: refused(host, "too little memory", "--gpu-memory-utilization", "0.15"),
        lambda: refused(host, "all memory", "--gpu-memory-utilization", "0.999"),
        lambda: refused(
            host, "too many sequences", "--max-num-seqs", "32768", "--max-num-batched-tokens", "65536",
            "--gpu-memory-utilization", "0.97",
        ),
        lambda: signalled(host, "SIGTERM to the API server", signal.SIGTERM),
    )  # fmt: skip
    for step in steps:
        try:
            rows.append(await step())
        except EngineError as error:
            rows.append({"error": str(error), "cause": error.cause})
        print(json.dumps(rows[-1]), flush=True)
        keep.write_text(json.dumps({"gpus": [g.name for g in host.gpus.gpus], "rows": rows}, indent=1) + "\n")


class Grid:
    """The replays of `grid`, each written down as it ends."""

    def __init__(self, host: Host, trace: Trace, keep: Path) -> None:
        self.host, self.trace, self.keep = host, trace, keep
        self.found: dict[str, JSON] = {"slo": {"ttft_ms": 500, "tpot_ms": 50, "attainment": 0.95}}
        self.rows: list[dict[str, JSON]] = []

    def wrote(self, row: dict[str, JSON]) -> None:
        """One more row, on the screen and in the file."""
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        rows: list[JSON] = list(self.rows)
        self.keep.write_text(json.dumps({**self.found, "rows": rows}, indent=1) + "\n")

    async def met(self, server: Server, limits_now: JSON, speed: float) -> bool:
        """One replay at that speed."""
        row = await attained(self.host, server, self.trace, len(self.rows), speed)
        self.wrote({"limits": limits_now, **row})
        return bool(row["met"])

    async def highest(self, server: Server, limits_now: JSON, start: float) -> float:
        """The highest speed that meets the SLO with the limits that the engine has now."""

        async def at(speed: float) -> bool:
            return await self.met(server, limits_now, speed)

        return (await bisect(at, start=start, floor=0.5, ceiling=12.0, tolerance=0.06, most=8)).speed

    async def sets(self, server: Server, wanted: list[dict[str, Value]], speed: float) -> None:
        """Every set of limits at one speed; one that meets the SLO is asked a second time."""
        for each in wanted:
            if not await set_limits(server, each):
                self.wrote({"limits": dict(each), "refused": True})
            elif await self.met(server, dict(each), speed):
                await self.met(server, dict(each), speed)


LIMITS = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold")


async def set_limits(server: Server, each: Mapping[str, Value]) -> bool:
    """Whether the engine took these limits; what is not named goes back to no bound on long prefills."""
    return await limits.change(server, {LIMITS[2]: 0, **each})


async def grid(host: Host, trace_file: Path, keep: Path, graphs: int | None) -> None:
    """The default's highest speed, then every set of limits at 1.3 × that speed: in the same engine, or in a
    second one with graphs up to `graphs` tokens.
    """
    asked = Grid(host, importers.read_any(trace_file), keep)
    long, tokens = (LONG, TOKENS) if graphs is None else (GRAPH_LONG, GRAPH_TOKENS)
    pairs = [(seqs, size) for seqs in SEQS for size in tokens]
    wanted: list[dict[str, Value]] = [dict(zip(LIMITS, each, strict=False)) for each in (*long, *pairs)]
    async with serve(host.spec(live=True), gpus=host.gpus) as server:
        best = await asked.highest(server, "default", 3.0)
        goal = round(best * 1.3, 2)
        asked.found |= {"default_max_speed": best, "asked_speed": goal}
        if graphs is None:
            await asked.sets(server, wanted, goal)
    if graphs is not None:
        asked.found |= {"max_cudagraph_capture_size": graphs}
        argv = ("--max-cudagraph-capture-size", str(graphs))
        async with serve(host.spec(argv, live=True), gpus=host.gpus) as server:
            await asked.sets(server, wanted, goal)
            await closest(asked, server, best)


async def closest(asked: Grid, server: Server, start: float) -> None:
    """The highest speed of the three sets of limits that served most requests in time at the asked speed."""
    at = [r for r in asked.rows if r.get("speed") == asked.found["asked_speed"] and r["limits"] != "default"]
    at.sort(key=lambda row: -float(str(row["slo_attainment"])))
    speeds: list[JSON] = []
    for row in at[:3]:
        if isinstance(row["limits"], dict) and await set_limits(
            server, cast("dict[str, Value]", row["limits"])
        ):
            speeds.append(
                {"limits": row["limits"], "max_speed": await asked.highest(server, row["limits"], start)}
            )
            asked.found |= {"closest": speeds}
    print(json.dumps(asked.found), flush=True)


async def attained(host: Host, server: Server, trace: Trace, number: int, speed: float) -> dict[str, JSON]:
    """One replay of the stretch, ended as soon as the answer is sure: whether it meets the SLO."""
    shape = models.read(host.model, env=dict(os.environ))
    plan = replace(PLANS["quick"], load_warmup_s=4.0, tail_limit_s=60.0)
    load = Load(
        seed=7, number=number, speed=speed, model="m", vocabulary=shape.vocab_size, slo=SLO, senders=2
    )
    begun = time.monotonic()
    done = await replay(server, trace, (STRETCH,), plan, load, judge=sure(SLO))
    values = measure(done, SLO).values
    reached = done.stopped is None and values.get("slo_attainment", 0.0) >= SLO.attainment
    names = ("slo_attainment", "ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms", "goodput_rps", "failed")
    kept: dict[str, JSON] = {k: round(values[k], 3) for k in names if values.get(k, 1e99) < 1e12}
    return {
        "speed": speed,
        "met": not done.fidelity.failed and (done.stopped == MET or reached),
        "stopped": done.stopped,
        "failed_gates": list(done.fidelity.failed),
        "seconds": round(time.monotonic() - begun, 1),
        **kept,
    }


async def numbers(host: Host, server: Server, trace: Trace, number: int, speed: float) -> dict[str, JSON]:
    """One whole replay of the slice at a speed: the numbers that a choice is made by."""
    shape = models.read(host.model, env=dict(os.environ))
    load = Load(
        seed=7, number=number, speed=speed, model="m", vocabulary=shape.vocab_size, slo=SLO, senders=2
    )
    done = await replay(server, trace, (SLICE,), replace(PLANS["quick"], tail_limit_s=30.0), load)
    values = measure(done, SLO).values
    names = ("slo_attainment", "ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms", "goodput_rps", "failed")
    kept: dict[str, JSON] = {k: round(values[k], 3) for k in names if values.get(k, 1e99) < 1e12}
    return {**kept, "failed_gates": list(done.fidelity.failed)}


async def order(host: Host, trace_file: Path, keep: Path, relaunch: list[int]) -> None:
    """The six pairs at ×4, each in an engine of its own (those named), or all in one engine."""
    trace, rows = importers.read_any(trace_file), list[JSON]()

    def wrote(pair: tuple[int, int], how: str, row: dict[str, JSON]) -> None:
        rows.append({"max_num_seqs": pair[0], "max_num_batched_tokens": pair[1], "how": how, **row})
        print(json.dumps(rows[-1]), flush=True)
        keep.write_text(json.dumps(rows, indent=1) + "\n")

    for index in relaunch:
        seqs, tokens = PAIRS[index]
        argv = ("--max-num-seqs", str(seqs), "--max-num-batched-tokens", str(tokens))
        begun = time.monotonic()
        async with serve(host.spec(argv), gpus=host.gpus) as server:
            row = await numbers(host, server, trace, index, 4.0)
        wrote((seqs, tokens), "relaunched", {**row, "seconds": round(time.monotonic() - begun, 1)})
    if relaunch:
        return
    async with serve(host.spec(live=True), gpus=host.gpus) as server:
        for index, (seqs, tokens) in enumerate(PAIRS):
            begun = time.monotonic()
            if not await limits.change(server, {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}):
                wrote((seqs, tokens), "refused", {})
                continue
            row = await numbers(host, server, trace, index, 4.0)
            wrote((seqs, tokens), "screened", {**row, "seconds": round(time.monotonic() - begun, 1)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="python3")
    parser.add_argument("what", choices=("facts", "grid", "order"))
    parser.add_argument("--relaunch", default="", help="indices of pairs to relaunch, with commas")
    parser.add_argument("--graphs", type=int, help="grid: capture graphs up to so many tokens")
    parser.add_argument("model")
    parser.add_argument("files", nargs="+", type=Path)
    asked = parser.parse_args()
    host = Host(asked.python, asked.model, Path(tempfile.mkdtemp(prefix="gpu-")))
    if asked.what == "facts":
        asyncio.run(facts(host, asked.files[0]))
    elif asked.what == "order":
        picked = [int(i) for i in asked.relaunch.split(",") if i]
        asyncio.run(order(host, asked.files[0], asked.files[1], picked))
    else:
        asyncio.run(grid(host, asked.files[0], asked.files[1], asked.graphs))


if __name__ == "__main__":
    main()
