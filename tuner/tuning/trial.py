"""One launch and what is measured in it; one attempt of one trial, from its row to its end."""

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tuner.engine.failures import KINDS
from tuner.engine.gpu import Gpus, Watch
from tuner.engine.server import Server, serve
from tuner.errors import Aborted, EngineError, Infeasible, StudyFailed, Unavailable
from tuner.history.store import Store
from tuner.knobs.arguments import compile_candidate
from tuner.measures import NAMES
from tuner.records import (
    Candidate,
    Launch,
    LaunchSpec,
    Measurement,
    Purpose,
    Slice,
    Trial,
    TrialState,
    Value,
    Violation,
)
from tuner.replay import outcomes
from tuner.replay.measure import measure
from tuner.replay.plan import Load
from tuner.replay.timeline import Judge, Progress, Replayed, replay
from tuner.tuning.events import Event, Tell
from tuner.tuning.study import Clock, Prepared

ERROR_RATE = 0.01
"""More failed requests than this share, and the candidate is infeasible."""

ABORTED_RETRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Which cores serve and which send; None = anywhere (a host with one core)."""

    engine: tuple[int, ...] | None
    sender: tuple[int, ...] | None


def split_cores(available: Sequence[int]) -> Cores:
    """The sender gets an eighth of the host, one to four cores; the engine all the others."""
    if len(available) < 2:
        return Cores(engine=None, sender=None)
    share = min(4, max(1, len(available) // 8))
    return Cores(sender=tuple(available[:share]), engine=tuple(available[share:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a host needs to do an order."""

    prepared: Prepared
    cores: Cores
    gpus: Gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all launches of a run share. `home` is TUNER_HOME; `work` does an order elsewhere, None: here."""

    prepared: Prepared
    store: Store
    home: Path
    clock: Clock
    tell: Tell
    cores: Cores = field(default_factory=lambda: split_cores(sorted(os.sched_getaffinity(0))))
    gpus: Gpus = field(default_factory=lambda: Gpus(nvml=None))
    work: "Work | None" = None

    @property
    def place(self) -> Place:
        return Place(prepared=self.prepared, cores=self.cores, gpus=self.gpus)

    def directory(self, number: int, label: str) -> Path:
        """Where one launch keeps its log and outcomes: TUNER_HOME/trials/<study>/<number>-<label>."""
        return self.home / "trials" / self.prepared.study.id[:16] / f"{number:04d}-{label}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One replay within a launch."""

    slices: tuple[Slice, ...]
    purpose: Purpose = "search"
    repeat: int = 0
    judge: Judge | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What a launch gave. `curtailed` is the judge's reason when a replay was cut short."""

    launch: Launch
    measurements: tuple[Measurement, ...]
    gpu_seconds: float
    curtailed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One launch and its replays, as handed to the host that does them; nothing in it touches the history."""

    spec: LaunchSpec
    passes: tuple[Pass, ...]
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What an engine said of itself once it was ready."""

    effective: Mapping[str, Value]
    timeline: Mapping[str, float]
    kv_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One pass: its numbers, and the judge's reason when it was cut short."""

    measurement: Measurement
    curtailed: str | None


News = str | Serving
Note = Callable[[News], None]
Work = Callable[[Order, Note], Awaitable[Sequence[Measured]]]


async def launch(bench: Bench, trial: Trial, passes: Sequence[Pass], directory: Path) -> Launched:
    """Start an engine on the trial's candidate, replay the passes and stop it. The launch row comes first.

    Raises Infeasible, Aborted or StudyFailed; whatever happens, no process is left and the row is closed.
    """
    prepared, started = bench.prepared, time.monotonic()
    _make(directory)
    spec = launch_spec(prepared, trial.candidate, directory, bench.cores)
    row = bench.store.add_launch(
        Launch(
            id=spec.launch_id, study_id=prepared.study.id, argv=spec.argv, started_at=bench.clock(),
            directory=str(directory),
        )
    )  # fmt: skip

    def note(news: News) -> None:
        nonlocal row
        if isinstance(news, Serving):
            row = replace(row, effective=news.effective, timeline=news.timeline, kv_tokens=news.kv_tokens)
        else:
            bench.tell(Event(kind="phase", text=news, trial=trial))

    verdict: str | None = "stopped"
    order = Order(spec=spec, passes=tuple(passes), number=trial.number)
    try:
        measured = await (bench.work or partial(work_here, bench.place))(order, note)
        verdict = None
    except EngineError as error:
        verdict = f"{error.cause}: {error}"
        raise
    finally:
        row = bench.store.finish_launch(replace(row, ended_at=bench.clock(), verdict=verdict))
    gpu_seconds = (time.monotonic() - started) * max(1, prepared.facts.gpu_count)
    return Launched(
        launch=row,
        measurements=tuple(replace(m.measurement, launch_id=row.id) for m in measured),
        gpu_seconds=gpu_seconds,
        curtailed=next((m.curtailed for m in measured if m.curtailed), None),
    )


