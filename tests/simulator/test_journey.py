"""The older ways of serving against what can be counted by hand."""

import pytest

from benchmarks.journey import WAYS, Batching, serve_continuously, serve_in_batches
from tuner.knobs.model import read
from tuner.simulator.cost import CARDS, StepCost, preset
from tuner.simulator.state import EngineRequest, SchedulerLimits

CARD = CARDS["a4500"]
COST = StepCost(read("Qwen/Qwen2.5-7B-Instruct", env={}), CARD, preset(CARD))
LIMITS = SchedulerLimits(num_blocks=5000, max_model_len=2048)


def many(*rows: tuple[float, int, int]) -> list[EngineRequest]:
    return [EngineRequest(i, at, (prompt, output)) for i, (at, prompt, output) in enumerate(rows)]


def test_one_by_one_is_a_sum() -> None:
    alone = serve_in_batches(many((0.0, 100, 50)), COST, Batching())
    assert serve_in_batches(many(*[(0.0, 100, 50)] * 3), COST, Batching()) == pytest.approx(3 * alone)


def test_a_static_batch_answers_all_when_its_longest_is_done() -> None:
    sent = many((0.0, 50, 5), (0.0, 50, 60))
    end = serve_in_batches(sent, COST, Batching(size=2, timeout_s=1.0))
    assert sent[0].last == sent[1].last == end
    sent = many((0.0, 50, 5), (0.0, 50, 60))
    serve_in_batches(sent, COST, Batching(size=2, timeout_s=1.0, static=False))
    assert sent[0].last < sent[1].last


def test_a_batch_starts_when_full_or_when_the_first_has_waited() -> None:
    sent = many((0.0, 50, 1), (0.01, 50, 1), (0.5, 50, 1))
    serve_in_batches(sent, COST, Batching(size=2, timeout_s=0.1))
    assert 0.01 < sent[0].first < 0.1
    assert sent[2].first > 0.6


def test_continuous_batching_with_as_many_slots_gains_what_the_journey_gained() -> None:
    """10.7 over 5.9 requests a second, mixed lengths, 16 in a static batch against 16 slots."""
    rows = [(0.0, 10 + 37 * i % 191, 10 + 37 * i % 191) for i in range(200)]
    static = serve_in_batches(many(*rows), COST, Batching(size=16, timeout_s=0.05))
    continuous = serve_continuously(many(*rows), COST, 16, LIMITS)
    assert static / continuous == pytest.approx(10.7 / 5.9, rel=0.25)


def test_every_way_answers_everybody() -> None:
    for way in WAYS.values():
        sent = many(*[(0.3 * i, 20 + i, 5 + i % 7) for i in range(40)])
        way(sent, COST, LIMITS)
        assert all(0 < r.first <= r.last for r in sent)
