"""One launch and the measurements in it; `max_speed` by bisection over the same rows."""

import os
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tuner import masking
from tuner.adapters import adapter_of
from tuner.engine import limits
from tuner.engine.boots import FIRST_S
from tuner.engine.gpu import Watch, throttled
from tuner.engine.server import Server, serve
from tuner.errors import Aborted, EngineError, Unavailable
from tuner.knobs.arguments import compile_candidate
from tuner.knobs.catalogue import read_back
from tuner.measures import NAMES
from tuner.metrics import counted, is_good
from tuner.records import Candidate, Launch, LaunchSpec, Measurement, Slice, Slo, Trial
from tuner.replay import outcomes
from tuner.replay.plan import Load
from tuner.replay.prepare import Progress
from tuner.replay.timeline import Judge, Partial, Replayed, measure, replay
from tuner.tuning import quality
from tuner.tuning.context import (
    Cores,
    HostContext,
    LaunchEstimates,
    LaunchJob,
    LaunchResult,
    Measured,
    News,
    Note,
    Pass,
    RunContext,
    RunEvent,
    Serving,
    held,
    largest_kv,
)
from tuner.tuning.study import Prepared

# The largest relative distance between the reported speed and the next one that failed.
SPEED_TOLERANCE = 0.05
MET, LOST = "the SLO is certain to be met", "the SLO cannot be met any more"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxSpeed:
    """`speed` met the SLO and `above` did not (None: nothing tried failed). 0.0 when not even `floor` met it.

    `tried` holds every speed in order with its answer.
    """

    speed: float
    above: float | None
    tried: tuple[tuple[float, bool], ...]


async def bisect(
    measure_at: Callable[[float], Awaitable[bool]],
    *,
    start: float = 1.0,
    floor: float = 0.1,
    ceiling: float = 16.0,
    tolerance: float = SPEED_TOLERANCE,
    most: int = 12,
) -> MaxSpeed:
    """Double or halve from `start` until the answer flips, then bisect geometrically.

    `measure_at(speed)` replays the same rows at that speed and returns whether the SLO was met; `sure` may
    stop it early. Ends when the two speeds are within `tolerance` (relative), at the bounds, or after `most`.
    """
    tried: list[tuple[float, bool]] = []
    low, high, speed = 0.0, None, start
    while len(tried) < most:
        met = await measure_at(speed)
        tried.append((speed, met))
        if met:
            low = speed
        else:
            high = speed
        following = _next_speed(low, high, floor, ceiling, tolerance)
        if following is None:
            break
        speed = following
    return MaxSpeed(speed=low, above=high, tried=tuple(tried))


def _next_speed(
    low: float, high: float | None, floor: float, ceiling: float, tolerance: float
) -> float | None:
    if high is None:
        return min(ceiling, 2 * low) if low < ceiling else None
    if low == 0.0:
        return max(floor, high / 2) if high > floor else None
    return (low * high) ** 0.5 if high / low > 1 + tolerance else None


def sure(slo: Slo) -> Judge:
    """A judge that ends a replay as soon as it is certain whether the whole window reaches the attainment.

    Pass it to `replay`; `Replayed.stopped` is then MET or LOST. A request past the E2E limit counts as bad
    before it ends.
    """

    def judge(partial: Partial) -> str | None:
        kept = counted(partial.outcomes)
        good = sum(is_good(o, slo) for o in kept)
        cancelled = len(partial.outcomes) - len(kept)
        bad = len(kept) - good
        if slo.e2e_ms is not None:
            bad += sum((partial.now_s - at) * 1000 > slo.e2e_ms for at in partial.waiting_s)
        planned = partial.planned - cancelled
        if planned - bad < slo.attainment * planned:
            return LOST
        return MET if planned and good >= slo.attainment * partial.planned else None

    return judge