async def work_here(place: Place, order: Order, note: Note) -> Sequence[Measured]:
    """Do an order on this host: launch, replay, measure, stop. Outcomes are written beside the log."""
    async with serve(order.spec, gpus=place.gpus, note=note) as server:
        note(Serving(effective=server.effective, timeline=server.timeline, kv_tokens=server.kv_tokens))
        return [await _measured(place, order, each, server, note) for each in order.passes]


def launch_spec(prepared: Prepared, candidate: Candidate, directory: Path, cores: Cores) -> LaunchSpec:
    """How a candidate is launched: fixed arguments first, then its own, so that its own win."""
    compiled = compile_candidate(candidate, prepared.facts, env=prepared.file.engine.env)
    return LaunchSpec(
        launch_id=uuid.uuid4().hex,
        command=prepared.command,
        model=prepared.model_path,
        argv=(*prepared.fixed, *compiled.argv),
        served_name=prepared.study.id[:16],
        directory=str(directory),
        env={**simulated_card(prepared), **prepared.file.engine.env, **compiled.env},
        asked=candidate,
        gpus=prepared.node.gpus,
        cores=cores.engine,
    )


def simulated_card(prepared: Prepared) -> dict[str, str]:
    """What tells the simulated engine which card it is; nothing for a real one."""
    engine = prepared.file.engine
    return {"TUNER_SIM_CARD": engine.card} if engine.kind == "simulated" else {}


async def _measured(place: Place, order: Order, each: Pass, server: Server, note: Note) -> Measured:
    prepared = place.prepared
    load = Load(
        seed=prepared.study.seed,
        number=order.number,
        repeat=each.repeat,
        speed=prepared.file.speed,
        model=prepared.study.id[:16],
        vocabulary=prepared.model.vocab_size,
        slo=prepared.study.slo,
        cores=place.cores.sender,
    )
    note(f"replaying {', '.join(s.name for s in each.slices)}")
    with Watch(place.gpus) as watch:
        replayed = await replay(
            server, prepared.trace, each.slices, prepared.plan, load,
            judge=each.judge, progress=partial(_tell_progress, note),
        )  # fmt: skip
    if (fault := await server.fault("run")) is not None:
        raise fault
    measurement = measure(
        replayed,
        prepared.study.slo,
        price_per_gpu_hour=prepared.file.price_per_gpu_hour,
        gpus=max(1, prepared.facts.gpu_count),
        extra={"ready_s": server.ready_s, **_known(watch.summary())},
        asked=prepared.study.objectives,
        purpose=each.purpose,
        repeat=each.repeat,
    )
    measurement = _with_files(measurement, replayed, Path(order.spec.directory))
    _check_gate(measurement)
    return Measured(measurement=measurement, curtailed=replayed.stopped)


def _with_files(measurement: Measurement, replayed: Replayed, directory: Path) -> Measurement:
    """Write each slice's outcomes beside the log, and name the files in the measurement."""
    kept = []
    for part, row in zip(replayed.slices, measurement.slices, strict=True):
        path = directory / f"{measurement.purpose}-{measurement.repeat}-{row.name}.parquet"
        try:
            outcomes.write(path, part.outcomes)
        except Unavailable as error:
            raise Aborted(str(error), cause="disk") from error
        kept.append(replace(row, outcomes_file=str(path)))
    return replace(measurement, slices=tuple(kept))


def _check_gate(measurement: Measurement) -> None:
    if measurement.fidelity.failed:
        raise GateFailed(measurement)


class GateFailed(Aborted):
    """The replay is not to be believed: the sender was late, or the answers were not what was asked for."""

    def __init__(self, measurement: Measurement) -> None:
        gates = "; ".join(measurement.fidelity.failed)
        super().__init__(f"the replay failed its fidelity gate: {gates}", cause="gate")
        self.measurement = measurement


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Aborted(f"cannot make {directory}: {error.strerror}", cause="disk") from error


