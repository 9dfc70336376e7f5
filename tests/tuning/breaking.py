"""A Python interpreter whose vLLM fails on order: it starts the simulated engine, or writes a log and ends.

A program of its own. `BREAKING_LOG` is the log that it writes, `BREAKING_CODE` its exit code, `BREAKING_WHEN`
a pattern of the command lines that end so (default: all). Every launch is counted in `launches` beside it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.tuning.studies import STUDY, write
from tuner.knobs.discover import facts_of_version

ROOT = Path(__file__).parents[2]


def interpreter(folder: Path) -> Path:
    """The program, and beside it the facts that it answers the probe with."""
    facts = facts_of_version("0.32.0", "cpu")
    told = subprocess.run(
        [sys.executable, "-m", "tuner.simulator.app", "--help"], capture_output=True, text=True, check=True
    ).stdout
    flags = sorted(set(re.findall(r"--[a-z][a-z0-9-]+", told)) | {"--compilation-config"})
    answer = {"version": facts.version, "platform": "cpu", "flags": flags, "defaults": {}, "choices": {}}
    (folder / "facts.json").write_text(json.dumps(answer))
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
                    "from tests.tuning.breaking import main\nmain()\n")  # fmt: skip
    path.chmod(0o755)
    return path


def study(folder: Path, log: Path | None, *, code: int = 1, when: str = "", text: str = STUDY) -> Path:
    """A study whose engine is that interpreter; its trials are launched one by one."""
    env = {"BREAKING_LOG": str(log or ""), "BREAKING_CODE": str(code), "BREAKING_WHEN": when}
    shown = ", ".join(f"{name}: {json.dumps(value)}" for name, value in env.items())
    engine = f"engine:\n  kind: vllm\n  python: {interpreter(folder)}\n  env: {{{shown}}}\n"
    return write(folder, text.replace("engine:\n  kind: simulated\n", engine))


def launches(folder: Path) -> list[str]:
    """The command lines so far."""
    path = folder / "launches"
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    """Answer the probe, fail as ordered, or become the simulated engine."""
    here, words = Path(sys.argv[0]).parent, sys.argv[1:]
    if words[0] == "-c":
        print("TUNER-PROBE " + (here / "facts.json").read_text())
        return
    with (here / "launches").open("a") as file:
        print(" ".join(words), file=file)
    log, when = os.environ.get("BREAKING_LOG"), os.environ.get("BREAKING_WHEN", "")
    if log and re.search(when, " ".join(words)):
        print(Path(log).read_text(), flush=True)
        sys.exit(int(os.environ.get("BREAKING_CODE", "1")))
    os.execv(sys.executable, [sys.executable, "-m", "tuner.simulator.app", *words[2:]])
