"""Types commands of an installed wheel, far from the tree: `python -m benchmarks.wheel ENVIRONMENT`.

`make wheel` calls it. It looks whether all files that the package ships are inside, and ends with the first
command that fails.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = """
import sys
from pathlib import Path
from tuner.settings import shipped
package = Path(shipped("data")).parent
assert Path(sys.prefix) in package.parents, f"{package} is not the wheel's"
for name in ("search_spaces", "migrations", "data/traces", "data/models", "data/study.yaml",
             "lint/rules.yaml", "knobs/catalogue.yaml", "report/style.css",
             "report/report.html.j2", "service/pages/templates",
             "service/pages/static/pages.css", "py.typed"):
    found = shipped(*name.split("/"))
    assert found.exists() and package in found.parents, f"{name} is not in the wheel"
print("all files are inside", package)
"""
LINT = ("lint", "vllm serve Qwen/Qwen2.5-7B-Instruct --max-num-seqs 16", "--card", "h100-80")
COMMANDS = (
    ("--version",), (*LINT, "--fail-on", "never"), ("knobs",), ("doctor",),
    ("demo", "--trials", "2", "--home", "home"),
    ("run", "list"), ("profile", "list"), ("db", "upgrade"),
)  # fmt: skip


def main() -> None:
    """Run every command with a home of its own, in an empty folder."""
    program = Path(sys.argv[1]).resolve() / "bin"
    with tempfile.TemporaryDirectory() as folder:
        env = {"PATH": f"{program}:{os.environ['PATH']}", "HOME": folder, "TUNER_HOME": f"{folder}/home"}
        subprocess.run([program / "python", "-I", "-c", FILES], cwd=folder, env=env, check=True)
        for words in COMMANDS:
            print("$ tuner", *words, flush=True)
            subprocess.run([program / "tuner", *words], cwd=folder, env=env, check=True)


if __name__ == "__main__":
    main()
