"""The search against its rivals, in virtual time, each charged the GPU-seconds that its trials would take.

    python benchmarks/search.py --traces DIR --cache DIR run [--truths A B C] [--seeds 10] [--methods …]
    python benchmarks/search.py --traces DIR --cache DIR table [--truths …] [--methods …]

DIR holds AzureLLMInferenceTrace_conv.csv, AzureLLMInferenceTrace_code.csv, mooncake_conversation_trace.jsonl.
`run` works off what is missing in the cache, at most --minutes, and can be called again; with --part K/N,
every N-th scenario from the K-th on: several processes share the work. docs/search.md explains the numbers.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import optuna
from search_bench import GOALS, Bench
from search_methods import ABLATION, METHODS, digest
from search_truth import CARD_NAMES, TRACES, World

from tuner.records import JSON

HELD_OUT = ("B", "C")
BUDGET, OURS = 7200.0, 1500.0
"""GPU-seconds a study; ours is stopped at the second, and charged the first where it has not arrived."""

Place = tuple[str, str, str]


def places(truths: Sequence[str]) -> list[Place]:
    """(trace, card, truth) of every scenario."""
    return [(trace, card, truth) for truth in truths for trace in TRACES for card in CARD_NAMES]


def one(world: World, seed: int, method: str) -> dict[str, JSON]:
    """One study: its scores, what was paid for until most of the front was found, and our own seconds."""
    mine = method == "ours" or method in ABLATION
    bench = Bench(world=world, seed=seed, budget=OURS if mine else BUDGET)
    begun = time.process_time()
    {**METHODS, **ABLATION}[method](bench)
    return {
        "method": method, "scenario": world.name, "seed": seed,
        **bench.onlooker.reached, "spent": bench.spent,
        "trials": len(bench.trials), "failed": bench.failed, "own_s": time.process_time() - begun,
        "false_winner": bench.onlooker.false_winner(), "on": dict(bench.on),
    }  # fmt: skip


def run(asked: argparse.Namespace) -> None:
    """Work off what is missing, scenario by scenario, so that predictions are shared."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    end = time.monotonic() + 60 * asked.minutes
    part, parts = map(int, asked.part.split("/"))
    kept = Kept(asked.cache, part)
    for place in places(asked.truths)[part - 1 :: parts]:
        world: World | None = None
        for seed in range(asked.seeds):
            for method in asked.methods:
                if method in ABLATION and seed >= asked.ablation_seeds:
                    continue
                if (place, seed, method) in kept:
                    continue
                if time.monotonic() > end:
                    print("to be continued")
                    return
                world = world or World(place, asked.traces, asked.cache)
                if not world.serves:
                    continue
                kept.add(place, seed, one(world, seed, method))


class Kept:
    """Rows of finished studies, one JSON line each, by the code that they were made with."""

    def __init__(self, folder: Path, part: int = 1) -> None:
        self._path = folder / f"rows-{part}.jsonl"
        self._code = {method: digest(method) for method in (*METHODS, *ABLATION)}
        lines = [
            line for path in sorted(folder.glob("rows-*.jsonl")) for line in path.read_text().splitlines()
        ]
        self._rows = {tuple(k): row for k, row in map(json.loads, lines)}

    def _key(self, place: Place, seed: int, method: str) -> tuple[JSON, ...]:
        return (*place, seed, method, self._code[method])

    def __contains__(self, key: tuple[Place, int, str]) -> bool:
        return self._key(*key) in self._rows

    def add(self, place: Place, seed: int, row: Mapping[str, JSON]) -> None:
        key = self._key(place, seed, str(row["method"]))
        with self._path.open("a") as file:
            file.write(json.dumps([key, row]) + "\n")

    def of(self, truths: Sequence[str]) -> list[Mapping[str, JSON]]:
        return [r for k, r in self._rows.items() if k[2] in truths and k[5] == self._code.get(k[4])]


def table(rows: Sequence[Mapping[str, JSON]], methods: Sequence[str]) -> Iterator[str]:
    """GPU-seconds per goal, median [quartiles] (who never arrives is charged the budget), and who arrived.

    Every scenario counts alike, also one of which seeds are missing.
    """
    yield "| method | studies | " + " | ".join(GOALS) + " | failed launches | false winners | own s |"
    yield "|---" * (len(GOALS) + 5) + "|"
    for method in methods:
        mine = [r for r in rows if r["method"] == method]
        if len(mine) < 2:
            continue
        cells = [_cell(mine, goal) for goal in GOALS]
        failed = statistics.mean(float(str(r["failed"])) for r in mine)
        false = sum(bool(r["false_winner"]) for r in mine)
        own = statistics.median(float(str(r["own_s"])) for r in mine)
        yield f"| {method} | {len(mine)} | " + " | ".join(cells) + f" | {failed:.1f} | {false} | {own:.1f} |"


