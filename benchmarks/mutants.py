"""Mutation testing: small faults are put into a room's code, one at a time, and its tests must fail.

    python -m benchmarks.mutants search [--count 200] [--seed 1] [--seconds 3600] [-o FILE]

A mutant changes one place: a comparison, an arithmetic or boolean operator, a number, a condition, or what is
returned. Places are drawn from the seed.

First the room's tests run once under coverage, which says which tests run each line and how long each takes;
that is kept under build/ until the room or its tests change. Each mutant then runs the tests of its own line
in a copy of the tree, the quick ones first, until the first failure (a line that only an import runs: the
tests of its file). One that fails none has survived and is printed, to be read. Prints and writes the share.
Processes are forked from one that has imported pytest and the libraries, so a mutant costs little but tests.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

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
    """One changed place: the file below the tree, its line, what stood there, what stands there now. `lines`
    are those of the place and the first of its statement: a test that runs one of them may notice.
    """

    path: str
    line: int
    lines: frozenset[int]
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
    begins = {
        id(part): each.lineno for each in ast.walk(tree) if isinstance(each, ast.stmt) for part in _own(each)
    }
    for node in ast.walk(tree):
        for other in changed(node):
            start, end = _place(text, node)
            made = f"({ast.unparse(other)})" if isinstance(other, ast.expr) else ast.unparse(other)
            source = text.encode()[:start].decode() + made + text.encode()[end:].decode()
            first, last = node.lineno, node.end_lineno or node.lineno  # type: ignore[attr-defined]
            yield Mutant(
                path=str(path.relative_to(ROOT)), line=first, before=ast.unparse(node)[:80], after=made[:80],
                lines=frozenset({begins.get(id(node), first), *range(first, last + 1)}), source=source,
            )  # fmt: skip


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """A statement's own expressions, not those of the statements in it."""
    left: list[ast.AST] = [statement]
    while left:
        part = left.pop()
        yield part
        left += [each for each in ast.iter_child_nodes(part) if not isinstance(each, ast.stmt)]


def _place(text: str, node: ast.AST) -> tuple[int, int]:
    """Where a node stands, in bytes."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
    return starts[first - 1] + node.col_offset, starts[last - 1] + node.end_col_offset  # type: ignore[attr-defined]


@dataclass(frozen=True)
class TestsOfLines:
    """Which tests run each line of a room's files, and each test's seconds."""

    lines: Mapping[str, Mapping[str, Sequence[str]]]
    seconds: Mapping[str, float]

    def of(self, mutant: Mutant, most_s: float) -> list[str]:
        """The tests that may notice a mutant, the quick ones first, of together at most so many seconds."""
        ours = self.lines.get(mutant.path, {})
        found = {test for line in mutant.lines for test in ours.get(str(line), ())}
        found = found or {test for tests in ours.values() for test in tests}
        chosen, left = list[str](), most_s
        for test in sorted(found & self.seconds.keys(), key=lambda each: (self.seconds[each], each)):
            left -= self.seconds[test]
            if left < 0 and chosen:
                break
            chosen.append(test)
        return chosen


def tests_of_lines(room: str, tree: Path) -> TestsOfLines:
    """By one run of the room's tests under coverage, or what is kept of it."""
    kept = ROOT / "build" / f"mutants-{room}.json"
    code = [p for folder in ("tuner", "tests") for p in (ROOT / folder / room).rglob("*.py")]
    if not kept.is_file() or kept.stat().st_mtime < max(each.stat().st_mtime for each in code):
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(_covered(room, tree)))
    lines, seconds = json.loads(kept.read_text())
    return TestsOfLines(lines, seconds)


