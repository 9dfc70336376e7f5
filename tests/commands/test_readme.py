"""What README and docs/start/ say can be typed is typed here."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from tests.tuning.studies import WATCHDOG_S, environment, tuner
from tuner.tuning.study import parse

ROOT = Path(__file__).parents[2]
PAGES = "".join(
    path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs" / "start").glob("*.md")))
)
BLOCK = re.compile(r"(?:<!-- run: (\w+) -->\s*)?^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks() -> Iterator[tuple[str, str, str]]:
    """(marker, language, text) of every fenced block."""
    for marker, indent, language, text in BLOCK.findall(PAGES):
        yield marker, language, "\n".join(line.removeprefix(indent) for line in text.splitlines())


def commands(marker: str) -> list[str]:
    return [line for found, _, text in blocks() if found == marker for line in text.splitlines() if line]


def typed(pattern: str) -> str:
    """The one line of these pages that begins so."""
    lines = [line for _, language, text in blocks() if language != "yaml" for line in text.splitlines()]
    (found,) = [line for line in lines if line.startswith(pattern)]
    return found


def shell(line: str, home: Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run a line as a user would, with this tree's `tuner` on the path."""
    bin_folder = cwd / "bin"
    bin_folder.mkdir(exist_ok=True)
    program = bin_folder / "tuner"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tuner "$@"\n')
    program.chmod(0o755)
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["/bin/sh", "-c", line], env=environment(home, {"PATH": path}), cwd=cwd, capture_output=True,
        text=True, timeout=WATCHDOG_S, check=False,
    )  # fmt: skip


def run_line(line: str, home: Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run a line without a shell of its own."""
    program, *words = shlex.split(line, comments=True)
    assert program == "tuner"
    return tuner(home, *words, cwd=cwd)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home that `tuner demo` leaves."""
    home = tmp_path_factory.mktemp("demo")
    done = tuner(home.parent / "unused", "demo", "--home", home, "--trials", 3)
    assert done.returncode == 0, done.stderr
    (home / "said.txt").write_text(done.stdout)
    return home


def test_the_demo_says_what_it_is_and_how_to_pull(demo: Path) -> None:
    said = (demo / "said.txt").read_text()
    assert "DEMONSTRATION on a simulated engine" in said
    assert "baseline" in said
    assert (demo / "report.html").read_text().startswith("<!doctype html>")
    pull = next((line.strip() for line in said.splitlines() if "profile export" in line), None)
    assert pull is not None, said
    _, _, words = pull.partition("tuner profile ")
    done = shell(f"tuner profile {words}", demo, demo)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["max-model-len"] == 16384


@pytest.mark.parametrize("line", commands("demo"))
def test_a_command_of_the_second_page_works(line: str, demo: Path) -> None:
    done = run_line(line, demo, demo)
    assert done.returncode == 0, done.stderr
    assert done.stdout or done.stderr


def test_the_first_study_of_the_pages_works(tmp_path: Path) -> None:
    """As written, but for the interpreter: the simulated engine stands in for it."""
    at = [datetime(2026, 11, 20, 9, tzinfo=UTC) + timedelta(seconds=0.4 * n) for n in range(2000)]
    rows = "".join(f"{when.isoformat()},{200 + n % 300},{20 + n % 50}\n" for n, when in enumerate(at))
    (tmp_path / "gateway.csv").write_text("when,prompt_tokens,answer_tokens\n" + rows)
    home = tmp_path / "home"
    for start in ("tuner trace import", "tuner trace show chat"):
        done = run_line(typed(start), home, tmp_path)
        assert done.returncode == 0, done.stderr
    (text,) = [text for _, language, text in blocks() if language == "yaml"]
    whole = parse(text, name="study.md")
    assert whole.engine.kind == "vllm"
    changed = re.sub(r"^ +python:.*\n", "", text, flags=re.MULTILINE).replace(
        "kind: vllm\n", "kind: simulated\n"
    )
    (tmp_path / "chat.yaml").write_text(changed)
    for line in (typed("tuner doctor chat.yaml"), typed("tuner tune chat.yaml --dry-run")):
        done = run_line(line, home, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "--max-model-len 16384" in done.stdout


def test_the_readme_is_one_screen_that_begins_with_lint_and_demo() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    typed_first = [line for _, language, block in blocks() if language == "sh" for line in block.splitlines()]
    assert [line.split(" '")[0] for line in typed_first[1:3]] == ["tuner lint", "make demo"]
    for linked in re.findall(r"\]\(([^):]+)\)", text):
        assert (ROOT / linked.partition("#")[0]).is_file(), linked


def test_the_number_of_the_readme_is_that_of_the_results() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    (row,) = [
        line
        for line in (ROOT / "docs/results/h100.md").read_text().splitlines()
        if line.startswith("| Study A ")
    ]
    for number in re.findall(r"[−+]\d+ %", row):
        assert number in text, number
