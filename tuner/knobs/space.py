"""Search spaces: read from YAML as ordered levels per knob with conditions, limited to what an engine has,
and checked against an engine; and the knobs that an engine has.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, product
from math import prod
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from tuner import yamltext
from tuner.errors import BadInput, NotFound, nearest
from tuner.knobs import arguments
from tuner.knobs.catalogue import CATALOGUE, Knob, matches, specifier, written
from tuner.knobs.model import ModelFacts
from tuner.records import Candidate, EngineFacts, Value, canonical_json, digest_of
from tuner.settings import NAME, shipped

# Parent knob → values with which the child is turned. None: the parent has the engine's default.
Condition = Mapping[str, tuple[Value, ...]]

# In a space file this means "the engine's own default".
DEFAULT = "default"

# No search can use more levels of one knob: more of them are a mistake in `step`.
_MOST_LEVELS = 4096

# No knob is as large as this.
LARGEST_NUMBER = 2.0**63

# Combinations of levels that are tried to meet a condition; those of people need a few.
_MOST_COMBINATIONS = 100_000


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The knobs that a study may turn. The levels of a knob are ordered. The level None (always the first)
    leaves the knob to the engine's default; a candidate then does not have the knob.

    `dropped` says what `restricted` took out: knob, or `knob=value`, → reason. `inherited` are the knobs of
    today's configuration that the space does not turn: every candidate has their values.
    """

    name: str
    levels: Mapping[str, tuple[Value, ...]]
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    vllm: str = ">=0.10"
    about: str = ""
    dropped: Mapping[str, str] = field(default_factory=dict)
    inherited: Mapping[str, Value] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Identity of the space: levels, conditions and versions, without name and baseline."""
        return digest_of(
            {
                "vllm": self.vllm,
                "levels": {name: list(values) for name, values in self.levels.items()},
                "conditions": {
                    name: {parent: list(values) for parent, values in condition.items()}
                    for name, condition in self.conditions.items()
                },
            }
        )

    @property
    def size(self) -> int:
        """The number of combinations of levels. An upper bound: inactive knobs count too."""
        return math.prod(map(len, self.levels.values()))

    @property
    def changes_output(self) -> tuple[str, ...]:
        """The knobs of the space that may change what the model answers."""
        return tuple(name for name in self.levels if CATALOGUE[name].changes_output)

    @property
    def needs_raw(self) -> tuple[str, ...]:
        """The knobs of the space that need the real prompts (`history: raw`) to be judged."""
        return tuple(name for name in self.levels if CATALOGUE[name].needs_raw)

    def active(self, name: str, values: Mapping[str, Value], found: dict[str, bool] | None = None) -> bool:
        """Whether a knob is turned, given the values of the others. `found` has those that are judged."""
        found = {} if found is None else found
        for parent, wanted in self.conditions.get(name, {}).items():
            value = self.inherited.get(parent)
            if parent in self.levels:
                if parent not in found:
                    found[parent] = self.active(parent, values, found)
                value = values.get(parent) if found[parent] else None
            if value not in wanted:
                return False
        return True

    def canonical(self, candidate: Mapping[str, Value]) -> Candidate:
        """The candidate in its one form: without inactive knobs, without knobs at the engine's default, and
        with the knobs that it inherits from today's configuration.
        """
        kept = {
            name: value
            for name, value in candidate.items()
            if value is not None and (name not in self.levels or self.active(name, candidate))
        }
        whole = {**kept, **self.inherited}
        graphs = self.levels.get(arguments.GRAPHS)
        return Candidate(arguments.with_acting_graphs(whole, graphs) if graphs else whole)

    def contains(self, candidate: Mapping[str, Value]) -> bool:
        """Whether the candidate is canonical and has every active knob at one of its levels, the inherited
        knobs, and nothing else.
        """
        if self.canonical(candidate) != Candidate(candidate):
            return False
        if not candidate.keys() <= self.levels.keys() | self.inherited.keys():
            return False
        return all(
            level_of(levels, candidate.get(name)) is not None
            for name, levels in self.levels.items()
            if self.active(name, candidate)
        )

    def known_violation(
        self,
        candidate: Mapping[str, Value],
        facts: EngineFacts,
        max_model_len: int | None = None,
        model: ModelFacts | None = None,
    ) -> str | None:
        """Why a candidate is known to fail before any launch, or None."""
        return arguments.known_violation(self.canonical(candidate), facts, max_model_len, model)

    def restricted(
        self,
        facts: EngineFacts,
        *,
        env: Mapping[str, str] | None = None,
        baseline: Mapping[str, Value] = MappingProxyType({}),
        unjudged: str | None = None,
    ) -> "SearchSpace":
        """The part of the space that this engine can turn, on top of today's configuration (`baseline`).

        `unjudged`, if given, is why knobs that change the output keep their baseline value. BadInput when the
        engine's version is out of range or no knob is left.
        """
        if not matches(facts.version, self.vllm):
            raise BadInput(f"space '{self.name}' is for vLLM {self.vllm}, but {facts.version} is installed")
        dropped: dict[str, str] = {}
        levels: dict[str, tuple[Value, ...]] = {}
        for name, values in self.levels.items():
            rest = {knob: v for knob, v in baseline.items() if v is not None and knob not in self.levels}
            held = unjudged if CATALOGUE[name].changes_output else None
            reasons = {
                value: _refusal(name, value, facts, env)
                or _clash(name, value, rest, facts)
                or (held if value != baseline.get(name) else None)
                for value in values
            }
            kept = tuple(value for value in values if reasons[value] is None)
            refused = {
                value: why.removeprefix(f"{name}: ") for value, why in reasons.items() if why is not None
            }
            if any(value is not None for value in kept):
                levels[name] = kept
                dropped |= {f"{name}={value}": why for value, why in refused.items()}
            else:
                dropped[name] = next(iter(refused.values()), "it has no value but the default")
        inherited = {name: v for name, v in baseline.items() if v is not None and name not in levels}
        left = replace(
            self, levels=levels, conditions=_conditions_for(self.conditions, levels), dropped=dropped,
            inherited=inherited,
        )  # fmt: skip
        never = {name: why for name in levels if (why := left.never_active(name)) is not None}
        if len(never) == len(levels):
            raise BadInput(
                f"space '{self.name}': {arguments.title(facts)} ({facts.platform}) has none of its knobs:"
                f" {'; '.join(f'{name}: {why}' for name, why in list(dropped.items())[:3])}"
            )
        kept_levels = {name: values for name, values in levels.items() if name not in never}
        conditions = _conditions_for(self.conditions, kept_levels)
        return replace(left, levels=kept_levels, conditions=conditions, dropped=dropped | never)

    def never_active(self, name: str) -> str | None:
        """Why no combination of the other knobs turns this one, or None."""
        parents = sorted(set(self.ancestors(name)) & self.levels.keys())
        levels = []  # of each parent one for each set of conditions that a level of it meets
        for parent in parents:
            wanted = [set(each[parent]) for each in self.conditions.values() if parent in each]
            levels.append({tuple(v in each for each in wanted): v for v in self.levels[parent]}.values())
        combinations = product(*levels)
        for values in islice(combinations, _MOST_COMBINATIONS):
            if self.active(name, dict(zip(parents, values, strict=True))):
                return None
        if next(combinations, None) is not None:
            raise BadInput(f"space '{self.name}': {name} depends on too many knobs: give it fewer conditions")
        condition = canonical_json({key: list(wanted) for key, wanted in self.conditions[name].items()})
        return f"{name}: nothing in the space makes its condition {condition} true"

    def ancestors(self, name: str) -> list[str]:
        """The knobs that the conditions of a knob depend on. BadInput when it depends on itself."""
        found: dict[str, str] = {}
        left = [name]
        while left:
            child = left.pop()
            for parent in self.conditions.get(child, {}):
                if parent not in found:
                    found[parent] = child
                    left.append(parent)
        if name in found:
            circle = [name, found[name]]
            while circle[-1] != name:
                circle.append(found[circle[-1]])
            raise BadInput(f"space '{self.name}': conditions go in a circle: {' → '.join(circle[::-1])}")
        return list(found)


def _refusal(name: str, value: Value, facts: EngineFacts, env: Mapping[str, str] | None) -> str | None:
    """Why a level cannot be used here (the engine refuses it, or the host has too few GPUs), or None."""
    if name.endswith("_parallel_size") and value is not None:
        alone = arguments.known_violation({name: value}, facts)
        return arguments.refusal(name, value, facts, env=env) or alone
    return arguments.refusal(name, value, facts, env=env)


def _clash(name: str, value: Value, rest: Mapping[str, Value], facts: EngineFacts) -> str | None:
    """Why a level conflicts with a knob of today's configuration that the space does not turn, or None."""
    if value is None or arguments.known_violation({name: value}, facts):
        return None
    for knob, today in rest.items():
        if arguments.known_violation({knob: today}, facts):
            continue
        if (why := arguments.known_violation({knob: today, name: value}, facts)) is not None:
            return f"{why} (baseline: {knob} is {today} and the space does not change it)"
    return None


