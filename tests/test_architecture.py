"""What a newcomer reads: docs/architecture.md leads to code that is there, the glossary stays short."""

import ast
import re
from pathlib import Path

import pytest

from tests.test_layers import FLOOR_OF

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
TEXT = PAGE.read_text()
LINKS = sorted(set(re.findall(r"\[([\w.]+)\]\(([^)#]+)\)", TEXT)))


def defined(path: Path) -> set[str]:
    """Functions, classes and methods of a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


@pytest.mark.parametrize(("name", "target"), LINKS, ids=[f"{name} in {target}" for name, target in LINKS])
def test_a_link_leads_to_a_file_that_has_the_name(name: str, target: str) -> None:
    path = (PAGE.parent / target).resolve()
    assert path.is_file(), target
    assert name == path.name or name in defined(path), f"{target} has no {name}"


def test_it_links_to_the_way_of_a_candidate_and_of_a_request() -> None:
    for title in ("The way of one candidate", "The way of one request"):
        part = TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]
        assert part.count("](../tuner/") >= 10, title


def test_functions_without_a_link_are_there_too() -> None:
    (attempt,) = {target for name, target in LINKS if name == "attempt.py"}
    part = TEXT.partition("8. **The state.**")[2].partition("\n9. ")[0]
    named = {name for name in re.findall(r"`(\w+)`", part) if name[0].islower() or name[0] == "_"}
    assert named
    assert named <= defined((PAGE.parent / attempt).resolve())
    root = PAGE.parents[1]
    files = re.findall(r"`((?:tuner|tests)/[\w/]+\.py|migrations/)`", TEXT)
    assert len(files) > 3
    assert [name for name in files if not (root / name).exists()] == []


def test_the_list_of_parts_is_the_one_that_is_checked() -> None:
    """From the top floor down; a floor may take several lines."""
    block = re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)[-1]
    shown = re.findall(r"(\w+)(?:\.py|/)", block)
    rooms = set(FLOOR_OF) - {"__main__", "cli", "__init__"}
    assert sorted(shown) == sorted(rooms)
    assert [FLOOR_OF[name] for name in shown] == sorted(FLOOR_OF[name] for name in rooms)


def test_the_glossary_has_at_most_forty_terms_and_none_twice() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", (PAGE.parent / "glossary.md").read_text(), re.MULTILINE)
    terms = [term for term in rows if term != "term"]
    assert 30 < len(terms) <= 40
    assert len(set(terms)) == len(terms)


def test_each_way_to_extend_the_tuner_has_an_example_that_a_test_runs() -> None:
    """A test takes a code block by the title of its section, or by words that stand in it."""
    page = (PAGE.parent / "extending.md").read_text()
    texts = (path.read_text() for path in (PAGE.parents[1] / "tests").rglob("test_*.py"))
    reading = "".join(text for text in texts if "extending.md" in text)
    marks = re.findall(r'"([^"\n]+)" in part|"## ([^"\n]+)"', reading)
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        examples = "".join(text.split("```")[1::2])
        assert examples, title
        taken = [words for words, name in marks if name == title or (words and words in examples)]
        assert taken, f"no test takes the example under '{title}'"
