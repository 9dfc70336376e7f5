"""The scheduler core and its two pools of truth: what vLLM does, and what a slower way of counting finds."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.knobs.model import read
from tuner.simulator.clock import Clock
from tuner.simulator.cost import CARDS, Coefficients, StepCost
from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import BlockRun, EngineRequest, SchedulerLimits, Step

FACTS = read("Qwen/Qwen2.5-7B-Instruct", env={})
COST = StepCost(FACTS, CARDS["h100-80"], Coefficients())
SMALL = SchedulerLimits(
    max_num_seqs=4, max_num_batched_tokens=64, num_blocks=40, block_size=8, max_model_len=256, watermark=0.0
)


def held(scheduler: Scheduler) -> int:
    """Blocks in use, counted from the requests that hold them."""
    nodes: set[BlockRun] = set()
    private = 0
    for request in scheduler.running:
        computed, _ = scheduler.tokens_of(request)
        blocks = -(-computed // scheduler.limits.block_size)
        private += max(blocks, request.table.blocks) - request.table.shared
        nodes.update(request.table.nodes)
    return private + sum(node.cached for node in nodes)


def drive(scheduler: Scheduler, requests: Sequence[EngineRequest], most: int = 5000) -> list[Step]:
    """Step by step, one request arriving per step, until nothing is left."""
    steps, left = [], list(requests)
    for _ in range(most):
        if left:
            scheduler.add(left.pop(0))
        step = scheduler.schedule()
        if step is None:
            if not left:
                break
            continue
        steps.append(step)
        assert step.tokens <= scheduler.limits.max_num_batched_tokens
        assert len(scheduler.running) <= scheduler.limits.active
        assert held(scheduler) == scheduler.pool.total - scheduler.pool.free
        scheduler.complete(step)
    return steps


LENGTHS = st.lists(st.tuples(st.integers(1, 120), st.integers(1, 60)), min_size=1, max_size=25)


@settings(max_examples=150, deadline=None)
@given(
    lengths=LENGTHS,
    seqs=st.integers(1, 8),
    budget=st.integers(8, 100),
    threshold=st.sampled_from([0, 5, 16]),
    blocks=st.integers(32, 80),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    shared=st.integers(0, 3),
    watermark=st.sampled_from([0.0, 0.1]),
)
def test_every_token_is_made_once_and_every_block_comes_back(
    lengths: list[tuple[int, int]],
    seqs: int,
    budget: int,
    threshold: int,
    blocks: int,
    caching: bool,
    policy: str,
    shared: int,
    watermark: float,
) -> None:
    limits = replace(
        SMALL,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(budget, seqs),
        long_prefill_token_threshold=threshold,
        num_blocks=blocks,
        enable_prefix_caching=caching,
        policy=policy,
        watermark=watermark,
    )
    scheduler = Scheduler(limits, tell=True)
    requests = [
        EngineRequest(i, float(i), ls, tuple((100 + k, 2) for k in range(min(shared, ls[0] // 16))), i % 3)
        for i, ls in enumerate(lengths)
    ]
    steps = drive(scheduler, requests)
    assert all(request.done for request in requests)
    assert scheduler.pool.free == scheduler.pool.total
    assert sum(len(s.sampling) + len(s.members) for s in steps) == sum(r.output for r in requests)
    assert all(r.made == r.output for r in requests)
    assert scheduler.context == 0
    assert not any(scheduler._phase)


def test_one_that_leaves_by_itself_does_not_end_the_work() -> None:
    """The least important request runs first, finds no block and has nobody to push out but itself."""
    limits = replace(SMALL, num_blocks=34, policy="priority", max_num_seqs=7, long_prefill_token_threshold=16)
    for first in range(1, 121, 7):
        requests = [EngineRequest(i, float(i), (first + i, 60), (), 2 - i % 3) for i in range(7)]
        drive(Scheduler(limits), requests)
        assert all(request.done for request in requests)


@settings(max_examples=80, deadline=None)
@given(
    lengths=LENGTHS,
    gaps=st.lists(st.floats(0.0, 0.6), min_size=25, max_size=25),
    ahead=st.booleans(),
    seqs=st.integers(1, 8),
    blocks=st.integers(32, 100),
    shared=st.integers(0, 3),
    more=st.fixed_dictionaries(
        {
            "watermark": st.sampled_from([0.0, 0.1]),
            "policy": st.sampled_from(["fcfs", "priority"]),
            "scheduler_reserve_full_isl": st.booleans(),
            "swap_blocks": st.sampled_from([0, 20]),
        }
    ),
)
def test_stretches_of_decode_steps_change_nothing(
    lengths: list[tuple[int, int]],
    gaps: list[float],
    ahead: bool,
    seqs: int,
    blocks: int,
    shared: int,
    more: dict[str, Any],
) -> None:
    """Many steps at once give the same times as one after the other, also while a request waits for room."""
    limits = replace(SMALL, max_num_seqs=seqs, async_scheduling=ahead, num_blocks=blocks, **more)

    def times(single: bool) -> np.ndarray:
        at = np.cumsum(gaps)
        prefix = tuple((key, 1) for key in range(shared))
        requests = [
            EngineRequest(i, float(at[i]), ls, prefix[: ls[0] // limits.block_size], i % 3)
            for i, ls in enumerate(lengths)
        ]
        scheduler = Scheduler(limits)

        def ask_again(now: float, step: Step) -> None:
            scheduler._blocked = None

        course = Clock(scheduler, COST).run(requests, ask_again if single else None)
        return np.array([(r.first, r.last) for r in requests] + [(course.steps, course.tokens)])

    np.testing.assert_allclose(times(True), times(False), rtol=1e-9)


def trace_of(limits: SchedulerLimits, lengths: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(prefill tokens, decodes, running) of each step with all requests present from the start."""
    scheduler = Scheduler(limits)
    for number, pair in enumerate(lengths):
        scheduler.add(EngineRequest(number, 0.0, pair))
    found = []
    while (step := scheduler.schedule()) is not None:
        found.append((step.prefill_tokens, step.decodes, len(scheduler.running)))
        scheduler.complete(step)
    return found


