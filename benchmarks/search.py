"""The search against its rivals, in virtual time, each charged the GPU-seconds that its trials would take.

    python benchmarks/search.py --traces DIR --cache DIR run [--truths A B C] [--seeds 10] [--methods …]
    python benchmarks/search.py --traces DIR --cache DIR table [--truths …] [--methods …]
    python benchmarks/search.py --cache DIR real [--seeds 20] [--rows FILE]

DIR holds AzureLLMInferenceTrace_conv.csv, AzureLLMInferenceTrace_code.csv, mooncake_conversation_trace.jsonl.
`run` works off what is missing in the cache, at most --minutes, and can be called again; with --part K/N,
every N-th scenario from the K-th on: several processes share the work. docs/search.md explains the numbers.
`real` does the same on the measured tables (benchmarks/table), and prints their numbers when all is done.
"""

import argparse
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import optuna
from search_bench import GOALS, Bench
from search_methods import ABLATION, LIVE, METHODS, RIVALS, SABOTAGE, digest
from search_table import TABLES, TableWorld
from search_truth import CARD_NAMES, TRACES, World

from tuner.records import JSON

HELD_OUT = ("B", "C")
BUDGET = 7200.0
"""GPU-seconds that every study may spend; who has not arrived is charged them."""
EASY = 0.3
"""Scenarios of which the default alone covers more of the best volume are left out: there is little to find.
"""
GOAL, DRAWS = "hv90", 10_000

REAL = ("ours", *RIVALS, *LIVE, "without simulator", "shuffled")
"""Methods on the measured tables."""
REAL_GOALS = ("any80", "any90", "hv80", "hv90", "pick")

Place = tuple[str, str, str]


def places(truths: Sequence[str]) -> list[Place]:
    """(trace, card, truth) of every scenario."""
    return [(trace, card, truth) for truth in truths for trace in TRACES for card in CARD_NAMES]


def one(world: World, seed: int, method: str, goals: Sequence[str] = GOALS) -> dict[str, JSON]:
    """One study: its scores, what was paid for until most of the front was found, and our own seconds."""
    bench = Bench(world=world, seed=seed, budget=BUDGET, goals=goals)
    begun = time.process_time()
    METHODS[method](bench)
    return {
        "method": method, "scenario": world.name, "seed": seed,
        **{goal: bench.onlooker.reached[goal] for goal in goals}, "spent": bench.spent,
        "trials": len(bench.trials), "failed": bench.failed, "own_s": time.process_time() - begun,
        "false_winner": bench.onlooker.false_winner(), "on": dict(bench.on),
        "default_share": bench.onlooker.default_share,
    }  # fmt: skip


def run(asked: argparse.Namespace) -> None:
    """Work off what is missing, scenario by scenario, so that predictions are shared."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    end = time.monotonic() + 60 * asked.minutes
    part, parts = map(int, asked.part.split("/"))
    kept = Kept(asked.cache, part)
    for place in places(asked.truths)[part - 1 :: parts]:
        missing = [
            (seed, method)
            for seed in range(asked.seeds)
            for method in asked.methods or [m for m in METHODS if m not in LIVE]
            if not (method in ABLATION and seed >= asked.ablation_seeds) and (place, seed, method) not in kept
        ]
        world: World | None = None
        for seed, method in missing:
            if time.monotonic() > end:
                print("to be continued")
                return
            if world is None:
                world = World(place, asked.traces, asked.cache)
                gc.freeze()  # a world is large and stays: collections need not look at it
                if why_not := _too_easy(world):
                    print(f"left out: {world.name}: {why_not}", flush=True)
                    break
            kept.add(place, seed, one(world, seed, method))


def _too_easy(world: World) -> str | None:
    """Why a scenario does not count; None: it counts."""
    if not world.serves:
        return "its defaults do not serve the traffic"
    share = Bench(world=world, seed=0, budget=BUDGET).onlooker.default_share
    return _why_not(share) if share is None or share > EASY else None


def real(asked: argparse.Namespace) -> None:
    """Work off what is missing on the measured tables that count; then write --rows and print."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    end = time.monotonic() + 60 * asked.minutes
    kept, digests, methods = Kept(asked.cache), list[str](), asked.methods or REAL
    for name in TABLES:
        world = TableWorld(name, asked.cache)
        if why_not := _too_easy(world):
            print(f"left out: {name}: {why_not}")
            continue
        place = ("table", name, world.digest)
        digests.append(world.digest)
        for seed in range(asked.seeds):
            for method in methods:
                if (place, seed, method) in kept:
                    continue
                if time.monotonic() > end:
                    print("to be continued")
                    return
                kept.add(place, seed, one(world, seed, method, REAL_GOALS))
    found = [row for row in Kept(asked.cache).of(digests) if row["seed"] < asked.seeds]
    if asked.rows:
        short = (json.loads(json.dumps(row), parse_float=lambda text: round(float(text), 2)) for row in found)
        asked.rows.write_text("".join(json.dumps(row) + "\n" for row in short))
    for name in dict.fromkeys(row["scenario"] for row in found):
        its = [row for row in found if row["scenario"] == name]
        print(f"\n{name}: the default alone covers {its[0]['default_share']:.0%}\n")
        print("\n".join(table(its, methods, REAL_GOALS)))
        print("\n".join(real_protocol(its)))
        print("spent by ours:", spending(its))


