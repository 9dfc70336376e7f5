"""What moved between two traces is named with its size, and nothing that did not move is."""

import numpy as np
import pytest

from tests.traffic.conftest import make
from tuner.traffic.statistics import Shift, compare
from tuner.traffic.trace import Trace, build, bundled


def traffic(seed: int, *, rate: float = 5.0, prompt: float = 1.0, answer: float = 1.0, bulk: float = 0.2,
            adapters: float = 0.3) -> Trace:  # fmt: skip
    chance = np.random.default_rng(seed)
    count = int(600 * rate)
    return build(
        {
            "arrival_s": np.sort(chance.random(count) * 600),
            "input_len": (chance.lognormal(6.5, 0.8, count) * prompt).astype(int) + 1,
            "output_len": (chance.lognormal(5.0, 0.6, count) * answer).astype(int) + 1,
            "priority": np.where(chance.random(count) < bulk, 10, 0),
            "lora": np.where(chance.random(count) < adapters, 1, -1),
        }
    )


def moved(before: Trace, after: Trace) -> dict[str, Shift]:
    return {each.name: each for each in compare(before, after) if each.moved}


def test_traffic_of_one_kind_has_not_moved() -> None:
    """At most one of the numbers of forty pairs."""
    wrong = [list(moved(traffic(2 * pair), traffic(2 * pair + 1))) for pair in range(40)]
    assert sum(map(len, wrong)) <= 1, wrong


@pytest.mark.parametrize(
    ("change", "names", "size"),
    [
        ({"rate": 7.5}, {"request rate"}, 0.5),
        ({"rate": 4.0}, {"request rate"}, -0.2),
        ({"prompt": 1.5}, {"prompt length p50", "prompt length p95"}, 0.5),
        ({"answer": 0.6}, {"answer length p50", "answer length p95"}, -0.4),
        ({"bulk": 0.4}, {"requests of priority 0", "requests of priority 10"}, None),
        ({"adapters": 0.1}, {"requests for an adapter"}, -0.2),
    ],
)
def test_what_moved_is_named_with_its_size(
    change: dict[str, float], names: set[str], size: float | None
) -> None:
    found = moved(traffic(1), traffic(2, **change))
    assert set(found) == names
    for each in found.values():
        assert f"{each.after:,.4g}" in each.sentence or f"{each.after:.1%}" in each.sentence
        if size is not None:
            assert each.change == pytest.approx(size, abs=0.12)


def test_reuse_that_went_is_named() -> None:
    shared = make([64] * 100, ids=[[0, 1, 2, row] for row in range(100)])
    unique = make([64] * 100, ids=[[4 * row, 4 * row + 1, 4 * row + 2, 4 * row + 3] for row in range(100)])
    assert list(moved(shared, unique)) == ["prompt tokens that a prefix cache of any size finds"]


def test_a_slower_real_trace_has_moved() -> None:
    whole = bundled()
    assert not moved(whole, whole)
    assert set(moved(whole, whole.changed(arrival_s=whole.arrival_s * 2))) == {"request rate"}
