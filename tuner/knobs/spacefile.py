"""The file form of a search space: YAML text → SearchSpace, with an error that names the key and mends it."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner import yamltext
from tuner.errors import BadInput, NotFound, nearest
from tuner.knobs.catalogue import CATALOGUE, Knob, written
from tuner.knobs.space import SearchSpace
from tuner.knobs.versions import specifier
from tuner.records import Value
from tuner.settings import NAME, shipped

FILE_KEYS = ("name", "about", "vllm", "accept", "knobs")
LEVEL_KEYS = ("values", "from", "to", "step", "per_octave", "multiple", "default", "when")
DEFAULT = "default"
"""The word for « left to the engine's default » among values and in conditions."""
_MOST_LEVELS = 4096


def names() -> tuple[str, ...]:
    """The shipped spaces."""
    return tuple(sorted(path.stem for path in shipped("search_spaces").glob("*.yaml")))


def load(name_or_path: str) -> SearchSpace:
    """See space.load."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml") and "/" not in name_or_path:
        path = shipped("search_spaces") / f"{name_or_path}.yaml"
    elif not path.is_file() and path.parent.name == "search_spaces" and path.stem in names():
        path = shipped("search_spaces") / path.name
    if not path.is_file():
        known = ", ".join(names())
        raise NotFound(f"no search space '{name_or_path}'{nearest(path.stem, names())}; shipped are {known}")
    return parse(yamltext.read(path, "the search space"), where=str(name_or_path), name=path.stem)


def parse(text: str, *, where: str, name: str = "space") -> SearchSpace:
    """A space from YAML text; `where` names it in errors."""
    top = _mapping(yamltext.load(text, where).value, where, FILE_KEYS)
    knobs = top.get("knobs")
    if not isinstance(knobs, dict) or not knobs:
        raise BadInput(f"{where}: 'knobs' is empty; list at least one knob with its values")
    if not re.fullmatch(NAME, str(top.get("name", name))):
        raise BadInput(
            f"{where}: name: '{top.get('name', name)}': letters, digits, '.', '_' and '-' make a name"
        )
    versions = str(top.get("vllm", ">=0.10"))
    specifier(versions, f"{where}: vllm")
    levels: dict[str, tuple[Value, ...]] = {}
    conditions: dict[str, dict[str, tuple[Value, ...]]] = {}
    for key, entry in knobs.items():
        found = _knob(str(key), top.get("accept") or [], where)
        body = entry if isinstance(entry, dict) else {"values": entry}
        levels[found.name] = _levels(found, _mapping(body, f"{where}: {key}", LEVEL_KEYS), f"{where}: {key}")
        if body.get("when") is not None:
            conditions[found.name] = _condition(body["when"], f"{where}: {key}: when")
    space = SearchSpace(
        name=str(top.get("name", name)),
        levels=levels,
        conditions=conditions,
        vllm=versions,
        about=str(top.get("about", "")).strip(),
    )
    _check_conditions(space, where)
    return space


def _mapping(raw: object, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise BadInput(f"{where}: expected keys and values ({', '.join(known)}), found {raw!r}")
    for key in raw:
        if key not in known:
            close = nearest(str(key), known) or f"; known are {', '.join(known)}"
            raise BadInput(f"{where}: unknown key '{key}'{close}")
    return raw


def _knob(name: str, accept: object, where: str) -> Knob:
    found = CATALOGUE.get(name.replace("-", "_"))
    if found is None:
        raise BadInput(f"{where}: no knob is named '{name}'{nearest(name, CATALOGUE)}")
    if found.never and not (isinstance(accept, list) and found.name in accept):
        how = f"if you mean it, write 'accept: [{found.name}]'"
        raise BadInput(f"{where}: {found.name} is not turned by default: {found.never} ({how})")
    return found


def _levels(found: Knob, body: Mapping[str, Any], where: str) -> tuple[Value, ...]:
    ranged = "from" in body or "to" in body
    if ranged == ("values" in body):
        raise BadInput(f"{where}: give either 'values' or 'from' and 'to'")
    raw = _range(found, body, where) if ranged else body["values"]
    if not isinstance(raw, list):
        raw = [raw]
    default = bool(body.get("default")) or any(item in (DEFAULT, None) for item in raw)
    values = [_value(found, item, where) for item in raw if item not in (DEFAULT, None)]
    if not values:
        raise BadInput(f"{where}: the range is empty; give at least one value")
    unique = tuple(dict.fromkeys((type(value), value) for value in values))
    if len(unique) != len(values):
        raise BadInput(f"{where}: a value stands twice")
    return (None, *values) if default else tuple(values)


def _value(found: Knob, raw: object, where: str) -> Value:
    value = written(raw)
    if found.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if (wrong := found.complaint(value)) is not None:
        raise BadInput(f"{where}: {wrong.removeprefix(found.name + ': ')}")
    return value


def _range(found: Knob, body: Mapping[str, Any], where: str) -> list[Value]:
    """A grid from `from` to `to`, both included: linear with `step`, geometric with `per_octave`."""
    for key in ("from", "to"):
        if not _is_number(body.get(key)):
            raise BadInput(f"{where}: '{key}' is no number")
    low, high = body["from"], body["to"]
    if low > high:
        raise BadInput(f"{where}: the range is empty: from {low} is above to {high}")
    if ("step" in body) == ("per_octave" in body):
        raise BadInput(f"{where}: give either 'step' (linear) or 'per_octave' (geometric)")
    pace = body.get("step", body.get("per_octave"))
    if not _is_number(pace) or pace <= 0:
        raise BadInput(f"{where}: the pace {pace!r} is no number above 0")
    multiple = body.get("multiple", 1)
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise BadInput(f"{where}: 'multiple' is no whole number above 0")
    if "step" in body:
        count = math.floor((high - low) / pace + 1e-9)
        grid = [low + index * pace for index in range(min(count, _MOST_LEVELS) + 1)]
    else:
        if low <= 0:
            raise BadInput(f"{where}: a geometric range starts above 0")
        count = math.floor(math.log2(high / low) * pace + 1e-9)
        grid = [low * 2 ** (index / pace) for index in range(min(count, _MOST_LEVELS) + 1)]
    if len(grid) > _MOST_LEVELS:
        raise BadInput(f"{where}: more than {_MOST_LEVELS} levels; take a bigger step")
    return list(dict.fromkeys(_rounded(found, value, multiple) for value in grid))


def _rounded(found: Knob, value: float, multiple: int) -> Value:
    if found.kind == "float":
        return round(float(value), 10)
    return max(multiple, round(value / multiple) * multiple)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _condition(raw: object, where: str) -> dict[str, tuple[Value, ...]]:
    if not isinstance(raw, dict) or not raw:
        raise BadInput(f"{where}: expected a knob and the value or values with which this one is turned")
    condition: dict[str, tuple[Value, ...]] = {}
    for key, wanted in raw.items():
        items = wanted if isinstance(wanted, list) else [wanted]
        name = str(key).replace("-", "_")
        condition[name] = tuple(None if item in (DEFAULT, None) else written(item) for item in items)
    return condition


def _check_conditions(space: SearchSpace, where: str) -> None:
    for name, condition in space.conditions.items():
        for parent, wanted in condition.items():
            if parent not in space.levels:
                raise BadInput(
                    f"{where}: {name}: when names '{parent}'{nearest(parent, space.levels)}, not a knob here"
                )
            stray = [value for value in wanted if value not in space.levels[parent]]
            if stray and stray != [None]:
                raise BadInput(f"{where}: {name}: when: {parent} never is {stray[0]}")
        list(space.ancestors(name))
    for name in space.conditions:
        if (why := space.never_active(name)) is not None:
            raise BadInput(f"{where}: contradictory conditions: {why}")
    pair = ("gpu_memory_utilization", "kv_cache_memory_bytes")
    if all(name in space.levels for name in pair):
        both = [set(space.ancestors(name)) for name in pair]
        free = None in space.levels[pair[0]] or None in space.levels[pair[1]]
        if not free and pair[1] not in both[0] and pair[0] not in both[1]:
            raise BadInput(
                f"{where}: {pair[1]} overrides {pair[0]}: make one conditional on the other's default"
            )
