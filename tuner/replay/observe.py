"""The engine's own numbers over a window: raw scrapes while it runs, parsed once it is over."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import cache
from time import perf_counter_ns
from typing import Any

import numpy as np

from tuner.adapters import adapter_of
from tuner.engine import limits, metrics
from tuner.replay.prepare import EngineHandle
from tuner.replay.sse import status_and_body
from tuner.replay.wire import HttpExchange, Pool, get

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
        self.series = series(scrapes)
        (begun, before), (ended, after) = self._steps if len(self._steps) == 2 else [(0.0, {})] * 2
        return {**fold(scrapes), **limits.stepped(before, after, ended - begun)}


# What is read of each scrape at once, for who watches a run.
SHOWN = ("running", "waiting", "kv_usage", "preemptions")


@cache
def _lines(engine: str) -> re.Pattern[bytes]:
    """The lines of /metrics that have what is shown; to parse all of them would disturb the replay."""
    names = [name for ours in SHOWN for name in adapter_of(engine).metrics.get(ours, ())]
    return re.compile(rf"^(?:{'|'.join(map(re.escape, names))})\b.*$".encode(), re.MULTILINE)


def _shown(parts: Sequence[bytes], engine: str) -> Mapping[str, float]:
    """What is shown of one answer; empty where it cannot be read."""
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


def series(scrapes: list[tuple[float, metrics.EngineMetrics]]) -> dict[str, list[float | None]]:
    """The scrapes as series: `at_s` into the window, and a value per scrape for each name (None = not
    exported). `preemptions` counts from the first scrape.
    """
    found: dict[str, list[float | None]] = {"at_s": [round(at, 3) for at, _ in scrapes]}
    for name in ("waiting", "running", "kv_usage"):
        found[name] = [one.values.get(name) for _, one in scrapes]
    first = scrapes[0][1] if scrapes else None
    counted = [metrics.between(first, one).get("preemptions") for _, one in scrapes] if first else []
    return found | {"preemptions": counted}


def fold(scrapes: list[tuple[float, metrics.EngineMetrics]]) -> dict[str, float | None]:
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
    counted = "left out of the hit rate" if engine.get("prefix_hits") is not None else "there is no hit rate"
    return (
        f"{share:.0%} of the tokens looked up in the prefix cache belong to preempted or waiting requests,"
        f" not to traffic: {counted}"
    )
