"""The older ways of serving against what can be counted by hand."""

import pytest

from benchmarks.journey import (
    WAYS,
    Batching,
    chat_lengths,
    serve_continuously,
    serve_in_batches,
    serve_in_processes,
    shared_by_beams,
    shared_by_samples,
    waste,
)
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


def test_M13_processes_share_the_device_and_overlap_only_on_the_host() -> None:
    rows = [(0.0, 100, 20)] * 8
    alone = serve_in_batches(many(*rows), COST, Batching())
    assert serve_in_processes(many(*rows), COST, 1) == pytest.approx(alone)
    four = serve_in_processes(many(*rows), COST, 4)
    host = COST.coefficients.step_s * 8 * 20
    assert alone - host - 1e-9 <= four < alone


def test_M13_the_journey_climbs_from_one_by_one_to_continuous_batching() -> None:
    """On variable lengths; static batches wait for their longest, and that shows against uniform ones."""
    mixed = [(0.0, 10 + 37 * i % 191, 10 + 37 * i % 191) for i in range(160)]
    uniform = [(0.0, 100, 100)] * 160
    rates = {
        name: {way: len(rows) / run(many(*rows), COST, LIMITS) for way, run in WAYS.items()}
        for name, rows in (("mixed", mixed), ("uniform", uniform))
    }
    climb = ("one by one", "four processes", "static batch 16, 50 ms", "dynamic batch 16, 50 ms")
    found = [rates["mixed"][way] for way in (*climb, "continuous, 64 slots")]
    assert found == sorted(found)
    static = "static batch 16, 50 ms"
    assert rates["uniform"][static] > 1.5 * rates["mixed"][static], "uniform test data is misleading"


def test_M13_pages_waste_under_four_per_cent_where_contiguous_caches_waste_most() -> None:
    contiguous, paged = waste(chat_lengths(), reserved=16384)
    assert paged < 0.04
    assert contiguous > 0.6
    assert waste([(15, 1)], reserved=32) == (0.5, 0.0)


def test_M13_answers_to_one_prompt_share_its_pages() -> None:
    assert shared_by_samples(512, 128, 4, COST) == pytest.approx(3 * 32 / (4 * 40), abs=0.03)
    assert shared_by_beams(512, 128, 4) > 3 * 32 / (4 * 40), "beams share parts of their answers too"
    assert shared_by_samples(512, 128, 1, COST) == 0


def test_M13_a_smaller_batch_beats_a_larger_one_where_the_cache_is_small() -> None:
    rows = [(0.0, 10 + 37 * i % 191, 10 + 37 * i % 191) for i in range(200)]

    def served(blocks: int, slots: int) -> tuple[float, float]:
        sent = many(*rows)
        end = serve_continuously(sent, COST, slots, SchedulerLimits(num_blocks=blocks, max_model_len=512))
        return len(rows) / end, max((r.last - r.first) / max(1, r.output - 1) for r in sent)

    (large, large_token), (small, small_token) = served(400, 64), served(400, 32)
    assert small > large
    assert small_token < large_token
    assert served(5000, 64)[0] > served(5000, 32)[0], "with memory for all, more slots serve more"
