"""Seconds of `tuner lint` for each public command line, with a trace of more than a million requests.

    python -m benchmarks.lint.speed [--every N] [--rows N]

Every line is linted by a process of its own, against the busiest requests of one made-up trace. Lines whose
model is not known get the shape of a 7B model, so that they are simulated too. Printed: wall and processor
seconds, and the ratio of the latter to `python -c 'import tuner.cli'`, which a loaded machine disturbs less.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tuner.traffic import trace as traces

ROOT = Path(__file__).parents[2]
SHAPE = ROOT / "benchmarks" / "h100" / "qwen2.5-7b-shape" / "config.json"
AGAINST = ("--card", "h100-80", "--gpus", "8", "--slo", "ttft=500,tpot=50", "--fail-on", "never")
BLOCK = 512


def long_trace(path: Path, rows: int) -> None:
    """Two weeks with a daily rhythm, prompts that share their beginnings, all by one seed."""
    made = np.random.default_rng(26)
    second = np.sort(made.uniform(0, 14 * 86400, rows))
    shifted = second + 14400 * np.sin(2 * np.pi * second / 86400)
    inputs = np.clip(made.lognormal(7, 0.8, rows), 16, 8000).astype(np.int32)
    columns = {
        "arrival_s": np.sort(shifted),
        "input_len": inputs,
        "output_len": np.clip(made.lognormal(5, 0.8, rows), 1, 2000).astype(np.int32),
    }
    lengths = -(-inputs.astype(np.int64) // BLOCK)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    first = made.integers(0, 50, rows)
    ids = np.arange(offsets[-1]) + 50
    ids[offsets[:-1]] = first
    traces.write(traces.build(columns, blocks=(offsets, ids), block_size=BLOCK), path)


def timed(*words: str) -> tuple[float, float, str]:
    """(wall seconds, processor seconds, output) of a Python process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run((sys.executable, *words), capture_output=True, text=True, env=env, check=True)
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def quantiles(seconds: list[float]) -> str:
    return "median {:.2f}, worst {:.2f}".format(*np.quantile(seconds, (0.5, 1.0)))


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--every", type=int, default=1, help="lint every N-th line only")
    asked.add_argument("--rows", type=int, default=1_200_000, help="requests of the trace")
    args = asked.parse_args()
    table = (ROOT / "tests" / "data" / "lint" / "commands.tsv").read_text().splitlines()[1:]
    lines = [line.split("\t", 1)[1] for line in table][:: args.every]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TUNER_HOME"] = folder
        path = Path(folder) / "long.parquet"
        long_trace(path, args.rows)
        print(f"{args.rows:,} requests, {path.stat().st_size / 1e6:.0f} MB; load {os.getloadavg()[0]:.1f}")
        cli = min(timed("-c", "import tuner.cli")[1] for _ in range(5))
        rows = []
        for line in lines:
            words = ["-m", "tuner", "lint", f"vllm serve {line}", *AGAINST, "--trace", str(path)]
            wall, busy, said = timed(*words, "--hf-config", str(SHAPE))
            rows.append((wall, busy, "predicted for" in said))
            mark = "simulated" if rows[-1][2] else "-"
            print(f"{wall:6.2f} s wall {busy:6.2f} s processor  {mark:9}  {line[:60]}", flush=True)
        walls, worked = [row[0] for row in rows], [row[1] for row in rows]
        simulated = [row[1] for row in rows if row[2]]
        print(f"import tuner.cli: {cli:.2f} s processor; load {os.getloadavg()[0]:.1f}")
        print(f"{len(rows)} lines, wall s: {quantiles(walls)}")
        print(f"processor s: {quantiles(worked)}; {len(simulated)} simulated: {quantiles(simulated)}")
        print(f"ratio to import tuner.cli: {quantiles([each / cli for each in worked])}")


if __name__ == "__main__":
    main()