async def launch(context: RunContext, trial: Trial, passes: Sequence[Pass], directory: Path) -> LaunchResult:
    """Start an engine on the trial's candidate, replay the passes and stop it. The launch row comes first.

    Raises Infeasible, Aborted or StudyFailed; whatever happens, no process is left and the row is closed.
    """
    started = context.seconds()
    make(directory)
    known, kv = context.estimates(), largest_kv(context.launches())
    spec = launch_spec(context.prepared, trial.candidate, directory, context.cores, known=known)
    row_of = LaunchRecorder(context, add_launch(context, spec), trial)
    settle = context.settles(spec.argv)
    verdict: str | None = "stopped"
    job = LaunchJob(spec=spec, passes=tuple(passes), number=trial.number, kv_tokens=kv, settle=settle)
    try:
        measured = await (context.work or partial(work_here, context.host))(job, row_of.note)
        verdict = None
    except EngineError as error:
        verdict = f"{error.cause}: {error}"
        raise
    finally:
        row = row_of.close(verdict)
    gpu_seconds = (context.seconds() - started) * held(context.prepared, spec.argv)
    return launched(row, measured, gpu_seconds)


class LaunchRecorder:
    """Keeps the row of a launch up to date while its engine runs, and passes progress on."""

    def __init__(self, context: RunContext, row: Launch, trial: Trial) -> None:
        self._context, self.row, self.trial = context, row, trial

    def note(self, news: News) -> None:
        """Keep what the engine reports; pass everything else on as progress."""
        if isinstance(news, Serving):
            self.row = replace(
                self.row, effective=news.effective, timeline=news.timeline, kv_tokens=news.kv_tokens
            )
        else:
            progress = news if isinstance(news, Progress) else None
            text = _words(news) if isinstance(news, Progress) else news
            self._context.tell(RunEvent(kind="phase", text=text, trial=self.trial, progress=progress))

    def close(self, verdict: str | None) -> Launch:
        """Store how it ended. A first boot that was thrown away counts as another launch."""
        self._context.budget.begun += FIRST_S in self.row.timeline
        ended = replace(self.row, ended_at=self._context.clock(), verdict=verdict)
        self.row = self._context.store.finish_launch(ended)
        return self.row


def add_launch(context: RunContext, spec: LaunchSpec) -> Launch:
    """The row of a launch, before its engine exists. Aborted when the run may start no more."""
    context.budget.take()
    return context.store.add_launch(
        Launch(
            id=spec.launch_id, study_id=context.prepared.study.id, argv=masking.arguments(spec.argv),
            started_at=context.clock(), directory=spec.directory,
        )
    )  # fmt: skip


def launched(row: Launch, measured: Sequence[Measured], gpu_seconds: float) -> LaunchResult:
    """The result of a launch; its measurements name its row."""
    return LaunchResult(
        launch=row,
        measurements=tuple(replace(m.measurement, launch_id=row.id) for m in measured),
        gpu_seconds=gpu_seconds,
        curtailed=next((m.curtailed for m in measured if m.curtailed), None),
        answers=next((m.answers for m in measured if m.answers), ()),
    )


async def work_here(host: HostContext, job: LaunchJob, note: Note) -> Sequence[Measured]:
    """Do a launch job on this host: launch, replay, measure, stop. Outcomes are written beside the log."""
    async with serve(job.spec, gpus=host.gpus, note=note, settle=job.settle) as server:
        note(Serving(effective=server.effective, timeline=server.timeline, kv_tokens=server.kv_tokens))
        return [await measured_pass(host, job, each, server, note) for each in job.passes]


class LimitsRefused(Aborted):
    """The running engine did not take the limits of a job."""