def _cell(rows: Sequence[Mapping[str, JSON]], goal: str) -> str:
    low, middle, high = (quantile(rows, goal, share) for share in (0.25, 0.5, 0.75))
    weights = _weights(rows)
    arrived = sum(w for r, w in zip(rows, weights, strict=True) if r[goal] is not None) / sum(weights)
    return f"{middle:.0f} [{low:.0f}–{high:.0f}] {arrived:.0%}"


def _weights(rows: Sequence[Mapping[str, JSON]]) -> list[float]:
    """Of each study, so that every scenario has the same."""
    many = Counter(row["scenario"] for row in rows)
    return [1 / many[row["scenario"]] for row in rows]


def _spent(row: Mapping[str, JSON], goal: str) -> float:
    return BUDGET if row[goal] is None else float(str(row[goal]))


def quantile(rows: Sequence[Mapping[str, JSON]], goal: str, share: float) -> float:
    """GPU-seconds within which that share of the studies arrived, every scenario counted alike."""
    ordered = sorted((_spent(r, goal), w) for r, w in zip(rows, _weights(rows), strict=True))
    total = sum(w for _, w in ordered)
    reached = accumulate(w for _, w in ordered)
    return next(s for (s, _), w in zip(ordered, reached, strict=True) if w >= share * total - 1e-9)


def ratios(rows: Sequence[Mapping[str, JSON]], rival: str) -> Iterator[str]:
    """Ours to a rival: of the medians over all studies, and the median over scenarios of such ratios."""
    for goal in GOALS:
        by: dict[str, dict[str, list[Mapping[str, JSON]]]] = {}
        for row in rows:
            if row["method"] in ("ours", rival):
                by.setdefault(str(row["scenario"]), {}).setdefault(str(row["method"]), []).append(row)
        both = [each for each in by.values() if len(each) == 2]
        if not both:
            return
        middle = {m: quantile([r for each in both for r in each[m]], goal, 0.5) for m in ("ours", rival)}
        medians = [{m: statistics.median(_spent(r, goal) for r in e[m]) for m in e} for e in both]
        each_ = [m["ours"] / max(m[rival], 1.0) for m in medians]
        listed = ", ".join(f"{r:.2f}" for r in each_)
        yield (
            f"{goal}: {middle['ours'] / max(middle[rival], 1.0):.2f} of the medians,"
            f" {statistics.median(each_):.2f} the median scenario ({listed})"
        )


def spending(rows: Sequence[Mapping[str, JSON]]) -> str:
    """Mean GPU-seconds of ours until `any90` (or the end), by what they went to."""
    mine = [r["on"] for r in rows if r["method"] == "ours"]
    names = sorted({n for on in mine if isinstance(on, dict) for n in on})
    paid = {n: [float(str(on.get(n, 0.0))) for on in mine if isinstance(on, dict)] for n in names}
    means = {name: statistics.mean(each) for name, each in paid.items()}
    return ", ".join(f"{name} {mean:.0f}" for name, mean in means.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=("run", "table"))
    parser.add_argument("--traces", type=Path, required=True, help="folder of the three traces")
    parser.add_argument("--cache", type=Path, required=True, help="keeps tables and finished studies")
    parser.add_argument("--truths", nargs="*", default=["A", *HELD_OUT])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--ablation-seeds", type=int, default=3)
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N shares of the scenarios")
    parser.add_argument("--minutes", type=float, default=3.0, help="`run` begins no study after so many")
    parser.add_argument("--methods", nargs="*", default=[*METHODS, *ABLATION])
    asked = parser.parse_args()
    asked.cache.mkdir(parents=True, exist_ok=True)
    if asked.do == "run":
        run(asked)
        return
    rows = Kept(asked.cache).of(asked.truths)
    print("\n".join(table(rows, asked.methods)))
    print("\n".join(ratios(rows, "TPE, constraints")))
    print("spent by ours:", spending(rows))


if __name__ == "__main__":
    main()
