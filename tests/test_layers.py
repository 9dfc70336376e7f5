"""The house: imports point down and in no circle, files and functions stay small, a name has one meaning."""

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tuner

ROOT = Path(tuner.__file__).parent

FLOORS = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("service", "doctor"),
    ("fleet", "lint"),
    ("tuning",),
    ("simulator", "profiles", "report"),
    ("replay", "search"),
    ("traffic", "engine", "knobs", "history"),
    ("processes",),
    ("leftovers", "yamltext", "adapters"),
    ("errors", "settings"),
    ("conclusions", "metrics"),
    ("measures",),
    ("records",),
    ("masking",),
    ("__init__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ONLY_IN = {
    "optuna": ("search", "report"),
    "sqlalchemy": ("history", "traffic"),
    "subprocess": ("processes",),
    "ray": ("fleet",),
}
MODULES = sorted(path for path in ROOT.rglob("*.py") if "migrations" not in path.parts)


def _room(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = _room(path)
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] in ONLY_IN:
            assert room in ONLY_IN[parts[0]], f"{room} imports {parts[0]}"
        if parts[0] != "tuner" or len(parts) == 1:
            continue
        target = parts[1] if parts[1] in FLOOR_OF else "__init__"
        if target != room:
            assert FLOOR_OF[target] > FLOOR_OF[room], f"{room} imports {target}"


def _name(path: Path) -> str:
    return ".".join(("tuner", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def test_files_import_each_other_in_no_circle() -> None:
    """Imports inside functions count: such a one only hides a circle."""
    names = {_name(path): path for path in MODULES}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found = _imports(path)
        graph[name] = {n if n in names else n.rpartition(".")[0] for n in found} & names.keys() - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


TWO_MEANINGS: set[str] = set()
"""Only to be made fewer."""


def test_a_public_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert {name: paths for name, paths in twice.items() if name not in TWO_MEANINGS} == {}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 600, f"{path} is longer than 600 lines: does it hold one idea?"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = [
                n for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
            ]
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= 40, f"{path}:{node.lineno} {node.name} has {lines} lines"
