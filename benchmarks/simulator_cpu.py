"""One measured trial against nine predicted ones on a real CPU vLLM.

    python -m benchmarks.simulator_cpu [TRACE] --python PYTHON --model DIR [--seconds 8] [--speed 2]
    python -m benchmarks.simulator_cpu [TRACE] --model DIR --seen SEEN.json

Launches the baseline and nine candidates, harmful to generous, replays one slice against each (without the
requests that the model's length does not hold), calibrates on the baseline and prints the table. Target: rank
correlation of 0.9 or more in p95 TTFT and E2E. --live makes one launch with the highest limits and changes
them between replays. --keep stores what was measured, --seen predicts it again.
Without --python the simulated engine stands in, which shows only that the path works.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.simulator import spearman
from tuner.engine import limits
from tuner.engine.server import Server, serve
from tuner.knobs.model import read
from tuner.records import Candidate, LaunchSpec, Slice, Value
from tuner.replay.measure import measure
from tuner.replay.plan import PLANS, Load
from tuner.replay.timeline import replay
from tuner.settings import shipped
from tuner.simulator.calibrate import Observation, fit
from tuner.simulator.cost import card_of
from tuner.simulator.predict import Predictor, Scene
from tuner.traffic.importers import read_any

BASE = (128, 2048)
OTHERS = ((1, 2048), (2, 256), (3, 1024), (4, 4096), (6, 512), (8, 64), (16, 32), (32, 128), (64, 4096))
CANDIDATES = tuple(
    Candidate({"max_num_seqs": seqs, "max_num_batched_tokens": tokens}) for seqs, tokens in (BASE, *OTHERS)
)
TRACE = shipped("data", "traces", "azure-conversation-slice.parquet")
LENGTH = 2048
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
SHOWN = ("ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms")


def scene_of(given: argparse.Namespace) -> Scene:
    plan = replace(
        PLANS["quick"],
        warmup_waves=3,
        warmup_requests=8,
        warmup_limit_s=10.0,
        load_warmup_s=2.0,
        tail_limit_s=300.0,
        lateness_ms=1000.0,
    )
    part = Slice(name="part", start_s=given.start, duration_s=given.seconds * given.speed)
    trace = read_any(given.trace)
    fits = trace.input_len + trace.output_len < LENGTH
    return Scene(
        trace=trace.take(np.flatnonzero(fits)),
        slices=(part,),
        facts=read(given.model, env={}),
        card=card_of("cpu"),
        plan=plan,
        speed=given.speed,
        args={"max_model_len": LENGTH},
        env=ENV,
        deadline_s=600.0,
    )


def launch(
    given: argparse.Namespace, scene: Scene, candidate: Mapping[str, Value], directory: Path
) -> LaunchSpec:
    """A fresh engine whose limits can be changed while it runs."""
    knobs = {**scene.args, **candidate}
    argv = [word for name, value in knobs.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    launch_id = uuid.uuid4().hex
    installed = limits.install(directory, launch_id)
    if given.python:
        command = (given.python, "-m", "vllm.entrypoints.openai.api_server")
        argv += ["--load-format", "dummy", "--skip-tokenizer-init"]
    else:
        command = (sys.executable, "-m", "tuner.simulator.app")
    if given.live:
        argv += installed.argv
    return LaunchSpec(
        launch_id=launch_id,
        command=command,
        model=given.model,
        argv=tuple(argv),
        served_name="study",
        directory=str(directory),
        env={**ENV, **(installed.env if given.live else {}), "TUNER_SIM_CARD": "cpu"},
        ready_timeout_s=600.0,
        stop_timeout_s=60.0,
    )


async def measured(server: Server, scene: Scene, number: int) -> dict[str, float]:
    """The numbers of one replay."""
    load = Load(
        seed=0,
        number=number,
        speed=scene.speed,
        model="study",
        vocabulary=scene.facts.vocab_size,
        deadline_s=scene.deadline_s,
    )
    replayed = await replay(server, scene.trace, scene.slices, scene.plan, load)
    values = dict(measure(replayed, scene.slo).values)
    shown = ", ".join(f"{name} {values.get(name, float('inf')):.1f}" for name in SHOWN)
    print(f"{number} {dict(CANDIDATES[number])}: {shown}", file=sys.stderr, flush=True)
    return values


async def relaunched(given: argparse.Namespace, scene: Scene) -> list[dict[str, float]]:
    """One launch per candidate."""
    seen = []
    for number, candidate in enumerate(CANDIDATES):
        with tempfile.TemporaryDirectory() as directory:
            async with serve(launch(given, scene, candidate, Path(directory))) as server:
                seen.append(await measured(server, scene, number))
    return seen


async def changed(given: argparse.Namespace, scene: Scene) -> list[dict[str, float]]:
    """One launch for all, with the highest limits of any."""
    most = {name: max(int(str(c[name])) for c in CANDIDATES) for name in CANDIDATES[0]}
    seen = []
    with tempfile.TemporaryDirectory() as directory:
        async with serve(launch(given, scene, most, Path(directory))) as server:
            for number, candidate in enumerate(CANDIDATES):
                if not await limits.change(server, candidate, patience_s=60.0):
                    raise SystemExit(f"the engine did not take {dict(candidate)}")
                seen.append(await measured(server, scene, number))
    return seen


def measurements(given: argparse.Namespace, scene: Scene) -> list[dict[str, float]]:
    """Of the baseline and the candidates, measured now or before."""
    if given.seen:
        seen: list[dict[str, float]] = json.loads(given.seen.read_text())
        return seen
    seen = asyncio.run(changed(given, scene) if given.live else relaunched(given, scene))
    if given.keep:
        given.keep.write_text(json.dumps(seen))
    return seen


def table(predicted: Sequence[Mapping[str, float]], seen: Sequence[Mapping[str, float]]) -> bool:
    """Print predictions beside measurements; whether the rank correlations hold."""
    print(
        "| max_num_seqs | max_num_batched_tokens | " + " | ".join(f"{n} predicted / measured" for n in SHOWN)
    )
    print("|---" * (2 + len(SHOWN)) + "|")
    for candidate, ours, real in zip(CANDIDATES[1:], predicted, seen, strict=True):
        cells = " | ".join(f"{ours[name]:.0f} / {real.get(name, float('inf')):.0f}" for name in SHOWN)
        print(f"| {candidate['max_num_seqs']} | {candidate['max_num_batched_tokens']} | {cells} |")
    print()
    held = True
    for name in SHOWN:
        pairs = [(a[name], b.get(name, float("inf"))) for a, b in zip(predicted, seen, strict=True)]
        rank = spearman([a for a, _ in pairs], [b for _, b in pairs])
        errors = sorted(abs(a / b - 1) for a, b in pairs)
        print(f"{name}: rank correlation {rank:.3f}, median error {errors[len(errors) // 2]:.1%}")
        held &= rank >= 0.9 or not name.startswith(("ttft", "e2e"))
    return held


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, nargs="?", default=TRACE)
    parser.add_argument("--python")
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--start", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--speed", type=float, default=2.0)
    parser.add_argument("--live", action="store_true", help="one launch, its limits changed in between")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--seen", type=Path)
    given = parser.parse_args()
    scene = scene_of(given)
    seen = measurements(given, scene)
    calibration = fit(scene, [Observation(candidate=CANDIDATES[0], values=seen[0])])
    print("coefficients " + ", ".join(f"{k} {v:.3g}" for k, v in calibration.coefficients.to_json().items()))
    print("residuals " + ", ".join(f"{k} {v:.1%}" for k, v in calibration.residuals.items()) + "\n")
    predicted = Predictor(scene, calibration.coefficients, error=calibration.error)(CANDIDATES[1:])
    return 0 if table([prediction.values for prediction in predicted], seen[1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
