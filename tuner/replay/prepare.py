"""What comes before a window: engine warm-up, cache reset, cache priming. None of it is measured."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tuner.errors import Aborted, EngineError
from tuner.records import Outcome, Slice, Value
from tuner.replay.feeder import Bodies
from tuner.replay.jobs import Job, Sent
from tuner.replay.plan import Load, Plan, priming_rows, warmup_rows
from tuner.replay.sender import Sender
from tuner.replay.wire import Pool
from tuner.traffic.trace import Trace

REFUSED = "refused"
# vLLM refuses while blocks are in use: it gets two seconds to free them.
RESET_TRIES, RESET_PAUSE_S = 10, 0.2


class Reset(Protocol):
    """How a cache reset went; `proved`: the engine confirmed it."""

    @property
    def proved(self) -> bool: ...
    @property
    def how(self) -> str: ...


class EngineHandle(Protocol):
    """What a replay needs of a running engine (`engine.server.Server`)."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def kv_tokens(self) -> int | None: ...
    @property
    def effective(self) -> Mapping[str, Value]: ...
    @property
    def alive(self) -> bool: ...
    async def reset_cache(self) -> Reset: ...
    async def fault(self, phase: str) -> EngineError | None: ...
    def heard(self) -> None: ...
    async def steps(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a replay is: the phase, the slice, seconds done of seconds expected, and what the engine said of
    itself last (`observe.SHOWN`; empty: nothing yet).
    """

    phase: str
    slice: str
    done_s: float
    total_s: float
    engine: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Notes:
    """What a replay gathers about itself for the fidelity report."""

    values: dict[str, float | None] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def lowest(self, name: str, value: float) -> None:
        """Keep the smallest value seen."""
        self.values[name] = min(value, found) if (found := self.values.get(name)) is not None else value

    def highest(self, name: str, value: float | None) -> None:
        """Keep the largest value seen."""
        if value is not None:
            self.values[name] = max(value, found) if (found := self.values.get(name)) is not None else value


async def check_alive(server: EngineHandle) -> None:
    """Raise what ended or froze the engine, if anything did."""
    if (fault := await server.fault("run")) is not None:
        raise fault
    if not server.alive:
        raise Aborted("the engine ended in the replay", cause="engine_died")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preparer:
    """Prepares one engine for one replay."""

    server: EngineHandle
    trace: Trace
    plan: Plan
    load: Load
    bodies: Bodies
    pool: Pool
    notes: Notes
    progress: Callable[[Progress], None]

    async def warm_up(self, rows: NDArray[np.int64]) -> None:
        """Waves of the longest and of typical prompts, until the TTFT of two waves agrees."""
        chosen = warmup_rows(self.trace, rows, self.plan.warmup_requests)
        start, medians = perf_counter_ns(), list[float]()
        for wave in range(self.plan.warmup_waves if len(chosen) else 0):
            spent = (perf_counter_ns() - start) / 1e9
            self.progress(Progress(phase="warm-up", slice="", done_s=spent, total_s=self.plan.warmup_limit_s))
            if wave > 1 and spent > self.plan.warmup_limit_s:
                break
            found = await self.burst(chosen, f"warm-up {wave}", self.plan.warmup_tokens, len(chosen))
            waits = [o.first_token_s - o.scheduled_s for o in found if o.ok and o.first_token_s is not None]
            medians.append(float(np.median(waits)) if waits else math.inf)
            if self._agree(medians):
                break
        self.notes.values["warmup_waves"] = float(len(medians))
        self.notes.values["warmup_agreed"] = float(self._agree(medians))
        if medians and not self._agree(medians):
            self.notes.warnings.append("warm-up ended before the TTFT of two waves agreed")

    def _agree(self, medians: list[float]) -> bool:
        if len(medians) < 2 or not math.isfinite(medians[-1] + medians[-2]):
            return False
        return abs(medians[-1] - medians[-2]) <= self.plan.warmup_agreement * medians[-2]

    async def reset(self) -> None:
        """Empty the prefix cache; where an engine cannot do that, prompts with new tokens have the same
        effect.

        Aborted when the engine keeps refusing: then nobody knows what its cache holds.
        """
        outcome = await self.server.reset_cache()
        for _ in range(RESET_TRIES):
            if outcome.proved or outcome.how != REFUSED:
                break
            await asyncio.sleep(RESET_PAUSE_S)
            outcome = await self.server.reset_cache()
        if not outcome.proved and outcome.how == REFUSED:
            await check_alive(self.server)
            raise Aborted("the engine refused to reset its prefix cache", cause="cache_reset")
        self.notes.lowest("cache_reset_proved", float(outcome.proved))
        if not outcome.proved:
            self.notes.warnings.append(
                f"the cache reset was not proved ({outcome.how}), so the replay uses fresh tokens"
            )

    async def prime(self, part: Slice) -> NDArray[np.int64]:
        """Bring the cache to where production's would be: the rows before, one token each, in order. The rows
        that were answered."""
        capacity = self.load.kv_tokens or self.server.kv_tokens
        if len(self.trace.blocks) == 0 or not capacity:
            return np.empty(0, np.int64)
        target = self.plan.priming_turnovers * capacity
        before = self.plan.load_warmup_s * self.load.speed
        rows = priming_rows(self.trace, part, before_s=before, tokens=target)
        limit = self.plan.priming_limit_s
        self.progress(Progress(phase="priming", slice=part.name, done_s=0.0, total_s=limit))
        found = await self.burst(rows, "", 1, self.plan.priming_concurrency, limit)
        primed = float(sum(o.input_tokens for o in found if o.ok))
        self.notes.lowest("primed_turnovers", primed / capacity)
        if primed < target:
            self.notes.warnings.append(
                f"slice {part.name}: primed {primed / capacity:.2f} KV turnovers of {target / capacity:.2f}"
            )
        return np.sort(np.array([o.row for o in found if o.ok], np.int64))

    async def burst(
        self, rows: NDArray[np.int64], kind: str, tokens: int, concurrency: int, limit_s: float = math.inf
    ) -> list[Outcome]:
        """Send rows in order, at most `concurrency` at once, until done or the limit."""
        found: list[Outcome] = []
        room = asyncio.Semaphore(concurrency)

        def take(sent: Sent) -> None:
            found.append(sent.outcome)
            room.release()
            if sent.outcome.ok:
                self.server.heard()

        sender = Sender(self.pool, take)
        zero = perf_counter_ns()

        async def jobs() -> AsyncIterator[Job]:
            for key, row in enumerate(rows):
                await room.acquire()
                if not self.server.alive:
                    return
                at = (perf_counter_ns() - zero) / 1e9
                if at > limit_s:
                    return
                yield self.bodies.job(key, int(row), at, kind=kind, tokens=tokens)

        await sender.play(jobs(), zero)
        await sender.settle(self.load.deadline)
        await sender.cut_all("not waited for")
        sender.close()
        await check_alive(self.server)
        return found
