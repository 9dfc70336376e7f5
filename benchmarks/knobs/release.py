"""Add a vLLM release to the shipped flags by reading its wheel or source, which is neither installed nor run:
`python -m benchmarks.knobs.release vllm-0.33.0-….whl`.
"""

import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from tuner.errors import BadInput, TunerError
from tuner.knobs.catalogue import FlagTable, Interval, read_table
from tuner.settings import shipped

ENGINE_ARGS = "vllm/engine/arg_utils.py"
FRONTEND_ARGS = (
    "vllm/entrypoints/common/cli_args.py",
    "vllm/entrypoints/launchers/cli_args.py",
    "vllm/entrypoints/openai/cli_args.py",
)
VERSION_FILE = "vllm/_version.py"
_FRONTEND = re.compile(r"FrontendArgs$")
_BOOLEAN = ("bool", "bool | None", "Optional[bool]")
_ENGINE = re.compile(r"^(Async)?EngineArgs$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The long flags of one release; `paired` have a `--no-` form, `bare` take no value."""

    version: str
    flags: frozenset[str]
    paired: frozenset[str]
    bare: frozenset[str]


def read(path: Path) -> Release:
    """The release in a wheel or an unpacked source folder. BadInput names what is missing there."""
    if path.is_dir():
        return _release(lambda name: (path / name).read_text() if (path / name).is_file() else None, path)
    if not zipfile.is_zipfile(path):
        raise BadInput(f"{path} is neither a wheel nor a folder that holds {ENGINE_ARGS}")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        return _release(lambda name: wheel.read(name).decode() if name in names else None, path)


def added(data: FlagTable, release: Release) -> FlagTable:
    """The table with one newer release at its end. BadInput for one that it has, or that is older."""
    newest = data.versions[-1]
    if Version(release.version) <= Version(newest):
        raise BadInput(f"the data already reaches vLLM {newest}; {release.version} is not newer")
    flags: dict[str, tuple[Interval, ...]] = {}
    for flag in sorted(data.flags.keys() | release.flags):
        spans = data.flags.get(flag, ())
        there = spans and spans[-1][1] is None
        if there and flag not in release.flags:
            spans = (*spans[:-1], (spans[-1][0], newest))
        elif not there and flag in release.flags:
            spans = (*spans, (release.version, None))
        flags[flag] = spans
    return replace(
        data,
        versions=(*data.versions, release.version),
        flags=flags,
        paired=data.paired | release.paired,
        bare=data.bare | release.bare,
    )


def text(data: FlagTable) -> str:
    """The table in its file form: one flag on a line."""
    lines = [f"{json.dumps(flag)}: {json.dumps(spans)}" for flag, spans in sorted(data.flags.items())]
    head = {"versions": data.versions, "paired": sorted(data.paired), "bare": sorted(data.bare)}
    top = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    return "{\n" + top + '"flags": {\n' + ",\n".join(lines) + "\n}\n}\n"


def _release(source: Callable[[str], str | None], path: Path) -> Release:
    engine = source(ENGINE_ARGS)
    frontend = next((found for name in FRONTEND_ARGS if (found := source(name)) is not None), None)
    version = re.search(r"version = ['\"]([^'\"]+)", source(VERSION_FILE) or "")
    if engine is None or frontend is None or version is None:
        lacks = [
            name
            for name, found in ((ENGINE_ARGS, engine), (FRONTEND_ARGS[0], frontend), (VERSION_FILE, version))
            if not found
        ]
        raise BadInput(f"{path} holds no vLLM that can be read: {', '.join(lacks)} is missing")
    flags, bare = _written_flags(ast.parse(engine))
    more, more_bare = _written_flags(ast.parse(frontend))
    fields = _fields(ast.parse(frontend), _FRONTEND)
    switches = {flag for flag, kind in fields.items() if kind in _BOOLEAN}
    switches |= {flag for flag, kind in _fields(ast.parse(engine), _ENGINE).items() if kind in _BOOLEAN}
    every = frozenset(flags | more | fields.keys())
    return Release(
        version=version[1].split("+", maxsplit=1)[0],
        flags=every,
        paired=frozenset(switches & every - bare - more_bare),
        bare=frozenset(bare | more_bare),
    )


def _written_flags(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Long flags that `add_argument` calls name, and those of them that take no value at all."""
    flags: set[str] = set()
    bare: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "add_argument":
            continue
        words = [word.value for word in node.args if isinstance(word, ast.Constant)]
        named = {word for word in words if isinstance(word, str) and word.startswith("--")}
        flags |= named
        actions = [key.value for key in node.keywords if key.arg == "action"]
        if any(isinstance(action, ast.Constant) and action.value == "store_true" for action in actions):
            bare |= named
    return flags, bare


def _fields(tree: ast.Module, name: re.Pattern[str]) -> Mapping[str, str]:
    """Flag → annotation of the fields of the argument classes of that name."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and name.search(node.name):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    found["--" + item.target.id.replace("_", "-")] = ast.unparse(item.annotation)
    return found


def main(argv: Sequence[str]) -> int:
    """Add each wheel named to the shipped data; 2 with a sentence when one cannot be."""
    path = shipped("data", "vllm_flags.json")
    try:
        for name in argv:
            release, data = read(Path(name)), read_table(path)
            grown = added(data, release)
            path.write_text(text(grown))
            newest = data.versions[-1]
            new = sorted(flag for flag in release.flags if not data.has(flag, newest))
            gone = sorted(flag for flag in data.flags if data.has(flag, newest) and flag not in release.flags)
            print(f"{release.version}: {len(release.flags)} flags, new {new}, gone {gone}")
    except TunerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
