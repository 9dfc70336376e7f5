"""YAML that people write: plain values and each key's line, or one BadInput on what is wrong with it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tuner.errors import BadInput

MOST = 100_000
"""Values that a text may hold, what its aliases repeat counted each time."""
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What a text says; `lines` maps the path of every key and item to its line."""

    value: Any
    lines: Mapping[Key, int]


def read(path: Path, what: str = "the file") -> str:
    """The text of a file. BadInput where it cannot be read, or is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not a UTF-8 text file") from error
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {what} {path}: {getattr(error, 'strerror', None) or error}") from error


def load(text: str, where: str) -> Text:
    """The one document of a text; `where` is what errors call it."""
    found = list(documents(text, where))
    if len(found) > 1:
        raise BadInput(f"{where}: holds {len(found)} YAML documents, one is expected")
    return found[0] if found else Text(value=None, lines={})


def documents(text: str, where: str) -> Iterator[Text]:
    """Every document of a text."""
    try:
        loader = _Loader(text)
        while loader.check_node():
            node: yaml.Node = loader.get_node()  # type: ignore[assignment]  # there is one, just checked
            lines = dict(_lines(node, where))
            yield Text(value=loader.construct_document(node), lines=lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f" line {mark.line + 1}" if mark else ""
        raise BadInput(f"{where}{at}: not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise BadInput(f"{where}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise BadInput(f"{where}: is nested too deeply") from error


class _Loader(yaml.SafeLoader):
    """Plain values alone, and what is no value of its kind is an error with a line."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            found = super().construct_object(node, deep=deep)
            if isinstance(found, str):
                found.encode()
        except (ValueError, AttributeError, OverflowError) as error:
            kind = "Unicode text" if isinstance(error, UnicodeError) else node.tag.rpartition(":")[2]
            problem = f"{str(node.value)[:40]!r} is no {kind}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error
        if isinstance(found, str) and "\0" in found:
            raise yaml.MarkedYAMLError(problem="a NUL in a text", problem_mark=node.start_mark)
        if isinstance(found, float) and not math.isfinite(found):
            raise yaml.MarkedYAMLError(problem="a number that is not finite", problem_mark=node.start_mark)
        return found


def _lines(node: yaml.Node, where: str) -> Iterator[tuple[Key, int]]:
    """The line of every key and item. BadInput for a key that stands twice, is no plain word, or that holds
    itself, and for aliases that multiply beyond MOST.
    """
    left: list[tuple[yaml.Node, Key, tuple[yaml.Node, ...]]] = [(node, (), ())]
    count = 0
    while left:
        here, at, above = left.pop()
        line = here.start_mark.line + 1
        count += 1
        if here in above or count > MOST:
            raise BadInput(f"{where} line {line}: aliases that repeat themselves without end")
        if at == () or not isinstance(at[-1], str):
            yield at, line
        inside = (*above, here)
        if isinstance(here, yaml.MappingNode):
            seen: set[object] = set()
            for key, value in here.value:
                line = key.start_mark.line + 1
                if not isinstance(key, yaml.ScalarNode):
                    raise BadInput(f"{where} line {line}: a key is one word, not a list or mapping")
                if key.value in seen:
                    raise BadInput(f"{where} line {line}: key '{key.value}' stands twice")
                seen.add(key.value)
                yield (*at, key.value), line
                left.append((value, (*at, key.value), inside))
        elif isinstance(here, yaml.SequenceNode):
            left += [(item, (*at, index), inside) for index, item in enumerate(here.value)]