def level_of(levels: tuple[Value, ...], value: Value) -> int | None:
    """The index of a value among levels, None when it is not there. True and 1 are different values."""
    for index, level in enumerate(levels):
        if level == value and isinstance(level, bool) == isinstance(value, bool):
            return index
    return None


def _conditions_for(
    conditions: Mapping[str, Condition], levels: Mapping[str, tuple[Value, ...]]
) -> dict[str, Condition]:
    return {name: condition for name, condition in conditions.items() if name in levels}


class SpaceFile(yamltext.Section):
    """A space file as written."""

    name: Any = None
    about: Any = ""
    vllm: Any = ">=0.10"
    accept: Any = None
    knobs: Any = None


class KnobFile(yamltext.Section):
    """One knob of a space file: its levels are listed in `values`, or computed from `from` to `to`."""

    values: Any = None
    start: Any = Field(None, alias="from")
    stop: Any = Field(None, alias="to")
    step: Any = None
    per_octave: Any = None
    multiple: Any = 1
    default: Any = False
    when: Any = None


def names() -> tuple[str, ...]:
    """The shipped spaces."""
    return tuple(sorted(path.stem for path in shipped("search_spaces").glob("*.yaml")))


def load(name_or_path: str | Path) -> SearchSpace:
    """A shipped space by name, or a YAML file. BadInput names file and key; NotFound lists the shipped
    spaces.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml") and "/" not in str(name_or_path):
        path = shipped("search_spaces") / f"{name_or_path}.yaml"
    elif not path.is_file() and path.parent.name == "search_spaces" and path.stem in names():
        path = shipped("search_spaces") / path.name
    if not path.is_file():
        known = ", ".join(names())
        raise NotFound(
            f"no search space '{name_or_path}'{nearest(path.stem, names())}; the shipped ones are {known}"
        )
    return parse(yamltext.read(path, "the search space"), where=str(name_or_path), name=path.stem)


def parse(text: str, *, where: str, name: str = "space") -> SearchSpace:
    """A space from YAML text. `where` names the text in errors, `name` the space unless the text does."""
    file = yamltext.validated(SpaceFile, yamltext.load(text, where).value, where)
    if not isinstance(file.knobs, dict) or not file.knobs:
        raise BadInput(f"{where}: 'knobs' is empty; list at least one knob with its values")
    name = name if file.name is None else str(file.name)
    if not re.fullmatch(NAME, name):
        raise BadInput(f"{where}: name: '{name}': use only letters, digits, '.', '_' and '-'")
    specifier(str(file.vllm), f"{where}: vllm")
    levels: dict[str, tuple[Value, ...]] = {}
    conditions: dict[str, dict[str, tuple[Value, ...]]] = {}
    for key, entry in file.knobs.items():
        found = _knob(str(key), file.accept or [], where)
        body = entry if isinstance(entry, dict) else {"values": entry}
        levels[found.name] = _levels(found, body, f"{where}: {key}")
        if body.get("when") is not None:
            conditions[found.name] = _condition(body["when"], f"{where}: {key}: when")
    space = SearchSpace(
        name=name, levels=levels, conditions=conditions, vllm=str(file.vllm), about=str(file.about).strip()
    )
    _check_conditions(space, where)
    return space


def _knob(name: str, accept: object, where: str) -> Knob:
    found = CATALOGUE.get(name.replace("-", "_"))
    if found is None:
        raise BadInput(f"{where}: no knob is named '{name}'{nearest(name, CATALOGUE)}")
    if found.never and not (isinstance(accept, list) and found.name in accept):
        how = f"to change it anyway, write 'accept: [{found.name}]'"
        raise BadInput(f"{where}: {found.name} is not changed by default: {found.never} ({how})")
    return found


def _levels(found: Knob, body: Mapping[str, Any], where: str) -> tuple[Value, ...]:
    file = yamltext.validated(KnobFile, body, where)
    ranged = "from" in body or "to" in body
    if ranged == ("values" in body):
        raise BadInput(f"{where}: give either 'values' or 'from' and 'to'")
    raw = _range(found, file, where) if ranged else file.values
    items = raw if isinstance(raw, list) else [raw]
    values = [_value(found, item, where) for item in items if item not in (DEFAULT, None)]
    if not values:
        raise BadInput(f"{where}: the range is empty; give at least one value")
    if len({(type(value), value) for value in values}) != len(values):
        raise BadInput(f"{where}: a value occurs twice")
    default = bool(file.default) or any(item in (DEFAULT, None) for item in items)
    return (None, *values) if default else tuple(values)


def _value(found: Knob, raw: object, where: str) -> Value:
    value = written(raw)
    if found.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if (wrong := found.complaint(value)) is not None:
        raise BadInput(f"{where}: {wrong.removeprefix(found.name + ': ')}")
    return value


def _range(found: Knob, file: KnobFile, where: str) -> list[Value]:
    """A grid from `from` to `to`, both included: linear with `step`, geometric with `per_octave`."""
    low, high, multiple = file.start, file.stop, file.multiple
    for key, bound in (("from", low), ("to", high)):
        if not _is_number(bound):
            raise BadInput(f"{where}: '{key}' is not a number")
    if low > high:
        raise BadInput(f"{where}: the range is empty: 'from' is {low}, which is more than 'to' ({high})")
    if (file.step is None) == (file.per_octave is None):
        raise BadInput(f"{where}: give either 'step' (linear) or 'per_octave' (geometric)")
    pace = file.per_octave if file.step is None else file.step
    if not _is_number(pace) or pace <= 0:
        raise BadInput(f"{where}: the step {pace!r} is not a number above 0")
    if isinstance(multiple, bool) or not isinstance(multiple, int) or not 1 <= multiple < LARGEST_NUMBER:
        raise BadInput(f"{where}: 'multiple' is not a whole number above 0")
    if file.step is None and low <= 0:
        raise BadInput(f"{where}: 'from' of a geometric range must be above 0")
    steps = (math.log2(high / low) * pace) if file.step is None else (high - low) / pace
    if steps + 1e-9 >= _MOST_LEVELS:
        raise BadInput(f"{where}: more than {_MOST_LEVELS} levels; take a bigger step")
    count = math.floor(steps + 1e-9) + 1
    grid = (low * 2 ** (i / pace) if file.step is None else low + i * pace for i in range(count))
    return list(dict.fromkeys(_rounded(found, value, multiple) for value in grid))


def _rounded(found: Knob, value: float, multiple: int) -> Value:
    if found.kind == "float":
        return round(float(value), 10)
    return max(multiple, round(value / multiple) * multiple)


def _is_number(value: object) -> bool:
    """Whether a value is a number that a grid can be computed with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_NUMBER


