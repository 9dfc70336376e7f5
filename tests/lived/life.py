"""A life of the fleet: what happens, drawn from a seed, and every invariant after each step."""

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

from tests.lived.invariants import Seen, check
from tests.lived.world import FLEET, KILLED, Truth, World
from tuner.records import Trial

FAULTS = (
    "slow", "crashes", "every launch crashes", "killed", "killed early", "disk full", "no database",
    "two controllers", "a slow path", "a short window", "a window of one trial", "slow from the middle on",
)  # fmt: skip


def live(
    home: Path, seed: int, nights: int, nodes: Sequence[Truth] = FLEET, trials: int = 4, whole_every: int = 1
) -> World:
    """So many nights of a fleet. Returns the world as it ended; AssertionError tells the story so far."""
    draw = random.Random(f"life {seed}")
    with World(home, seed=seed, nodes=nodes, trials=trials) as world:
        seen = Seen()
        for night in range(nights):
            _day(world, draw)
            check(world, seen, whole=False)
            world.next_night()
            for place, truth in enumerate(nodes):
                whole = (night * len(nodes) + place) % whole_every == 0
                step_of_night(world, seen, truth.name, _fault(draw), whole=whole)
            world.morning()
    return world


def _fault(draw: random.Random) -> str | None:
    return draw.choice(FAULTS) if draw.random() < 0.3 else None


def step_of_night(world: World, seen: Seen, node: str, fault: str | None, *, whole: bool) -> None:
    """One node's night with its fault; where the controller died or was refused, the timer comes again."""
    begun = world.now
    night = world.night(node, fault)
    check(world, seen, whole=whole)
    if night.said.code == KILLED or fault in ("disk full", "no database"):
        world.later(minutes=20)
        world.night(node)
        check(world, seen, whole=whole)
    if fault is not None and fault.startswith("killed") and world.nodes[0].name == node:
        world.say("node", "restore", node)
    world.now = begun


def _day(world: World, draw: random.Random) -> None:
    """What people do by day."""
    if draw.random() < 0.25:
        world.capture(rate=draw.choice((0.8, 1.0, 1.25)), inputs=draw.choice((0.9, 1.0, 1.5)))
    if draw.random() < 0.08 and not world.release:
        world.upgrade()
    if draw.random() < 0.1:
        world.later(hours=draw.choice((-1, 2)))
    for truth in world.nodes:
        if draw.random() < 0.4:
            world.promote(truth.name)
        if draw.random() < 0.05:
            world.promote_unproved(truth.name)
        if draw.random() < 0.05:
            world.rollback(truth.name)
        if draw.random() < 0.4:
            pulled_is_champion(world, truth.name)


def pulled_is_champion(world: World, node: str) -> None:
    """A pull gives the version that a person has promoted, and nothing where nobody has."""
    status, text = world.pull(node, "champion")
    champion = world.champions.get(node)
    assert (status == 200) == (champion is not None), (node, status, champion)
    assert champion is None or f"# version: {champion}\n" in text, (node, champion, text)


def history_of(world: World) -> str:
    """The digest of everything that the fleet measured and concluded, without ids that are drawn."""
    store = world.store()
    told: list[object] = []
    try:
        for study in sorted(store.studies(), key=lambda s: s.id):
            told += [_told(study.id, trial) for trial in store.trials(study.id)]
            told += [[c.outcome.value, c.winner] for c in store.conclusions(study.id)]
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
    finally:
        store.close()


def _told(study: str, trial: Trial) -> list[object]:
    """A trial without ids; why one failed may name a folder, so the cause stands for it."""
    values = trial.measurement.values if trial.measurement else {}
    measured = {name: repr(value) for name, value in sorted(values.items())}
    place = (study, trial.number, trial.attempt, trial.state.value, trial.origin, trial.cause)
    return [*place, dict(trial.candidate), measured]