class LocalHost:
    """Does launch jobs on this host; an engine that is to stay runs until `release`. An `EngineHost`."""

    def __init__(self, host: HostContext) -> None:
        self._host = host
        self._stack = AsyncExitStack()
        self._server: Server | None = None

    async def __call__(self, job: LaunchJob, note: Note) -> Sequence[Measured]:
        """Do a job: in an engine of its own, or with `stay` in one that goes on running."""
        if not job.stay:
            await self.release()
            return await work_here(self._host, job, note)
        server = await (self._launched(job, note) if job.limits is None else self._changed(job))
        return [await measured_pass(self._host, job, each, server, note) for each in job.passes]

    async def holds(self, launch_id: str) -> bool:
        """Whether the engine of this launch still runs."""
        server = self._server
        return server is not None and server.spec.launch_id == launch_id and server.alive

    async def release(self) -> None:
        """Stop the engine that stayed, if any."""
        stack, self._stack, self._server = self._stack, AsyncExitStack(), None
        await stack.aclose()

    async def _launched(self, job: LaunchJob, note: Note) -> Server:
        """Launch the engine of a job so that its limits can be changed."""
        await self.release()
        spec = job.spec
        paths = spec.env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        installed = limits.install(Path(spec.directory).resolve(), spec.launch_id, paths, spec.kind)
        spec = replace(spec, env={**spec.env, **installed.env})
        server = await self._stack.enter_async_context(
            serve(spec, gpus=self._host.gpus, settle=job.settle, note=note)
        )
        note(Serving(effective=server.effective, timeline=server.timeline, kv_tokens=server.kv_tokens))
        self._server = server
        return server

    async def _changed(self, job: LaunchJob) -> Server:
        """The running engine with the limits of a job."""
        if self._server is None or not await self.holds(job.spec.launch_id):
            raise Aborted("the engine that was to measure it has ended", cause="stopped")
        if not await limits.change(self._server, job.limits or {}):
            said = await limits.ask(self._server, {})
            reason = f"the running engine did not take the limits: {said.error or 'no reason given'}"
            raise LimitsRefused(reason, cause="limits")
        return self._server


def launch_spec(
    prepared: Prepared,
    candidate: Candidate,
    directory: Path,
    cores: Cores,
    *,
    known: LaunchEstimates | None = None,
) -> LaunchSpec:
    """How a candidate is launched: the fixed arguments first, then its own, which override them."""
    engine, known = prepared.file.engine, known or LaunchEstimates()
    compiled = compile_candidate(candidate, prepared.facts, env=engine.env)
    return LaunchSpec(
        launch_id=uuid.uuid4().hex,
        command=prepared.command,
        model=prepared.model_path,
        argv=(*prepared.fixed, *compiled.argv),
        served_name=prepared.study.id[:16],
        directory=str(directory),
        env={**simulated_card(prepared), **known.env, **engine.env, **compiled.env},
        asked=candidate,
        asked_argv=compiled.argv,
        read_back=read_back(),
        ready_timeout_s=known.ready_timeout_s,
        stop_command=engine.stop_command,
        gpus=prepared.node.gpus,
        cores=cores.engine,
        kind=prepared.facts.kind,
    )


def simulated_card(prepared: Prepared) -> dict[str, str]:
    """The environment that sets the simulated engine's cards; empty for a real one."""
    engine = prepared.file.engine
    if not adapter_of(engine.kind).simulated:
        return {}
    several = {"TUNER_SIM_CARDS": str(engine.cards)} if engine.cards > 1 else {}
    return {"TUNER_SIM_CARD": engine.card, **several}


def load_of(host: HostContext, job: LaunchJob, each: Pass, kv_tokens: int | None) -> Load:
    """What one pass sends to an engine whose KV cache has `kv_tokens`."""
    prepared = host.prepared
    return Load(
        seed=prepared.study.seed, number=job.number, repeat=each.repeat, speed=prepared.file.speed,
        model=prepared.study.id[:16], vocabulary=prepared.model.vocab_size, slo=prepared.study.slo,
        kv_tokens=max(filter(None, (job.kv_tokens, kv_tokens)), default=None),
        history="open" if prepared.file.history == "synthetic" else prepared.file.history,
        senders=len(host.cores.sender or (0,)), cores=host.cores.sender, isolated=host.isolated,
    )  # fmt: skip


