"""What is asked of the engine besides the measured requests. Before a window: engine warm-up, cache reset,
cache priming. During it: raw scrapes of the engine's own numbers, parsed once it is over.
"""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tuner.adapters import adapter_of
from tuner.engine import limits, metrics
from tuner.errors import Aborted, EngineError
from tuner.records import Outcome, Slice, Value
from tuner.replay.feeder import Bodies
from tuner.replay.plan import Load, Plan, priming_rows, warmup_rows
from tuner.replay.sender import Job, Sender, Sent
from tuner.replay.wire import HttpExchange, Pool, get, status_and_body
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
        """Empty the prefix cache; if an engine cannot do that, prompts with new tokens have the same
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
                f"slice {part.name}: priming filled {primed / capacity:.0%} of the KV cache, not"
                f" {target / capacity:.0%}"
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


PATIENCE_S = 5.0  # a scrape that takes longer is left out


class Observer:
    """Scrapes /metrics at the window's start, every `every_s`, and at its end; parsing waits for the end."""

    def __init__(self, server: EngineHandle, every_s: float) -> None:
        self._pool, self._server, self._every_s = Pool(server.host, server.port), server, every_s
        self._steps: list[tuple[float, Mapping[str, Any]]] = []
        self._texts: list[tuple[float, Sequence[bytes]]] = []
        self.series: dict[str, list[float | None]] = {}
        self._key = 0
        self.now: Mapping[str, float] = {}

    async def run(self, zero_ns: int, window_s: float) -> None:
        """Scrape until the window's end."""
        due = 0.0
        await self._ask(zero_ns)
        while True:
            now = (perf_counter_ns() - zero_ns) / 1e9
            await asyncio.sleep(max(0.0, due - now))
            await self.scrape(zero_ns)
            now = (perf_counter_ns() - zero_ns) / 1e9
            if now >= window_s:
                await self._ask(zero_ns)
                return
            due = min(window_s, max(due + self._every_s, now))

    async def _ask(self, zero_ns: int) -> None:
        """Keep what the scheduler counted so far, at the window's start and end."""
        await asyncio.sleep(max(0.0, -(perf_counter_ns() - zero_ns) / 1e9))
        steps = await self._server.steps()
        self._steps.append(((perf_counter_ns() - zero_ns) / 1e9, steps))

    async def scrape(self, zero_ns: int) -> None:
        """Keep one exposition text; a scrape that fails is left out."""
        self._key += 1
        gone = asyncio.Event()
        exchange = HttpExchange(
            self._key, get(self._pool.host, self._pool.port, "/metrics"), lambda _: gone.set()
        )
        self._pool.send(exchange)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await gone.wait()
        except TimeoutError:
            self._pool.cut(exchange, "no metrics")
        if exchange.failure is None:
            at = (perf_counter_ns() - zero_ns) / 1e9
            self._texts.append((at, exchange.parts))
            self.now = _shown(exchange.parts, self._server.kind)

    async def conclude(self) -> dict[str, float | None]:
        """The numbers of the window, under canonical names and those of measurements; None = not exported."""
        await self._pool.close()
        scrapes = [
            (at, found)
            for at, parts in self._texts
            if (found := _parsed(parts, self._server.kind)) is not None
        ]
        self.series = scraped_series(scrapes)
        (begun, before), (ended, after) = self._steps if len(self._steps) == 2 else [(0.0, {})] * 2
        return {**fold_scrapes(scrapes), **limits.stepped(before, after, ended - begun)}


# What is read of each scrape at once, for who watches a run.
SHOWN = ("running", "waiting", "kv_usage", "preemptions")


@cache
def _lines(engine: str) -> re.Pattern[bytes]:
    """The lines of /metrics that have what is shown; to parse all of them would disturb the replay."""
    names = [name for ours in SHOWN for name in adapter_of(engine).metrics.get(ours, ())]
    return re.compile(rf"^(?:{'|'.join(map(re.escape, names))})\b.*$".encode(), re.MULTILINE)


def _shown(parts: Sequence[bytes], engine: str) -> Mapping[str, float]:
    """What is shown of one answer; empty if it cannot be read."""
    try:
        status, body = status_and_body(parts)
        lines = b"\n".join((*_lines(engine).findall(body), b"")).decode("utf-8", "replace")
        values = metrics.parse(lines, engine).values if status == 200 else {}
    except ValueError:
        return {}
    return {name: value for name in SHOWN if (value := values.get(name)) is not None}


def _parsed(parts: Sequence[bytes], engine: str) -> metrics.EngineMetrics | None:
    try:
        status, body = status_and_body(parts)
        return metrics.parse(body.decode("utf-8", "replace"), engine) if status == 200 else None
    except ValueError:
        return None


def scraped_series(scrapes: list[tuple[float, metrics.EngineMetrics]]) -> dict[str, list[float | None]]:
    """The scrapes as scraped_series: `at_s` into the window, and a value per scrape for each name (None = not
    exported). `preemptions` counts from the first scrape.
    """
    found: dict[str, list[float | None]] = {"at_s": [round(at, 3) for at, _ in scrapes]}
    for name in ("waiting", "running", "kv_usage"):
        found[name] = [one.values.get(name) for _, one in scrapes]
    first = scrapes[0][1] if scrapes else None
    counted = [metrics.between(first, one).get("preemptions") for _, one in scrapes] if first else []
    return found | {"preemptions": counted}


def fold_scrapes(scrapes: list[tuple[float, metrics.EngineMetrics]]) -> dict[str, float | None]:
    """Counters from first to last scrape; mean, maximum and slope of queue depth and KV usage over them."""
    if not scrapes:
        return {}
    values: dict[str, float | None] = dict(metrics.between(scrapes[0][1], scrapes[-1][1]))
    values["scrapes"] = float(len(scrapes))
    moved = [values[f"offload_{way}"] for way in ("load_bytes", "store_bytes")]
    known = [one for one in (*moved, values["offload_bytes"] if None in moved else None) if one is not None]
    span = scrapes[-1][0] - scrapes[0][0]
    if span > 0 and known:
        values["offload_gib_per_s"] = sum(known) / span / 2**30
    for name, ours in (("waiting", "queue_depth"), ("kv_usage", "kv_usage"), ("running", "running")):
        found = [(at, value) for at, one in scrapes if (value := one.values.get(name)) is not None]
        if not found:
            continue
        at, seen = np.array(found).T
        values[f"{ours}_mean"] = float(seen.mean())
        values[f"{ours}_max"] = float(seen.max())
        if len(found) > 2 and ours == "queue_depth":
            values["queue_slope_per_s"] = float(np.polyfit(at - at[0], seen, 1)[0])
    return values


def growing(engine: Mapping[str, float | None], window_s: float) -> bool:
    """Whether the queue grew through the window by more than it was deep on average: an unstable load."""
    slope, mean = engine.get("queue_slope_per_s"), engine.get("queue_depth_mean")
    return slope is not None and mean is not None and mean > 1 and slope * window_s > mean


def recomputed(engine: Mapping[str, float | None]) -> str | None:
    """A warning if the engine counted recomputed tokens as prefix hits, else None."""
    share = engine.get("prefix_recomputed")
    if not share:
        return None
    counted = (
        "they do not count in the hit rate"
        if engine.get("prefix_hits") is not None
        else "there is no hit rate"
    )
    return (
        f"{share:.0%} of the tokens that vLLM looked up in the prefix cache belong to preempted or waiting"
        f" requests: {counted}"
    )