def _condition(raw: object, where: str) -> dict[str, tuple[Value, ...]]:
    if not isinstance(raw, dict) or not raw:
        raise BadInput(
            f"{where}: write KNOB: VALUE or KNOB: [VALUES]. This knob is then used only with these values"
        )
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
                    f"{where}: {name}: when: '{parent}' is not a knob of this space"
                    f"{nearest(parent, space.levels)}"
                )
            known = set(space.levels[parent])
            stray = [value for value in wanted if value not in known]
            if stray and stray != [None]:
                raise BadInput(f"{where}: {name}: when: {parent} never has the value {stray[0]}")
        space.ancestors(name)
    for name in space.conditions:
        if (why := space.never_active(name)) is not None:
            raise BadInput(f"{where}: contradictory conditions: {why}")
    pair = ("gpu_memory_utilization", "kv_cache_memory_bytes")
    if all(name in space.levels for name in pair):
        both = [set(space.ancestors(name)) for name in pair]
        free = None in space.levels[pair[0]] or None in space.levels[pair[1]]
        if not free and pair[1] not in both[0] and pair[0] not in both[1]:
            raise BadInput(
                f"{where}: {pair[1]} overrides {pair[0]}: use one of them only when the other has its default"
            )


# Enough for a share that is right to about 1 %, drawn in a moment.
_SAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobRow:
    """One knob on one engine. `flag` is the engine's flag; `why_not` is None if the knob can be used."""

    name: str
    flag: str | None
    default: Value
    choices: tuple[Value, ...]
    why_not: str | None
    knob: Knob


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceFinding:
    """A fact on a space with an engine. An `error` prevents a study; something `dropped` is taken out of the
    space.
    """

    kind: Literal["error", "dropped", "note"]
    about: str
    text: str


