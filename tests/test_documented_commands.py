"""Every command line that README and docs show is one that the command line takes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tuner.cli import app

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PROGRAM = typer.main.get_command(app)
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def shown() -> Iterator[tuple[str, str]]:
    """(page, command) of everything that begins with `tuner ` in a code block or between backquotes."""
    for page in PAGES:
        text = page.read_text()
        for language, block in BLOCK.findall(text):
            if language in ("", "sh", "bash", "console", "shell", "cron", "ini", "yaml"):
                for line in block.replace("\\\n", " ").splitlines():
                    found = re.search(r"(?:^|[\s=/'\"(])tuner ((?:--?)?[a-z].*)", line)
                    if found and not line.lstrip().startswith("#"):
                        yield page.name, found[1]
        for inline in re.findall(r"`tuner ([^`\n]+)`", BLOCK.sub("", text)):
            yield page.name, inline


def words_of(line: str) -> list[str]:
    """The command's own words: comments, explanations after two blanks, pipes and redirections are cut."""
    line = re.split(r"\s{2,}|\s+#|\s[|;>&]|\s…|;|\)$", line)[0]
    line = re.sub(r"\[([^]]*)\]", r"\1", line).replace("\\|", "|").replace("…", "")
    try:
        return shlex.split(line)
    except ValueError:  # an apostrophe
        return shlex.split(line.replace("'", "").replace('"', ""))


def complaint(words: list[str]) -> str | None:
    """What is wrong with a command line, as far as its commands and options go."""
    command: Any = PROGRAM
    options: set[str] = set()
    for word in words:
        options |= {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        if word.startswith("-") and len(word) > 1:
            name = word.partition("=")[0]
            if name not in options | {"-h", "--help"}:
                return f"{command.name} has no option {name}"
        elif hasattr(command, "commands"):
            found = [command.commands.get(name) for name in word.split("|")]
            if None in found:
                if command.invoke_without_command:
                    continue
                return f"{command.name} has no command {word}"
            command = found[0]
    return None


LINES = sorted(set(shown()))


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}: {line[:60]}" for page, line in LINES])
def test_a_documented_command_exists(page: str, line: str) -> None:
    wrong = complaint(words_of(line))
    assert wrong is None, f"{page}: tuner {line}: {wrong}"


def test_there_are_many_and_a_wrong_one_would_be_found() -> None:
    assert len(LINES) > 60
    assert complaint(["db", "copi", "URL"]) == "db has no command copi"
    assert complaint(["tune", "STUDY.yaml", "--tirals", "3"]) == "tune has no option --tirals"


def test_a_documented_pull_names_a_node_or_a_gpu_class() -> None:
    """The service answers 400 to a pull of neither."""
    pulls = [p for page in PAGES for p in re.findall(r"/v1/profiles/resolve\?([^\s\"]+)", page.read_text())]
    assert len(pulls) >= 3
    assert [p for p in pulls if not re.search(r"(^|&)(node|gpu_class)=", p)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_shown_start_of_the_engine_names_its_model(page: Path) -> None:
    """An exported file does not name it, and an engine without a model serves its default one."""
    text = page.read_text().replace("\\\n", " ")
    starts = re.findall(r"vllm\.entrypoints\.openai\.api_server[^`\n]*", text)
    assert [line for line in starts if " " in line and "--model" not in line] == []
    serves = re.findall(r"vllm serve [^`\n]*--config [^`\n]*", text)
    assert [line for line in serves if line.split()[2].startswith("-")] == []
