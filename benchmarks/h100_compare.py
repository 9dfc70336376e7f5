"""Two configurations from the request files of their launches, compared as a confirmation does it.

    python -m benchmarks.h100_compare STUDY.yaml --base A0.parquet A1.parquet --other B0.parquet B1.parquet

The files lie in a history's trials/ (`search-0-….parquet`, `confirm-1-….parquet`), in order of launches:
file r of one side is paired with file r of the other. For confirmations that were cut before a verdict.
"""

import argparse
from pathlib import Path

import yaml

from tuner.records import Outcome, Slo
from tuner.replay import outcomes
from tuner.search.compare import compare, pooled_noise
from tuner.tuning.verdict import words


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
        noise, freedom = pooled_noise([base, other], metric, slo=slo)
        told = {"noise": noise, "freedom": freedom or None}
        found = compare(base, other, metric, slo=slo, family=len(metrics), **told)  # type: ignore[arg-type]
        print(f"| {found.base:.5g} | {found.other:.5g} | {words(found)} |")


if __name__ == "__main__":
    main()
