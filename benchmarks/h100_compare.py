"""Two configurations from the request files of their launches, compared as a confirmation does it.

    python -m benchmarks.h100_compare STUDY.yaml --base A0.parquet A1.parquet --other B0.parquet B1.parquet

The files lie in a history's trials/ (`search-0-….parquet`, `confirm-1-….parquet`), in order of launches:
file r of one side is paired with file r of the other. For confirmations that were cut before a verdict.
"""

import argparse
import math
from pathlib import Path

import yaml

from tuner.metrics import fold
from tuner.records import Outcome, Slo
from tuner.replay import outcomes
from tuner.tuning.significance import compare, spread_of


def passes(paths: list[Path]) -> list[dict[str, list[Outcome]]]:
    """One mapping slice → outcomes per launch."""
    return [{"slice": outcomes.read(path)} for path in paths]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--base", type=Path, nargs="+", required=True)
    parser.add_argument("--other", type=Path, nargs="+", required=True)
    given = parser.parse_args()
    study = yaml.safe_load(given.study.read_text())
    metrics, slo = study["objectives"], Slo(**study["slo"])
    base, other = passes(given.base), passes(given.other)
    print("| base | other | change |")
    print("|--:|--:|---|")
    for metric in metrics:
        spread = spread_of(
            [[fold(each["slice"], 1.0, slo, metrics)[metric] for each in side] for side in (base, other)]
        )
        found = compare(base, other, metric, slo=slo, family=len(metrics), spread=spread)
        low, high = (f"{100 * math.expm1(v):+.0f}" for v in (found.low, found.high))
        told = f"{metric} {100 * found.change:+.0f} % ({low} … {high}, {found.word})"
        print(f"| {found.base:.5g} | {found.other:.5g} | {told} |")


if __name__ == "__main__":
    main()
