"""One measured trial against nine predicted ones on a real CPU vLLM.

    python -m benchmarks.simulator_cpu [TRACE] --python PYTHON --keep SEEN.json [--limit-s 600] [--repeats 2]

Launches the baseline and nine candidates, harmful to generous, each in an engine of its own, replays one
slice (without the requests that the model's length does not hold) against each, calibrates on the baseline
and prints the table. Target: rank correlation of 0.9 or more in p95 TTFT and E2E. What was measured is kept
in SEEN.json and not measured again: after --limit-s nothing more is launched, and the same command goes on.
Without --python the simulated engine stands in, which shows only that the path works.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.simulator import spearman
from benchmarks.tiny import ENV, LENGTH, launch, write
from tuner.engine.server import serve
from tuner.knobs.model import read
from tuner.records import Candidate, LaunchSpec, Slice
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
SHOWN = ("ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms")

Seen = dict[str, list[dict[str, float]]]
"""Of each candidate by its label, the numbers of each launch."""


def label(candidate: Candidate) -> str:
    return f"{candidate['max_num_seqs']} {candidate['max_num_batched_tokens']}"


def scene_of(given: argparse.Namespace, model: str) -> Scene:
    plan = replace(
        PLANS["quick"],
        warmup_waves=3,
        warmup_requests=8,
        warmup_limit_s=5.0,
        load_warmup_s=1.0,
        tail_limit_s=300.0,
        lateness_ms=1000.0,
    )
    part = Slice(name="part", start_s=given.start, duration_s=given.seconds * given.speed)
    trace = read_any(given.trace)
    fits = trace.input_len + trace.output_len < LENGTH
    return Scene(
        trace=trace.take(np.flatnonzero(fits)),
        slices=(part,),
        facts=read(model, env={}),
        card=card_of("cpu"),
        plan=plan,
        speed=given.speed,
        args={"max_model_len": LENGTH},
        env=ENV,
        deadline_s=600.0,
    )


def words(candidate: Candidate) -> list[str]:
    """The candidate as arguments."""
    return [w for name, value in candidate.items() for w in (f"--{name.replace('_', '-')}", str(value))]


async def measured(spec: LaunchSpec, scene: Scene, number: int, repeat: int) -> dict[str, float]:
    """The numbers of one replay in an engine of its own."""
    load = Load(
        seed=0,
        number=number,
        repeat=repeat,
        speed=scene.speed,
        model="study",
        vocabulary=scene.facts.vocab_size,
        deadline_s=scene.deadline_s,
    )
    async with serve(spec) as server:
        replayed = await replay(server, scene.trace, scene.slices, scene.plan, load)
    values = dict(measure(replayed, scene.slo).values)
    shown = ", ".join(f"{name} {values.get(name, float('inf')):.1f}" for name in SHOWN)
    print(f"{label(CANDIDATES[number])}: {shown}", file=sys.stderr, flush=True)
    return values


def measurements(given: argparse.Namespace, scene: Scene, model: str) -> Seen:
    """Of every candidate, kept after each launch; SystemExit when the time is over before all are there."""
    seen: Seen = json.loads(given.keep.read_text()) if given.keep and given.keep.exists() else {}
    begun = time.monotonic()
    for repeat in range(given.repeats):
        for number, candidate in enumerate(CANDIDATES):
            if len(seen.get(label(candidate), ())) > repeat:
                continue
            if time.monotonic() - begun > given.limit_s:
                raise SystemExit(f"{sum(map(len, seen.values()))} launches so far; the same command goes on")
            with tempfile.TemporaryDirectory() as directory:
                spec = launch(given.python, model, Path(directory), *words(candidate))
                values = asyncio.run(measured(spec, scene, number, repeat))
            seen.setdefault(label(candidate), []).append(values)
            if given.keep:
                given.keep.write_text(json.dumps(seen, indent=1) + "\n")
    return seen


def middle(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of repeats, name by name, where all have a positive number: a stall of the machine in one of
    three does not count. Of two, the geometric mean.
    """
    names = [name for name in rows[0] if all(0 < row.get(name, 0) < float("inf") for row in rows)]
    middle_of = statistics.median if len(rows) > 2 else statistics.geometric_mean
    return {name: middle_of([row[name] for row in rows]) for name in names}


def noise(seen: Seen, name: str) -> float:
    """The largest distance of a repeat from its candidate's middle, as a share."""
    means = {key: middle(rows)[name] for key, rows in seen.items()}
    return max(abs(row[name] / means[key] - 1) for key, rows in seen.items() for row in rows)


def table(predicted: Sequence[Mapping[str, float]], seen: Sequence[Mapping[str, float]]) -> bool:
    """Print predictions beside measurements; whether the rank correlations hold."""
    heads = " | ".join(f"{n} predicted / measured" for n in SHOWN)
    print(f"| max_num_seqs | max_num_batched_tokens | {heads} |")
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
    parser.add_argument("--python", help="of the CPU build of vLLM")
    parser.add_argument("--start", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--speed", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=1, help="launches of each candidate")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write(Path(directory))
        scene = scene_of(given, model)
        seen = measurements(given, scene, model)
    means = [middle(seen[label(candidate)]) for candidate in CANDIDATES]
    calibration = fit(scene, [Observation(candidate=CANDIDATES[0], values=means[0])])
    print("coefficients " + ", ".join(f"{k} {v:.3g}" for k, v in calibration.coefficients.to_json().items()))
    print("residuals " + ", ".join(f"{k} {v:.1%}" for k, v in calibration.residuals.items()))
    print("largest distance of a repeat " + ", ".join(f"{n} {noise(seen, n):.1%}" for n in SHOWN) + "\n")
    predicted = Predictor(scene, calibration.coefficients, error=calibration.error)(CANDIDATES[1:])
    return 0 if table([prediction.values for prediction in predicted], means[1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
