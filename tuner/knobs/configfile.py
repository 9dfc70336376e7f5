"""YAML mappings as words of a command line, as vLLM's `--config` and the charts around it write them."""

import re
from collections.abc import Mapping
from typing import Any

from tuner import yamltext
from tuner.errors import BadInput
from tuner.records import canonical_json


def load_yaml(text: str, where: str) -> dict[str, Any]:
    """One YAML mapping. BadInput otherwise."""
    for document in documents(text, where):
        return document
    raise BadInput(f"{where}: expected keys and values")


def argv_of_mapping(mapping: Mapping[str, Any]) -> list[str]:
    """Keys and values (dashes, underscores or camelCase) as words of a command line; null is left out."""
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


def documents(text: str, where: str) -> list[dict[str, Any]]:
    """The YAML mappings of a text; none when it is a command line."""
    try:
        return [each.value for each in yamltext.documents(text, where) if isinstance(each.value, dict)]
    except BadInput:
        if where.endswith((".yaml", ".yml", ".json")):
            raise
        return []