# Replays slices on a ready engine.
Send = Callable[[Sequence[Slice], Load, Judge | None], Awaitable[Replayed]]


async def measured_pass(
    host: HostContext, job: LaunchJob, each: Pass, server: Server, note: Note
) -> Measured:
    """Replay one pass on a ready engine. Its outcomes go to the job's directory. GateFailed, or the
    engine's fault during the replay.
    """
    prepared = host.prepared
    load = load_of(host, job, each, server.kv_tokens)

    async def send(slices: Sequence[Slice], load: Load, judge: Judge | None) -> Replayed:
        return await replay(server, prepared.trace, slices, prepared.plan, load, judge=judge, progress=note)

    with Watch(host.gpus) as watch:
        replayed = await send_pass(each, load, send, note)
    if (fault := await server.fault("run")) is not None:
        raise fault
    extra = {"ready_s": server.ready_s, **_sampled(watch.summary(), replayed)}
    measurement = measurement_of(host, job, each, replayed, extra)
    measurement = await with_speed(host, each, load, replayed, measurement, send, note)
    measurement = flagged(measurement, host, watch.summary())
    if measurement.fidelity.failed:
        raise GateFailed(measurement)
    asked = each.purpose == "search" and quality.why_not(prepared) is None
    answers = await quality.answers(server, prepared) if asked else ()
    return Measured(measurement=measurement, curtailed=replayed.stopped, answers=answers)


async def send_pass(each: Pass, load: Load, send: Send, note: Note) -> Replayed:
    """Replay the slices of a pass; progress names them."""
    note(f"replaying {', '.join(s.name for s in each.slices)}")
    return await send(each.slices, load, each.judge)


def measurement_of(
    host: HostContext, job: LaunchJob, each: Pass, replayed: Replayed, extra: Mapping[str, float]
) -> Measurement:
    """The numbers of a replayed pass, its outcomes written beside the log."""
    prepared = host.prepared
    measurement = measure(
        replayed,
        prepared.study.slo,
        price_per_gpu_hour=prepared.file.price_per_gpu_hour,
        gpus=held(prepared, job.spec.argv),
        extra=extra,
        asked=(*prepared.study.objectives, *prepared.file.not_worse),
        purpose=each.purpose,
        repeat=each.repeat,
    )
    return _with_files(measurement, replayed, Path(job.spec.directory))


async def with_speed(
    host: HostContext,
    each: Pass,
    load: Load,
    replayed: Replayed,
    measurement: Measurement,
    send: Send,
    note: Note,
) -> Measurement:
    """The measurement with the highest speed that keeps the SLO, if that is an objective."""
    prepared = host.prepared
    wanted = MAX_SPEED in prepared.study.objectives and each.purpose != "held_out"
    if not wanted or replayed.stopped is not None or measurement.fidelity.failed:
        return measurement

    async def faster(slices: Sequence[Slice], load: Load, judge: Judge) -> Replayed:
        note(f"replaying at speed {load.speed:.3g}")
        return await send(slices, load, judge)

    found, doubts = await max_speed(faster, each.slices, load, prepared.study.slo)
    for doubt in doubts:
        measurement = _warned(measurement, doubt)
    return replace(measurement, values={**measurement.values, MAX_SPEED: found.speed})


def _with_files(measurement: Measurement, replayed: Replayed, directory: Path) -> Measurement:
    """Write each slice's outcomes beside the log, and name the files in the measurement."""
    kept = []
    for part, row in zip(replayed.slices, measurement.slices, strict=True):
        path = directory / f"{measurement.purpose}-{measurement.repeat}-{row.name}.parquet"
        try:
            outcomes.write(path, part.outcomes)
            outcomes.write_series(path, part.series)
        except Unavailable as error:
            raise Aborted(str(error), cause="disk") from error
        kept.append(replace(row, outcomes_file=str(path)))
    return replace(measurement, slices=tuple(kept))


