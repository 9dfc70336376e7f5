"""The help: of every command, by group, in whole sentences, with examples that can be typed."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperOption
from typer.testing import CliRunner

from tuner import errors
from tuner.cli import EXAMPLES, EXIT_CODES, GROUPS, app

ROOT: Any = typer.main.get_command(app)
WIDTHS = {"COLUMNS": "80"}


def commands(command: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, command) of everything that can be typed, groups too."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


ALL = dict(commands())
LEAVES = {path: each for path, each in ALL.items() if path and not hasattr(each, "commands")}
LINES = [(path, line) for path, lines in EXAMPLES.items() for line in lines]


def shown(*words: str) -> str:
    done = CliRunner().invoke(app, list(words), env=WIDTHS)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_h_is_help_everywhere_and_nothing_is_cut(path: tuple[str, ...]) -> None:
    said = shown(*path, "-h")
    assert said == shown(*path, "--help")
    assert max(map(len, said.splitlines())) <= 80
    names = getattr(ALL[path], "commands", {})
    for name, below in names.items():
        summary = below.get_short_help_str(1000)
        assert summary.endswith("."), summary
        assert re.search(rf"^  {name} +{re.escape(summary)}$", said, re.MULTILINE), f"{name}: {summary}"


def test_every_option_that_may_be_repeated_says_so_in_the_same_words() -> None:
    for path, command in LEAVES.items():
        for each in command.params:
            if isinstance(each, TyperOption):
                last = (each.help or "").endswith(" May be repeated.")
                assert last == (each.multiple and not each.hidden), (path, each.name, each.help)


def test_the_help_shows_the_commands_by_group() -> None:
    said = shown("-h")
    at = [said.index(f"\n{title}:\n") for title in GROUPS]
    assert at == sorted(at)
    for names in GROUPS.values():
        for name in names:
            assert f"\n  {name} " in said


@pytest.mark.parametrize("path", [*LEAVES, ("knobs",)], ids=" ".join)
def test_every_command_has_examples_in_its_help(path: tuple[str, ...]) -> None:
    for line in EXAMPLES[" ".join(path)]:
        assert f"\n    {line}\n" in shown(*path, "-h"), "an example is cut or broken"


def test_every_example_belongs_to_a_command() -> None:
    assert {tuple(path.split()) for path in EXAMPLES} <= ALL.keys()


@pytest.mark.parametrize(("path", "line"), LINES, ids=[line for _, line in LINES])
def test_an_example_can_be_typed(path: str, line: str) -> None:
    program, *words = shlex.split(line)
    begin = path.split()
    assert program == "tuner"
    assert words[: len(begin)] == begin
    ALL[tuple(begin)].make_context(path, words[len(begin) :])


RELEASED = (Path(__file__).parent / "released.txt").read_text().splitlines()
"""The commands and options of the release before: `path --option`."""


@pytest.mark.parametrize("line", RELEASED)
def test_what_could_be_typed_before_can_be_typed_today(line: str) -> None:
    path = tuple(word for word in line.split() if not word.startswith("-"))
    options = {name for each in ALL[path].params for name in (*each.opts, *each.secondary_opts)}
    assert set(line.split()) - set(path) <= options


def test_a_wrong_example_would_be_found() -> None:
    with pytest.raises(Exception, match="--tirals"):
        ALL[("tune",)].make_context("tune", ["chat.yaml", "--tirals", "3"])


def test_a_mistyped_command_names_the_right_one() -> None:
    done = CliRunner().invoke(app, ["frnt"])
    assert done.exit_code == 2
    assert "'front'" in done.output


def test_the_help_names_every_exit_code() -> None:
    kinds = [getattr(errors, name) for name in dir(errors) if name[0].isupper()]
    codes = {kind.exit_code for kind in kinds if isinstance(kind, type) and hasattr(kind, "exit_code")}
    for code in codes | {0, 3, errors.INTERRUPTED, 9}:
        assert re.search(rf"\b{code} [a-z]", EXIT_CODES), code


def test_the_help_and_lint_load_nothing_heavy() -> None:
    heavy = ("optuna", "sqlalchemy", "pyarrow", "rich", "fastapi", "ray", "structlog")
    for words in (["-h"], ["lint", "-h"], ["tune", "-h"]):
        code = f"""import sys
sys.argv[1:] = {words}
try:
    from tuner.cli import main
    main()
except SystemExit:
    print(sorted(set({heavy}) & set(sys.modules)))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]", words