def test_running_before_waiting_under_one_budget() -> None:
    limits = replace(SMALL, max_num_seqs=8, max_num_batched_tokens=20)
    # 20 of 30 tokens, then the other 10 and 10 of the next prompt, then a decode beside 19 more.
    assert trace_of(limits, [(30, 2), (40, 1)])[:3] == [(20, 0, 1), (20, 0, 2), (19, 1, 2)]


def test_a_threshold_cuts_long_prompts_only_beside_others() -> None:
    limits = replace(SMALL, max_num_batched_tokens=64, long_prefill_token_threshold=10)
    assert trace_of(limits, [(50, 1)])[0] == (50, 0, 1)
    assert trace_of(limits, [(50, 1), (50, 1)])[0] == (20, 0, 2)


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it() -> None:
    limits = replace(SMALL, max_num_batched_tokens=64, enable_chunked_prefill=False)
    assert [tokens for tokens, _, _ in trace_of(limits, [(50, 1), (30, 1)])] == [50, 30]


def test_active_seqs_admit_fewer_than_max_seqs() -> None:
    limits = replace(SMALL, max_num_seqs=4, max_num_active_seqs=2)
    assert trace_of(limits, [(10, 3)] * 4)[0] == (20, 0, 2)


def test_the_last_admitted_is_preempted_and_starts_over() -> None:
    limits = replace(SMALL, num_blocks=10, enable_prefix_caching=False)
    scheduler = Scheduler(limits, tell=True)
    old, young = EngineRequest(0, 0.0, (30, 40)), EngineRequest(1, 1.0, (30, 40))
    drive(scheduler, [old, young])
    assert (old.preempted, young.preempted) == (0, 1)
    assert scheduler.preemptions == 1
    assert young.done


