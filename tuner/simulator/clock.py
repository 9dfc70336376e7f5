"""The core in virtual time: requests go through a scheduler and a step cost, and nothing waits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import EngineRequest, Step

FOREVER = math.inf


class Seconds(Protocol):
    """Seconds of one step, and (base, slope per context token) of pure decode steps of `count` requests that
    read `context` tokens in the first of them.
    """

    def __call__(self, step: Step) -> float: ...

    def decode_line(self, count: int, context: int) -> tuple[float, float]: ...


@dataclass(slots=True)
class Course:
    """What a run looked like. `gaps` are (end of stretch, seconds per step, steps), `levels` (time,
    waiting, KV usage, yielding steps and tokens so far); at most `most_running` requests ran at once.
    """

    steps: int = 0
    yielding: int = 0  # of the steps, those that gave a token
    tokens: int = 0
    end_s: float = 0.0
    most_running: int = 0
    gaps: list[tuple[float, float, int]] = field(default_factory=list)
    levels: list[tuple[float, int, float, int, int]] = field(default_factory=list)

    def table(self) -> NDArray[np.float64]:
        """`levels` as an array of (moment, column)."""
        return np.fromiter(chain.from_iterable(self.levels), float, 5 * len(self.levels)).reshape(-1, 5)


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
        self.now += seconds
        now, course = self.now, self.course
        for request in step.admitted:
            if request.scheduled < 0:
                request.scheduled = now - seconds
        for request in step.sampling:
            if request.first < 0:
                request.first = now
        for request in step.finishing:
            request.last = now
        self.scheduler.complete(step)
        course.steps += 1
        course.yielding += bool(step.decodes or step.sampling)
        course.tokens += step.tokens
        if step.decodes:
            course.gaps.append((now, seconds, 1))
        self._note()
        if watch is not None:
            watch(now, step)

    def _note(self) -> None:
        scheduler, course = self.scheduler, self.course
        state = len(scheduler.waiting), scheduler.pool.usage
        course.levels.append((self.now, *state, course.yielding, course.tokens))

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
        course.gaps.append((self.now, seconds / count, count))
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
