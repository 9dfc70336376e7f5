"""One engine found in a file, before its arguments are read; and the small steps that all readers share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """vLLM's own arguments, what else is known of the engine, and where it was found."""

    where: str
    name: str
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    notes: tuple[str, ...] = ()


def at(document: object, *path: str) -> Any:
    """What lies under some keys; None where one is missing."""
    for key in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(key)
    return document


def walk(document: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value of a document with its path, outer ones first."""
    yield path, document
    if isinstance(document, Mapping):
        for key, value in document.items():
            yield from walk(value, (*path, str(key)))
    elif isinstance(document, list):
        for number, value in enumerate(document):
            yield from walk(value, (*path, str(number)))


def environment(raw: object) -> tuple[dict[str, str], tuple[str, ...]]:
    """A Kubernetes or compose environment (list or mapping), and notes on what is not in the file."""
    env: dict[str, str] = {}
    notes: list[str] = []
    if isinstance(raw, Mapping):
        raw = [{"name": name, "value": value} for name, value in raw.items()]
    for item in raw if isinstance(raw, list) else []:
        if isinstance(item, str):
            name, equals, value = item.partition("=")
            item = {"name": name, "value": value} if equals else {"name": name}
        if isinstance(item, Mapping) and item.get("value") is not None:
            value = item["value"]
            env[str(item.get("name"))] = str(value).lower() if isinstance(value, bool) else str(value)
        elif isinstance(item, Mapping) and item.get("name"):
            notes.append(f"{item.get('name')} comes from elsewhere in the cluster and is left out")
    return env, tuple(notes)
