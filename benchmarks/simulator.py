"""Predictions against measurements: calibrate on one row of measured candidates, predict the others.

    python -m benchmarks.simulator ROWS... [--traffic SLICE.csv] [--model M] [--card C] [--on "1024 8192 0"]
    python -m benchmarks.simulator benchmarks/h100/live_limits.jsonl benchmarks/h100/graphs.jsonl
    python -m benchmarks.simulator benchmarks/table/h200-7b --card h200 --on {}
    python -m benchmarks.simulator benchmarks/table/h200-7b{,-two-cards} --card h200 --on {}

ROWS is a folder of benchmarks/table, or a file with a row a line: {"label": "max_num_seqs
max_num_batched_tokens long_prefill_token_threshold ANY xSPEED", "n": requests sent, "ttft"|"tpot"|"e2e":
{"50": ms, "95": ms}}, and "capture": the largest captured graph (512). The traffic: a CSV with arrival_s,
prompt_tokens and output_tokens. The targets are those of docs/simulator.md; exit code 1 when one is missed.
"""

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml

from benchmarks.table import load
from tuner.knobs.arguments import GRAPHS
from tuner.knobs.model import read
from tuner.records import Candidate, Slice
from tuner.replay.plan import Plan
from tuner.simulator.calibrate import Calibration, Observation, fit
from tuner.simulator.cost import card_of, preset
from tuner.simulator.predict import UNCALIBRATED, Predictor, Scene
from tuner.traffic.trace import Trace, build

