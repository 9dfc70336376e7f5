"""What may go wrong at times, as rates over seeds: the tuner against the hidden truth of each node."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.lived.world import MODEL, Truth, World
from tuner.conclusions import Conclusion
from tuner.history.store import Store
from tuner.knobs import space as spaces
from tuner.records import Study, Value
from tuner.replay.plan import PLANS, Load
from tuner.replay.timeline import measure
from tuner.simulator import virtual
from tuner.simulator.boot import Booted, NotStarted, boot
from tuner.simulator.virtual import VirtualPace
from tuner.traffic import trace as traces

EQUAL = 0.05
"""A true difference below this is none."""
GAIN = 0.2
E2E = "e2e_p95_ms"
NIGHTS = 3


@dataclass(frozen=True, kw_only=True)
class Count:
    """How often it could have happened, and how often it did."""

    of: int = 0
    bad: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(of=self.of + other.of, bad=self.bad + other.bad)

    @property
    def holds(self) -> bool:
        """At most one in twenty."""
        return self.bad * 20 <= self.of


class Oracle:
    """What a node would measure without noise: what no tuner may know."""

    def __init__(self, world: World, store: Store) -> None:
        self._world, self._store = world, store
        self._known: dict[tuple[object, ...], Mapping[str, float]] = {}

    def values(self, study: Study, candidate: Mapping[str, Value]) -> Mapping[str, float]:
        """The objectives, and E2E; empty where the engine does not start."""
        key = (study.node, study.trace_digest, tuple(sorted(candidate.items())))
        if key not in self._known:
            self._known[key] = self._measured(study, candidate)
        return self._known[key]

    def _measured(self, study: Study, candidate: Mapping[str, Value]) -> Mapping[str, float]:
        truth = next(each for each in self._world.nodes if each.name == study.node)
        found = self._booted(truth, candidate)
        if found is None:
            return {}
        trace = traces.read(Path(self._store.trace(study.trace_digest).path))
        load = Load(seed=0, number=0, model="study", vocabulary=1000, slo=study.slo)
        parts = [each for each in study.slices if not each.held_out]
        replayed, _ = virtual.replay(
            found, trace, parts, PLANS["brief"], load, VirtualPace(slower=truth.slower)
        )
        values = measure(replayed, study.slo).values
        return {name: values[name] for name in (*study.objectives, E2E)}

    @staticmethod
    def _booted(truth: Truth, candidate: Mapping[str, Value]) -> Booted | None:
        argv = ["--model", MODEL, "--max-model-len", "4096"]
        for name, value in candidate.items():
            flag = name.replace("_", "-")
            argv += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
        try:
            return boot(argv, {"TUNER_SIM_CARD": truth.card})
        except NotStarted:
            return None

    def gains(
        self, study: Study, candidate: Mapping[str, Value], over: Mapping[str, Value] | None = None
    ) -> list[float]:
        """The true gain over a configuration (None: today's) per objective, positive is better."""
        today = self._world.today(study.node) if over is None else over
        before, after = self.values(study, today), self.values(study, candidate)
        if not before or not after:  # what does not start serves nothing
            return [(not before) - (not after) + 0.0] * len(study.objectives)
        return [gain(before[n], after[n], n == "goodput_rps") for n in study.objectives]


def gain(before: float, after: float, maximized: bool) -> float:
    """How many times better, minus 1; a request that was not served waits for ever."""
    low, high = (before, after) if maximized else (after, before)
    if low == high:
        return 0.0
    return high / low - 1 if low > 0 else math.inf


def regressions(world: World) -> Count:
    """Promoted versions: truly worse than today's configuration in an objective, and better in none."""
    store = world.store()
    oracle, bad, of = Oracle(world, store), 0, 0
    for key in store.profile_keys():
        for event in store.alias_events(key, alias="champion"):
            profile = store.profile_version(key, event.to_version or 0)
            gains = oracle.gains(store.study(profile.study_id), profile.candidate)
            of, bad = of + 1, bad + (min(gains) < -EQUAL and max(gains) < EQUAL)
    store.close()
    return Count(of=of, bad=bad)


def missed(world: World) -> Count:
    """Studies in whose first three conclusions no winner was named, though a gain of 20 % was there."""
    store = world.store()
    oracle, bad, of = Oracle(world, store), 0, 0
    for study, said in _quiet(store):
        if _has_gain(oracle, study, world):
            of, bad = of + 1, bad + all(each.winner is None for each in said[:NIGHTS])
    store.close()
    return Count(of=of, bad=bad)


def _quiet(store: Store) -> Iterator[tuple[Study, list[Conclusion]]]:
    for study in store.studies():
        said = sorted(store.conclusions(study.id), key=lambda each: each.at)
        if len(said) >= NIGHTS:
            yield study, said


def _has_gain(oracle: Oracle, study: Study, world: World) -> bool:
    space = spaces.load(str(world.home / "space.yaml"))
    for value in space.levels["max_num_seqs"]:
        gains = oracle.gains(study, {**world.today(study.node), "max_num_seqs": value})
        if max(gains) >= GAIN and min(gains) > -EQUAL:
            return True
    return False


def growing_regret(world: World) -> Count:
    """Studies whose last winner is truly worse than their first, by the rule that picks it: goodput within
    the SLO, then the 95th percentile of E2E.
    """
    store = world.store()
    oracle, bad, of = Oracle(world, store), 0, 0
    for study, said in _quiet(store):
        winners = [arm for each in said if (arm := each.arm(each.winner)) is not None]
        if len(winners) < 2:
            continue
        first, last = (oracle.values(study, arm.candidate) for arm in (winners[0], winners[-1]))
        of, bad = of + 1, bad + is_worse(first, last)
    store.close()
    return Count(of=of, bad=bad)


def is_worse(first: Mapping[str, float], last: Mapping[str, float]) -> bool:
    """Whether less is good at the last, or as much and the slowest take longer."""
    if not first or not last:
        return bool(first)
    good = gain(first["goodput_rps"], last["goodput_rps"], maximized=True)
    slow = gain(first[E2E], last[E2E], maximized=False)
    return good < -EQUAL or (good <= EQUAL and slow < -EQUAL)
