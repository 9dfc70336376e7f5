"""Five ways of serving translations, as ratios: `python -m benchmarks.journey [--card a4500] [--model M]`.

Requests per second of 400 requests that arrive together, and the median and p95 time of one among others that
arrive at 80 % of the static batches' throughput. Inputs are 100 tokens each, or 10 to 200; an answer is as
long as its input. Only continuous batching is what vLLM does; the other ways are here for comparison.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.knobs.model import read
from tuner.simulator.clock import Clock
from tuner.simulator.cost import StepCost, card_of, preset
from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import EngineRequest, SchedulerLimits, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How requests are gathered: a batch starts when `size` wait or the first has waited `timeout_s`.

    A static batch answers all when its longest is done and pads every prompt to the longest; a dynamic one
    answers each when it is done and packs prompts. Both admit nobody until the batch is over.
    """

    size: int = 1
    timeout_s: float = 0.0
    static: bool = True


def serve_in_batches(requests: Sequence[EngineRequest], cost: StepCost, how: Batching) -> float:
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


def _run_batch(batch: Sequence[EngineRequest], now: float, cost: StepCost, *, static: bool) -> float:
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


def serve_continuously(
    requests: Sequence[EngineRequest], cost: StepCost, slots: int, limits: SchedulerLimits
) -> float:
    """The same by the V1 core with so many slots. The time at which all are done."""
    return Clock(Scheduler(replace(limits, max_num_seqs=slots)), cost).run(requests).end_s


WAYS: dict[str, Callable[[Sequence[EngineRequest], StepCost, SchedulerLimits], float]] = {
    "one by one": lambda r, c, _: serve_in_batches(r, c, Batching()),
    "static batch 16, 50 ms": lambda r, c, _: serve_in_batches(r, c, Batching(size=16, timeout_s=0.05)),
    "dynamic batch 16, 50 ms": lambda r, c, _: serve_in_batches(
        r, c, Batching(size=16, timeout_s=0.05, static=False)
    ),
    "continuous, 64 slots": lambda r, c, limits: serve_continuously(r, c, 64, limits),
    "continuous, 16 slots": lambda r, c, limits: serve_continuously(r, c, 16, limits),
}
"""The stations of a published journey of a translation service."""


def requests(
    lengths: "np.ndarray[tuple[int], np.dtype[np.int64]]", rate: float | None
) -> list[EngineRequest]:
    rng = np.random.default_rng(1)
    at = np.zeros(len(lengths)) if rate is None else np.cumsum(rng.exponential(1 / rate, len(lengths)))
    return [EngineRequest(i, float(at[i]), (int(n), int(n))) for i, n in enumerate(lengths)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", default="a4500")
    parser.add_argument("--model", default="Qwen/Qwen2.5-7B-Instruct")
    given = parser.parse_args()
    card = card_of(given.card)
    cost = StepCost(read(given.model, env={}), card, preset(card))
    limits = SchedulerLimits(num_blocks=5000, max_model_len=2048)
    rng = np.random.default_rng(0)
    for name, lengths in (
        ("uniform, 100 tokens", np.full(400, 100)),
        ("10 to 200 tokens", rng.integers(10, 201, 400)),
    ):
        speeds = {way: len(lengths) / run(requests(lengths, None), cost, limits) for way, run in WAYS.items()}
        rate = 0.8 * speeds["static batch 16, 50 ms"]
        print(f"{name} ({given.card}, {given.model}); times at {rate:.1f} requests/s")
        for way, run in WAYS.items():
            sent = requests(lengths, rate)
            run(sent, cost, limits)
            times = [r.last - r.arrival for r in sent]
            p50, p95 = np.percentile(times, [50, 95])
            print(
                f"  {way:24} {speeds[way]:6.2f} requests/s  {speeds[way] / speeds['one by one']:5.1f}x"
                f"   p50 {p50:7.2f} s  p95 {p95:7.2f} s"
            )


if __name__ == "__main__":
    main()
