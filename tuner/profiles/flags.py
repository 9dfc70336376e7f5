"""An engine's argument list taken apart, as the exports need it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tuner.errors import BadInput
from tuner.records import JSON


@dataclass(frozen=True, slots=True)
class Flag:
    """One long flag without its dashes, spelled with dashes, and the words after it."""

    name: str
    words: tuple[str, ...] = ()


def split(argv: Sequence[str]) -> tuple[Flag, ...]:
    """The flags of an argument list, in its order. BadInput for a word before any flag, or a repeat."""
    found: list[Flag] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found.append(Flag(name.replace("_", "-"), (value,) if equals else ()))
        elif not found:
            raise BadInput(f"argument '{word}' stands before any flag: it cannot be exported")
        else:
            found[-1] = Flag(found[-1].name, (*found[-1].words, word))
    seen: set[str] = set()
    for flag in found:
        if flag.name in seen:
            raise BadInput(f"flag --{flag.name} is there twice: it cannot be exported")
        seen.add(flag.name)
    return tuple(found)


def plain(word: str) -> JSON:
    """A word as a JSON number where that prints as the same word, else the word itself."""
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return value if isinstance(value, int | float) and str(value) == word else word


def as_mapping(argv: Sequence[str]) -> dict[str, JSON]:
    """Flag → true, a value or a list, sorted; a switch that is off keeps its `no-…: true` form.

    vLLM before 0.28 drops every `false` of a config file, and later ones drop it under an underscore key.
    """
    return dict(sorted(_entries(argv)))


def _entries(argv: Sequence[str]) -> Iterator[tuple[str, JSON]]:
    for flag in split(argv):
        if not flag.words:
            yield flag.name, True
        elif len(flag.words) == 1:
            yield flag.name, plain(flag.words[0])
        else:
            yield flag.name, [plain(word) for word in flag.words]