def knob_rows(facts: EngineFacts) -> tuple[KnobRow, ...]:
    """Every knob of the catalogue on this engine, in the order of the catalogue."""
    return tuple(
        KnobRow(
            name=name,
            flag=entry.flag_in(facts),
            default=facts.defaults.get(name),
            choices=facts.choices.get(name) or entry.choices_for(facts.version),
            why_not=arguments.refusal(name, sample_value(entry, facts), facts),
            knob=entry,
        )
        for name, entry in CATALOGUE.items()
    )


def sample_value(entry: Knob, facts: EngineFacts) -> Value:
    """A value of the right type for a knob, which this engine takes as far as our data shows."""
    offered = facts.choices.get(entry.name) or entry.choices_for(facts.version)
    if offered:
        return offered[-1]
    plain: dict[str, Value] = {
        "int": int(entry.minimum or 1),
        "float": float(entry.minimum or 0.0),
        "bool": True,
        "text": "x",
        "choice": next((value for rule in entry.choices for value in rule.values), "x"),
        "json": "{}",
        "ints": "[1,2]",
        "preemption": "recompute",
    }
    return plain[entry.kind]


def check_space(
    space: SearchSpace,
    facts: EngineFacts,
    *,
    max_model_len: int | None = None,
    model: ModelFacts | None = None,
) -> tuple[SpaceFinding, ...]:
    """The findings on a space with an engine: errors, what is dropped, and notes."""
    try:
        left = space.restricted(facts)
    except BadInput as error:
        return (SpaceFinding(kind="error", about=space.name, text=str(error)),)
    dropped = [SpaceFinding(kind="dropped", about=what, text=why) for what, why in left.dropped.items()]
    notes = [*_marks(left), *_shapes(left), *_doomed(left, facts, max_model_len, model)]
    return (*dropped, *(SpaceFinding(kind="note", about=about, text=text) for about, text in notes))


