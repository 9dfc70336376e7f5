"""Six nights of a fleet, and short stories of it whose order Hypothesis chooses."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.lived.invariants import Seen, check
from tests.lived.life import FAULTS, history_of, live, pulled_is_champion, step_of_night
from tests.lived.world import FLEET, World

SEED = int(os.environ.get("TUNER_TEST_SEED", "7"))


def test_six_nights_hold_every_invariant(tmp_path: Path) -> None:
    world = live(tmp_path, SEED, nights=3, nodes=(FLEET[0], FLEET[4]), trials=3, whole_every=2)
    assert len(world.nights) >= 6


@pytest.mark.month
def test_the_same_seed_gives_the_same_history(tmp_path: Path) -> None:
    told = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        world = live(tmp_path / name, SEED, nights=3, nodes=(FLEET[1], FLEET[5]), trials=3, whole_every=99)
        told.append(history_of(world))
    assert told[0] == told[1]


class Story(RuleBasedStateMachine):
    """Two nodes, and whatever their people and faults do in an order that Hypothesis chooses."""

    folders: ClassVar[list[Path]] = []
    home: ClassVar[Path]
    lived: ClassVar[list[int]] = []
    """The nights of each story."""

    @initialize()
    def begin(self) -> None:
        place = self.home / str(len(self.folders))
        place.mkdir()
        self.folders.append(place)
        self.world = World(place, nodes=FLEET[1:3], trials=3)
        self.world.__enter__()
        self.seen = Seen()

    @rule(node=st.sampled_from(("n2", "n3")), fault=st.sampled_from((None, None, *FAULTS)))
    def night(self, node: str, fault: str | None) -> None:
        self.world.next_night()
        step_of_night(self.world, self.seen, node, fault, whole=False)
        self.world.morning()

    @rule(rate=st.sampled_from((0.8, 1.25)), inputs=st.sampled_from((0.9, 1.5)))
    def capture(self, rate: float, inputs: float) -> None:
        self.world.capture(rate=rate, inputs=inputs)

    @precondition(lambda self: self.world.nights)
    @rule(node=st.sampled_from(("n2", "n3")))
    def promote_and_pull(self, node: str) -> None:
        self.world.promote(node)
        pulled_is_champion(self.world, node)
        check(self.world, self.seen, whole=False)

    @precondition(lambda self: self.world.nights)
    @rule(node=st.sampled_from(("n2", "n3")))
    def rollback(self, node: str) -> None:
        self.world.rollback(node)
        pulled_is_champion(self.world, node)

    @precondition(lambda self: self.world.nights)
    @rule(node=st.sampled_from(("n2", "n3")))
    def promote_unproved(self, node: str) -> None:
        self.world.promote_unproved(node)
        pulled_is_champion(self.world, node)

    @rule(hours=st.sampled_from((-1, 2)))
    def clock_jumps(self, hours: int) -> None:
        self.world.later(hours=hours)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.lived.append(len(self.world.nights))
            self.world.__exit__(None, None, None)


def stories(home: Path, count: int) -> None:
    """Live so many stories, each of at most eight steps; a failing one is shrunk."""
    Story.home = home
    Story.folders.clear()
    run_state_machine_as_test(
        Story,
        settings=settings(
            max_examples=count, stateful_step_count=8, deadline=None, derandomize=True, database=None,
            phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        ),
    )  # fmt: skip


@pytest.mark.month
@pytest.mark.timeout(3600)
def test_stories_in_any_order_hold_every_invariant(tmp_path: Path) -> None:
    """A failing story is shrunk; Hypothesis prints its steps. Its first stories are nearly empty."""
    Story.lived.clear()
    count = int(os.environ.get("TUNER_TEST_STORIES", "12"))
    stories(tmp_path, count)
    print(f"{count} stories of {Story.lived} nights")
    assert sum(Story.lived) >= count


class Recorded:
    """Stands for a fleet: notes what is done to it, and falls ill in a night that follows a promotion of the
    same node that followed a night with a fault.
    """

    told: ClassVar[list[list[str]]] = []

    def __init__(self, *_: object, **__: object) -> None:
        self.nights: list[str] = []
        self.steps: list[str] = []
        self.told.append(self.steps)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **named: self.steps.append(" ".join(map(str, (name, *given, *named.values()))))

    def lives(self, node: str, fault: str | None) -> None:
        self.nights.append(node)
        told = self.steps[::-1]
        promoted = next((place for place, each in enumerate(told) if each == f"promote {node}"), len(told))
        assert not any(each.startswith(f"fault {node}") for each in told[promoted:]), "ill"
        self.steps.append(f"{'fault' if fault else 'night'} {node}")


@pytest.mark.slow
def test_a_failing_story_shrinks_to_its_few_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hypothesis chooses the order of the steps, and of a story that fails only what it needs is left."""
    here = sys.modules[__name__]
    Recorded.told.clear()
    monkeypatch.setattr(here, "World", Recorded)
    monkeypatch.setattr(here, "check", lambda *_, **__: None)
    monkeypatch.setattr(here, "pulled_is_champion", lambda *_: None)
    monkeypatch.setattr(
        here, "step_of_night", lambda world, seen, node, fault, *, whole: world.lives(node, fault)
    )
    with pytest.raises(AssertionError, match="ill"):
        stories(tmp_path, 60)
    begins = {tuple(steps[:2]) for steps in Recorded.told}
    assert len(begins) > 10, begins
    shortest = [each for each in Recorded.told[-1] if each not in ("next_night", "morning")]
    assert 2 <= len(shortest) <= 4, f"of at most eight; two where Hypothesis is not out of time: {shortest}"
    assert shortest[0].startswith("fault")
    assert shortest[1].startswith("promote n")
