"""One replay, from a ready engine to outcomes: warm-up → per slice: cache reset → priming → load warm-up →
window by scheduled arrival → tail under load.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tuner.errors import Aborted, EngineError
from tuner.records import Fidelity, Outcome, Slice, Value
from tuner.replay import fidelity, lock
from tuner.replay.bodies import PATH, Bodies
from tuner.replay.observe import Observer
from tuner.replay.plan import PLANS, Causality, Load, Plan
from tuner.replay.schedule import KINDS, Schedule, cancel_after, priming_rows, schedule, warmup_rows
from tuner.replay.sender import Job, Sender, Sent, cpu_seconds, quiet_collector
from tuner.replay.wire import Pool, post
from tuner.traffic.trace import Trace

__all__ = ["PLANS", "Causality", "Load", "Partial", "Plan", "Progress", "Replayed", "SliceReplay", "replay"]

LEAD_S = 0.05
WATCH_S = 0.25


class Reset(Protocol):
    """How a cache reset went; `proved` = the engine said so itself."""

    @property
    def proved(self) -> bool: ...
    @property
    def how(self) -> str: ...


class Engine(Protocol):
    """What a replay needs of a running engine (`engine.server.Server`)."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def kv_tokens(self) -> int | None: ...
    @property
    def effective(self) -> Mapping[str, Value]: ...
    @property
    def alive(self) -> bool: ...
    async def reset_cache(self) -> Reset: ...
    async def fault(self, phase: str) -> EngineError | None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partial:
    """What a judge sees while a window runs. `outcomes` are counted ones so far; `waiting_s` holds the
    scheduled times of counted requests sent and not yet ended; `planned` is the window's whole count.
    """

    slice: Slice
    now_s: float
    window_s: float
    planned: int
    outcomes: Sequence[Outcome]
    waiting_s: Sequence[float]