class GateFailed(Aborted):
    """The replay does not count: the sender was late, or the answers were not as requested."""

    def __init__(self, measurement: Measurement) -> None:
        gates = "; ".join(measurement.fidelity.failed)
        super().__init__(f"the replay failed its fidelity gate: {gates}", cause="gate")
        self.measurement = measurement


def make(directory: Path) -> None:
    """Make a directory unless it exists. Aborted if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Aborted(f"cannot make {directory}: {error.strerror}", cause="disk") from error


def _sampled(sampled: Mapping[str, float], replayed: Replayed) -> dict[str, float]:
    """GPU numbers that are measurements, and the energy for each output token."""
    found = {name: value for name, value in sampled.items() if name in NAMES}
    tokens = sum(o.output_tokens for part in replayed.slices for o in part.outcomes)
    if tokens and (energy := sampled.get("gpu_energy_j")):
        found["energy_j_per_token"] = energy / tokens
    return found


def flagged(measurement: Measurement, host: HostContext, sampled: Mapping[str, float]) -> Measurement:
    """The measurement with the GPUs' clocks, temperature and power, and warnings about throttling."""
    beside = {name: value for name, value in sampled.items() if name not in NAMES}
    fidelity = replace(measurement.fidelity, values={**measurement.fidelity.values, **beside})
    measurement = replace(measurement, fidelity=fidelity)
    if throttled(sampled):
        measurement = _warned(measurement, "the GPU was throttled for more than 5 % of the time")
    if host.isolated:
        measurement = _warned(measurement, "isolated: other replays of this host may have run beside it")
    return measurement


def _warned(measurement: Measurement, warning: str) -> Measurement:
    fidelity = measurement.fidelity
    return replace(measurement, fidelity=replace(fidelity, warnings=(*fidelity.warnings, warning)))


def _words(progress: Progress) -> str:
    inside = 0 <= progress.done_s <= progress.total_s and progress.total_s > 0
    share = f"{progress.done_s:.0f}/{progress.total_s:.0f} s" if inside else ""
    return " ".join(part for part in (progress.phase, progress.slice, share) if part)


MAX_SPEED = "max_speed"

# Bounds of the search for the highest speed, relative to the study's speed, and the most speeds that are
# tried: eight halvings or doublings span them, and each further one halves the error.
FLOOR, CEILING, MOST = 1 / 16, 16.0, 10

# Each speed has prompts of its own, so that no prefix is cached: repeat r uses the prompts of repeats
# r × SALTS + 1 and up.
SALTS = 100

Try = Callable[[Sequence[Slice], Load, Judge], Awaitable[Replayed]]


async def max_speed(
    send: Try, slices: Sequence[Slice], load: Load, slo: Slo
) -> tuple[MaxSpeed, tuple[str, ...]]:
    """Bisect from the load's own speed.

    A speed is good when every slice by itself meets the SLO; a replay stops as soon as that is certain. A
    replay that fails a fidelity gate is repeated once. If it fails again, that speed does not count, and the
    second result is a warning: the sender reached its limit, perhaps not the engine.
    """
    tried, doubts = 0, list[str]()

    async def meets(speed: float) -> bool:
        nonlocal tried
        for part in slices:
            for _ in range(2):
                tried += 1
                faster = replace(load, speed=speed, repeat=load.repeat * SALTS + tried)
                replayed = await send((part,), faster, sure(slo))
                if not (failed := replayed.fidelity.failed):
                    break
            else:
                doubts.append(f"{MAX_SPEED}: speed {speed:.3g} is not counted: {'; '.join(failed)}")
                return False
            if replayed.stopped is None:
                met = measure(replayed, slo).values.get("slo_attainment", 0.0) >= slo.attainment
            else:
                met = replayed.stopped == MET
            if not met:
                return False
        return True

    found = await bisect(
        meets, start=load.speed, floor=FLOOR * load.speed, ceiling=CEILING * load.speed, most=MOST
    )
    return found, tuple(doubts)