def test_priority_preempts_the_least_urgent() -> None:
    limits = replace(SMALL, num_blocks=10, enable_prefix_caching=False, policy="priority")
    scheduler = Scheduler(limits, tell=True)
    low, high = EngineRequest(0, 0.0, (30, 40), (), 5), EngineRequest(1, 1.0, (30, 40), (), 0)
    drive(scheduler, [low, high])
    assert (low.preempted, high.preempted) == (1, 0)


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    limits = replace(SMALL, num_blocks=10)
    scheduler = Scheduler(limits, tell=True)
    drive(
        scheduler, [*[EngineRequest(0, 0.0, (30, 40)), (young := EngineRequest(1, 1.0, (30, 40)))][:1], young]
    )
    assert young.preempted == 1
    assert young.table.tail is not None


def test_swap_moves_blocks_instead_of_computing_again() -> None:
    base = replace(SMALL, num_blocks=10, enable_prefix_caching=False)

    def total(limits: SchedulerLimits) -> tuple[int, int]:
        scheduler = Scheduler(limits, tell=True)
        steps = drive(scheduler, [EngineRequest(0, 0.0, (30, 40)), EngineRequest(1, 1.0, (30, 40))])
        return sum(s.prefill_tokens for s in steps), sum(s.swapped_blocks for s in steps)

    again, none = total(base)
    once, moved = total(replace(base, swap_blocks=20))
    assert none == 0
    assert moved > 0
    assert moved % 2 == 0
    assert once == 60 < again


def test_shared_prefixes_are_computed_once_and_forgotten_least_recently_used_first() -> None:
    limits = replace(SMALL, num_blocks=21, max_num_seqs=1)
    scheduler = Scheduler(limits, tell=True)

    def ask(key: int) -> int:
        request = EngineRequest(key, 0.0, (65, 1), ((key, 8),))
        drive(scheduler, [request])
        return request.cached

    assert [ask(1), ask(1), ask(2), ask(1)] == [0, 64, 0, 64]
    ask(3)  # takes from 2, which was used longest ago
    assert ask(1) == 64
    assert ask(2) == 24  # its last blocks went first


def test_the_watermark_keeps_room_beside_others_only() -> None:
    limits = replace(SMALL, num_blocks=10, watermark=0.3)
    assert trace_of(limits, [(60, 1)])[0] == (60, 0, 1)  # alone: 8 of 10 blocks
    assert trace_of(limits, [(24, 2), (40, 1)])[0] == (24, 0, 1)  # 3 + 5 + 3 > 10


def test_reset_is_refused_while_blocks_are_held() -> None:
    scheduler = Scheduler(SMALL)
    scheduler.add(EngineRequest(0, 0.0, (30, 2)))
    step = scheduler.schedule()
    assert step is not None
    assert not scheduler.pool.forget()
    scheduler.complete(step)
    while (step := scheduler.schedule()) is not None:
        scheduler.complete(step)
    assert scheduler.pool.forget()


@pytest.mark.parametrize("when", [0, 1, 3])
def test_an_abort_frees_everything(when: int) -> None:
    scheduler = Scheduler(SMALL)
    request = EngineRequest(0, 0.0, (100, 9))
    scheduler.add(request)
    for _ in range(when):
        step = scheduler.schedule()
        assert step is not None
        scheduler.complete(step)
    scheduler.abort(request)
    assert scheduler.pool.free == scheduler.pool.total
    assert scheduler.schedule() is None


def test_async_scheduling_admits_one_step_later() -> None:
    """A step chosen ahead cannot hold what arrived since."""

    def first(ahead: bool) -> float:
        requests = [EngineRequest(0, 0.0, (60, 200)), EngineRequest(1, 0.05, (60, 2))]
        Clock(Scheduler(replace(SMALL, async_scheduling=ahead, num_blocks=80)), COST).run(requests)
        return requests[1].first

    step = COST(Step(decodes=1, context=70))
    assert first(True) - first(False) == pytest.approx(step, rel=0.1)
