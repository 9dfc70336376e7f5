"""The studies that the benchmarks ship can be read, and their spaces exist."""

from pathlib import Path

import pytest

from tuner.knobs import space
from tuner.tuning import studyfile

HERE = Path(__file__).parents[2] / "benchmarks" / "h100"


@pytest.mark.parametrize("path", sorted(HERE.glob("study-*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_study_can_be_read_and_its_space_turns_the_graphs(path: Path) -> None:
    file = studyfile.read(path)
    named = HERE / file.space
    assert "max_cudagraph_capture_size" in space.load(named if named.is_file() else file.space).levels
    assert (HERE / file.model / "config.json").is_file()
