"""YAML that people write: what is wrong with it is one sentence with a line, and nothing takes for ever."""

from pathlib import Path

import pytest
from pydantic import Field

from tuner import yamltext
from tuner.errors import BadInput

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)
)
BAD = {
    "two of a key": ("a: 1\nb: {c: 1, c: 2}", "f line 2: key 'c' occurs twice"),
    "a mapping as a key": ("? {a: b}\n: 1", "f line 1: a key is one word"),
    "no such day": ("x: 1\na: 2026-99-99", "f line 2: not YAML: '2026-99-99' is not a valid timestamp"),
    "no integer": ("a: !!int x", "f line 1: not YAML: 'x' is not a valid int"),
    "no time": ("a: !!timestamp x", "'x' is not a valid timestamp"),
    "too many digits": (f"a: {'9' * 5000}", "f line 1: not YAML: '999999"),
    "half a character": ('a: "\\ud800"', "is not valid Unicode text"),
    "not a number": ("a: [1, {b: .nan}]", "f line 1: not YAML: a number that is not finite"),
    "a NUL": ('a: "\\0"', "f line 1: not YAML: a text with a NUL character"),
    "a program": ("a: !!python/object:os.system x", "could not determine a constructor"),
    "deep": ("[" * 5000, "f: is nested too deeply"),
    "itself": ("&a [*a]", "the aliases (*NAME) expand to too much text"),
    "a billion laughs": (LAUGHS, "the aliases (*NAME) expand to too much text"),
    "two documents": ("a: 1\n---\na: 2", "f: holds 2 YAML documents, one is expected"),
    "a bell": ("a: \x07", "f: not YAML: unacceptable character"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_in_one_sentence(case: str) -> None:
    text, sentence = BAD[case]
    with pytest.raises(BadInput) as caught:
        yamltext.load(text, "f")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_what_is_right_is_read_with_its_lines() -> None:
    found = yamltext.load("a: &x [1, {b: 2}]\nc:\n  d: *x\n", "f")
    assert found.value == {"a": [1, {"b": 2}], "c": {"d": [1, {"b": 2}]}}
    assert (found.lines["a",], found.lines["a", 1, "b"], found.lines["c", "d"]) == (1, 1, 3)
    assert yamltext.load("", "f").value is None


@pytest.mark.parametrize("path", ["nowhere", ".", "latin", "x" * 300, "nul\0"])
def test_a_file_that_cannot_be_read_is_named(path: str, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"a: \xff")
    with pytest.raises(BadInput, match=r"latin is not a UTF-8 text file|cannot read the study file "):
        yamltext.read(tmp_path / path, "the study file")


@pytest.mark.parametrize("word", ["on", "Off", "yes", "NO", "true", "y"])
def test_a_key_is_the_word_that_is_written(word: str) -> None:
    assert yamltext.load(f"- {word}: [{word}]\n  b: {{{word}: 1}}", "f").value == [
        {word: [yamltext.load(word, "f").value], "b": {word: 1}}
    ]


class _Inner(yamltext.Section):
    old: str = Field(default="", alias="from")
    alias: str = ""


class _Outer(yamltext.Section):
    trials: int = 1
    inner: _Inner | None = None


def test_an_unknown_key_of_a_section_names_the_nearest_key_of_that_section() -> None:
    for wrong, right in (("alais", "alias"), ("form", "from")):
        with pytest.raises(BadInput, match=f"unknown key '{wrong}' .did you mean '{right}'"):
            yamltext.validated(_Outer, {"inner": {wrong: "x"}}, "outer")
    with pytest.raises(BadInput, match=r"unknown key 'trails' .did you mean 'trials'"):
        yamltext.validated(_Outer, {"trails": 1}, "outer")
