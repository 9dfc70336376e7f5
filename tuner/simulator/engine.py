"""The core in real time: each step ends at its nominal time, its tokens are sent, late flushes are counted;
and its /metrics page under the names of vLLM 0.32.
"""

import asyncio
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from tuner.replay.timing import Alarm
from tuner.simulator.cost import StepCost
from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import EngineRequest, Step

# vLLM's own buckets, so that a dashboard or a parser made for vLLM reads them.
FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
TOKEN_S = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
REQUEST_S = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
STEP_TOKENS = (1.0, *(float(2**n) for n in range(3, 15)))
COUNTS = (*(step * 10.0**n for n in range(5) for step in (1.0, 2.0, 5.0)), 1e5)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", COUNTS),
    "request_generation_tokens": ("Number of generation tokens processed.", COUNTS),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", STEP_TOKENS),
    "request_params_max_tokens": ("Histogram of the max_tokens request parameter.", COUNTS),
    "time_to_first_token_seconds": (
        "Histogram of time to first token in seconds.",
        FIRST_TOKEN_S,
    ),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", TOKEN_S),
    "request_time_per_output_token_seconds": (
        "Histogram of time_per_output_token_seconds per request.",
        TOKEN_S,
    ),
    "e2e_request_latency_seconds": (
        "Histogram of e2e request latency in seconds.",
        REQUEST_S,
    ),
    "request_queue_time_seconds": (
        "Histogram of time spent in WAITING phase for request.",
        REQUEST_S,
    ),
    "request_inference_time_seconds": (
        "Histogram of time spent in RUNNING phase for request.",
        REQUEST_S,
    ),
    "request_prefill_time_seconds": (
        "Histogram of time spent in PREFILL phase for request.",
        REQUEST_S,
    ),
    "request_decode_time_seconds": (
        "Histogram of time spent in DECODE phase for request.",
        REQUEST_S,
    ),
    "request_num_preemptions": ("Histogram of the number of preemptions per request.", PREEMPTIONS),
}
_COUNTERS: Mapping[str, str] = {
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "generation_tokens": "Number of generation tokens processed.",
}
_GAUGES: Mapping[str, str] = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
}
_FINISHED = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Counts per bucket, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        running = 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            running += count
            edge = "+Inf" if bound is None else repr(float(bound))
            yield f'{name}_bucket{{{labels},le="{edge}"}} {float(running)}'
        yield f"{name}_count{{{labels}}} {float(running)}"
        yield f"{name}_sum{{{labels}}} {self.total}"


class Counters:
    """Everything on the page that only grows."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.values = dict.fromkeys(_COUNTERS, 0.0)
        self.finished = dict.fromkeys(_FINISHED, 0)

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)

    def page(self, model: str, gauges: Mapping[str, float], config: Mapping[str, object]) -> str:
        """The text of /metrics. `gauges` has a value for each of vLLM's three load gauges."""
        labels = f'engine="0",model_name="{model}"'
        lines = []
        for name, words in _GAUGES.items():
            lines += _head(f"vllm:{name}", words, "gauge")
            lines.append(f"vllm:{name}{{{labels}}} {float(gauges[name])}")
        for name, words in _COUNTERS.items():
            lines += _head(f"vllm:{name}_total", words, "counter")
            lines.append(f"vllm:{name}_total{{{labels}}} {float(self.values[name])}")
        lines += _head("vllm:request_success_total", "Count of successfully processed requests.", "counter")
        for reason, count in self.finished.items():
            lines.append(
                f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="{model}"}}'
                f" {float(count)}"
            )
        for name, (words, _) in _HISTOGRAMS.items():
            lines += _head(f"vllm:{name}", words, "histogram")
            lines += self.histograms[name].lines(f"vllm:{name}", labels)
        lines += _head("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", "gauge")
        shown = ",".join(f'{key}="{value}"' for key, value in sorted(config.items()))
        lines.append(f"vllm:cache_config_info{{{shown}}} 1.0")
        return "\n".join(lines) + "\n"


def _head(name: str, words: str, kind: str) -> list[str]:
    return [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]


# Takes the number of completion tokens so far and whether these were the last.
Sink = Callable[[int, bool], None]

_KEPT = 20_000  # steps that the report on punctuality covers: some minutes at 100 steps a second
_SLIP_S = 1.0  # a clock that is later than this skips the delay: catching up would send bursts of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPace:
    """How virtual seconds become real ones: `speed` 2 is twice as fast; `blind` steps ignore the knobs."""

    speed: float = 1.0
    noise: float = 0.0
    seed: int = 0
    blind: bool = False


@dataclass(slots=True)
class _Stream:
    sink: Sink
    sent: int = 0
    last_s: float = 0.0


