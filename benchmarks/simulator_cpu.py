"""One measured trial against nine predicted ones on a real CPU vLLM.

    python -m benchmarks.simulator_cpu [TRACE] --python PYTHON --keep SEEN.json [--limit-s 600]
        [--launches 3] [--replays 3] [--rounds]

Launches the baseline and nine candidates, harmful to generous, each in an engine of its own, and all of them
again (--launches); replays one slice (without the requests that the model's length does not hold) some times
in each engine (--replays), takes medians, calibrates on the baseline and prints the table. Target: rank
correlation of 0.9 or more in p95 TTFT and E2E. What was measured is kept in SEEN.json and not measured again:
after --limit-s nothing more is launched, and the same command goes on. With --launches 0 nothing is launched
and the table is of whatever SEEN.json holds; --rounds adds each round by itself, and the medians predicted
from single replays of the baseline. Without --python the simulated engine stands in, which shows only that
the path works.

The nine were chosen before they were measured, by prediction: from one to the next p95 TTFT and p95 E2E
differ by a seventh or more, as a machine that is shared repeats itself no better than that.
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
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.simulator import spearman
from benchmarks.tiny import ENV, LENGTH, launch, write
from tuner.engine.server import serve
from tuner.knobs.model import read
from tuner.records import Candidate, LaunchSpec, Slice
from tuner.replay.plan import PLANS, Load
from tuner.replay.timeline import measure, replay
from tuner.settings import shipped
from tuner.simulator.calibrate import Calibration, Observation, fit
from tuner.simulator.cost import card_of
from tuner.simulator.predict import Predictor, Scene
from tuner.traffic.importers import read_any

Values = Mapping[str, float]
TRACE = shipped("data", "traces", "azure-conversation-slice.parquet")
SHOWN = ("ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms")

Seen = dict[str, list[dict[str, float]]]
"""Of each candidate by its label, the numbers of each replay, launch after launch."""


def label(candidate: Candidate) -> str:
    return f"{candidate['max_num_seqs']} {candidate['max_num_batched_tokens']}"


def candidate_of(label: str) -> Candidate:
    seqs, tokens = map(int, label.split())
    return Candidate({"max_num_seqs": seqs, "max_num_batched_tokens": tokens})


BASE = "128 2048"
OTHERS = ("1 16", "1 2048", "2 16", "3 32", "4 1024", "8 128", "16 32", "32 512", "64 4096")
CANDIDATES = tuple(candidate_of(label) for label in (BASE, *OTHERS))


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


async def measured(spec: LaunchSpec, scene: Scene, number: int, repeats: range) -> list[dict[str, float]]:
    """The numbers of the replays of one engine, one after another; no two have a prompt in common."""
    found = []
    async with serve(spec) as server:
        for repeat in repeats:
            load = Load(
                seed=0,
                number=number,
                repeat=repeat,
                speed=scene.speed,
                model="study",
                vocabulary=scene.facts.vocab_size,
                deadline_s=scene.deadline_s,
            )
            replayed = await replay(server, scene.trace, scene.slices, scene.plan, load)
            values = dict(measure(replayed, scene.slo).values)
            shown = ", ".join(f"{name} {values.get(name, float('inf')):.1f}" for name in SHOWN)
            print(f"{label(CANDIDATES[number])}: {shown}", file=sys.stderr, flush=True)
            found.append(values)
    return found


def measurements(given: argparse.Namespace, scene: Scene, model: str) -> Seen:
    """Of every candidate, kept after each launch; SystemExit when the time is over before all are there."""
    seen: Seen = json.loads(given.keep.read_text()) if given.keep and given.keep.exists() else {}
    begun = time.monotonic()
    for repeats in (range(n * given.replays, (n + 1) * given.replays) for n in range(given.launches)):
        for number, candidate in enumerate(CANDIDATES):
            if len(seen.get(label(candidate), ())) > repeats[0]:
                continue
            if time.monotonic() - begun > given.limit_s:
                raise SystemExit(f"{sum(map(len, seen.values()))} replays so far; the same command goes on")
            with tempfile.TemporaryDirectory() as directory:
                spec = launch(given.python, model, Path(directory), *words(candidate))
                values = asyncio.run(measured(spec, scene, number, repeats))
            seen.setdefault(label(candidate), []).extend(values)
            if given.keep:
                given.keep.write_text(json.dumps(seen, indent=1) + "\n")
    return seen


def middle(rows: Sequence[Values]) -> dict[str, float]:
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


def predict(scene: Scene, base: Values, others: Sequence[Candidate]) -> tuple[Calibration, list[Values]]:
    """Calibrated on the baseline's numbers alone."""
    calibration = fit(scene, [Observation(candidate=CANDIDATES[0], values=base)])
    predicted = Predictor(scene, calibration.coefficients, spreads=False)(others)
    return calibration, [prediction.values for prediction in predicted]


