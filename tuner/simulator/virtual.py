"""A replay against the simulated engine in virtual time: the same core, timetable and measuring, no waiting.

A replay over HTTP also has connections, chunks that carry several tokens, turns that wait for each other,
clients that hang up, and time for warm-up and priming. This one does not.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tuner.metrics import CUT
from tuner.records import Outcome, Slice
from tuner.replay import fidelity
from tuner.replay.fidelity import PrefixCounts
from tuner.replay.plan import Load, Plan, schedule
from tuner.replay.sender import Sent, late
from tuner.replay.timeline import Judge, Replayed, SliceReplay, SliceWindow
from tuner.simulator.boot import Booted
from tuner.simulator.clock import Clock, PreparedSlice, Workload
from tuner.simulator.cost import StepCost
from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import EngineRequest, Step
from tuner.traffic.trace import Trace

# Virtual seconds between two questions to the judge; it is asked only when outcomes are there.
LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualPace:
    """`slower` multiplies the time of every step, `noise` is the relative standard deviation per step."""

    slower: float = 1.0
    noise: float = 0.0
    seed: int = 0


def replay(
    booted: Booted,
    trace: Trace,
    slices: Sequence[Slice],
    plan: Plan,
    load: Load,
    pace: VirtualPace,
    *,
    judge: Judge | None = None,
) -> tuple[Replayed, float]:
    """Replay every slice in turn; also returns the virtual seconds that it took."""
    work = Workload(trace, slices, plan, load.speed)
    evidence, prefix = _Evidence(), PrefixCounts()
    done: list[SliceReplay] = []
    seconds = 0.0
    for part in work.parts:
        cut = next(s for s in slices if s.name == part.name)
        one = _Slice(booted, work, part, cut, plan, load, pace)
        found, spent = one.run(judge, evidence, prefix)
        seconds += spent
        done.append(found)
        if evidence.stopped is not None:
            break
    checked = fidelity.check(
        fidelity.Evidence(
            sent=evidence.sent, planned=evidence.planned, cpu=0.0, curtailed=evidence.stopped is not None,
            extra=prefix.values(), warnings=("virtual time: simulated, not replayed",),
        ),
        plan,
    )  # fmt: skip
    return Replayed(slices=tuple(done), fidelity=checked, stopped=evidence.stopped), seconds


@dataclass(slots=True)
class _Evidence:
    sent: list[Sent] = field(default_factory=list)
    planned: int = 0
    stopped: str | None = None


class _Telemetry:
    """What a scrape of /metrics would have shown after each step."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, ...]] = []
        self.tokens = self.yielding = 0

    def note_decodes(self, ends: NDArray[np.float64], usage: float, scheduler: Scheduler) -> None:
        """Many pure decode steps; the KV usage grows evenly from `usage` to what it is now."""
        count, each = len(ends), len(scheduler.decoding)
        still = (scheduler.preemptions, scheduler.hits, scheduler.queries)
        queue = (len(scheduler.waiting), len(scheduler.running))
        grown = (scheduler.pool.usage - usage) / count
        for number, end in enumerate(ends.tolist(), 1):
            filled = usage + number * grown
            self.rows.append(
                (end, *queue, filled, *still, self.tokens + number * each, self.yielding + number)
            )
        self.tokens += count * each
        self.yielding += count

    def note(self, now: float, step: Step, scheduler: Scheduler, begun: Sequence[EngineRequest]) -> None:
        made = len(step.sampling) + len(step.members)
        self.tokens += sum(r.prompt for r in begun) + made
        self.yielding += bool(made)
        self.rows.append(
            (now, len(scheduler.waiting), len(scheduler.running), scheduler.pool.usage,
             scheduler.preemptions, scheduler.hits, scheduler.queries, self.tokens, self.yielding)
        )  # fmt: skip

    def at(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """One row of numbers per time, as of the last step before it; zeros before the first."""
        rows = np.array([(-math.inf, *[0.0] * 8), *self.rows])
        return rows[np.searchsorted(rows[:, 0], times, side="right") - 1, 1:]


class _Slice:
    """One slice against one fresh, primed engine."""

    def __init__(
        self,
        booted: Booted,
        work: Workload,
        part: PreparedSlice,
        cut: Slice,
        plan: Plan,
        load: Load,
        pace: VirtualPace,
    ) -> None:
        self.booted, self.work, self.part, self.slice = booted, work, part, cut
        self.plan, self.load, self.pace = plan, load, pace
        self.timetable = schedule(
            work.trace, cut, speed=load.speed, warmup_s=plan.load_warmup_s, tail_s=plan.tail_limit_s
        )
        self.scheduler = Scheduler(booted.options.limits, tell=True)
        self.chunks: list[list[float]] = [[] for _ in part.at_s]
        self.telemetry = _Telemetry()

    def run(
        self, judge: Judge | None, evidence: _Evidence, prefix: PrefixCounts
    ) -> tuple[SliceReplay, float]:
        """The slice as it went, and the virtual seconds from the first request to the end."""
        sent = self._simulate()
        window = SliceWindow(self.slice, self.timetable, np.full(len(sent), -1, np.int64), self.work.trace)
        evidence.planned += window.planned
        ended = self._watch(window, sorted(sent, key=_end), judge, evidence)
        evidence.sent += window.sent
        stopped = evidence.stopped is not None
        length = min(ended, self.timetable.window_s) if stopped else self.timetable.window_s
        outcomes = sorted(window.outcomes, key=lambda o: (o.scheduled_s, o.row))
        limits = self.booted.options.limits
        about = (limits.block_size, limits.num_blocks * limits.block_size)
        prefix.add(self.work.trace, (self.part.primed, self.timetable), outcomes, about)
        engine, series = self._engine(length)
        found = SliceReplay(
            slice=self.slice, window_s=length, outcomes=tuple(outcomes), engine=engine, series=series
        )
        return found, self.part.start_s + ended

    def _simulate(self) -> list[Sent]:
        part, limits = self.part, self.booted.options.limits
        self.work.prime(part, self.scheduler)
        requests = self.work.requests(part, limits, self.booted.cost.coefficients.request_s)
        fits = [r for r in requests if r.prompt < limits.max_model_len]
        last = part.start_s + part.window_s + self.plan.tail_limit_s
        cost = Paced(self.booted.cost, self.pace)
        stretches = None if self.pace.noise else self._record_decodes
        Clock(self.scheduler, cost, until=last).run(fits, self._record, stretches)
        return [self._sent(request, last) for request in requests]

    def _record_decodes(self, ends: NDArray[np.float64], usage: float) -> None:
        times = ends.tolist()
        for request in self.scheduler.decoding:
            self.chunks[request.number].extend(times)
        self.telemetry.note_decodes(ends, usage, self.scheduler)

    def _record(self, now: float, step: Step) -> None:
        begun = [r for r in step.sampling if not self.chunks[r.number]]
        for request in (*step.sampling, *step.members):
            self.chunks[request.number].append(now)
        self.telemetry.note(now, step, self.scheduler, begun)

    def _sent(self, request: EngineRequest, last: float) -> Sent:
        """One request as a sender would have recorded it; times count from the window's start."""
        part, number, zero = self.part, request.number, self.part.start_s
        due, limit = part.at_s[number], self.booted.options.limits.max_model_len
        times = np.array(self.chunks[number]) - zero
        error, end = None, request.last
        if request.prompt >= limit:
            error, end = f"HTTP 400: the prompt of {request.prompt} tokens does not fit", due
        elif request.last < 0 or request.last - due > self.load.deadline:
            over = due + self.load.deadline
            error, end = (late(self.load.deadline), over) if over < last else (CUT, last)
        times = times[times <= end - zero]
        lengths = part.lengths[number]
        outcome = Outcome(
            row=int(part.rows[number]), scheduled_s=due - zero, sent_s=due - zero,
            first_token_s=float(times[0]) if len(times) else None,
            last_token_s=float(times[-1]) if len(times) else None, end_s=end - zero,
            input_tokens=lengths[0], expected_input=lengths[0], output_tokens=len(times),
            expected_output=lengths[1], cached_tokens=max(0, request.cached), chunk_s=times,
            chunk_tokens=np.ones(len(times), np.int32), error=error,
        )  # fmt: skip
        return Sent(key=number, outcome=outcome, counted=bool(part.measured[number]))

    def _watch(
        self, window: SliceWindow, sent: Sequence[Sent], judge: Judge | None, evidence: _Evidence
    ) -> float:
        """Give the window each request that ended, in order, and ask the judge; the seconds into the window
        at the end."""
        at, now = 0, 0.0
        while True:
            now += LOOK_S
            while at < len(sent) and _end(sent[at]) <= now:
                window.take(sent[at])
                at += 1
            window.now_s = now
            if at == len(sent) or (window.done and now >= window.window_s):
                return max(window.window_s, max((_end(s) for s in sent[:at] if s.counted), default=0.0))
            if judge is not None and (reason := judge(window.partial(now))) is not None:
                evidence.stopped = reason
                for left in sent[at:]:
                    if left.outcome.scheduled_s <= now:
                        window.take(_cut(left, now))
                return now

    def _engine(
        self, length: float
    ) -> tuple[Mapping[str, float | None], Mapping[str, Sequence[float | None]]]:
        """The engine's numbers over the window and its series, as scrapes would have shown them."""
        zero, every = self.part.start_s, self.plan.scrape_s
        at = np.append(np.arange(0.0, length, every), length)
        waiting, running, usage, preempted, hits, queries, tokens, yielding = self.telemetry.at(at + zero).T
        counted = preempted - preempted[0]
        steps = float(yielding[-1] - yielding[0])
        values: dict[str, float | None] = {
            "scrapes": float(len(at)),
            "preemptions": float(preempted[-1] - preempted[0]),
            "prefix_hits": float(hits[-1] - hits[0]),
            "prefix_queries": float(queries[-1] - queries[0]),
            "batch_tokens_mean": float(tokens[-1] - tokens[0]) / steps if steps else None,
        }
        for name, seen in (("queue_depth", waiting), ("kv_usage", usage), ("running", running)):
            values[f"{name}_mean"], values[f"{name}_max"] = float(seen.mean()), float(seen.max())
        if len(at) > 2:
            values["queue_slope_per_s"] = float(np.polyfit(at, waiting, 1)[0])
        series = {"waiting": waiting, "running": running, "kv_usage": usage, "preemptions": counted}
        return values, {
            "at_s": at.round(3).tolist(),
            **{name: seen.tolist() for name, seen in series.items()},
        }


def _end(sent: Sent) -> float:
    return math.inf if sent.outcome.end_s is None else sent.outcome.end_s


def _cut(sent: Sent, now: float) -> Sent:
    """A request as it was when the replay was stopped."""
    outcome = sent.outcome
    kept = outcome.chunk_s <= now
    times = outcome.chunk_s[kept]
    return replace(
        sent,
        outcome=replace(
            outcome, error=CUT, end_s=now, chunk_s=times, chunk_tokens=outcome.chunk_tokens[kept],
            output_tokens=len(times), first_token_s=float(times[0]) if len(times) else None,
            last_token_s=float(times[-1]) if len(times) else None,
        ),
    )  # fmt: skip


class Paced:
    """A step cost with a pace. With noise, every step is computed by itself, so that the noise is
    per step.
    """

    def __init__(self, cost: StepCost, pace: VirtualPace) -> None:
        self._cost, self._pace, self._random = cost, pace, random.Random(pace.seed)

    def __call__(self, step: Step) -> float:
        seconds = self._cost(step) * self._pace.slower
        if self._pace.noise:
            seconds *= max(0.2, self._random.gauss(1.0, self._pace.noise))
        return seconds

    def decode_line(self, count: int, context: int) -> tuple[float, float]:
        """Without noise: what many steps take on average."""
        base, slope = self._cost.decode_line(count, context)
        return base * self._pace.slower, slope * self._pace.slower
