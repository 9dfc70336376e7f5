"""One measured trial against nine predicted ones on a real CPU vLLM.

    python -m benchmarks.simulator_cpu TRACE.csv --python PYTHON --model DIR [--seconds 20] [--speed 1]

Launches the baseline and nine candidates, harmful to generous, replays one slice against each, calibrates on
the baseline and prints the table. Target: rank correlation of 0.9 or more in p95 TTFT and p95 E2E.
Without --python the simulated engine stands in, which shows only that the path works.
"""

import argparse
import asyncio
import sys
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path

from benchmarks.simulator import spearman
from tuner.engine.server import serve
from tuner.knobs.model import read
from tuner.records import Candidate, LaunchSpec, Slice
from tuner.replay.measure import measure
from tuner.replay.plan import PLANS, Load
from tuner.replay.timeline import replay
from tuner.simulator.calibrate import Observation, fit
from tuner.simulator.cost import card_of
from tuner.simulator.predict import Predictor, Scene
from tuner.traffic.importers import read_any

BASE = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}
OTHERS = ((1, 2048), (2, 256), (4, 2048), (8, 64), (8, 512), (16, 1024), (32, 128), (64, 4096), (128, 256))
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
SHOWN = ("ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms")


def scene_of(given: argparse.Namespace) -> Scene:
    plan = replace(PLANS["quick"], load_warmup_s=2.0, tail_limit_s=60.0, lateness_ms=1000.0)
    part = Slice(name="part", start_s=given.start, duration_s=given.seconds * given.speed)
    return Scene(
        trace=read_any(given.trace),
        slices=(part,),
        facts=read(given.model, env={}),
        card=card_of("cpu"),
        plan=plan,
        speed=given.speed,
        args={"max_model_len": 2048},
        env=ENV,
        deadline_s=600.0,
    )


async def measured(given: argparse.Namespace, scene: Scene, candidate: Candidate) -> dict[str, float]:
    """The numbers of one fresh launch."""
    knobs = {**scene.args, **candidate}
    argv = [word for name, value in knobs.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    if given.python:
        command = (given.python, "-m", "vllm.entrypoints.openai.api_server")
        argv += ["--load-format", "dummy", "--skip-tokenizer-init"]
    else:
        command = (sys.executable, "-m", "tuner.simulator.app")
    with tempfile.TemporaryDirectory() as directory:
        spec = LaunchSpec(
            launch_id=uuid.uuid4().hex,
            command=command,
            model=given.model,
            argv=tuple(argv),
            served_name="study",
            directory=directory,
            env={**ENV, "TUNER_SIM_CARD": "cpu"},
            stop_timeout_s=60.0,
        )
        async with serve(spec) as server:
            load = Load(
                seed=0,
                number=0,
                speed=scene.speed,
                model="study",
                vocabulary=scene.facts.vocab_size,
                deadline_s=scene.deadline_s,
            )
            replayed = await replay(server, scene.trace, scene.slices, scene.plan, load)
    return dict(measure(replayed, scene.slo).values)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--python")
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--start", type=float, default=1200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--speed", type=float, default=1.0)
    given = parser.parse_args()
    scene = scene_of(given)
    base = Candidate(BASE)
    seen = asyncio.run(measured(given, scene, base))
    calibration = fit(scene, [Observation(candidate=base, values=seen)])
    print("coefficients " + ", ".join(f"{k} {v:.3g}" for k, v in calibration.coefficients.to_json().items()))
    print("residuals " + ", ".join(f"{k} {v:.1%}" for k, v in calibration.residuals.items()), flush=True)
    candidates = [
        Candidate({"max_num_seqs": seqs, "max_num_batched_tokens": tokens}) for seqs, tokens in OTHERS
    ]
    predicted = Predictor(scene, calibration.coefficients, error=calibration.error)(candidates)
    rows = []
    for candidate, prediction in zip(candidates, predicted, strict=True):
        real = asyncio.run(measured(given, scene, candidate))
        rows.append((prediction.values, real))
        cells = "  ".join(f"{n[:8]} {prediction.values[n]:9.1f}/{real[n]:9.1f}" for n in SHOWN)
        print(f"{candidate['max_num_seqs']:>4} {candidate['max_num_batched_tokens']:>5}  {cells}", flush=True)
    held = True
    for name in ("ttft_p95_ms", "e2e_p95_ms"):
        rank = spearman([p[name] for p, _ in rows], [m[name] for _, m in rows])
        held &= rank >= 0.9
        print(f"{name}: rank correlation {rank:.2f} (≥ 0.9)")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
