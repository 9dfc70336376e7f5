"""How long single steps took on a real engine, from the times at which tokens arrived.

    tar xJf docs/results/h200/d-home.tar.xz -C HOME
    python -m benchmarks.steps HOME/trials/*/0000-*/*.parquet --budget 8192
    python -m benchmarks.steps HOME/trials/*/0001-*/*.parquet --budget 1024

Tokens that arrive together end one step. Its decodes are seen; its prompt tokens follow from each prompt's
first token and from the order of the prompts. A step without a graph keeps the host busy, so that the tokens
of the step before arrive late: both lengths are added, less a decode step of that time. Steps after other
prompts are left out. The last line fits
length = decode step + seconds per token × tokens + pairs × PAIR_S - constant.
"""

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

GAP_S = 0.006  # tokens of one step arrive within it; no step is shorter
CAPTURED = 512  # tokens of the largest step with a graph
EDGES_S = (12.0, 52.3)  # all running requests are in the file: those of the warm-up have ended
PAIR_S = 2.4e-9  # seconds of a query × key pair at 55 % of the card's speed, 64 layers of 5,120
BINS = (100, 200, 320, 512, 1000, 1100, 1200, 1500, 2000, 3000, 4500, 8193)
Floats = NDArray[np.float64]


def steps_of(rows: list[dict[str, Any]]) -> tuple[Floats, Floats, list[list[int]]]:
    """Each step's end, its decodes, and the rows whose prompt it ends."""
    tokens = sorted((at, row, n) for row, r in enumerate(rows) for n, at in enumerate(r["chunk_s"]))
    groups: list[list[tuple[float, int, int]]] = []
    for token in tokens:
        if not groups or token[0] - groups[-1][-1][0] > GAP_S or token[1] in {t[1] for t in groups[-1]}:
            groups.append([])
        groups[-1].append(token)
    ends = np.array([np.median([at for at, _, _ in group]) for group in groups])
    decodes = np.array([sum(n > 0 for _, _, n in group) for group in groups], float)
    return ends, decodes, [[row for _, row, n in group if n == 0] for group in groups]


def prompts_of(
    rows: list[dict[str, Any]], ends: Floats, used: Floats, firsts: list[list[int]], budget: int
) -> Floats:
    """Query × key pairs of each step; adds the prompts' tokens to `used`. A prompt fills the steps from its
    first one on. Where two first steps are possible, the one that fits the steps' lengths better is taken."""
    pairs, lengths = np.zeros(len(ends)), np.diff(ends, prepend=ends[0])
    for last, ended in enumerate(firsts):
        for row in sorted(ended, key=lambda row: float(rows[row]["sent_s"])):
            best: tuple[float, int, list[float]] = (np.inf, last, [float(rows[row]["input_tokens"])])
            for first in range(last, -1, -1):
                left, parts = float(rows[row]["input_tokens"]), []
                if ends[first] <= rows[row]["sent_s"]:
                    break
                for step in range(first, last + 1):
                    parts.append(min(left, budget - used[step]))
                    left -= parts[-1]
                if left == 0 and parts[-1] <= 0:
                    break
                filled = used[max(0, last - 12) : last + 1].copy()
                filled[len(filled) - len(parts) :] += parts[-len(filled) :]
                off = lengths[max(0, last - 12) : last + 1] - np.maximum(0.02, 0.013 + filled * 0.97e-4)
                best = min(best, (float(off @ off) if left == 0 else np.inf, first, parts))
            done = 0.0
            for step, part in zip(range(best[1], last + 1), best[2], strict=True):
                pairs[step] += part * done + part * part / 2
                used[step], done = used[step] + part, done + part
    return pairs


def isolated(path: Path, budget: int) -> list[tuple[float, float, float, float]]:
    """(tokens, seconds, seconds of a decode step around it, pairs) of every step with prompt tokens that
    follows a decode step."""
    rows = pq.read_table(path).to_pylist()
    ends, decodes, firsts = steps_of(rows)
    tokens = decodes.copy()
    pairs = prompts_of(rows, ends, tokens, firsts, budget)
    lengths, plain = np.diff(ends, prepend=ends[0]), tokens == decodes
    calm = plain & np.roll(plain, 1) & np.roll(plain, -1)
    found = []
    for step in np.flatnonzero(
        ~plain & np.roll(plain, 1) & (tokens <= budget) & (tokens >= BINS[0])
    ).tolist():
        near = np.arange(max(0, step - 20), min(len(ends), step + 20))
        near = near[calm[near] & (abs(decodes[near] - decodes[step - 1]) < 6)]
        hidden = tokens[step] <= CAPTURED and step + 1 < len(ends) and tokens[step + 1] > CAPTURED
        if not EDGES_S[0] < ends[step] < EDGES_S[1] or len(near) < 6 or hidden:
            continue
        usual = float(np.median(lengths[near]))
        late = lengths[step - 1] - usual if tokens[step] > CAPTURED else 0.0
        found.append((tokens[step], lengths[step] + late, usual, pairs[step]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("outcomes", type=Path, nargs="+")
    parser.add_argument("--budget", type=int, required=True, help="max_num_batched_tokens of the engine")
    given = parser.parse_args()
    seen = np.array([step for path in given.outcomes for step in isolated(path, given.budget)])
    tokens, seconds, usual, pairs = seen.T
    for low, high in pairwise(BINS):
        if (inside := (tokens >= low) & (tokens < high)).any():
            ms = np.percentile(1e3 * seconds[inside], (10, 50, 90)).round(1)
            print(f"{inside.sum():4} steps of {tokens[inside].mean():6.0f} tokens: p10, p50, p90 {ms} ms")
    kept, grown = tokens >= 200, seconds - usual - pairs * PAIR_S
    for _ in range(6):
        shape = np.stack([tokens, -np.ones(len(tokens))], 1) / (0.003 + 0.03 * seconds)[:, None]
        wanted = grown / (0.003 + 0.03 * seconds)
        line = np.linalg.lstsq(shape[kept], wanted[kept], rcond=None)[0]
        off = abs(shape @ line - wanted)
        kept &= off < 4 * np.median(off[kept])
    print(f"{kept.sum()} steps: {1e3 * line[0]:.4f} ms a token, less {1e3 * line[1]:.1f} ms")


if __name__ == "__main__":
    main()
