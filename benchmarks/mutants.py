"""Mutation testing: small faults are put into a room's code, one at a time, and its tests must fail.

    python -m benchmarks.mutants search [--count 200] [--seed 1] [--seconds 3600] [-o FILE]

A mutant changes one place: a comparison, an arithmetic or boolean operator, a number, a condition, or what is
returned. Places are drawn from the seed. Each mutant runs the room's tests in a copy of the tree until the
first failure; one that fails none has survived and is printed, to be read. Prints and writes the share.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"search": ("tests/search",), "tuning": ("tests/tuning",), "history": ("tests/history",)}
CARRIED = (
    "tuner",
    "tests",
    "search_spaces",
    "migrations",
    "docs",
    "benchmarks",
    "deploy",
    "README.md",
    "pyproject.toml",
)
COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div}


@dataclass(frozen=True)
class Mutant:
    """One changed place: the file below the tree, its line, what stood there, what stands there now."""

    path: str
    line: int
    before: str
    after: str
    source: str


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """What a node may become; nothing for nodes that are left as they are."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield ast.Compare(node.left, [COMPARED[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        yield ast.BinOp(node.left, COMPUTED[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield ast.Return(ast.Constant(None))


def mutants(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    text = path.read_text()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for other in changed(node):
            start, end = _place(text, node)
            made = f"({ast.unparse(other)})" if isinstance(other, ast.expr) else ast.unparse(other)
            source = text.encode()[:start].decode() + made + text.encode()[end:].decode()
            before = ast.unparse(node)[:80]
            yield Mutant(str(path.relative_to(ROOT)), node.lineno, before, made[:80], source)  # type: ignore[attr-defined]


def _place(text: str, node: ast.AST) -> tuple[int, int]:
    """Where a node stands, in bytes."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
    return starts[first - 1] + node.col_offset, starts[last - 1] + node.end_col_offset  # type: ignore[attr-defined]


def survives(mutant: Mutant, tree: Path, tests: tuple[str, ...], limit_s: float) -> bool:
    """Whether the tests pass with the mutant in place; one that hangs is caught."""
    path = tree / mutant.path
    whole = path.read_text()
    path.write_text(mutant.source)
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
    try:
        done = subprocess.run(words, cwd=tree, env=env, capture_output=True, timeout=limit_s)
        return done.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(whole)


def main() -> int:
    """Run, print each survivor and the share; exit code 1 where more than a fifth survive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("room", choices=sorted(ROOMS))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=36000, help="Stop after so many seconds.")
    parser.add_argument("--tests", nargs="*", help="Instead of the room's own tests.")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    tests = tuple(asked.tests or ROOMS[asked.room])
    found = [m for path in sorted((ROOT / "tuner" / asked.room).glob("*.py")) for m in mutants(path)]
    drawn = random.Random(asked.seed).sample(found, min(asked.count, len(found)))
    begun, ran, left = time.monotonic(), 0, []
    with tempfile.TemporaryDirectory(prefix="tuner-mutants-") as folder:
        tree = Path(folder)
        for name in CARRIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        for mutant in drawn:
            if time.monotonic() - begun > asked.seconds:
                break
            ran += 1
            if survives(mutant, tree, tests, 900):
                left.append(mutant)
                print(f"{mutant.path}:{mutant.line}: {mutant.before} → {mutant.after}", flush=True)
    share = len(left) / ran if ran else 0.0
    print(f"{asked.room}: {len(left)} of {ran} mutants survived ({share:.0%}), of {len(found)} places")
    if asked.output:
        rows = [f"{m.path}:{m.line}: {m.before} → {m.after}" for m in left]
        about = {"room": asked.room, "seed": asked.seed, "tests": tests, "ran": ran, "survived": rows}
        asked.output.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return int(share > 0.2)


if __name__ == "__main__":
    sys.exit(main())
