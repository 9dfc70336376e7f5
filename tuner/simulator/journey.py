"""The older ways of serving, on the same step cost: one by one, static batches, dynamic batches.

For comparison with continuous batching only; no engine that the tuner drives serves like this.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tuner.simulator.clock import Clock
from tuner.simulator.cost import StepCost
from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import Limits, Request, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How requests are gathered: a batch starts when `size` wait or the first has waited `timeout_s`.

    A static batch answers all when its longest is done and pads every prompt to the longest; a dynamic one
    answers each when it is done and packs prompts. Both admit nobody until the batch is over.
    """

    size: int = 1
    timeout_s: float = 0.0
    static: bool = True


def serve_in_batches(requests: Sequence[Request], cost: StepCost, how: Batching) -> float:
    """Run requests sorted by arrival; fills in `first` and `last`. The time at which all are done."""
    now, at = 0.0, 0
    while at < len(requests):
        opened = max(now, requests[at].arrival)
        full_at = requests[at + how.size - 1].arrival if at + how.size <= len(requests) else float("inf")
        starts = max(opened, min(full_at, requests[at].arrival + how.timeout_s))
        batch = [r for r in requests[at : at + how.size] if r.arrival <= starts]
        now = _run_batch(batch, starts, cost, static=how.static)
        at += len(batch)
    return now


def _run_batch(batch: Sequence[Request], now: float, cost: StepCost, *, static: bool) -> float:
    longest = max(request.prompt for request in batch)
    prompts = [longest if static else request.prompt for request in batch]
    step = Step(
        prefill_tokens=sum(prompts),
        prefills=len(batch),
        pairs=sum(n * (n + 1) // 2 for n in prompts),
        prefill_context=sum(prompts),
        sampling=list(batch),
    )
    now += cost(step)
    for request in batch:
        request.first = request.last = now
    for made in range(2, max(request.output for request in batch) + 1):
        alive = [r for r in batch if r.output >= made]
        width = len(batch) if static else len(alive)
        context = sum((n if static else r.prompt) + made for n, r in zip(prompts, batch, strict=True))
        now += cost(Step(decodes=width, context=context))
        for request in alive:
            request.last = now
    if static:
        for request in batch:
            request.first = request.last = now
    return now


def serve_continuously(requests: Sequence[Request], cost: StepCost, slots: int, limits: Limits) -> float:
    """The same by the V1 core with so many slots. The time at which all are done."""
    return Clock(Scheduler(replace(limits, max_num_seqs=slots)), cost).run(requests).end_s


WAYS: dict[str, Callable[[Sequence[Request], StepCost, Limits], float]] = {
    "one by one": lambda r, c, _: serve_in_batches(r, c, Batching()),
    "static batch 16, 50 ms": lambda r, c, _: serve_in_batches(r, c, Batching(size=16, timeout_s=0.05)),
    "dynamic batch 16, 50 ms": lambda r, c, _: serve_in_batches(
        r, c, Batching(size=16, timeout_s=0.05, static=False)
    ),
    "continuous, 64 slots": lambda r, c, limits: serve_continuously(r, c, 64, limits),
    "continuous, 16 slots": lambda r, c, limits: serve_continuously(r, c, 16, limits),
}
"""The stations of a published journey of a translation service."""