def _known(sampled: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in sampled.items() if name in NAMES}


def _tell_progress(note: Note, progress: Progress) -> None:
    share = f" {progress.done_s:.0f}/{progress.total_s:.0f} s" if progress.total_s else ""
    note(f"{progress.phase} {progress.slice}{share}".replace("  ", " "))


async def perform(bench: Bench, trial: Trial, earlier: Sequence[Trial], judge: Judge | None = None) -> Trial:
    """One attempt, from its RUNNING row to its finished one. `earlier` are this number's attempts before.

    StudyFailed and cancellation are passed on after the row was closed as ABORTED.
    """
    searched = tuple(s for s in bench.prepared.study.slices if not s.held_out)
    directory = bench.directory(trial.number, str(trial.attempt))
    started = time.monotonic()
    try:
        launched = await launch(bench, trial, [Pass(slices=searched, judge=judge)], directory)
    except (Infeasible, Aborted) as error:
        return _close(bench, _failed(trial, error, earlier, time.monotonic() - started))
    except StudyFailed as error:
        _close(bench, replace(trial, state=TrialState.ABORTED, reason=str(error), cause=error.cause))
        raise
    except asyncio.CancelledError:
        reason = "the run was stopped in the middle of this trial"
        _close(bench, replace(trial, state=TrialState.ABORTED, reason=reason, cause="stopped"))
        raise
    return _close(bench, _judged(trial, launched))


def _close(bench: Bench, trial: Trial) -> Trial:
    return bench.store.finish_trial(replace(trial, ended_at=bench.clock()))


def _failed(trial: Trial, error: EngineError, earlier: Sequence[Trial], seconds: float) -> Trial:
    """INFEASIBLE once the cause has used up its retries, else ABORTED: an attempt that decided nothing."""
    ended = replace(trial, reason=str(error), cause=error.cause, gpu_seconds=seconds)
    if isinstance(error, GateFailed):
        ended = replace(ended, measurements=(replace(error.measurement, launch_id=None, kind="partial"),))
    if not isinstance(error, Infeasible):
        return replace(ended, state=TrialState.ABORTED)
    again = sum(1 for t in earlier if t.cause == error.cause) < retries_of(error.cause)
    state = TrialState.ABORTED if again else TrialState.INFEASIBLE
    return replace(ended, state=state, violation=error.violation)


def retries_of(cause: str) -> int:
    """How often an infeasible verdict is tried again before it is believed."""
    return KINDS[cause].retries if cause in KINDS else 0


def _judged(trial: Trial, launched: Launched) -> Trial:
    """COMPLETE, PRUNED when the judge cut it, or INFEASIBLE when more than 1 % of the requests failed."""
    extra = {"gpu_seconds": launched.gpu_seconds}
    measurements = tuple(replace(m, values={**m.values, **extra}) for m in launched.measurements)
    ended = replace(
        trial,
        state=TrialState.PRUNED if launched.curtailed else TrialState.COMPLETE,
        reason=launched.curtailed,
        measurements=measurements,
        effective=launched.launch.effective,
        gpu_seconds=launched.gpu_seconds,
    )
    values = measurements[-1].values
    rate = values["failed"] / values["requests"] if values.get("requests") else 0.0
    ended = replace(ended, violation=Violation(err=rate - ERROR_RATE))
    if rate > ERROR_RATE:
        reason = f"{values['failed']:.0f} of {values['requests']:.0f} requests failed"
        return replace(ended, state=TrialState.INFEASIBLE, reason=reason, cause="errors")
    if (knob := not_as_asked(trial.candidate, launched.launch.effective)) is not None:
        reason = f"the engine runs {knob} = {launched.launch.effective[knob]}, not {trial.candidate[knob]}"
        return replace(ended, state=TrialState.INFEASIBLE, reason=reason, cause="not_effective")
    return ended


def not_as_asked(asked: Candidate, effective: Mapping[str, Value]) -> str | None:
    """The first knob whose effective value the engine reports and that is not the one asked for."""
    for name, value in asked.items():
        found = effective.get(name)
        if value is not None and found is not None and not same_value(found, value):
            return name
    return None


def same_value(found: Value, asked: Value) -> bool:
    """Numbers by value, everything else by its text: engines answer in their own types."""
    if isinstance(found, int | float) and isinstance(asked, int | float):
        return abs(found - asked) <= 1e-6 * max(1.0, abs(asked))
    return str(found).lower() == str(asked).lower()