class Kept:
    """Rows of finished studies, one JSON line each, by the code that they were made with."""

    def __init__(self, folder: Path, part: int = 1) -> None:
        self._path = folder / f"rows-{part}.jsonl"
        self._code = {method: digest(method) for method in METHODS}
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


def table(
    rows: Sequence[Mapping[str, JSON]], methods: Sequence[str], goals: Sequence[str] = GOALS
) -> Iterator[str]:
    """GPU-seconds per goal, median [quartiles] (who never arrives is charged the budget), and who arrived.

    Every scenario counts alike, also one of which seeds are missing.
    """
    yield "| method | studies | " + " | ".join(goals) + " | failed launches | false winners | own s |"
    yield "|---" * (len(goals) + 5) + "|"
    for method in methods:
        mine = [r for r in rows if r["method"] == method]
        if len(mine) < 2:
            continue
        cells = [_cell(mine, goal) for goal in goals]
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


def valid(rows: Sequence[Mapping[str, JSON]]) -> tuple[list[Mapping[str, JSON]], dict[str, str]]:
    """(rows of the scenarios that count, the others by name with the rule that leaves them out)."""
    out: dict[str, str] = {}
    for row in rows:
        share = None if row["default_share"] is None else float(str(row["default_share"]))
        if share is None or share > EASY:
            out[str(row["scenario"])] = _why_not(share)
    return [r for r in rows if r["scenario"] not in out], out


def _why_not(share: float | None) -> str:
    """Why a scenario does not count, by the share of the best volume that its default alone covers."""
    return "nothing passes" if share is None else f"the default alone covers {share:.0%}"


def against_the_best(
    rows: Sequence[Mapping[str, JSON]], rivals: Sequence[str], mine: str = "ours"
) -> dict[str, float]:
    """By scenario: median GPU-seconds to GOAL of `mine` over those of its best rival, chosen on the even
    seeds and judged on the odd ones; on all seeds where there is one kind only.
    """
    by: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        place = by.setdefault(str(row["scenario"]), {}).setdefault(str(row["method"]), {})
        place[int(str(row["seed"]))] = _spent(row, GOAL)
    found = {}
    for scenario, methods in by.items():
        others = {m: seeds for m, seeds in methods.items() if m in rivals}
        if mine not in methods or not others:
            continue
        chosen = {
            m: [s for n, s in seeds.items() if n % 2 == 0] or list(seeds.values())
            for m, seeds in others.items()
        }
        best = min(others, key=lambda m: statistics.median(chosen[m]))
        judged = [s for n, s in others[best].items() if n % 2] or list(others[best].values())
        ours = statistics.median(methods[mine].values())
        found[scenario] = ours / max(statistics.median(judged), 1.0)
    return found


def interval(ratios_: Mapping[str, float]) -> tuple[float, float, float]:
    """(median over scenarios, and its 90 % interval by bootstrap over scenarios)."""
    values = np.array(list(ratios_.values()))
    rng = np.random.default_rng(0)
    drawn = np.median(values[rng.integers(len(values), size=(DRAWS, len(values)))], axis=1)
    low, high = np.quantile(drawn, [0.05, 0.95])
    return float(np.median(values)), float(low), float(high)


