"""A simulated engine on a virtual clock: a night of launches and replays in seconds, and nothing waits.

The controller's environment variable TUNER_SIM_HIDDEN says what is hidden from the tuner: a card that is
slower than its data sheet, noise between launches, a night that slows down, engines that crash. It is a JSON
list of stretches such as `{"from_s": 0, "until_s": null, "slower": 1.3, "launch_noise": 0.05, "crashes": 0.1,
"knobs": {"max_num_seqs": 64}}`, in seconds since 1970. A stretch applies to the launches within it that ask
for all of its `knobs`; `crashes` is the share of launches that die while they start.
"""

import asyncio
import contextlib
import io
import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from tuner.engine import failures, metrics
from tuner.engine import log as engine_log
from tuner.engine.metrics import read_effective
from tuner.engine.server import arguments
from tuner.records import Slice, digest_of
from tuner.replay.plan import Load
from tuner.replay.timeline import Judge, Replayed
from tuner.simulator import virtual
from tuner.simulator.boot import Booted, NotStarted, announce, boot, cache_config, server_info
from tuner.simulator.engine import Counters
from tuner.simulator.options import release_of
from tuner.simulator.virtual import VirtualPace
from tuner.tuning.context import HostContext, LaunchJob, Measured, Note, Pass, RunContext, Serving
from tuner.tuning.trial import GateFailed, load_of, measurement_of, send_pass, with_speed

# How long an engine takes to be ready, unless TUNER_SIM_STARTUP_S sets it.
STARTUP_S = 1.0

HIDDEN = "TUNER_SIM_HIDDEN"

CRASH = (
    "(EngineCore pid=1) ERROR torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
)


_parsed = lru_cache(maxsize=64)(metrics.parse)  # the page of an idle engine, the same for equal arguments


def startup_of(job: LaunchJob) -> float:
    """Seconds that the job's engine takes to be ready."""
    return float(job.spec.env.get("TUNER_SIM_STARTUP_S") or STARTUP_S)


class VirtualTime:
    """A clock that only `pass_by` moves. It stops at `end` (None: never)."""

    def __init__(self, start: datetime, end: datetime | None = None) -> None:
        self._start, self._end, self._passed = start, end, 0.0

    def now(self) -> datetime:
        """The time of day, aware UTC."""
        return self._start + timedelta(seconds=self._passed)

    def seconds(self) -> float:
        """Seconds since the start."""
        return self._passed

    async def pass_by(self, seconds: float) -> None:
        """Let time pass. What would end after the window waits there until the run is cut, as on a real
        engine.
        """
        self._passed += max(0.0, seconds)
        if self._end is not None and self.now() > self._end:
            self._passed = (self._end - self._start).total_seconds()
            await asyncio.Event().wait()


def on_virtual_time(context: RunContext, window: timedelta | None = None) -> RunContext:
    """The same run with virtual engines. Its clock begins now, or after the study's last run or launch ended
    if that is later. So nothing begins before what it follows, and a launch that was killed as it began is
    not one of this run. `window`: the time that the run has, from there on.
    """
    runs, launches = context.store.runs(context.prepared.study.id), context.launches()
    ended = [each.ended_at or each.started_at for each in runs]
    ended += [each.ended_at or each.started_at for each in launches]
    begun = max([context.clock(), *(at + timedelta(microseconds=1) for at in ended)])
    time = VirtualTime(begun, None if window is None else begun + window)
    return replace(context, clock=time.now, seconds=time.seconds, work=VirtualEngine(context.host, time))


