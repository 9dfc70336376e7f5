"""Runs in the target interpreter (`python -c`), never here: prints one JSON line with what its vLLM offers.

Standard library only, any Python since 3.10. It tries three ways in turn: vLLM's own parser, the fields of
its argument dataclass, the text of its source. With the argument `identity` it prints only place and version.
"""

import ast
import importlib
import importlib.util
import json
import os
import pathlib
import sys
from types import ModuleType
from typing import Any

MARK = "TUNER-PROBE "
PARSERS = ("vllm.utils.argparse_utils", "vllm.utils")
MAKERS = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)
BOOLEAN = ("bool", "bool | None", "Optional[bool]")


def folder() -> pathlib.Path | None:
    """The folder of the installed package, found without importing it; None when there is none."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    return pathlib.Path(next(iter(spec.submodule_search_locations or [""]))) if spec else None


def version_of(package: pathlib.Path) -> str | None:
    """The version from the package's own file, without importing it."""
    for name in ("_version.py", "version.py"):
        path = package / name
        if not path.is_file():
            continue
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Constant):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if {"version", "__version__"} & {t.id for t in targets if isinstance(t, ast.Name)}:
                return str(node.value.value)
    return None


def identity() -> dict[str, Any]:
    """The package's place, its version and when it was last written."""
    package = folder()
    if package is None:
        return {"error": "no package named vllm"}
    times = [
        path.stat().st_mtime_ns
        for path in (package / "__init__.py", package / "engine" / "arg_utils.py")
        if path.exists()
    ]
    return {"package": str(package), "version": version_of(package), "written": times}


def plain(value: Any) -> Any:
    """A default as JSON can hold it; None if it cannot."""
    value = getattr(value, "value", value)
    return value if isinstance(value, (bool, int, float, str)) else None


def from_parser() -> dict[str, Any]:
    """Flags, defaults and choices of the API server's own parser."""
    parser_class = maker = None
    for name in PARSERS:
        parser_class = parser_class or getattr(_module(name), "FlexibleArgumentParser", None)
    for name in MAKERS:
        maker = maker or getattr(_module(name), "make_arg_parser", None)
    if parser_class is None or maker is None:
        raise ImportError("no parser at the place where vLLM has it")
    actions = maker(parser_class())._actions
    return {
        "tier": "parser",
        "flags": sorted({flag for a in actions for flag in a.option_strings if flag.startswith("--")}),
        "defaults": {a.dest: plain(a.default) for a in actions if a.option_strings},
        "choices": {a.dest: [plain(c) for c in a.choices] for a in actions if a.choices and a.option_strings},
    }


def kind(annotation: Any) -> str:
    """An annotation as it is written in the source."""
    if isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def from_dataclass() -> dict[str, Any]:
    """Flags by the fields of the argument dataclass; no choices, and no flags of the HTTP front end."""
    import dataclasses

    fields = dataclasses.fields(importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs)
    missing = dataclasses.MISSING
    flags = {"--" + field.name.replace("_", "-") for field in fields}
    flags |= {"--no-" + f.name.replace("_", "-") for f in fields if kind(f.type) in BOOLEAN}
    defaults = {f.name: plain(f.default) for f in fields if f.default is not missing}
    return {"tier": "dataclass", "flags": sorted(flags), "defaults": defaults, "choices": {}}


def from_source(package: pathlib.Path) -> dict[str, Any]:
    """Flags by the text of engine/arg_utils.py; nothing is imported."""
    tree = ast.parse((package / "engine" / "arg_utils.py").read_text())
    flags: set[str] = set()
    for node in ast.walk(tree):
        name = getattr(getattr(node, "func", None), "attr", "")
        if isinstance(node, ast.Call) and name == "add_argument":
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            flags |= {word for word in words if isinstance(word, str) and word.startswith("--")}
    booleans: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs"):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    named = {"--" + item.target.id.replace("_", "-")}
                    booleans |= named if ast.unparse(item.annotation) in BOOLEAN else set()
    flags |= {"--no-" + flag[2:] for flag in flags & booleans}
    return {"tier": "source", "flags": sorted(flags), "defaults": {}, "choices": {}}


def device() -> dict[str, Any]:
    """Platform and GPUs as vLLM sees them; without vLLM, by what PyTorch was built for."""
    found: dict[str, Any] = {"platform": None, "gpu_name": None, "gpu_memory_gib": None, "gpu_count": 0}
    platform = getattr(_module("vllm.platforms"), "current_platform", None)
    for name in ("cuda", "rocm", "xpu", "tpu", "cpu"):
        if platform is not None and getattr(platform, "is_" + name)():
            found["platform"] = name
    torch = _module("torch")
    if found["platform"] is None and torch is not None:
        found["platform"] = "cuda" if torch.version.cuda else "rocm" if torch.version.hip else "cpu"
    if found["platform"] in ("cuda", "rocm", "xpu") and platform is not None and torch is not None:
        try:
            found["gpu_count"] = torch.cuda.device_count()
            found["gpu_name"] = platform.get_device_name()
            found["gpu_memory_gib"] = platform.get_device_total_memory() / 2**30
        except Exception as error:
            found["gpu_error"] = str(error)
    return found


def _module(name: str) -> ModuleType | None:
    """A module, or None when it cannot be imported here, for any reason."""
    try:
        return importlib.import_module(name)
    except Exception:
        return None


def describe() -> dict[str, Any]:
    """All facts, by the best way that works; `tried` lists why better ways did not."""
    found = identity()
    if "error" in found:
        return found
    package, tried = pathlib.Path(found["package"]), []
    for way in (from_parser, from_dataclass, lambda: from_source(package)):
        try:
            answer = way()
            break
        except BaseException as error:
            tried.append(type(error).__name__ + ": " + str(error).split("\n")[0][:200])
    else:
        return {**found, "error": "; ".join(tried)}
    return {**found, **answer, **device(), "tried": tried}


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)
    answer = identity() if sys.argv[1:] == ["identity"] else describe()
    os.write(out, (MARK + json.dumps(answer) + "\n").encode())