Judge = Callable[[Partial], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a replay is: the phase, the slice, and seconds done of seconds expected."""

    phase: str
    slice: str
    done_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SliceReplay:
    """One slice as it went. `outcomes` are those scheduled inside the window, in that order; `window_s` is
    shorter than planned only where a judge stopped it. `engine` are the engine's numbers over the window.
    """

    slice: Slice
    window_s: float
    outcomes: tuple[Outcome, ...]
    engine: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """A whole replay; `stopped` is the judge's reason where it was curtailed."""

    slices: tuple[SliceReplay, ...]
    fidelity: Fidelity = field(default_factory=Fidelity)
    stopped: str | None = None


async def replay(
    server: Engine,
    trace: Trace,
    slices: Sequence[Slice],
    plan: Plan,
    load: Load,
    *,
    judge: Judge | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Replayed:
    """Replay every slice in turn. Raises what `server.fault` says when the engine dies meanwhile.

    One replay at a time per host, unless the load is isolated; waits for its turn.
    """
    async with lock.held(isolated=load.isolated):
        run = _Replay(server, trace, plan, load, judge, progress or (lambda _: None))
        try:
            return await run.all(slices)
        finally:
            await run.pool.close()


class _Replay:
    """The state of one replay."""

    def __init__(
        self,
        server: Engine,
        trace: Trace,
        plan: Plan,
        load: Load,
        judge: Judge | None,
        progress: Callable[[Progress], None],
    ) -> None:
        self.server = server
        self.trace = trace
        self.plan = plan
        self.load = load
        self.judge = judge
        self.progress = progress
        self.pool = Pool(server.host, server.port)
        priorities = server.effective.get("scheduling_policy") == "priority"
        self.bodies = Bodies(trace, load, priorities=priorities)
        self.sent: list[Sent] = []
        self.planned = 0
        self.cpu = 0.0
        self.extra: dict[str, float | None] = {}
        self.warnings: list[str] = []
        self.stopped: str | None = None
        self._key = 0

    async def all(self, slices: Sequence[Slice]) -> Replayed:
        done: list[SliceReplay] = []
        self.warm_up = [schedule(self.trace, s, speed=self.load.speed, warmup_s=0, tail_s=0) for s in slices]
        await self.engine_warmup(slices)
        for part in slices:
            done.append(await self.one(part))
            if self.stopped is not None:
                break
        evidence = fidelity.Evidence(
            sent=self.sent,
            planned=self.planned,
            cpu=self.cpu,
            curtailed=self.stopped is not None,
            extra=self.extra,
            warnings=tuple(self.warnings),
        )
        return Replayed(
            slices=tuple(done), fidelity=fidelity.check(evidence, self.plan), stopped=self.stopped
        )

    async def engine_warmup(self, slices: Sequence[Slice]) -> None:
        """Waves of the longest and of typical prompts, until the TTFT of two waves agrees."""
        rows = np.concatenate([s.rows for s in self.warm_up]) if slices else np.empty(0, np.int64)
        chosen = warmup_rows(self.trace, rows, self.plan.warmup_requests)
        start, medians = perf_counter_ns(), list[float]()
        for wave in range(self.plan.warmup_waves if len(chosen) else 0):
            spent = (perf_counter_ns() - start) / 1e9
            self.progress(Progress(phase="warm-up", slice="", done_s=spent, total_s=self.plan.warmup_limit_s))
            if wave and spent > self.plan.warmup_limit_s:
                break
            outcomes = await self.burst(chosen, f"warm-up {wave}", self.plan.warmup_tokens, len(chosen))
            waits = [o.first_token_s - o.scheduled_s for o in outcomes if o.first_token_s is not None]
            medians.append(float(np.median(waits)) if waits else math.inf)
            if len(medians) > 1 and abs(medians[-1] / medians[-2] - 1) <= self.plan.warmup_agreement:
                break
        self.extra["warmup_waves"] = float(len(medians))
        agreed = len(medians) > 1 and abs(medians[-1] / medians[-2] - 1) <= self.plan.warmup_agreement
        self.extra["warmup_agreed"] = float(agreed)
        if medians and not agreed:
            self.warnings.append(
                f"warm-up ended before two waves agreed within {self.plan.warmup_agreement:.0%}"
            )

    async def burst(
        self, rows: NDArray[np.int64], kind: str, tokens: int, concurrency: int, limit_s: float = math.inf
    ) -> list[Outcome]:
        """Send rows in order, at most `concurrency` at once, until done or the limit; none is measured."""
        found: list[Outcome] = []
        room = asyncio.Semaphore(concurrency)

        def take(sent: Sent) -> None:
            found.append(sent.outcome)
            room.release()

        sender = Sender(self.pool, take)
        zero = perf_counter_ns()

        async def jobs() -> AsyncIterator[Job]:
            for row in rows:
                await room.acquire()
                self.check_engine_now()
                at = (perf_counter_ns() - zero) / 1e9
                if at > limit_s:
                    return
                body = self.bodies.body(int(row), kind=kind, tokens=tokens)
                yield self.job(int(row), at, body, tokens=tokens, counted=True)

        await sender.play(jobs(), zero)
        await sender.settle(self.load.deadline)
        await sender.cut_all("not waited for")
        await self.check_engine()
        return found

    def job(self, row: int, at_s: float, body: bytes, *, counted: bool, tokens: int | None = None) -> Job:
        self._key += 1
        choices = self.bodies.choices(row)
        measured = tokens is None
        return Job(
            key=self._key,
            row=row,
            at_s=at_s,
            request=post(self.pool.host, self.pool.port, PATH, body),
            expected_input=int(self.trace.input_len[row]),
            expected_output=(self.bodies.answer(row) if tokens is None else tokens) * choices,
            choices=choices,
            counted=counted,
            cancel_s=cancel_after(self.trace, row) if measured and self.load.replay_cancellations else None,
            deadline_s=self.load.deadline,
        )

    async def one(self, part: Slice) -> SliceReplay:
        """One slice: reset, prime, warm up under load, measure, keep the load until the last answer."""
        plan, speed = self.plan, self.load.speed
        timetable = schedule(
            self.trace, part, speed=speed, warmup_s=plan.load_warmup_s, tail_s=plan.tail_limit_s
        )
        await self.reset()
        await self.prime(part)
        requests = [self.request(timetable, k) for k in range(len(timetable))]
        counted = int(timetable.measured.sum())
        self.planned += counted
        window = _Window(part, timetable.window_s, counted)
        sender = Sender(self.pool, window.take)
        await self.pool.open(max(0, min(64, counted) - len(self.pool.idle)))
        zero = perf_counter_ns() + int((plan.load_warmup_s + LEAD_S) * 1e9)
        observer = Observer(self.pool.host, self.pool.port, plan.scrape_s)
        with quiet_collector():
            before = cpu_seconds()
            player = asyncio.create_task(sender.play(_each(requests), zero))
            watcher = asyncio.create_task(observer.run(zero, timetable.window_s))
            try:
                await self.watch(window, sender, zero)
            finally:
                for task in (player, watcher):
                    task.cancel()
                await asyncio.gather(player, watcher, return_exceptions=True)
            span = (perf_counter_ns() - zero) / 1e9 + plan.load_warmup_s
            self.cpu = max(self.cpu, (cpu_seconds() - before) / max(span, 1e-9))
            await sender.cut_all("cut at the end of the tail")
        self.sent += window.sent
        engine = await observer.conclude()
        ended = min(window.now_s, timetable.window_s) if self.stopped else timetable.window_s
        outcomes = sorted((s.outcome for s in window.sent if s.counted), key=lambda o: o.scheduled_s)
        return SliceReplay(slice=part, window_s=ended, outcomes=tuple(outcomes), engine=engine)

    def request(self, timetable: Schedule, k: int) -> Job:
        row, kind = int(timetable.rows[k]), KINDS[int(timetable.filler[k])]
        body = self.bodies.body(row, kind=kind)
        return self.job(row, float(timetable.at_s[k]), body, counted=bool(timetable.measured[k]))

    async def reset(self) -> None:
        """Empty the prefix cache; the fresh salt stands in where the engine cannot prove it."""
        outcome = await self.server.reset_cache()
        if not outcome.proved:
            outcome = await self.server.reset_cache()
        self.extra["cache_reset_proved"] = min(
            float(outcome.proved), self.extra.get("cache_reset_proved", 1.0) or 0.0
        )
        if not outcome.proved:
            self.warnings.append(f"prefix cache reset not proved ({outcome.how}): fresh tokens stand in")

    async def prime(self, part: Slice) -> None:
        """Bring the cache to where production's would be: the rows before, one token each, in order."""
        capacity = self.load.kv_tokens or self.server.kv_tokens
        if len(self.trace.blocks) == 0 or not capacity:
            return
        target = self.plan.priming_turnovers * capacity
        before = self.plan.load_warmup_s * self.load.speed
        rows = priming_rows(self.trace, part, before_s=before, tokens=target)
        self.progress(
            Progress(phase="priming", slice=part.name, done_s=0.0, total_s=self.plan.priming_limit_s)
        )
        found = await self.burst(rows, "", 1, self.plan.priming_concurrency, self.plan.priming_limit_s)
        primed = float(sum(o.input_tokens for o in found if o.ok))
        self.extra["primed_turnovers"] = min(
            primed / capacity, self.extra.get("primed_turnovers", math.inf) or 0.0
        )
        if primed < target and len(rows):
            self.warnings.append(
                f"slice {part.name}: primed {primed / capacity:.2f} KV turnovers of {target / capacity:.2f}"
            )

    async def watch(self, window: "_Window", sender: Sender, zero: int) -> None:
        """Until every counted request ended: ask the judge, look after the engine, report progress."""
        limit = window.window_s + self.plan.tail_limit_s
        while True:
            window.now_s = (perf_counter_ns() - zero) / 1e9
            if window.done or window.now_s > limit:
                return
            self.progress(
                Progress(
                    phase="window" if 0 <= window.now_s < window.window_s else "load",
                    slice=window.slice.name, done_s=window.now_s, total_s=window.window_s,
                )
            )  # fmt: skip
            await self.check_engine()
            if self.judge is not None and window.now_s > 0:
                self.stopped = self.judge(window.partial(sender))
                if self.stopped is not None:
                    return
            left = window.window_s - window.now_s
            await asyncio.sleep(WATCH_S if left > WATCH_S else 0.02)

    def check_engine_now(self) -> None:
        if not self.server.alive:
            raise Aborted("the engine ended during the replay", cause="engine_died")

    async def check_engine(self) -> None:
        if not self.server.alive:
            raise await self.server.fault("run") or Aborted(
                "the engine ended during the replay", cause="engine_died"
            )


class _Window:
    """Counted requests of one slice as they come in."""

    def __init__(self, part: Slice, window_s: float, planned: int) -> None:
        self.slice = part
        self.window_s = window_s
        self.planned = planned
        self.now_s = -math.inf
        self.sent: list[Sent] = []
        self.outcomes: list[Outcome] = []

    def take(self, sent: Sent) -> None:
        self.sent.append(sent)
        if sent.counted:
            self.outcomes.append(sent.outcome)

    @property
    def done(self) -> bool:
        return self.now_s >= self.window_s and len(self.outcomes) >= self.planned

    def partial(self, sender: Sender) -> Partial:
        waiting = [job.at_s for job, _ in sender.in_flight.values() if job.counted]
        return Partial(
            slice=self.slice, now_s=self.now_s, window_s=self.window_s, planned=self.planned,
            outcomes=self.outcomes, waiting_s=waiting,
        )  # fmt: skip


async def _each(jobs: Sequence[Job]) -> AsyncIterator[Job]:
    for job in jobs:
        yield job
