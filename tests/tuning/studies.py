"""Studies for tests: a tiny one on the simulated engine, and how to run the command line on it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests import warm
from tuner.settings import shipped

TRACE = shipped("data", "traces", "azure-conversation-slice.parquet")
SPACE = """\
about: Two knobs for tests.
vllm: ">=0.10"
knobs:
  max_num_seqs: [4, 16, 64]
  max_num_batched_tokens: [512, 2048, 8192]
"""
STUDY = f"""\
name: tiny
model: Qwen/Qwen2.5-7B-Instruct
workload: chat
trace: {TRACE}
space: space.yaml
engine:
  kind: simulated
  args: {{max-model-len: 16384}}
baseline: {{max_num_seqs: 4}}
slices: [{{start_s: 20, duration_s: 1.0}}]
plan: quick
slo: {{ttft_ms: 500, tpot_ms: 50}}
budget: {{trials: 3}}
seed: 3
"""
VIRTUAL = STUDY.replace("  kind: simulated\n", "  kind: simulated\n  clock: virtual\n")
"""The same without engines as processes: for what a test shows of the run, not of launches."""
WATCHDOG_S = 1800.0
"""No test asserts a time; this only ends what hangs."""


def wait_for(what: Callable[[], object]) -> None:
    """Until something is true; the watchdog ends what never is."""
    end = time.monotonic() + WATCHDOG_S
    while not what():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.02)


def write(folder: Path, study: str = STUDY, space: str = SPACE) -> Path:
    """The study file in a folder, with its space beside it."""
    (folder / "space.yaml").write_text(space)
    path = folder / "study.yaml"
    path.write_text(study)
    return path


def environment(home: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment with a home of its own."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TUNER_")}
    return {**plain, "TUNER_HOME": str(home), **(more or {})}


def command(*words: object) -> list[str]:
    """The command line as a process."""
    return [sys.executable, "-m", "tuner", *(str(word) for word in words)]


def tuner(
    home: Path, *words: object, cwd: Path | None = None, more: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the command line to its end; `more` is added to its environment."""
    return warm.run([str(word) for word in words], env=environment(home, more), cwd=cwd, timeout_s=WATCHDOG_S)


def answer(home: Path, *words: object) -> dict[str, object]:
    """Run a command that prints a JSON object."""
    done = tuner(home, *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found
