"""Lists the knobs of an engine, and checks a search space against an engine."""

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from math import prod
from random import Random
from typing import Literal

from tuner.errors import BadInput
from tuner.knobs.arguments import refusal
from tuner.knobs.catalogue import CATALOGUE, Knob
from tuner.knobs.model import ModelFacts
from tuner.knobs.space import SearchSpace
from tuner.records import EngineFacts, Value

# Enough for a share that is right to about 1 %, drawn in a moment.
_SAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobRow:
    """One knob on one engine. `flag` is the engine's flag; `why_not` is None where the knob can be used."""

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


def rows(facts: EngineFacts) -> tuple[KnobRow, ...]:
    """Every knob of the catalogue on this engine, in the order of the catalogue."""
    return tuple(
        KnobRow(
            name=name,
            flag=entry.flag_in(facts),
            default=facts.defaults.get(name),
            choices=facts.choices.get(name) or entry.choices_for(facts.version),
            why_not=refusal(name, sample(entry, facts), facts),
            knob=entry,
        )
        for name, entry in CATALOGUE.items()
    )


def sample(entry: Knob, facts: EngineFacts) -> Value:
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


def check(
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
        (name, "it can change the answers, so the study needs a 'quality' section")
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
