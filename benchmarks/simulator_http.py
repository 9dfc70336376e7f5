"""The simulated engine over HTTP, on the virtual clock, and predicted; and the punctuality of its flushes.

    python -m benchmarks.simulator_http TRACE.csv [--start 1200] [--seconds 20] [--speed 2] [--pace 1] [K=V]

Replays a slice of a trace through the replay room against the app, replays it on the virtual clock
(`engine: {kind: simulated, clock: virtual}`), predicts it, and prints all three and the
app's punctuality from its /server_info. Targets: 5 % in every number, flushes begin within 1 ms. With
--pace 0.25 the app and the traffic take four times as long, so that a busy machine's delays weigh a quarter.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.engine.server import serve
from tuner.knobs.catalogue import read_back
from tuner.knobs.model import read
from tuner.records import Candidate, LaunchSpec, Slice, Slo, Value
from tuner.replay.plan import PLANS, Load, Plan
from tuner.replay.timeline import measure, replay
from tuner.simulator import virtual
from tuner.simulator.boot import boot
from tuner.simulator.cost import card_of, preset
from tuner.simulator.predict import Predictor, Scene
from tuner.simulator.virtual import VirtualPace
from tuner.traffic.importers import read_any

MODEL = "Qwen/Qwen2.5-7B-Instruct"
SHOWN = (
    *("ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "tpot_p95_ms", "e2e_p50_ms", "e2e_p95_ms"),
    *("itl_p50_ms", "itl_p95_ms", "batch_tokens_mean"),
)


def plan_of(warmup_s: float, tail_s: float) -> Plan:
    return replace(
        PLANS["quick"],
        load_warmup_s=warmup_s,
        tail_limit_s=tail_s,
        priming_turnovers=0.0,
        lateness_ms=50.0,
    )


def scene_of(arguments: argparse.Namespace) -> Scene:
    part = Slice(name="part", start_s=arguments.start, duration_s=arguments.seconds * arguments.speed)
    return Scene(
        trace=read_any(arguments.trace),
        slices=(part,),
        facts=read(MODEL, env={}),
        card=card_of(arguments.card),
        plan=plan_of(2.0, 30.0),
        speed=arguments.speed,
        args={"max_model_len": 16384},
        slo=Slo(ttft_ms=500, tpot_ms=50),
    )


def on_virtual_clock(scene: Scene, candidate: Candidate) -> dict[str, float]:
    """The same replay as `engine.clock: virtual` does it."""
    argv = [f"--{k.replace('_', '-')}={v}" for k, v in {**scene.args, **candidate}.items()]
    booted = boot(["--model", MODEL, *argv], {"TUNER_SIM_CARD": scene.card.name})
    load = Load(
        seed=0, number=0, speed=scene.speed, model="study", vocabulary=scene.facts.vocab_size,
        deadline_s=scene.deadline,
    )  # fmt: skip
    replayed, _ = virtual.replay(booted, scene.trace, scene.slices, scene.plan, load, VirtualPace())
    return dict(measure(replayed, scene.slo).values)


async def over_http(
    scene: Scene, candidate: Candidate, pace: float
) -> tuple[dict[str, float], dict[str, float]]:
    """(measured numbers in simulated time, the app's punctuality) of one replay against a fresh app."""
    plan = plan_of(2.0 / pace, 30.0 / pace)
    argv = [f"--{k.replace('_', '-')}={v}" for k, v in {**scene.args, **candidate}.items()]
    with tempfile.TemporaryDirectory() as directory:
        spec = LaunchSpec(
            read_back=read_back(),
            launch_id=uuid.uuid4().hex,
            command=(sys.executable, "-m", "tuner.simulator.app"),
            model=MODEL,
            argv=tuple(argv),
            served_name="study",
            directory=directory,
            env={"TUNER_SIM_CARD": scene.card.name, "TUNER_SIM_SPEED": str(pace)},
            ready_timeout_s=60.0,
        )
        async with serve(spec) as server:
            load = Load(
                seed=0,
                number=0,
                speed=scene.speed * pace,
                model="study",
                vocabulary=scene.facts.vocab_size,
                deadline_s=scene.deadline / pace,
            )
            replayed = await replay(server, scene.trace, scene.slices, plan, load)
            info: Any = (await server.ask("GET", "/server_info")).json()
    values = measure(replayed, scene.slo).values
    scaled = {name: value * pace if name.endswith("_ms") else value for name, value in values.items()}
    return scaled, dict(info["simulated"]["flushes"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("knobs", nargs="*", help="KNOB=VALUE")
    parser.add_argument("--card", default="h100-80")
    parser.add_argument("--start", type=float, default=1200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--speed", type=float, default=2.0)
    parser.add_argument("--pace", type=float, default=1.0)
    arguments = parser.parse_args()
    scene = scene_of(arguments)
    knobs: dict[str, Value] = {}
    for word in arguments.knobs:
        name, _, value = word.partition("=")
        knobs[name] = json.loads(value)
    candidate = Candidate(knobs)
    (predicted,) = Predictor(scene, preset(scene.card), spreads=False)([candidate])
    clocked = on_virtual_clock(scene, candidate)
    measured, late = asyncio.run(over_http(scene, candidate, arguments.pace))
    worst = 0.0
    print(f"{int(measured['requests'])} requests, {int(measured['failed'])} failed")
    for name in SHOWN:
        errors = [found[name] / measured[name] - 1 for found in (clocked, predicted.values)]
        worst = max(worst, *(abs(error) for error in errors))
        print(
            f"{name:>14}: HTTP {measured[name]:9.2f}  virtual clock {clocked[name]:9.2f} {errors[0]:+.1%}"
            f"  predicted {predicted.values[name]:9.2f} {errors[1]:+.1%}"
        )
    print("flushes: " + ", ".join(f"{name} {value:.4g}" for name, value in late.items()))
    print(f"worst {worst:.1%} (≤ 5 %)")
    return 0 if worst <= 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