def ranked(predicted: Sequence[Values], real: Sequence[Values]) -> dict[str, tuple[float, float]]:
    """(rank correlation, median relative error) per name."""
    found = {}
    for name in SHOWN:
        pairs = [(a[name], b.get(name, float("inf"))) for a, b in zip(predicted, real, strict=True)]
        errors = sorted(abs(a / b - 1) for a, b in pairs)
        found[name] = spearman([a for a, _ in pairs], [b for _, b in pairs]), errors[len(errors) // 2]
    return found


def table(others: Sequence[Candidate], predicted: Sequence[Values], real: Sequence[Values]) -> bool:
    """Print predictions beside measurements; whether the rank correlations hold."""
    heads = " | ".join(f"{n} predicted / measured" for n in SHOWN)
    print(f"| max_num_seqs | max_num_batched_tokens | {heads} |")
    print("|---" * (2 + len(SHOWN)) + "|")
    for candidate, ours, seen in zip(others, predicted, real, strict=True):
        cells = " | ".join(f"{ours[name]:.0f} / {seen.get(name, float('inf')):.0f}" for name in SHOWN)
        print(f"| {candidate['max_num_seqs']} | {candidate['max_num_batched_tokens']} | {cells} |")
    print()
    found = ranked(predicted, real)
    for name, (rank, error) in found.items():
        print(f"{name}: rank correlation {rank:.3f}, median error {error:.1%}")
    return all(rank >= 0.9 for name, (rank, _) in found.items() if name.startswith(("ttft", "e2e")))


def rounds(scene: Scene, seen: Seen, replays: int) -> None:
    """Print how each round ranks by itself, how far two rounds agree, and what single baselines predict."""
    base, *keys = seen
    others = [candidate_of(key) for key in keys]
    parts = [
        {key: middle(rows[at : at + replays]) for key, rows in seen.items()}
        for at in range(0, len(seen[base]), replays)
    ]

    def told(what: str, predicted: Sequence[Values], real: Sequence[Values]) -> None:
        shown = (f"{n} {rank:.3f} ({error:.0%})" for n, (rank, error) in ranked(predicted, real).items())
        print(f"{what}: {', '.join(shown)}")

    for number, part in enumerate(parts, 1):
        told(f"round {number}", predict(scene, part[base], others)[1], [part[key] for key in keys])
    for (i, one), (j, other) in combinations(enumerate(parts, 1), 2):
        told(f"round {i} as measured, against {j}", [one[k] for k in keys], [other[k] for k in keys])
    medians = [middle(seen[key]) for key in keys]
    for number, row in enumerate(seen[base], 1):
        told(f"medians, by replay {number} of the baseline", predict(scene, row, others)[1], medians)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, nargs="?", default=TRACE)
    parser.add_argument("--python", help="of the CPU build of vLLM")
    parser.add_argument("--start", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--speed", type=float, default=2.0)
    parser.add_argument("--launches", type=int, default=1, help="of each candidate")
    parser.add_argument("--replays", type=int, default=1, help="in each launch")
    parser.add_argument("--rounds", action="store_true", help="also each round by itself")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write(Path(directory))
        scene = scene_of(given, model)
        seen = measurements(given, scene, model)
    base, *keys = seen
    others = [candidate_of(key) for key in keys]
    real = [middle(seen[key]) for key in keys]
    calibration, predicted = predict(scene, middle(seen[base]), others)
    print("coefficients " + ", ".join(f"{k} {v:.3g}" for k, v in calibration.coefficients.to_json().items()))
    print("residuals " + ", ".join(f"{k} {v:.1%}" for k, v in calibration.residuals.items()))
    print("largest distance of a repeat " + ", ".join(f"{n} {noise(seen, n):.1%}" for n in SHOWN) + "\n")
    held = table(others, predicted, real)
    if given.rounds:
        rounds(scene, seen, given.replays)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
