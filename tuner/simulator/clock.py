"""The core in virtual time: a trace's slices as requests, in the timeline that a replay follows, go through a
scheduler and a step cost, and nothing waits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tuner.records import Slice
from tuner.replay.plan import Plan, priming_rows, schedule
from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import EngineRequest, SchedulerLimits, Step
from tuner.traffic.trace import Trace

FOREVER = math.inf


class Seconds(Protocol):
    """Seconds of one step, and (base, slope per context token) of pure decode steps of `count` requests that
    read `context` tokens in the first of them.
    """

    def __call__(self, step: Step) -> float: ...

    def decode_line(self, count: int, context: int) -> tuple[float, float]: ...


@dataclass(slots=True)
class Course:
    """What a run looked like. `gaps` holds (end of stretch, seconds per step, steps) one after the other,
    `levels` (time, waiting, KV usage, yielding steps and tokens so far): a tuple for each step would keep
    Python's garbage collector busy. At most `most_running` requests ran at once.
    """

    steps: int = 0
    yielding: int = 0  # of the steps, those that gave a token
    tokens: int = 0
    end_s: float = 0.0
    most_running: int = 0
    gaps: list[float] = field(default_factory=list)
    levels: list[float] = field(default_factory=list)

    def table(self) -> NDArray[np.float64]:
        """`levels` as an array of (moment, column)."""
        return np.array(self.levels, float).reshape(-1, 5)


class Clock:
    """Runs requests to their end, or until `until` (virtual seconds)."""

    def __init__(self, scheduler: Scheduler, cost: Seconds, *, until: float = FOREVER) -> None:
        self.scheduler = scheduler
        self.cost = cost
        self.until = until
        self.course = Course()
        self.now = 0.0

    def run(
        self,
        requests: Sequence[EngineRequest],
        watch: Callable[[float, Step], None] | None = None,
        stretches: Callable[[NDArray[np.float64], float], None] | None = None,
    ) -> Course:
        """`requests` are sorted by arrival; fills in `first` and `last`. `watch` sees single steps. Many pure
        decode steps at once go to `stretches`, as their ends and the KV usage before them; a watched run
        without it computes every step by itself.
        """
        scheduler, course = self.scheduler, self.course
        single = watch is not None and stretches is None
        ahead = scheduler.limits.async_scheduling
        pending: Step | None = None
        at, count = 0, len(requests)
        arrival = requests[0].arrival if requests else FOREVER
        while self.now < self.until:
            while arrival <= self.now:
                scheduler.add(requests[at])
                at += 1
                arrival = requests[at].arrival if at < count else FOREVER
            if not single and (not ahead if pending is None else pending.steady):
                pending = self._stretch(pending, arrival, stretches)
                if self.now >= arrival:
                    continue
            step = scheduler.schedule()
            if ahead:
                pending, step = step, pending
            if step is not None:
                self._execute(step, watch)
            elif pending is None:
                if at >= count:
                    break
                self.now = max(self.now, arrival)
        course.end_s, course.most_running = self.now, scheduler.most_running
        return course

    def _execute(self, step: Step, watch: Callable[[float, Step], None] | None) -> None:
        seconds = self.cost(step)
        now = self.now = self.now + seconds
        course = self.course
        for request in step.admitted:
            if request.scheduled < 0:
                request.scheduled = now - seconds
        for request in step.sampling:
            if request.first < 0:
                request.first = now
        for request in step.finishing:
            request.last = now
        if step.finishing:
            self.scheduler.complete(step)
        decodes = step.decodes
        course.steps += 1
        if decodes or step.sampling:
            course.yielding += 1
        course.tokens += decodes + step.prefill_tokens
        if decodes:
            course.gaps += (now, seconds, 1)
        scheduler = self.scheduler
        pool = scheduler.pool
        course.levels += (now, len(scheduler.waiting), pool.usage, course.yielding, course.tokens)
        if watch is not None:
            watch(now, step)

    def _note(self) -> None:
        scheduler, course = self.scheduler, self.course
        waiting, usage = len(scheduler.waiting), scheduler.pool.usage
        course.levels += (self.now, waiting, usage, course.yielding, course.tokens)

    def _stretch(
        self,
        pending: Step | None,
        arrival: float,
        stretches: Callable[[NDArray[np.float64], float], None] | None,
    ) -> Step | None:
        """Compute many pure decode steps at once where nothing can happen between them; the step then
        pending. The one that is pending now is steady."""
        scheduler = self.scheduler
        if not scheduler.still():
            return pending
        number = len(scheduler.decoding)
        if pending is not None and pending.decodes != number:
            return pending
        bound = arrival
        if scheduler.waiting and scheduler.slots_full and scheduler.limits.policy == "fcfs" and not stretches:
            bound = FOREVER  # in a queue that waits for a slot, an arrival changes only the queue
        first = scheduler.context if pending is not None else scheduler.context + number
        base, slope = self.cost.decode_line(number, first)
        step_s, growth = base + slope * first, slope * number
        most = self._steps_before(min(bound, self.until) - self.now, step_s, growth)
        usage = scheduler.pool.usage
        count = scheduler.advance(most) if most > 1 else 0
        if count <= 0:
            return pending
        seconds = count * step_s + growth * count * (count - 1) / 2
        if stretches is not None:
            done = np.arange(1.0, count + 1.0)
            stretches(self.now + done * step_s + growth * done * (done - 1) / 2, usage)
        self.now += seconds
        course = self.course
        course.steps += count
        course.yielding += count
        course.tokens += count * number
        course.gaps += (self.now, seconds / count, count)
        self._note()
        return pending and scheduler.pure_step()

    @staticmethod
    def _steps_before(room: float, step_s: float, growth: float) -> int:
        """Steps that all start less than `room` seconds from now (the first starts now)."""
        if room == FOREVER:
            return 1 << 40
        if growth <= 0:
            return max(0, math.ceil(room / step_s))
        b = step_s - growth / 2
        count = (-b + math.sqrt(b * b + 2 * growth * room)) / growth
        return max(0, math.ceil(count))


@dataclass(slots=True)
class PreparedSlice:
    """One slice: rows in order of arrival (seconds, ≥ 0), which of them are measured, the window's length."""

    name: str
    window_s: float
    start_s: float  # of the window, on the clock of `at_s`
    at_s: list[float]
    rows: NDArray[np.int64]
    lengths: list[tuple[int, int]]
    measured: NDArray[np.bool_]
    filler: list[int]
    priority: list[int]
    primed: NDArray[np.int64]
    segments: dict[int, list[tuple[tuple[int, int], ...]]] = field(default_factory=dict)