BARE = Plan(
    name="bare",
    slices=1,
    slice_s=0.0,
    repeats=1,
    most_repeats=1,
    warmup_waves=0,
    warmup_requests=0,
    warmup_limit_s=0.0,
    warmup_tokens=0,
    priming_turnovers=0.0,
    priming_limit_s=0.0,
    load_warmup_s=0.0,
    tail_limit_s=0.0,
)
FILLED = replace(BARE, tail_limit_s=180.0)
"""The rows of a table: requests go on arriving until the last one that counts is answered."""
SHOWN = ("ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms")
KINDS = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured candidate."""

    knobs: str
    speed: float
    count: int
    candidate: Candidate
    values: dict[str, float]
    model: str | None = None
    plan: Plan = BARE

    @property
    def gpus(self) -> int:
        """The cards that its engine holds."""
        sizes = [self.candidate.get(f"{kind}_parallel_size") or 1 for kind in ("tensor", "data")]
        return int(sizes[0]) * int(sizes[1])


def table_rows(folder: Path) -> list[Row]:
    """What a table has complete. A screened row has the graphs of the engine that it was screened in."""
    found, plan = [], yaml.safe_load(folder.with_suffix(".yaml").read_text())
    for row in load.rows(folder.name, folder.parent):
        if row["state"] == "COMPLETE":
            knobs = " ".join(f"{name}={value}" for name, value in row["knobs"].items()) or "{}"
            captured = {GRAPHS: row["effective"][GRAPHS]}
            values = {n: v for n, v in row.items() if n.partition("_")[0] in KINDS and v is not None}
            found.append(
                Row(
                    knobs=f"{row['how'][0]} {knobs}" if knobs != "{}" else knobs,
                    speed=float(plan["speed"]),
                    model=str(folder.parent / plan["model"]),
                    count=int(row["requests"]),
                    candidate=Candidate({**row["knobs"], **captured}),
                    values=values,
                    plan=FILLED,
                )
            )
    return found


def rows_of(path: Path) -> list[Row]:
    if path.is_dir():
        return table_rows(path)
    found = []
    for line in path.read_text().splitlines():
        raw = json.loads(line)
        words = raw["label"].split()
        found.append(
            Row(
                knobs=" ".join(words[:3]),
                speed=float(words[-1].lstrip("x")),
                count=int(raw["n"]),
                candidate=_candidate(*map(int, words[:3])).with_values(**{GRAPHS: raw.get("capture", 512)}),
                values={
                    f"{kind}_p{share}_ms": value
                    for kind in ("ttft", "tpot", "e2e")
                    for share, value in raw[kind].items()
                },
            )
        )
    return found


def _candidate(seqs: int, tokens: int, threshold: int) -> Candidate:
    """Limits changed in a running engine may hold more sequences than tokens; a launch may not."""
    return Candidate(
        {
            "max_num_seqs": min(seqs, tokens),
            "max_num_batched_tokens": tokens,
            "long_prefill_token_threshold": threshold,
        }
    )


def trace_of(path: Path, count: int) -> Trace:
    with path.open() as file:
        rows = [row for _, row in zip(range(count), csv.DictReader(file), strict=False)]
    return build(
        {
            "arrival_s": [float(row["arrival_s"]) for row in rows],
            "input_len": [int(row["prompt_tokens"]) for row in rows],
            "output_len": [int(row["output_tokens"]) for row in rows],
        }
    )


def scene_of(arguments: argparse.Namespace, row: Row) -> Scene:
    trace = trace_of(Path(arguments.traffic), row.count)
    whole = Slice(name="all", start_s=0.0, duration_s=trace.duration_s + 1e-3)
    return Scene(
        trace=trace,
        slices=(whole,),
        facts=read(row.model or arguments.model, env={}),
        card=card_of(arguments.card),
        plan=row.plan,
        deadline_s=row.plan.tail_limit_s or None,
        speed=row.speed,
        args={"max_model_len": arguments.max_model_len},
        cut=False,
        gpus=row.gpus,
    )


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


@dataclass(slots=True)
class Table:
    """Predicted beside measured, and what they come to."""

    lines: list[tuple[Row, dict[str, float], dict[str, float], float]]

    def print(self) -> None:
        print(f"{'candidate':>16} {'x':>4}  " + "  ".join(f"{name[:8]:>22}" for name in SHOWN) + "      s")
        for row, predicted, _, seconds in self.lines:
            cells = [
                f"{predicted[n]:8.1f}/{row.values[n]:8.1f} {predicted[n] / row.values[n] - 1:+5.0%}"
                for n in SHOWN
            ]
            print(f"{row.knobs:>16} {row.speed:4g}  " + "  ".join(cells) + f"  {seconds:5.2f}")

    def measured(self, row: Row, name: str, predicted: float) -> float:
        """What was measured; of a configuration with several rows, the nearest point of their range."""
        same = [
            r.values[name] for r, *_ in self.lines if (r.candidate, r.speed) == (row.candidate, row.speed)
        ]
        return min(max(predicted, min(same)), max(same))

    def pairs(self, name: str) -> list[tuple[float, float]]:
        """(predicted, measured) of every row."""
        return [(p[name], self.measured(row, name, p[name])) for row, p, _, _ in self.lines]

    def errors(self, name: str) -> list[float]:
        return [abs(p / m - 1) for p, m in self.pairs(name)]

    def verdicts(self) -> list[tuple[str, bool]]:
        found = []
        for name in ("tpot_p95_ms", "e2e_p95_ms"):
            errors = self.errors(name)
            middle, worst = float(np.median(errors)), max(errors)
            found.append((f"{name}: median {middle:.1%} (≤ 5 %)", middle <= 0.05))
            found.append((f"{name}: worst {worst:.1%} (≤ 15 %)", worst <= 0.15))
        pairs = self.pairs("ttft_p95_ms")
        light = [abs(p - m) for p, m in pairs if m < 1000]
        heavy = [(p, m) for p, m in pairs if m >= 1000]
        if light:
            worst = max(light)
            found.append((f"ttft_p95_ms below 1 s: worst {worst:.0f} ms off (≤ 100 ms)", worst <= 100))
        if len(heavy) > 1:
            middle = float(np.median([abs(p / m - 1) for p, m in heavy]))
            rank = spearman([p for p, _ in heavy], [m for _, m in heavy])
            found.append((f"ttft_p95_ms saturated: median {middle:.1%} (≤ 25 %)", middle <= 0.25))
            found.append((f"ttft_p95_ms saturated: rank correlation {rank:.2f} (≥ 0.9)", rank >= 0.9))
        return found

    def coverage(self, spreads: float) -> float:
        """Share of the shown values that lie within so many predicted spreads."""
        inside = [
            abs(np.log(p[n] / self.measured(row, n, p[n]))) <= spreads * s[n]
            for row, p, s, _ in self.lines
            for n in SHOWN
        ]
        return float(np.mean(inside))


def predict_rows(
    arguments: argparse.Namespace, rows: Sequence[Row], calibration: Calibration | None
) -> Table:
    lines = []
    for row in rows:
        scene = scene_of(arguments, row)
        coefficients = calibration.coefficients if calibration else preset(scene.card)
        error = calibration.error if calibration else UNCALIBRATED
        predictor = Predictor(scene, coefficients, error=error)
        started = time.perf_counter()
        (prediction,) = predictor([row.candidate])
        lines.append((row, dict(prediction.values), dict(prediction.spread), time.perf_counter() - started))
    return Table(lines)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--traffic", type=Path, default=Path("benchmarks/table/conversation.csv"))
    parser.add_argument("--model", default="Qwen/Qwen2.5-7B-Instruct")
    parser.add_argument("--card", default="h100-80")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--on", default="1024 8192 0", help="the row to calibrate on")
    parser.add_argument("--uncalibrated", action="store_true")
    return parser.parse_args(words)


def run(given: argparse.Namespace) -> Table | None:
    """Calibrate and predict; None when the row to calibrate on is not in the file."""
    rows = [row for path in given.rows for row in rows_of(path)]
    base = next((row for row in rows if row.knobs == given.on), None)
    if base is None:
        return None
    calibration = None
    if not given.uncalibrated:
        started = time.perf_counter()
        seen = Observation(candidate=base.candidate, values=base.values)
        calibration = fit(scene_of(given, base), [seen])
        seconds = time.perf_counter() - started
        print(f"calibrated on '{base.knobs}' in {seconds:.1f} s, {calibration.rounds} rounds")
        print("  " + ", ".join(f"{k} {v:.4g}" for k, v in calibration.coefficients.to_json().items()))
        print("  residuals " + ", ".join(f"{k} {v:.1%}" for k, v in calibration.residuals.items()))
    return predict_rows(given, [row for row in rows if row is not base], calibration)


def main() -> int:
    given = arguments()
    table = run(given)
    if table is None:
        print(f"no row '{given.on}' in {given.rows}", file=sys.stderr)
        return 2
    table.print()
    print(f"within one predicted spread: {table.coverage(1):.0%}, within two: {table.coverage(2):.0%}")
    verdicts = table.verdicts()
    for words, held in verdicts:
        print(("  ok    " if held else "  MISSED ") + words)
    return 0 if all(held for _, held in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
