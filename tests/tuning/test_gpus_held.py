"""What an engine costs is what it holds, by its layout; cards that stand idle are told (M8, M22)."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.tuning.studies import write
from tuner.records import gpus_held
from tuner.tuning.context import held
from tuner.tuning.run import idle_of
from tuner.tuning.study import load


@pytest.mark.parametrize(
    ("argv", "count"),
    [
        ((), 1),
        (("--max-num-seqs", "8"), 1),
        (("--tensor-parallel-size", "2"), 2),
        (("--tensor-parallel-size", "2", "--data-parallel-size=2", "--pipeline-parallel-size", "3"), 12),
        (("--tensor-parallel-size", "4", "--tensor-parallel-size", "2"), 2),
        (("-tp", "2", "-dp", "4"), 8),
    ],
)
def test_M22_an_engine_holds_the_product_of_its_layout(argv: tuple[str, ...], count: int) -> None:
    assert gpus_held(argv) == count


def test_M8_a_baseline_that_leaves_cards_idle_says_so(tmp_path: Path) -> None:
    found = load(write(tmp_path), store=None, now=datetime.now(UTC))
    flags = found.facts.flags | {"--data-parallel-size"}
    two = replace(found, facts=replace(found.facts, kind="vllm", platform="cuda", gpu_count=2, flags=flags))
    assert "runs on 1 of 2 GPUs. To use all of them" in (idle_of(two) or "")
    both = replace(two, baseline=two.baseline.with_values(data_parallel_size=2))
    assert idle_of(both) is None
    fixed = replace(two, fixed=(*two.fixed, "--tensor-parallel-size", "2"))
    assert idle_of(fixed) is None
    assert idle_of(replace(two, facts=replace(two.facts, platform="cpu"))) is None
    assert held(fixed, fixed.fixed) == 2
    assert held(replace(fixed, facts=replace(two.facts, platform="cpu")), fixed.fixed) == 1
    assert held(two, two.fixed) == 1  # the other card is not charged