def protocol(rows: Sequence[Mapping[str, JSON]]) -> Iterator[str]:
    """Ours against the best rival of each scenario, and a wrong simulator against none."""
    kept, out = valid(rows)
    for name, why in sorted(out.items()):
        yield f"left out: {name}: {why}"
    pairs = [("ours", list(RIVALS), "the best rival"), ("ours", ["TPE"], "TPE with constraints")]
    pairs += [(m, ["without simulator"], "the search without a simulator") for m in SABOTAGE]
    for mine, rivals, title in pairs:
        found = against_the_best(kept, rivals, mine)
        if not found:
            continue
        middle, low, high = interval(found)
        seeds = Counter(str(r["scenario"]) for r in kept if r["method"] == mine).values()
        yield f"{mine} against {title}, GPU-seconds to {GOAL}: {middle:.2f} [{low:.2f}, {high:.2f}]"
        counted = f"{len(found)} scenarios of {min(seeds)} to {max(seeds)} seeds"
        yield f"  {counted}; worst {max(found.values()):.2f}"


def over_seeds(
    rows: Sequence[Mapping[str, JSON]], rivals: Sequence[str], mine: str, goal: str
) -> tuple[float, float, float, str]:
    """Of one scenario: (`against_the_best`, its 90 % interval by bootstrap over seeds, the best rival). Each
    draw chooses the best rival anew.
    """
    paid = {
        m: np.array(
            [_spent(r, goal) for r in sorted(rows, key=lambda r: int(str(r["seed"]))) if r["method"] == m]
        )
        for m in (mine, *rivals)
    }
    rng = np.random.default_rng(0)

    def drawn(values: np.ndarray) -> np.ndarray:
        picks = rng.integers(len(values), size=(DRAWS, len(values)))
        return np.median(np.vstack([values, values[picks]]), axis=1)  # the first is no draw

    chosen = np.array([drawn(paid[m][::2]) for m in rivals])
    judged = np.array([drawn(paid[m][1::2]) for m in rivals])
    best = chosen.argmin(axis=0)
    found = drawn(paid[mine]) / np.maximum(judged[best, np.arange(DRAWS + 1)], 1.0)
    low, high = np.quantile(found[1:], [0.05, 0.95])
    return float(found[0]), float(low), float(high), rivals[int(best[0])]


def real_protocol(rows: Sequence[Mapping[str, JSON]]) -> Iterator[str]:
    """Ours and its sabotage on one measured table."""
    known, everyone = {str(row["method"]) for row in rows}, [*RIVALS, *LIVE]
    pairs = [("ours", everyone), ("ours", ["TPE"]), ("without simulator", everyone)]
    for goal in (GOAL, "any90"):
        for mine, rivals in [*pairs, ("shuffled", ["without simulator"])]:
            there = [rival for rival in rivals if rival in known]
            if mine in known and there:
                middle, low, high, best = over_seeds(rows, there, mine, goal)
                yield f"{mine} / {best}, GPU-seconds to {goal}: {middle:.2f} [{low:.2f}, {high:.2f}]"


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
    parser.add_argument("do", choices=("run", "table", "real"))
    parser.add_argument("--traces", type=Path, help="folder of the three traces")
    parser.add_argument("--cache", type=Path, required=True, help="keeps tables and finished studies")
    parser.add_argument("--truths", nargs="*", default=["A", *HELD_OUT])
    parser.add_argument("--seeds", type=int, help="10, on the measured tables 20")
    parser.add_argument("--ablation-seeds", type=int, default=3)
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N shares of the scenarios")
    parser.add_argument("--minutes", type=float, default=3.0, help="`run` begins no study after so many")
    parser.add_argument("--methods", nargs="*", help="all that belong there, if not given")
    parser.add_argument("--rows", type=Path, help="`real` writes its studies here, a line each")
    asked = parser.parse_args()
    asked.seeds = asked.seeds or (20 if asked.do == "real" else 10)
    asked.cache.mkdir(parents=True, exist_ok=True)
    if asked.do == "real":
        real(asked)
        return
    if asked.traces is None:
        parser.error(f"{asked.do} needs --traces")
    if asked.do == "run":
        run(asked)
        return
    rows = Kept(asked.cache).of(asked.truths)
    print("\n".join(table(rows, asked.methods or list(METHODS))))
    if not rows:
        print("nothing was run with this code yet")
        return
    print("\n".join(ratios(rows, "TPE")))
    print("\n".join(protocol(rows)))
    print("spent by ours:", spending(rows))


if __name__ == "__main__":
    main()
