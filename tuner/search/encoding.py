"""A search space as flat integers: every knob is an index into its ordered list of levels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tuner.records import Candidate, Value


class Space(Protocol):
    """What the search needs of a space: ordered levels, what is inside, and the canonical form."""

    @property
    def levels(self) -> Mapping[str, tuple[Value, ...]]: ...

    def contains(self, candidate: Candidate) -> bool: ...

    def canonical(self, candidate: Candidate) -> Candidate: ...


# One index for each knob, in the space's order of knobs.
Point = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Candidate ↔ point. Trials are kept by value, so they survive a change of the level lists."""

    space: Space
    names: tuple[str, ...]
    levels: tuple[tuple[Value, ...], ...]
    defaults: Mapping[str, Value]

    @property
    def size(self) -> int:
        """The number of points, inactive duplicates included."""
        return math.prod(len(values) for values in self.levels)

    def candidate(self, point: Sequence[int]) -> Candidate:
        """The canonical candidate at a point."""
        pairs = zip(self.names, self.levels, point, strict=True)
        return self.space.canonical(Candidate({name: values[int(i)] for name, values, i in pairs}))

    def point(self, candidate: Mapping[str, Value]) -> Point | None:
        """Where a candidate lies, off-list numbers at the nearest level; None when it has no place.

        An absent knob lies where the engine's default does when that is known, else at None or level 0.
        """
        found = []
        for name, values in zip(self.names, self.levels, strict=True):
            index = _place(candidate[name], values) if name in candidate else self._default(name, values)
            if index is None:
                return None
            found.append(index)
        return tuple(found)

    def _default(self, name: str, values: tuple[Value, ...]) -> int:
        placed = _place(self.defaults[name], values) if name in self.defaults else None
        if placed is not None:
            return placed
        return values.index(None) if None in values else 0

    def completed(self, candidate: Mapping[str, Value]) -> Candidate:
        """What the engine would run: the candidate over the known defaults, without what is then inactive.
        The key of « the same ».
        """
        return self._filled(self.space.canonical(self._filled(candidate)))

    def _filled(self, candidate: Mapping[str, Value]) -> Candidate:
        known = {name: self.defaults[name] for name in self.names if name in self.defaults}
        asked = {
            name: known[name] if value is None and name in known else value
            for name, value in candidate.items()
        }
        return Candidate({name: _plain(value) for name, value in {**known, **asked}.items()})

    def random(self, rng: np.random.Generator) -> Point:
        return tuple(int(rng.integers(len(values))) for values in self.levels)


def encode(space: Space, defaults: Mapping[str, Value]) -> Encoding:
    """The encoding of a space; `defaults` is the baseline's effective configuration, as far as known."""
    names = tuple(name for name, values in space.levels.items() if len(values) > 0)
    return Encoding(
        space=space, names=names, levels=tuple(tuple(space.levels[n]) for n in names), defaults=defaults
    )


def _plain(value: Value) -> Value:
    """8.0 and 8 are one value to the engine; True and 1 are not."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _place(value: Value, values: tuple[Value, ...]) -> int | None:
    """Index of the value, the nearest number (on a log scale where both are positive), or None."""
    for index, level in enumerate(values):
        if level == value and isinstance(level, bool) == isinstance(value, bool):
            return index
    numbers = [i for i, level in enumerate(values) if _is_number(level)]
    if not numbers or not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return min(numbers, key=lambda i: (_distance(values[i], value), i))


def _distance(level: Value, value: float) -> float:
    number = float(level) if isinstance(level, int | float) else math.inf
    if number > 0 and value > 0:
        return abs(math.log(number / value))
    return math.inf if number == 0 else abs(number - value) * 1e6
