"""Six nights of a fleet, and short stories of it whose order Hypothesis chooses."""

import os
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
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

    @rule(hours=st.sampled_from((-1, 2)))
    def clock_jumps(self, hours: int) -> None:
        self.world.later(hours=hours)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.__exit__(None, None, None)


@pytest.mark.month
def test_stories_in_any_order_hold_every_invariant(tmp_path: Path) -> None:
    """A failing story is shrunk; Hypothesis prints its steps."""
    Story.home = tmp_path
    Story.folders.clear()
    run_state_machine_as_test(
        Story,
        settings=settings(
            max_examples=int(os.environ.get("TUNER_TEST_STORIES", "4")), stateful_step_count=8, deadline=None,
            derandomize=True, phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
