"""A search space: YAML → ordinal levels per knob, conditions, and what of it an installed engine can turn."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from types import MappingProxyType

from tuner.errors import BadInput
from tuner.knobs import arguments, constraints
from tuner.knobs.catalogue import CATALOGUE
from tuner.knobs.model import ModelFacts
from tuner.knobs.versions import matches
from tuner.records import Candidate, EngineFacts, Value, canonical_json, digest_of

Condition = Mapping[str, tuple[Value, ...]]
"""Parent knob → values with which the child is turned; None = left to the engine's default."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What a study may turn. Each knob's levels are ordered; a level None (always the first) means that the
    knob is left to the engine's default, and a candidate then does not hold it.

    `dropped` tells what `restricted` took out: knob, or `knob=value`, → reason. `inherited` are the knobs of
    today's configuration that the space does not turn: every candidate has them as they are.
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
        """Identity of what can be tried: levels, conditions and versions; not the name, not the baseline."""
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
        """Combinations of levels, inactive ones counted too: an upper bound."""
        total = 1
        for values in self.levels.values():
            total *= len(values)
        return total

    @property
    def changes_output(self) -> tuple[str, ...]:
        """The knobs in it whose turning changes what the model answers."""
        return tuple(name for name in self.levels if CATALOGUE[name].changes_output)

    @property
    def needs_raw(self) -> tuple[str, ...]:
        """The knobs in it that only the users' own words can judge."""
        return tuple(name for name in self.levels if CATALOGUE[name].needs_raw)

    def active(self, name: str, values: Mapping[str, Value]) -> bool:
        """Whether a knob is turned, given the values of the others."""
        for parent, wanted in self.conditions.get(name, {}).items():
            value = self.inherited.get(parent)
            if parent in self.levels:
                value = values.get(parent) if self.active(parent, values) else None
            if value not in wanted:
                return False
        return True

    def canonical(self, candidate: Mapping[str, Value]) -> Candidate:
        """The candidate without inactive knobs and without those left to the default or alike, and with
        what it inherits from today's configuration.
        """
        kept = {
            name: value
            for name, value in candidate.items()
            if value is not None and (name not in self.levels or self.active(name, candidate))
        }
        whole = {**kept, **self.inherited}
        graphs = self.levels.get(constraints.GRAPHS)
        return Candidate(constraints.with_acting_graphs(whole, graphs) if graphs else whole)

    def contains(self, candidate: Mapping[str, Value]) -> bool:
        """Whether it is a canonical point: every active knob at one of its levels, what is inherited, and
        nothing else.
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
        return constraints.known_violation(self.canonical(candidate), facts, max_model_len, model)

    def restricted(
        self,
        facts: EngineFacts,
        *,
        env: Mapping[str, str] | None = None,
        baseline: Mapping[str, Value] = MappingProxyType({}),
        unjudged: str | None = None,
    ) -> "SearchSpace":
        """The space that this engine can turn over today's configuration (`baseline`). BadInput when the
        engine's version is out of range or no knob is left. `unjudged` is why no knob that changes the output
        may leave what the baseline has, None: it may.
        """
        if not matches(facts.version, self.vllm):
            raise BadInput(f"space '{self.name}' is for vLLM {self.vllm}; installed is {facts.version}")
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
            refused = {value: why for value, why in reasons.items() if why is not None}
            if any(value is not None for value in kept):
                levels[name] = kept
                dropped |= {f"{name}={value}": why for value, why in refused.items()}
            else:
                dropped[name] = next(iter(refused.values()), f"{name}: it has no level to turn")
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
        for values in product(*(self.levels[parent] for parent in parents)):
            if self.active(name, dict(zip(parents, values, strict=True))):
                return None
        condition = canonical_json({key: list(wanted) for key, wanted in self.conditions[name].items()})
        return f"{name}: nothing in the space makes its condition {condition} true"

    def ancestors(self, name: str, below: tuple[str, ...] = ()) -> Iterator[str]:
        """The knobs that its conditions rest on. BadInput when they go round in a circle."""
        if name in below:
            raise BadInput(f"space '{self.name}': conditions go in a circle: {' → '.join((*below, name))}")
        for parent in self.conditions.get(name, {}):
            yield parent
            yield from self.ancestors(parent, (*below, name))


def _refusal(name: str, value: Value, facts: EngineFacts, env: Mapping[str, str] | None) -> str | None:
    """Why a level can never be turned here: the engine refuses it, or the host has too few GPUs for it."""
    if name.endswith("_parallel_size") and value is not None:
        alone = constraints.known_violation({name: value}, facts)
        return arguments.refusal(name, value, facts, env=env) or alone
    return arguments.refusal(name, value, facts, env=env)


def _clash(name: str, value: Value, rest: Mapping[str, Value], facts: EngineFacts) -> str | None:
    """Why a level cannot go together with a knob that the space leaves as it is today, or None."""
    if value is None or constraints.known_violation({name: value}, facts):
        return None
    for knob, today in rest.items():
        if constraints.known_violation({knob: today}, facts):
            continue
        if (why := constraints.known_violation({knob: today, name: value}, facts)) is not None:
            return f"{why} (baseline: {knob} is {today} and the space does not turn it)"
    return None


def level_of(levels: tuple[Value, ...], value: Value) -> int | None:
    """The index of a value among levels; True is not 1. None when it is not there."""
    for index, level in enumerate(levels):
        if level == value and isinstance(level, bool) == isinstance(value, bool):
            return index
    return None


def _conditions_for(
    conditions: Mapping[str, Condition], levels: Mapping[str, tuple[Value, ...]]
) -> dict[str, Condition]:
    return {name: condition for name, condition in conditions.items() if name in levels}


def load(name_or_path: str | Path) -> SearchSpace:
    """A shipped space by name, or a YAML file. BadInput names file and key; NotFound lists the shipped."""
    from tuner.knobs import spacefile

    return spacefile.load(str(name_or_path))
