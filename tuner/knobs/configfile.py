"""YAML of engines: values inside documents, and mappings as a command line (vLLM's `--config`, charts)."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tuner import yamltext
from tuner.errors import BadInput
from tuner.records import canonical_json


def documents(text: str, where: str) -> list[dict[str, Any]]:
    """The YAML mappings of a text; none where it is a command line."""
    try:
        return [each.value for each in yamltext.documents(text, where) if isinstance(each.value, dict)]
    except BadInput:
        if where.endswith((".yaml", ".yml", ".json")):
            raise
        return []


def argv_of_mapping(mapping: Mapping[str, Any]) -> list[str]:
    """Keys and values as words of a command line. Keys may have dashes, underscores or camelCase. A key
    without a value is left out.
    """
    words: list[str] = []
    for key, value in mapping.items():
        flag = "--" + re.sub(r"(?<=[a-z0-9])([A-Z])", r"-\1", str(key)).lower().replace("_", "-")
        if value is None or value == "":
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            words += [flag, *(str(item) for item in value)]
        else:
            words += [flag, canonical_json(value) if isinstance(value, dict) else str(value)]
    return words


def at(document: object, *path: str) -> Any:
    """The value under a path of keys (of lists: of places, as `walk` has them); None where one is missing."""
    for key in path:
        if isinstance(document, list):
            document = dict(enumerate(document)).get(int(key)) if key.isdigit() else None
        else:
            document = document.get(key) if isinstance(document, Mapping) else None
    return document


def walk(document: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value of a document with its path; a value comes before those inside it."""
    yield path, document
    inner = document.items() if isinstance(document, Mapping) else ()
    for key, value in enumerate(document) if isinstance(document, list) else inner:
        yield from walk(value, (*path, str(key)))


def environment(raw: object) -> tuple[dict[str, str], tuple[str, ...]]:
    """The environment of a Kubernetes container or compose service (a list or a mapping), and a note for
    each variable whose value is not in the file.
    """
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