class VirtualEngine:
    """Does launch jobs on the simulated engine's core; an `Executor` that lets virtual time pass."""

    def __init__(self, host: HostContext, time: VirtualTime) -> None:
        self._host, self._time = host, time

    async def __call__(self, job: LaunchJob, note: Note) -> Sequence[Measured]:
        """Launch, replay, measure. Raises as a launch on the real clock does."""
        note("starting")
        stretches = self._stretches(job)
        draw = self._draw(job, "crashes")
        crashes = [draw.random() < each.get("crashes", 0.0) for each in stretches]
        booted, text = self._boot(job, crashes=any(crashes))
        startup_s = startup_of(job)
        await self._time.pass_by(startup_s)
        if isinstance(booted, NotStarted):
            raise failures.classify(
                text,
                booted.code,
                "startup",
                asked=(*job.spec.asked, *job.spec.asked_argv),
                engine=job.spec.kind,
            ).error()
        kv_tokens = booted.options.limits.num_blocks * booted.options.limits.block_size
        timeline = {**engine_log.timeline(text), "ready_s": startup_s}
        idle = {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0}
        page = Counters().page(booted.options.names[0], idle, cache_config(booted.options))
        said = read_effective(job.spec, _parsed(page), server_info(booted.options), text)
        note(Serving(effective=said, timeline=timeline, kv_tokens=kv_tokens))
        slower = self._slower(job, stretches)
        return [await self._pass(job, each, booted, kv_tokens, slower, note) for each in job.passes]

    def _boot(self, job: LaunchJob, *, crashes: bool) -> tuple[Booted | NotStarted, str]:
        """What the engine resolved to, or its end, and its log (written where a real one would be)."""
        spec, said = job.spec, io.StringIO()
        argv = arguments(spec, 8000, "tuner-virtual")[len(spec.command) :]
        found: Booted | NotStarted
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                found = boot(argv, {**os.environ, **spec.env})
                announce(found.options, found.memory, release_of(spec.env).version)
                if crashes:
                    print(CRASH)
                    raise NotStarted(1)
            except NotStarted as failed:
                found = failed
            except SystemExit as refused:
                found = NotStarted(int(refused.code or 0))
        text = said.getvalue()
        (Path(spec.directory) / "engine.log").write_text(text)
        return found, text

    def _stretches(self, job: LaunchJob) -> list[dict[str, Any]]:
        """What is hidden from the tuner about this launch."""
        now = self._time.now().timestamp()
        hidden = json.loads(job.spec.env.get(HIDDEN) or os.environ.get(HIDDEN, "[]"))
        asked = dict(job.spec.asked)
        return [
            each
            for each in hidden
            if each.get("from_s", -math.inf) <= now < (each.get("until_s") or math.inf)
            and each.get("knobs", {}).items() <= asked.items()
        ]

    def _draw(self, job: LaunchJob, what: str) -> random.Random:
        """Chance of its own for each launch: the same one gives the same again."""
        return random.Random(digest_of([what, job.spec.asked.digest, job.number, self._time.seconds()]))

    def _slower(self, job: LaunchJob, stretches: Sequence[Mapping[str, Any]]) -> float:
        """The factor on every step of this launch: hidden stretches and the noise between launches."""
        draw, factor = self._draw(job, "slower"), 1.0
        for each in stretches:
            factor *= each.get("slower", 1.0) * math.exp(draw.gauss(0.0, each.get("launch_noise", 0.0)))
        return factor

    async def _pass(
        self, job: LaunchJob, each: Pass, booted: Booted, kv_tokens: int, slower: float, note: Note
    ) -> Measured:
        host, env = self._host, job.spec.env
        load = load_of(host, job, each, kv_tokens)

        async def send(slices: Sequence[Slice], load: Load, judge: Judge | None) -> Replayed:
            seed = digest_of(
                [env.get("TUNER_SIM_SEED", "0"), load.number, load.repeat, load.speed, self._time.seconds()]
            )
            noise = float(env.get("TUNER_SIM_NOISE", "0"))
            pace = VirtualPace(
                slower=slower / float(env.get("TUNER_SIM_SPEED", "1")), noise=noise, seed=int(seed[:8], 16)
            )
            replayed, seconds = virtual.replay(
                booted, host.prepared.trace, slices, host.prepared.plan, load, pace, judge=judge
            )
            await self._time.pass_by(seconds)
            return replayed

        replayed = await send_pass(each, load, send, note)
        measurement = measurement_of(host, job, each, replayed, {"ready_s": startup_of(job)})
        measurement = await with_speed(host, each, load, replayed, measurement, send, note)
        if measurement.fidelity.failed:
            raise GateFailed(measurement)
        return Measured(measurement=measurement, curtailed=replayed.stopped)
