"""Reads the YAML that people write: plain values with the line of each key, or one BadInput that names the
fault.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from tuner.errors import BadInput, nearest

# Values that a text may hold; what an alias repeats counts each time. A file of people is far smaller.
MOST = 100_000
Key = tuple[object, ...]
M = TypeVar("M", bound=BaseModel)

# What pydantic calls an unknown key: a word, or something else such as a number.
_UNKNOWN_KEY = ("extra_forbidden", "invalid_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The value of a text. `lines` maps the path of every key and item to its line."""

    value: Any
    lines: Mapping[Key, int]


def read(path: Path, what: str = "the file") -> str:
    """The text of a file. BadInput if the file cannot be read or holds no UTF-8 text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not a UTF-8 text file") from error
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {what} {path}: {getattr(error, 'strerror', None) or error}") from error


def load(text: str, where: str) -> Text:
    """The only document of a text. `where` names the text in errors."""
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


class Section(BaseModel):
    """A mapping that people write. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)


def validated(kind: type[M], raw: object, where: str) -> M:
    """A mapping as the model that describes it. BadInput is one sentence that names the place and the key;
    for an unknown key it names the nearest known one.
    """
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        found = min(error.errors(), key=lambda each: each["type"] not in _UNKNOWN_KEY)
    inside = found["loc"][:-1] if found["type"] in _UNKNOWN_KEY else ()
    known = _keys(kind, inside)
    listed = ", ".join(known)
    place = ": ".join([where, *map(str, found["loc"])])
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] in _UNKNOWN_KEY:
        place, key = where, str(found["loc"][-1])
        message = f"unknown key '{key}'{nearest(key, known) or '; known are ' + listed}"
    elif found["type"] == "model_type":
        message = f"expected keys and values ({listed}), found {raw!r}"
    elif found["type"] == "literal_error":
        message = f"{found['ctx']['expected'].replace(chr(39), '')}, not {found['input']!r}"
    raise BadInput(f"{place}: {message}")


def sentence(
    error: ValidationError, kind: type[BaseModel], name: str, lines: Mapping[tuple[object, ...], int]
) -> str:
    """What is wrong with the keys of a text, in one sentence that names the line and the key; for an unknown
    key it names the nearest known one.
    """
    found = min(error.errors(), key=lambda e: (e["type"] != "extra_forbidden", -len(e["loc"])))
    at = _place(found["loc"], lines)
    line = next((lines[at[:n]] for n in range(len(at), 0, -1) if at[:n] in lines), None)
    where = f"{name} line {line}" if line else name
    key = ".".join(str(part) for part in at)
    if found["type"] == "extra_forbidden":
        return f"{where}: unknown key '{key}'{nearest(str(at[-1]), _keys(kind, at[:-1]))}"
    if found["type"] == "missing":
        return f"{where}: key '{'.'.join([*map(str, at), str(found['loc'][-1])])}' is missing"
    message = found["msg"].removeprefix("Value error, ")
    given = found["input"]
    shown = ""
    if isinstance(given, str | int | float) and found["type"] != "value_error":
        shown = f", not {given!r}" if len(repr(given)) < 100 else f", not {repr(given)[:60]}…"
    return f"{where}: {key or kind.__name__.removesuffix('File').lower()}: {message}{shown}"


def _place(loc: tuple[int | str, ...], lines: Mapping[tuple[object, ...], int]) -> tuple[object, ...]:
    """The keys of the file that lead to an error; pydantic puts names of union branches in between."""
    at: tuple[object, ...] = ()
    for part in loc:
        if (*at, part) in lines:
            at = (*at, part)
    return at


def _keys(kind: type[BaseModel], inside: Sequence[object]) -> list[str]:
    """The keys of a model, or of the one that lies `inside` it."""
    for key in inside:
        found = [f.annotation for name, f in kind.model_fields.items() if key in (name, f.alias)]
        models = (each for kept in found for each in _types(kept) if isinstance(each, type))
        kind = next((each for each in models if issubclass(each, BaseModel)), kind)
    return [field.alias or name for name, field in kind.model_fields.items()]


def _types(annotation: Any) -> Iterator[Any]:
    """An annotation and everything inside it."""
    yield annotation
    for each in get_args(annotation):
        yield from _types(each)


class _Loader(yaml.SafeLoader):
    """Makes plain values only. A value that does not fit its YAML type is an error with its line."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A key such as `on` or `no` is a word, as it is written; YAML 1.1 reads it as true or false."""
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":
                key.tag = "tag:yaml.org,2002:str"
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            found = super().construct_object(node, deep=deep)
            if isinstance(found, str):
                found.encode()
        except (ValueError, AttributeError, OverflowError) as error:
            named = f"a valid {node.tag.rpartition(':')[2]}"
            kind = "valid Unicode text" if isinstance(error, UnicodeError) else named
            problem = f"{str(node.value)[:40]!r} is not {kind}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error
        if isinstance(found, str) and "\0" in found:
            raise yaml.MarkedYAMLError(problem="a text with a NUL character", problem_mark=node.start_mark)
        if isinstance(found, float) and not math.isfinite(found):
            raise yaml.MarkedYAMLError(problem="a number that is not finite", problem_mark=node.start_mark)
        return found


def _lines(node: yaml.Node, where: str) -> Iterator[tuple[Key, int]]:
    """The line of every key and item. BadInput for a key that occurs twice, is not plain text or contains
    itself, and for aliases that make more than MOST values.
    """
    left: list[tuple[yaml.Node, Key, tuple[yaml.Node, ...]]] = [(node, (), ())]
    count = 0
    while left:
        here, at, above = left.pop()
        line = here.start_mark.line + 1
        count += 1
        if here in above or count > MOST:
            raise BadInput(f"{where} line {line}: the aliases (*NAME) expand to too much text")
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
                    raise BadInput(f"{where} line {line}: key '{key.value}' occurs twice")
                seen.add(key.value)
                yield (*at, key.value), line
                left.append((value, (*at, key.value), inside))
        elif isinstance(here, yaml.SequenceNode):
            left += [(item, (*at, index), inside) for index, item in enumerate(here.value)]
