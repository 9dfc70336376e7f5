"""Ways of serving translations, as ratios: `python -m benchmarks.journey [--card a4500] [--model M]`.

Requests per second of 400 requests that arrive together, and the median and p95 time of one among others that
arrive at 80 % of the static batches' throughput. Inputs are 100 tokens each, or 10 to 200; an answer is as
long as its input. Then the memory that contiguous and paged caches waste, what several answers of one prompt
share, and 64 slots against 16 where the cache is small. Only continuous batching is what vLLM does; the other
ways are here for comparison.
"""

import argparse
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.knobs.model import read
from tuner.simulator.clock import Clock
from tuner.simulator.cost import StepCost, card_of, preset
from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import EngineRequest, SchedulerLimits, Step
from tuner.traffic.trace import bundled


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
    now += cost(_prefill(prompts, batch))
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


def _prefill(prompts: Sequence[int], batch: Sequence[EngineRequest]) -> Step:
    """The step that computes whole prompts of these lengths."""
    return Step(
        prefill_tokens=sum(prompts),
        prefills=len(batch),
        pairs=sum(n * (n + 1) // 2 for n in prompts),
        prefill_context=sum(prompts),
        sampling=list(batch),
    )


def serve_continuously(
    requests: Sequence[EngineRequest], cost: StepCost, slots: int, limits: SchedulerLimits
) -> float:
    """The same by the V1 core with so many slots. The time at which all are done."""
    return Clock(Scheduler(replace(limits, max_num_seqs=slots)), cost).run(requests).end_s


def serve_in_processes(requests: Sequence[EngineRequest], cost: StepCost, count: int) -> float:
    """Several processes that serve one request each: their work on the host overlaps, the device does one
    step at a time. The time at which all are done.
    """
    host, device = cost.coefficients.step_s, 0.0
    queue, turns = deque(requests), list[tuple[float, int, EngineRequest, int]]()

    def take(now: float, worker: int) -> None:
        if queue:
            request = queue.popleft()
            heapq.heappush(turns, (max(now, request.arrival) + host, worker, request, 0))

    for worker in range(count):
        take(0.0, worker)
    while turns:
        ready, worker, request, made = heapq.heappop(turns)
        step = (
            Step(decodes=1, context=request.prompt + made + 1)
            if made
            else _prefill([request.prompt], [request])
        )
        device = max(device, ready) + cost(step) - host
        request.last = device
        if not made:
            request.first = device
        if made + 1 < request.output:
            heapq.heappush(turns, (device + host, worker, request, made + 1))
        else:
            take(device, worker)
    return device


def waste(lengths: Iterable[tuple[int, int]], *, reserved: int, block_size: int = 16) -> tuple[float, float]:
    """The share of the held memory that no token fills, over the life of all (prompt, answer): where each
    holds `reserved` tokens in one piece, and where it holds pages of `block_size`.
    """
    tokens = np.concatenate([np.arange(prompt, prompt + answer) + 1 for prompt, answer in lengths])
    pages = -(-tokens // block_size) * block_size
    return 1 - float(tokens.sum()) / (reserved * len(tokens)), 1 - float(tokens.sum() / pages.sum())


def shared_by_samples(prompt: int, answer: int, count: int, cost: StepCost) -> float:
    """The share of blocks that `count` answers to one prompt save at their most, by the scheduler: against
    the same number of requests whose prompts have nothing in common.
    """
    most = []
    for same in (False, True):
        limits = SchedulerLimits(num_blocks=5000, max_model_len=4096, max_num_seqs=64)
        sent = [
            EngineRequest(n, 0.001 * n, (prompt, answer), ((1 if same else n, prompt // limits.block_size),))
            for n in range(count)
        ]
        course = Clock(Scheduler(limits), cost).run(sent)
        most.append(float(course.table()[:, 2].max()))
    return 1 - most[1] / most[0]


def shared_by_beams(prompt: int, answer: int, width: int, block_size: int = 16, seed: int = 0) -> float:
    """The share of blocks that the beams of one prompt save at the end. Each step's survivors come from beams
    drawn at random; a page that several have is copied when one of them writes to it.
    """
    rng, fresh = np.random.default_rng(seed), iter(range(10**9))
    common = [next(fresh) for _ in range(-(-prompt // block_size))]
    beams = [list(common) for _ in range(width)]
    for length in range(prompt, prompt + answer):
        beams = [list(beams[parent]) for parent in rng.integers(0, width, width)]
        for beam in beams:
            if length % block_size == 0:
                beam.append(next(fresh))
            elif sum(beam[-1] in other for other in beams) > 1:
                beam[-1] = next(fresh)
    return 1 - len({page for beam in beams for page in beam}) / sum(map(len, beams))


WAYS: dict[str, Callable[[Sequence[EngineRequest], StepCost, SchedulerLimits], float]] = {
    "one by one": lambda r, c, _: serve_in_batches(r, c, Batching()),
    "four processes": lambda r, c, _: serve_in_processes(r, c, 4),
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


def throughput(card: str, model: str, cost: StepCost) -> None:
    limits = SchedulerLimits(num_blocks=5000, max_model_len=2048)
    for name, lengths in LENGTHS.items():
        speeds = {way: len(lengths) / run(requests(lengths, None), cost, limits) for way, run in WAYS.items()}
        rate = 0.8 * speeds["static batch 16, 50 ms"]
        print(f"{name} ({card}, {model}); times at {rate:.1f} requests/s")
        for way, run in WAYS.items():
            sent = requests(lengths, rate)
            run(sent, cost, limits)
            times = [r.last - r.arrival for r in sent]
            p50, p95 = np.percentile(times, [50, 95])
            print(
                f"  {way:24} {speeds[way]:6.2f} requests/s  {speeds[way] / speeds['one by one']:5.1f}x"
                f"   p50 {p50:7.2f} s  p95 {p95:7.2f} s"
            )


def chat_lengths() -> list[tuple[int, int]]:
    """(prompt, answer) of the conversation trace that ships with the package."""
    trace = bundled()
    return [(int(i), max(1, int(o))) for i, o in zip(trace.input_len, trace.output_len, strict=True)]


def memory(cost: StepCost) -> None:
    print("memory held and not filled: contiguous (2,048 tokens; chat 16,384), paged (16 tokens)")
    loads = {name: ([(int(n), int(n)) for n in lengths], 2048) for name, lengths in LENGTHS.items()}
    for name, (lengths, reserved) in (loads | {"chat, Azure": (chat_lengths(), 16384)}).items():
        contiguous, paged = waste(lengths, reserved=reserved)
        print(f"  {name:24} {contiguous:6.1%} {paged:6.1%}")
    print("blocks saved by sharing, prompts of 512 and answers of 128 tokens: samples, beams")
    for count in (2, 4, 8):
        samples, beams = shared_by_samples(512, 128, count, cost), shared_by_beams(512, 128, count)
        print(f"  {count:24} {samples:6.1%} {beams:6.1%}")


def slots(cost: StepCost) -> None:
    print("10 to 200 tokens, 400 at once: slots, KV blocks, requests/s, p95 s, p95 ms per token, preemptions")
    for blocks in (5000, 400, 200, 100):
        for count in (64, 32, 16, 8):
            sent = requests(LENGTHS["10 to 200 tokens"], None)
            limits = SchedulerLimits(num_blocks=blocks, max_model_len=512, max_num_seqs=count)
            scheduler = Scheduler(limits)
            end = Clock(scheduler, cost).run(sent).end_s
            p95 = float(np.percentile([r.last - r.arrival for r in sent], 95))
            token = float(np.percentile([(r.last - r.first) / max(1, r.output - 1) * 1e3 for r in sent], 95))
            served = f"{len(sent) / end:8.2f} {p95:8.1f} {token:8.1f}"
            print(f"  {count:4} {blocks:6} {served} {scheduler.preemptions:6}")


LENGTHS = {
    "uniform, 100 tokens": np.full(400, 100),
    "10 to 200 tokens": np.random.default_rng(0).integers(10, 201, 400),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", default="a4500")
    parser.add_argument("--model", default="Qwen/Qwen2.5-7B-Instruct")
    given = parser.parse_args()
    card = card_of(given.card)
    cost = StepCost(read(given.model, env={}), card, preset(card))
    throughput(given.card, given.model, cost)
    memory(cost)
    slots(cost)


if __name__ == "__main__":
    main()
