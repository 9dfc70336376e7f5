"""Short stories: what lives of the fleet have found, each as short as it could be made."""

from pathlib import Path

from tests.lived.invariants import Seen, check
from tests.lived.world import FLEET, World


def test_a_window_that_ends_before_production_could_be_given_back_starts_nothing(tmp_path: Path) -> None:
    """The first night of a node drained production, ran nothing and gave it back: its deadline had passed."""
    with World(tmp_path, nodes=FLEET[:1], trials=3) as world:
        world.next_night()
        night = world.night("n1", "a window of one trial")
        assert night.said.code == 5
        assert "ends before production could be restored" in night.said.err
        assert not (tmp_path / "production-n1").exists(), "production was drained"
        store = world.store()
        assert store.runs() == ()
        store.close()
        check(world, Seen())
