"""Our own Parquet, damaged at random: a sentence, or the same trace; never a crash, never other numbers."""

import random
from pathlib import Path

from tests.traffic.conftest import make
from tests.traffic.test_importers import CORRUPTIONS, attempt, corrupted
from tuner.errors import BadInput
from tuner.traffic.trace import write


def test_a_damaged_trace_is_refused_or_whole(tmp_path: Path) -> None:
    trace = make([64, 64, 40, 80], ids=[[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3], [7, 8, 9, 1, 2]])
    digest = write(trace, tmp_path / "whole.parquet")
    data = (tmp_path / "whole.parquet").read_bytes()
    path, refused = tmp_path / "t.parquet", 0
    for seed in range(CORRUPTIONS):
        path.write_bytes(corrupted(data, random.Random(seed)))
        found = attempt(path, "parquet")
        if isinstance(found, BadInput):
            refused += 1
            assert "t.parquet" in str(found)
        else:
            assert found.digest == digest
            assert found.input_len.tolist() == [64, 64, 40, 80]
    assert refused > 0
    print(f"parquet: {CORRUPTIONS:,} corruptions, {refused:,} refused by a sentence, the rest unchanged")
