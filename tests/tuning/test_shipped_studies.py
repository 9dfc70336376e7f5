"""The studies that the benchmarks ship can be read, and their spaces exist."""

from pathlib import Path

import pytest

from tuner.knobs import space
from tuner.tuning.study import read

HERE = Path(__file__).parents[2] / "benchmarks" / "h100"


@pytest.mark.parametrize("path", sorted(HERE.glob("study-*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_study_can_be_read_and_its_space_turns_the_graphs(path: Path) -> None:
    """Only study h compares nothing but the order of the requests."""
    file = read(path)
    named = HERE / file.space
    levels = space.load(named if named.is_file() else file.space).levels
    if path.stem == "study-h":
        assert list(levels) == ["scheduling_policy"]
    else:
        assert "max_cudagraph_capture_size" in levels
    assert (HERE / file.model / "config.json").is_file()
