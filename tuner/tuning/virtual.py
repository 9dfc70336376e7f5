"""A simulated engine on a virtual clock: a night of launches and replays in seconds, and nothing waits.

The controller's environment variable TUNER_SIM_HIDDEN says what is hidden from the tuner: a card that is
slower than its data sheet, noise between launches, a night that slows down. It is a JSON list of stretches
`{"from_s": 0, "until_s": null, "slower": 1.3, "launch_noise": 0.05}`, in seconds since 1970. Every stretch
that holds the time of a launch applies to it.
"""

import contextlib
import io
import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from tuner.engine import effective, failures, metrics
from tuner.engine import log as engine_log
from tuner.engine.server import arguments
from tuner.records import Slice, digest_of
from tuner.replay.plan import Load
from tuner.replay.timeline import Judge, Replayed
from tuner.simulator import virtual
from tuner.simulator.boot import Booted, NotStarted, announce, boot, cache_config, server_info
from tuner.simulator.exposition import Counters
from tuner.simulator.release import release_of
from tuner.simulator.virtual import VirtualPace
from tuner.tuning.context import HostContext, LaunchJob, Measured, Note, Pass, RunContext, Serving
from tuner.tuning.trial import GateFailed, load_of, measurement_of, send_pass, with_speed

# How long an engine takes to be ready, unless TUNER_SIM_STARTUP_S sets it.
STARTUP_S = 1.0

HIDDEN = "TUNER_SIM_HIDDEN"


def startup_of(job: LaunchJob) -> float:
    """Seconds that the job's engine takes to be ready."""
    return float(job.spec.env.get("TUNER_SIM_STARTUP_S") or STARTUP_S)


class VirtualTime:
    """A clock that moves only by `advance`."""

    def __init__(self, start: datetime) -> None:
        self._start, self._passed = start, 0.0

    def now(self) -> datetime:
        """The time of day, aware UTC."""
        return self._start + timedelta(seconds=self._passed)

    def seconds(self) -> float:
        """Seconds since the start."""
        return self._passed

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._passed += max(0.0, seconds)


def on_virtual_time(context: RunContext) -> RunContext:
    """The same run with virtual engines. Its clock begins now, or where the study's last run ended if that is
    later, so that no run begins before the one that it follows.
    """
    ended = [
        run.ended_at for run in context.store.runs(context.prepared.study.id) if run.ended_at is not None
    ]
    time = VirtualTime(max([context.clock(), *ended]))
    return replace(context, clock=time.now, seconds=time.seconds, work=VirtualEngine(context.host, time))


class VirtualEngine:
    """Does orders on the simulated engine's core; an `Executor` that lets virtual time pass."""

    def __init__(self, host: HostContext, time: VirtualTime) -> None:
        self._host, self._time = host, time

    async def __call__(self, job: LaunchJob, note: Note) -> Sequence[Measured]:
        """Launch, replay, measure. Raises as a launch on the real clock does."""
        note("starting")
        booted, text = self._boot(job)
        startup_s = startup_of(job)
        self._time.advance(startup_s)
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
        said = effective.read(job.spec, _scraped(booted), server_info(booted.options), text)
        note(Serving(effective=said, timeline=timeline, kv_tokens=kv_tokens))
        slower = self._slower(job)
        return [await self._pass(job, each, booted, kv_tokens, slower, note) for each in job.passes]

    def _boot(self, job: LaunchJob) -> tuple[Booted | NotStarted, str]:
        """What the engine resolved to, or its end, and its log (written where a real one would be)."""
        spec, said = job.spec, io.StringIO()
        argv = arguments(spec, 8000, "tuner-virtual")[len(spec.command) :]
        found: Booted | NotStarted
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                found = boot(argv, {**os.environ, **spec.env})
                announce(found.options, found.memory, release_of(spec.env).version)
            except NotStarted as failed:
                found = failed
            except SystemExit as refused:
                found = NotStarted(int(refused.code or 0))
        text = said.getvalue()
        (Path(spec.directory) / "engine.log").write_text(text)
        return found, text

    def _slower(self, job: LaunchJob) -> float:
        """The factor on every step of this launch: hidden stretches and the noise between launches."""
        now, factor = self._time.now().timestamp(), 1.0
        seed = digest_of([job.spec.asked.digest, job.number, self._time.seconds()])
        draw = random.Random(seed)
        for stretch in json.loads(job.spec.env.get(HIDDEN) or os.environ.get(HIDDEN, "[]")):
            if stretch.get("from_s", -math.inf) <= now < (stretch.get("until_s") or math.inf):
                factor *= stretch.get("slower", 1.0) * math.exp(
                    draw.gauss(0.0, stretch.get("launch_noise", 0.0))
                )
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
            self._time.advance(seconds)
            return replayed

        replayed = await send_pass(each, load, send, note)
        measurement = measurement_of(host, job, each, replayed, {"ready_s": startup_of(job)})
        measurement = await with_speed(host, each, load, replayed, measurement, send, note)
        if measurement.fidelity.failed:
            raise GateFailed(measurement)
        return Measured(measurement=measurement, curtailed=replayed.stopped)


def _scraped(booted: Booted) -> metrics.EngineMetrics:
    """The /metrics of an idle engine."""
    idle = {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0}
    return metrics.parse(Counters().page(booted.options.names[0], idle, cache_config(booted.options)))