def _marks(space: SearchSpace) -> list[tuple[str, str]]:
    notes = [
        (name, "it can change the answers, so they are compared with the baseline's (key 'quality')")
        for name in space.changes_output
    ]
    notes += [
        (name, "it can only be judged with the users' own prompts, which a trace does not have")
        for name in space.needs_raw
    ]
    return notes + [(name, why) for name in space.levels if (why := CATALOGUE[name].never)]


def _shapes(space: SearchSpace) -> list[tuple[str, str]]:
    recompiling = [name for name in space.levels if CATALOGUE[name].recompiles]
    shapes = prod(len(space.levels[name]) for name in recompiling)
    if shapes <= 1:
        return []
    return [(space.name, f"up to {shapes} shapes to compile, because of {', '.join(recompiling)}")]


def _doomed(
    space: SearchSpace, facts: EngineFacts, max_model_len: int | None, model: ModelFacts | None
) -> list[tuple[str, str]]:
    """The share of combinations that are known to fail, with the commonest reasons, from a fixed sample."""
    random = Random(space.digest)
    reasons: Counter[str] = Counter()
    example: dict[str, str] = {}
    for _ in range(_SAMPLES):
        drawn = {name: random.choice(levels) for name, levels in space.levels.items()}
        why = space.known_violation(drawn, facts, max_model_len, model)
        if why is not None:
            kind = " ".join(word for word in why.split() if not word.isdigit())
            reasons[kind] += 1
            example.setdefault(kind, why)
    failing = sum(reasons.values())
    if not failing:
        return []
    share = f"{100 * failing / _SAMPLES:.0f} % of the combinations are known to fail and are never launched"
    common = "; ".join(example[kind] for kind, _ in islice(reasons.most_common(), 3))
    return [(space.name, f"{share}, such as: {common}")]