class Workload:
    """The slices of one study, ready to be run many times."""

    def __init__(self, trace: Trace, slices: Sequence[Slice], plan: Plan, speed: float = 1.0) -> None:
        self.trace = trace
        self.parts = [self._part(part, plan, speed) for part in slices]

    def _part(self, part: Slice, plan: Plan, speed: float) -> PreparedSlice:
        trace = self.trace
        due = schedule(trace, part, speed=speed, warmup_s=plan.load_warmup_s, tail_s=plan.tail_limit_s)
        shift = max(0.0, -float(due.at_s[0])) if len(due) else 0.0
        rows = due.rows
        inputs, outputs = trace.input_len[rows].tolist(), np.maximum(trace.output_len[rows], 1).tolist()
        primed = np.empty(0, np.int64)
        if len(trace.blocks) and plan.priming_turnovers > 0:
            before = plan.load_warmup_s * speed
            primed = priming_rows(trace, part, before_s=before, tokens=plan.priming_turnovers * 2e6)
        return PreparedSlice(
            name=part.name,
            window_s=due.window_s,
            start_s=shift,
            at_s=(due.at_s + shift).tolist(),
            rows=rows,
            lengths=list(zip(inputs, outputs, strict=True)),
            measured=due.measured,
            filler=due.filler.tolist(),
            priority=trace.priority[rows].tolist(),
            primed=primed,
        )

    def requests(
        self, part: PreparedSlice, limits: SchedulerLimits, delay_s: float = 0.0
    ) -> list[EngineRequest]:
        """Fresh requests of a slice; they reach the engine `delay_s` after they are due."""
        prefixes = self._segments(part, limits) if limits.enable_prefix_caching else None
        return [
            EngineRequest(number, at + delay_s, lengths, prefixes[number] if prefixes else (), priority)
            for number, (at, lengths, priority) in enumerate(
                zip(part.at_s, part.lengths, part.priority, strict=True)
            )
        ]

    def prime(self, part: PreparedSlice, scheduler: Scheduler) -> None:
        """Fill the prefix cache with the prompts before the slice, taking no time."""
        limits, pool = scheduler.limits, scheduler.pool
        if not limits.enable_prefix_caching:
            return
        for row in part.primed:
            length = int(self.trace.input_len[row])
            request = EngineRequest(-1, 0.0, (length, 1), self._row_segments(int(row), limits.block_size, 0))
            blocks = -(-length // limits.block_size)
            hit, found = pool.lookup(request.table, (length - 1) // limits.block_size)
            if blocks - hit + pool.cost_of(found) > pool.free:
                continue
            pool.hold(request.table, hit, found)
            pool.take(blocks - hit)
            request.table.blocks = blocks
            pool.remember(request.table, length // limits.block_size)
            pool.release(request.table, length)

    def _segments(
        self, part: PreparedSlice, limits: SchedulerLimits
    ) -> list[tuple[tuple[int, int], ...]] | None:
        if not len(self.trace.blocks):
            return None
        size = limits.block_size
        if size not in part.segments:
            part.segments[size] = [
                self._row_segments(int(row), size, filler)
                for row, filler in zip(part.rows, part.filler, strict=True)
            ]
        return part.segments[size]

    def _row_segments(self, row: int, size: int, kind: int) -> tuple[tuple[int, int], ...]:
        """(content key, engine blocks) of a prompt. Keys chain, so equal keys mean equal prefixes.

        Trace blocks that are multiples of engine blocks make one run each; otherwise an engine block's
        content is the trace blocks that it overlaps. The last, partial trace block counts as a complete one.
        """
        ids, width = self.trace.row_blocks(row).tolist(), self.trace.block_size
        whole = int(self.trace.input_len[row]) // size
        key, found = hash((kind, width)), []
        if width and width % size == 0:
            each = width // size
            for index, block in enumerate(ids):
                count = min(each, whole - index * each)
                if count <= 0:
                    break
                key = hash((key, block))
                found.append((key, count))
        elif width:
            for number in range(whole):
                first, last = number * size // width, ((number + 1) * size - 1) // width
                if last >= len(ids):
                    break
                key = hash((key, number * size % width, *ids[first : last + 1]))
                found.append((key, 1))
        return tuple(found)
