"""What keeps the tree in order says the same in every place: CI, the Makefile, the pre-commit hooks."""

import re
import shlex
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))


def test_hosted_ci_runs_what_ci_run_runs() -> None:
    wanted = re.findall(r"^make (\S+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    suite = WORKFLOW["jobs"]["suite"]
    assert suite["strategy"]["matrix"]["target"] == wanted
    assert [step["run"] for step in suite["steps"] if "run" in step] == ["make ${{ matrix.target }}"]
    assert set(wanted) <= targets()


def test_hosted_ci_pins_its_actions_and_may_only_read() -> None:
    used = [step["uses"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", name)] == []
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 60 for job in WORKFLOW["jobs"].values())


def test_the_hooks_check_what_lint_checks() -> None:
    """Each hook is a command of `make lint`, from the project's own environment."""
    recipe = MAKEFILE.partition("\nlint:")[2].partition("\n\n")[0]
    lint = [shlex.split(line.replace("$(BIN)", ".venv/bin")) for line in recipe.splitlines()[1:]]
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    hooks = [[word for word in shlex.split(h["entry"]) if word != "--force-exclude"] for h in local["hooks"]]
    assert hooks == [[word for word in words if word != "."] for words in lint]


def test_every_suite_ends_a_test_that_hangs() -> None:
    assert "pytest --timeout" in MAKEFILE
    recipes = [line for line in MAKEFILE.splitlines() if line.startswith("\t") and " pytest" in line]
    assert [line for line in recipes if "$(PYTEST)" not in line] == []
    assert sum("$(PYTEST)" in line for line in MAKEFILE.splitlines()) >= 7


def test_no_test_reads_data_outside_the_checkout() -> None:
    """A clone elsewhere tests the same."""
    above = re.compile(r"__file__\)(?:\.resolve\(\))?\.parents\[(\d)\](\.parent)?")
    for path in (ROOT / "tests").rglob("*.py"):
        depth = len(path.relative_to(ROOT).parts) - 1
        for climbed, further in above.findall(path.read_text()):
            assert int(climbed) + bool(further) <= depth, f"{path.relative_to(ROOT)} looks above the checkout"
