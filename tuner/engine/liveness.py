"""Whether a running engine still computes, by its step counter (/health answers 200 when it is frozen), and
how often the kernel's out-of-memory killer struck."""

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tuner.adapters import adapter_of
from tuner.engine.failures import LaunchFailure, failed
from tuner.engine.metrics import EngineMetrics, parse

_NEEDED = (
    "running",
    "waiting",
    "generation_tokens",
    "prompt_tokens",
    "preemptions",
    "iterations",
)


@cache
def _needed(engine: str) -> re.Pattern[str]:
    """The lines of /metrics that are needed here: this check runs more often than the whole page is
    parsed.
    """
    names = [name for ours in _NEEDED for name in adapter_of(engine).metrics.get(ours, ())]
    return re.compile(rf"^(?:{'|'.join(map(re.escape, names))})\b.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    at_s: float
    iterations: float | None
    tokens: float
    preemptions: float


class Liveness:
    """Takes scrapes during a replay and reports when the engine made no progress for `grace_s` seconds.

    Frozen: requests run, and no step ends. Thrash: no token comes while preemptions rise. An engine that
    exports neither steps nor tokens is not checked; one that does not export tokens is not checked for
    thrash.
    """

    def __init__(self, *, grace_s: float = 30.0, engine: str = "vllm") -> None:
        self.grace_s, self.engine = grace_s, engine
        self._step: _Mark | None = None
        self._token: _Mark | None = None

    def observe(self, metrics: EngineMetrics, now_s: float) -> LaunchFailure | None:
        """The verdict on an engine without progress; None while it progresses, idles, or exports nothing."""
        mark = _Mark(
            at_s=now_s,
            iterations=metrics["iterations"],
            tokens=(metrics["generation_tokens"] or 0.0) + (metrics["prompt_tokens"] or 0.0),
            preemptions=metrics["preemptions"] or 0.0,
        )
        silent = metrics["iterations"] is None and metrics["generation_tokens"] is None
        if silent or not metrics.busy or self._step is None or self._token is None:
            self._step = self._token = mark
            return None
        if mark.iterations != self._step.iterations or mark.tokens != self._step.tokens:
            self._step = mark
        if mark.tokens != self._token.tokens or metrics["generation_tokens"] is None:
            self._token = mark
        return self._judge(self._step, self._token, mark)

    def _judge(self, step: _Mark, token: _Mark, now: _Mark) -> LaunchFailure | None:
        rising = now.preemptions > token.preemptions
        if rising and now.at_s - token.at_s > self.grace_s:
            more = now.preemptions - token.preemptions
            return failed(
                "thrash", detail=f"{more:.0f} preemptions in {now.at_s - token.at_s:.0f} s", phase="run"
            )
        if now.at_s - step.at_s > self.grace_s:
            return failed("frozen", detail=f"no step in {now.at_s - step.at_s:.0f} s", phase="run")
        return None


async def watch(
    scrape: Callable[[], Awaitable[str]],
    liveness: Liveness,
    *,
    interval_s: float,
    clock: Callable[[], float] = time.monotonic,
    heard: Callable[[], float] = lambda: -math.inf,
) -> LaunchFailure:
    """Check a running engine until it makes no progress; returns that verdict.

    `scrape` gives the exposition text and raises OSError when there is none. No answer for the whole grace is
    no progress too, unless tokens came meanwhile (`heard`: the time of the last ones, by the same clock).
    """
    answered = clock()
    while True:
        await asyncio.sleep(interval_s)
        try:
            needed = _needed(liveness.engine).findall(await scrape())
        except OSError:
            silent = clock() - max(answered, heard())
            if silent > liveness.grace_s:
                return failed(
                    "frozen", detail=f"no token and no answer to /metrics for {silent:.0f} s", phase="run"
                )
            continue
        answered = clock()
        try:
            scraped = parse("\n".join((*needed, "")), liveness.engine)
        except ValueError:  # it answers, so it is alive, but this text cannot be read
            continue
        if (found := liveness.observe(scraped, answered)) is not None:
            return found


def oom_kills() -> int:
    """How many processes the kernel's out-of-memory killer has killed on this host; 0 if it does
    not count.
    """
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
