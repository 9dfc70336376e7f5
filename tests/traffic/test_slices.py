"""Slices by hand and chosen, and traces made faster, thinner or denser."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traffic.conftest import make
from tuner.errors import BadInput
from tuner.records import Slice
from tuner.replay.plan import SliceLimits, choose_slices, slice_rows
from tuner.traffic.importers import read_any
from tuner.traffic.statistics import dispersion
from tuner.traffic.structure import groups, merged, reuse_by_capacity, scaled, superposed, thinned
from tuner.traffic.trace import Trace, build, bundled


def poisson(rates: list[float], seconds: float = 100.0, seed: int = 0) -> Trace:
    """Poisson arrivals, each rate for so many seconds."""
    chance = np.random.default_rng(seed)
    parts = [
        place * seconds + np.sort(chance.random(int(rate * seconds)) * seconds)
        for place, rate in enumerate(rates)
    ]
    arrival = np.concatenate(parts)
    return build({"arrival_s": arrival, "input_len": [100] * len(arrival), "output_len": [10] * len(arrival)})


def test_the_peak_holds_the_peak_and_nothing_overlaps() -> None:
    trace = poisson([2, 2, 2, 10, 2, 2, 3, 3, 2, 2])
    chosen = choose_slices(trace, "auto", limits=SliceLimits(min_s=50, requests=100))
    assert [one.name for one in chosen] == ["peak", "median", "bursty", "held-out"]
    peak = chosen[0]
    assert 290 <= peak.start_s <= 350
    assert len(slice_rows(trace, peak)) > 2 * len(slice_rows(trace, chosen[1]))
    spans = sorted((one.start_s, one.start_s + one.duration_s) for one in chosen)
    assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(spans))
    assert [one.held_out for one in chosen] == [False, False, False, True]


def test_the_most_bursty_window_is_found() -> None:
    calm = poisson([3.0] * 10)
    arrival = calm.arrival_s.copy()
    inside = (arrival > 500) & (arrival < 600)
    arrival[inside] = 500 + np.floor((arrival[inside] - 500) / 20) * 20 + 1  # the same load, in bursts
    bursty = build({"arrival_s": arrival, "input_len": calm.input_len, "output_len": calm.output_len})
    chosen = {one.name: one for one in choose_slices(bursty, "auto", limits=SliceLimits(min_s=60))}
    assert 440 <= chosen["bursty"].start_s <= 580


def test_slices_are_long_enough_for_percentiles_and_for_the_cache() -> None:
    trace = poisson([5.0] * 10)
    assert choose_slices(trace, "auto", limits=SliceLimits(requests=1000))[0].duration_s == pytest.approx(
        200, rel=0.02
    )
    turned = choose_slices(trace, "auto", limits=SliceLimits(turnover_tokens=75_000))[0]
    assert turned.duration_s == pytest.approx(150, rel=0.02)
    fast = choose_slices(trace, "auto", limits=SliceLimits(min_s=60, speed=2.0))[0]
    assert fast.duration_s == pytest.approx(120)
    assert choose_slices(trace, "auto", limits=SliceLimits(requests=10**6, max_s=150))[0].duration_s == 150


def test_a_short_trace_is_one_slice() -> None:
    (only,) = choose_slices(bundled(), "auto", limits=SliceLimits(min_s=100))
    assert only.name == "whole"
    assert len(slice_rows(bundled(), only)) == len(bundled())


def test_the_same_trace_gives_the_same_slices() -> None:
    trace = poisson([2, 5, 3, 2])
    assert choose_slices(trace, "auto") == choose_slices(trace, "auto")


def test_slices_by_hand() -> None:
    trace = poisson([2.0])
    given: list[dict[str, Any]] = [
        {"start_s": 0, "duration_s": 10},
        {"start_s": 20, "duration_s": 5, "name": "b", "held_out": True},
    ]
    first, second = choose_slices(trace, given)
    assert first == Slice(name="slice-0", start_s=0.0, duration_s=10.0)
    assert second.held_out
    inside = trace.arrival_s[slice_rows(trace, first)]
    assert inside.max() < 10


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("aut", "did you mean 'auto'"),
        ([], "the list is empty"),
        (
            [{"start_s": 0, "duraton_s": 5}],
            r"slices\[0\]: unknown key 'duraton_s' .did you mean 'duration_s'",
        ),
        ([{"start_s": "x", "duration_s": 5}], "'start_s' is 'x', expected seconds"),
        ([{"start_s": 0}], "'duration_s' is None"),
        ([{"start_s": -1, "duration_s": 5}], "≥ 0"),
        ([{"start_s": 500, "duration_s": 5}], "beyond the end of the trace"),
        ([{"start_s": 0, "duration_s": 5, "held_out": True}], "at least one must be measured"),
        (
            [{"start_s": 0, "duration_s": 5, "name": "a"}, {"start_s": 9, "duration_s": 5, "name": "a"}],
            "twice",
        ),
    ],
)
def test_a_wrong_slice_is_named(given: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        choose_slices(poisson([2.0]), given)


def test_scaling_keeps_order_and_dispersion() -> None:
    trace = poisson([5.0] * 5)
    twice = scaled(trace, 2.0)
    assert twice.duration_s == pytest.approx(trace.duration_s / 2)
    assert dispersion(twice.arrival_s, 5.0) == dispersion(trace.arrival_s, 10.0)
    with pytest.raises(BadInput, match="above 0"):
        scaled(trace, 0)


def test_thinning_by_groups_keeps_reuse(real: Callable[[str], Path]) -> None:
    """Random thinning to a half loses half of the reuse; whole groups keep it."""
    trace = read_any(real("mooncake_conversation_trace.jsonl"))
    whole = reuse_by_capacity(trace, [None])[None]
    half = thinned(trace, 0.5)
    assert len(half) == pytest.approx(len(trace) / 2, rel=0.1)
    assert reuse_by_capacity(half, [None])[None] == pytest.approx(whole, abs=0.03)
    at_random = trace.take(np.flatnonzero(np.random.default_rng(0).random(len(trace)) < 0.5))
    assert reuse_by_capacity(at_random, [None])[None] < whole - 0.05


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=40), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_thinning_never_splits_a_session(sessions: list[int], seed: int) -> None:
    trace = make([10] * len(sessions), columns={"session": sessions})
    kept = thinned(trace, 0.5, seed)
    for one in set(sessions) - {-1}:
        assert int((kept.session == one).sum()) in (0, sessions.count(one))


def test_groups_are_sessions_then_prefixes_then_rows() -> None:
    ids = [[0, 1], [0, 1, 2], [0, 3], [0], []]
    trace = make([64] * 5, ids=ids, columns={"session": [-1, -1, 7, 7, -1]})
    found = groups(trace).tolist()
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert len(set(found)) == 3


def test_copies_add_load_and_share_nothing() -> None:
    trace = make(
        [32] * 20, ids=[[row // 2, 100 + row] for row in range(20)], columns={"session": list(range(20))}
    )
    three = superposed(trace, 3)
    assert len(three) == 60
    assert three.duration_s <= trace.duration_s + 1.0
    assert len(set(three.session.tolist())) == 60
    once, thrice = (reuse_by_capacity(one, [None])[None] for one in (trace, three))
    assert thrice == pytest.approx(once)
    assert superposed(trace, 3).digest == three.digest


def test_merging_keeps_parts_apart() -> None:
    one = make([32, 32], ids=[[0, 1], [0, 2]], columns={"session": [0, 0], "parent": [-1, 0]})
    both = merged([one, one])
    assert len(both) == 4
    assert sorted(both.session.tolist()) == [0, 0, 1, 1]
    assert len(set(both.blocks.tolist())) == 6
    for row in range(4):
        above = int(both.parent[row])
        assert above < 0 or both.session[above] == both.session[row]
    with pytest.raises(BadInput, match="the same block size"):
        merged([one, make([32], ids=[[1]], block_size=32)])