def _covered(room: str, tree: Path) -> tuple[dict[str, dict[str, list[str]]], dict[str, float]]:
    from coverage import CoverageData

    report, data = tree / "seconds.xml", tree / "lines.coverage"
    (tree / "coveragerc").write_text(f"[run]\ndata_file = {data}\nsource = tuner/{room}\n")
    words = ["--cov", "--cov-context=test", "--cov-report=", "--cov-config=coveragerc", "--cov-fail-under=0"]
    in_fork(tree, ["-q", f"--junitxml={report}", *words, *ROOMS[room]], 7200)
    seconds = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if len(case) == 0:  # neither failed nor skipped
            place = case.get("classname", "").split(".")
            whole = next(
                n for n in range(len(place), 0, -1) if (tree / f"{'/'.join(place[:n])}.py").is_file()
            )
            name = "::".join(["/".join(place[:whole]) + ".py", *place[whole:], case.get("name", "")])
            seconds[name] = float(case.get("time", 0))
    found = CoverageData(str(data))
    found.read()
    lines: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for path in found.measured_files():
        for line, contexts in found.contexts_by_lineno(path).items():
            tests = sorted({each.partition("|")[0] for each in contexts if each})
            if tests:
                lines[str(Path(path).relative_to(tree))][str(line)] = tests
    return lines, seconds


def in_fork(tree: Path, words: Sequence[str], limit_s: float) -> int | None:
    """pytest's exit code in a process of its own, in a tree; None where it took longer and was killed."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        os.environ.update({"PYTHONPATH": str(tree), "CI": "1"})
        said = os.open(tree / "pytest.log", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        import pytest

        code = 3
        try:
            quiet = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
            code = int(pytest.main([*quiet, *words]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def survives(mutant: Mutant, tree: Path, tests: Sequence[str], limit_s: float) -> bool:
    """Whether the tests pass with the mutant in place; one that hangs is caught."""
    path = tree / mutant.path
    whole = path.read_text()
    _write(path, mutant.source)
    try:
        return in_fork(tree, ["-q", "-x", *tests], limit_s) == 0
    finally:
        _write(path, whole)


def _write(path: Path, source: str) -> None:
    """Change a file; what Python compiled of it before could be taken for it within the same second."""
    path.write_text(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def preload() -> None:
    """Import what every test needs and no mutant is in."""
    import numpy
    import optuna
    import pyarrow.parquet
    import pydantic
    import pytest
    import schemathesis
    import sqlalchemy
    import starlette
    import typer

    assert all((numpy, optuna, pyarrow, pydantic, pytest, schemathesis, sqlalchemy, starlette, typer))


def main() -> int:
    """Run, print each survivor and the share; exit code 1 where more than a fifth survive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("room", choices=sorted(ROOMS))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=36000, help="Stop after so many seconds.")
    parser.add_argument("--most", type=float, default=120, help="Seconds of tests for one mutant.")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    found = [m for path in sorted((ROOT / "tuner" / asked.room).glob("*.py")) for m in mutants(path)]
    drawn = random.Random(asked.seed).sample(found, min(asked.count, len(found)))
    preload()
    begun, ran, left, untested = time.monotonic(), 0, list[Mutant](), 0
    with tempfile.TemporaryDirectory(prefix="tuner-mutants-") as folder:
        tree = Path(folder).resolve()
        for name in CARRIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        known = tests_of_lines(asked.room, tree)
        for mutant in drawn:
            if time.monotonic() - begun > asked.seconds:
                break
            ran += 1
            tests = known.of(mutant, asked.most)
            untested += not tests
            if not tests or survives(mutant, tree, tests, 900):
                left.append(mutant)
                print(f"{mutant.path}:{mutant.line}: {mutant.before} → {mutant.after}", flush=True)
    share = len(left) / ran if ran else 0.0
    told = f"{len(left)} of {ran} mutants survived ({share:.0%}), {untested} of them untested"
    print(f"{asked.room}: {told}; {len(found)} places")
    if asked.output:
        rows = [f"{m.path}:{m.line}: {m.before} → {m.after}" for m in left]
        about = {"room": asked.room, "seed": asked.seed, "places": len(found), "ran": ran, "survived": rows}
        asked.output.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return int(share > 0.2)


if __name__ == "__main__":
    sys.exit(main())