class Punctuality:
    """How punctual the clock was: how late after its nominal end each step's flush began, and how long it
    took."""

    def __init__(self) -> None:
        self.late: deque[float] = deque(maxlen=_KEPT)
        self.spread: deque[float] = deque(maxlen=_KEPT)
        self.steps = self.slips = 0

    def note(self, late_s: float, spread_s: float) -> None:
        self.steps += 1
        self.late.append(late_s)
        self.spread.append(spread_s)

    def report(self) -> dict[str, float]:
        """Milliseconds over the last steps; `slips` counts the times that the clock gave up catching up."""
        found: dict[str, float] = {"steps": self.steps, "slips": self.slips}
        for name, values in (("late", self.late), ("spread", self.spread)):
            ranked = sorted(values) or [0.0]
            for share in (50, 95, 99, 100):
                found[f"{name}_p{share}_ms"] = 1e3 * ranked[min(len(ranked) - 1, len(ranked) * share // 100)]
        return found


class Engine:
    """One scheduler, driven by the event loop's clock. Nothing here blocks."""

    def __init__(
        self, scheduler: Scheduler, cost: StepCost, pace: RealPace, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.scheduler = scheduler
        self.cost = cost
        self.pace = pace
        self.loop = loop
        self.counters = Counters()
        self.punctuality = Punctuality()
        self._random = random.Random(pace.seed)
        self._streams: dict[EngineRequest, _Stream] = {}
        self._now: Step | None = None
        self._next: Step | None = None
        self._at = 0.0
        self._alarm = Alarm()
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken = False

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Take a request; it reaches the scheduler the front end's time after its arrival."""
        self._streams[request] = _Stream(sink)
        delay = 0.0 if self.pace.blind else self.cost.coefficients.request_s / self.pace.speed
        self._start(self._enter(request, request.arrival + delay))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _enter(self, request: EngineRequest, at: float) -> None:
        await self._until(at)
        if request not in self._streams:
            return
        self.scheduler.add(request)
        if self._now is None and not self._woken:
            self._woken = True
            self._start(self._drive())

    async def _until(self, at: float) -> None:
        """Wait until the clock reads `at`; others get their turn in any case."""
        if at <= monotonic():
            await asyncio.sleep(0)
        else:
            await self._alarm.until(int(at * 1e9))
            self._alarm.wakes_ms.clear()

    def abort(self, request: EngineRequest) -> None:
        if self._streams.pop(request, None) is not None:
            self.scheduler.abort(request)  # one that has not entered yet never will
            self.counters.finished["abort"] += 1

    def gauges(self) -> dict[str, float]:
        scheduler = self.scheduler
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage_perc": scheduler.pool.usage,
        }

    async def _drive(self) -> None:
        """Steps, one after another, until none is left to do."""
        self._at = monotonic()
        self._launch()
        self._woken = False
        while self._now is not None:
            await self._until(self._at)
            self._finish(self._now)

    def _launch(self) -> None:
        """Start the next step at the nominal time `_at`; async scheduling chooses the one after too."""
        step = self._next or self.scheduler.schedule()
        self._next = None
        self._now = step
        if step is None:
            return
        if self.scheduler.limits.async_scheduling:
            self._next = self.scheduler.schedule()
        for request in step.admitted:
            if request.scheduled < 0:
                request.scheduled = self._at
        self._at += self._seconds(step)

    def _seconds(self, step: Step) -> float:
        seconds = 0.010 if self.pace.blind else self.cost(step)
        if self.pace.noise:
            seconds *= max(0.2, self._random.gauss(1.0, self.pace.noise))
        return seconds / self.pace.speed

    def _finish(self, step: Step) -> None:
        begun = monotonic()
        self._flush(step)
        self.scheduler.complete(step)
        late = begun - self._at
        self.punctuality.note(late, monotonic() - begun)
        if late > _SLIP_S:
            self.punctuality.slips += 1
            self._at += late
        self._launch()

    def _flush(self, step: Step) -> None:
        at, streams, counters = self._at, self._streams, self.counters
        ended = set(step.finishing)
        prompts = 0
        for request in step.sampling:
            stream = streams.get(request)
            if stream is None:
                continue
            if request.first < 0:
                request.first = at
                prompts += request.prompt
                self._count_first(request, at)
            else:
                counters.observe("inter_token_latency_seconds", at - stream.last_s)
            self._send(request, stream, request in ended)
        for request in step.members:
            stream = streams.get(request)
            if stream is not None:
                counters.observe("inter_token_latency_seconds", at - stream.last_s)
                self._send(request, stream, request in ended)
        made = len(step.sampling) + len(step.members)
        if made:
            counters.observe("iteration_tokens_total", prompts + made)
        values, scheduler = counters.values, self.scheduler
        values["prompt_tokens"] += prompts
        values["generation_tokens"] += made
        values["num_preemptions"] = scheduler.preemptions
        values["prefix_cache_queries"] = scheduler.queries
        values["prefix_cache_hits"] = scheduler.hits

    def _send(self, request: EngineRequest, stream: _Stream, last: bool) -> None:
        stream.sent += 1
        stream.last_s = self._at
        if last:
            request.last = self._at
            del self._streams[request]
            self._count_last(request)
        stream.sink(stream.sent, last)

    def _count_first(self, request: EngineRequest, at: float) -> None:
        counters = self.counters
        counters.values["prompt_tokens_cached"] += max(request.cached, 0)
        counters.observe("time_to_first_token_seconds", at - request.arrival)
        counters.observe("request_prompt_tokens", request.prompt)
        counters.observe("request_queue_time_seconds", request.scheduled - request.arrival)
        counters.observe("request_prefill_time_seconds", at - request.scheduled)

    def _count_last(self, request: EngineRequest) -> None:
        counters, decode = self.counters, request.last - request.first
        counters.finished["length"] += 1
        counters.observe("e2e_request_latency_seconds", request.last - request.arrival)
        counters.observe("request_inference_time_seconds", request.last - request.scheduled)
        counters.observe("request_decode_time_seconds", decode)
        counters.observe("request_generation_tokens", request.output)
        counters.observe("request_params_max_tokens", request.output)
        counters.observe("request_num_preemptions", request.preempted)
        if request.output > 1:
            counters.observe("request_time_per_output_token_seconds", decode / (request.output - 1))
