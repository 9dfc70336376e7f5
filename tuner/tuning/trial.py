"""One launch and what is measured in it."""

import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tuner import masking
from tuner.adapters import adapter_of
from tuner.engine.boots import FIRST_S, settles
from tuner.engine.gpu import Gpus, Watch, throttled
from tuner.engine.server import Server, serve
from tuner.errors import Aborted, EngineError, Unavailable
from tuner.history.store import Store
from tuner.knobs.arguments import compile_candidate, gpus_held
from tuner.knobs.catalogue import CONFIG_PATHS, LOG_WORDS
from tuner.measures import NAMES
from tuner.records import Candidate, Launch, LaunchSpec, Measurement, Purpose, Slice, Trial, Value
from tuner.replay import outcomes
from tuner.replay.measure import measure
from tuner.replay.plan import Load
from tuner.replay.timeline import Judge, Progress, Replayed, replay
from tuner.tuning import capacity, quality
from tuner.tuning.budget import LaunchBudget
from tuner.tuning.cores import Cores, split_cores
from tuner.tuning.events import Event, Tell
from tuner.tuning.launch_estimates import Learned, largest_kv, learned
from tuner.tuning.quality import Answer
from tuner.tuning.study import Clock, Prepared

ABORTED_RETRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a host needs to do an order. `isolated`: it does not wait for other replays of its host."""

    prepared: Prepared
    cores: Cores
    gpus: Gpus
    isolated: bool = False


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
    budget: LaunchBudget = field(default_factory=LaunchBudget)
    seconds: Callable[[], float] = time.monotonic
    """Reads a clock that only goes forward; a virtual engine brings its own."""

    def gpus_held(self, candidate: Candidate) -> int:
        """How many GPUs the candidate's engine holds: seconds of wall time to GPU-seconds."""
        prepared = self.prepared
        own = compile_candidate(candidate, prepared.facts, env=prepared.file.engine.env).argv
        return held(prepared, (*prepared.fixed, *own))

    def launches(self) -> Sequence[Launch]:
        """The study's launches so far."""
        return self.store.launches(self.prepared.study.id)

    def learned(self) -> Learned:
        """What they and this host tell of the next one."""
        return learned(self.store, self.prepared, home=self.home if self.work is None else None)

    def settles(self, argv: Sequence[str]) -> bool | None:
        """Whether a first boot of these arguments is thrown away, as `serve` takes it."""
        seen = [(each.argv, each.timeline) for each in self.launches()]
        return False if self.budget.left < 1 else settles(seen, masking.arguments(tuple(argv)))

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
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One launch and its replays, as handed to the host that does them; nothing in it touches the history.

    `kv_tokens` is the largest KV cache that a launch of the study had so far; `settle` as `serve` takes it.
    """

    spec: LaunchSpec
    passes: tuple[Pass, ...]
    number: int
    kv_tokens: int | None = None
    settle: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What an engine said of itself once it was ready."""

    effective: Mapping[str, Value]
    timeline: Mapping[str, float]
    kv_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One pass: its numbers, the judge's reason when it was cut short, and answers to canary prompts."""

    measurement: Measurement
    curtailed: str | None
    answers: tuple[Answer, ...] = ()


News = str | Serving
Note = Callable[[News], None]
Work = Callable[[Order, Note], Awaitable[Sequence[Measured]]]


async def launch(bench: Bench, trial: Trial, passes: Sequence[Pass], directory: Path) -> Launched:
    """Start an engine on the trial's candidate, replay the passes and stop it. The launch row comes first.

    Raises Infeasible, Aborted or StudyFailed; whatever happens, no process is left and the row is closed.
    """
    started = bench.seconds()
    make(directory)
    known, kv = bench.learned(), largest_kv(bench.launches())
    spec = launch_spec(bench.prepared, trial.candidate, directory, bench.cores, known=known)
    row_of = Row(bench, add_launch(bench, spec), trial)
    settle = bench.settles(spec.argv)
    verdict: str | None = "stopped"
    order = Order(spec=spec, passes=tuple(passes), number=trial.number, kv_tokens=kv, settle=settle)
    try:
        measured = await (bench.work or partial(work_here, bench.place))(order, row_of.note)
        verdict = None
    except EngineError as error:
        verdict = f"{error.cause}: {error}"
        raise
    finally:
        row = row_of.close(verdict)
    gpu_seconds = (bench.seconds() - started) * held(bench.prepared, spec.argv)
    return launched(row, measured, gpu_seconds)


def held(prepared: Prepared, argv: Sequence[str]) -> int:
    """How many GPUs an engine of the study with these arguments is charged for; 1 on a CPU."""
    return 1 if prepared.facts.platform == "cpu" else gpus_held(argv)


class Row:
    """The row of a launch while the engine runs: what is heard of it goes in here, and on to who listens."""

    def __init__(self, bench: Bench, row: Launch, trial: Trial) -> None:
        self._bench, self.row, self.trial = bench, row, trial

    def note(self, news: News) -> None:
        """Take what an engine says of itself; tell everything else."""
        if isinstance(news, Serving):
            self.row = replace(
                self.row, effective=news.effective, timeline=news.timeline, kv_tokens=news.kv_tokens
            )
        else:
            self._bench.tell(Event(kind="phase", text=news, trial=self.trial))

    def close(self, verdict: str | None) -> Launch:
        """Write how it ended. A first boot that was thrown away counts as a launch of its own."""
        self._bench.budget.begun += FIRST_S in self.row.timeline
        ended = replace(self.row, ended_at=self._bench.clock(), verdict=verdict)
        self.row = self._bench.store.finish_launch(ended)
        return self.row


def add_launch(bench: Bench, spec: LaunchSpec) -> Launch:
    """The row of a launch, before its engine exists. Aborted when the run may start no more."""
    bench.budget.take()
    return bench.store.add_launch(
        Launch(
            id=spec.launch_id, study_id=bench.prepared.study.id, argv=masking.arguments(spec.argv),
            started_at=bench.clock(), directory=spec.directory,
        )
    )  # fmt: skip


def launched(row: Launch, measured: Sequence[Measured], gpu_seconds: float) -> Launched:
    """What a launch gave, its measurements bound to its row."""
    return Launched(
        launch=row,
        measurements=tuple(replace(m.measurement, launch_id=row.id) for m in measured),
        gpu_seconds=gpu_seconds,
        curtailed=next((m.curtailed for m in measured if m.curtailed), None),
        answers=next((m.answers for m in measured if m.answers), ()),
    )


async def work_here(place: Place, order: Order, note: Note) -> Sequence[Measured]:
    """Do an order on this host: launch, replay, measure, stop. Outcomes are written beside the log."""
    async with serve(order.spec, gpus=place.gpus, note=note, settle=order.settle) as server:
        note(Serving(effective=server.effective, timeline=server.timeline, kv_tokens=server.kv_tokens))
        return [await measured_pass(place, order, each, server, note) for each in order.passes]


def launch_spec(
    prepared: Prepared, candidate: Candidate, directory: Path, cores: Cores, *, known: Learned | None = None
) -> LaunchSpec:
    """How a candidate is launched: fixed arguments first, then its own, so that its own win."""
    engine, known = prepared.file.engine, known or Learned()
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
        config_paths=CONFIG_PATHS,
        log_words=LOG_WORDS,
        ready_timeout_s=known.ready_timeout_s,
        stop_command=engine.stop_command,
        gpus=prepared.node.gpus,
        cores=cores.engine,
        kind=prepared.facts.kind,
    )


def simulated_card(prepared: Prepared) -> dict[str, str]:
    """What tells the simulated engine which card it is; nothing for a real one."""
    engine = prepared.file.engine
    return {"TUNER_SIM_CARD": engine.card} if adapter_of(engine.kind).simulated else {}


def load_of(place: Place, order: Order, each: Pass, kv_tokens: int | None) -> Load:
    """What one pass sends to an engine whose KV cache has `kv_tokens`."""
    prepared = place.prepared
    return Load(
        seed=prepared.study.seed, number=order.number, repeat=each.repeat, speed=prepared.file.speed,
        model=prepared.study.id[:16], vocabulary=prepared.model.vocab_size, slo=prepared.study.slo,
        kv_tokens=max(filter(None, (order.kv_tokens, kv_tokens)), default=None),
        history="open" if prepared.file.history == "synthetic" else prepared.file.history,
        senders=len(place.cores.sender or (0,)), cores=place.cores.sender, isolated=place.isolated,
    )  # fmt: skip


Send = Callable[[Sequence[Slice], Load, Judge | None], Awaitable[Replayed]]
"""Replays slices on a ready engine."""


async def measured_pass(place: Place, order: Order, each: Pass, server: Server, note: Note) -> Measured:
    """Replay one pass on a ready engine. Its outcomes go to the order's directory. GateFailed, or the fault
    that the engine had meanwhile.
    """
    prepared = place.prepared
    load = load_of(place, order, each, server.kv_tokens)

    async def send(slices: Sequence[Slice], load: Load, judge: Judge | None) -> Replayed:
        progress = partial(_tell_progress, note)
        return await replay(
            server, prepared.trace, slices, prepared.plan, load, judge=judge, progress=progress
        )

    with Watch(place.gpus) as watch:
        replayed = await send_pass(each, load, send, note)
    if (fault := await server.fault("run")) is not None:
        raise fault
    extra = {"ready_s": server.ready_s, **_sampled(watch.summary(), replayed)}
    measurement = measurement_of(place, order, each, replayed, extra)
    measurement = await with_speed(place, each, load, replayed, measurement, send, note)
    measurement = flagged(measurement, place, watch.summary())
    if measurement.fidelity.failed:
        raise GateFailed(measurement)
    asked = each.purpose == "search" and quality.why_not(prepared) is None
    answers = await quality.answers(server, prepared) if asked else ()
    return Measured(measurement=measurement, curtailed=replayed.stopped, answers=answers)


async def send_pass(each: Pass, load: Load, send: Send, note: Note) -> Replayed:
    """Replay a pass's slices, saying which."""
    note(f"replaying {', '.join(s.name for s in each.slices)}")
    return await send(each.slices, load, each.judge)


def measurement_of(
    place: Place, order: Order, each: Pass, replayed: Replayed, extra: Mapping[str, float]
) -> Measurement:
    """The numbers of a replayed pass, its outcomes written beside the log."""
    prepared = place.prepared
    measurement = measure(
        replayed,
        prepared.study.slo,
        price_per_gpu_hour=prepared.file.price_per_gpu_hour,
        gpus=held(prepared, order.spec.argv),
        extra=extra,
        asked=(*prepared.study.objectives, *prepared.file.not_worse),
        purpose=each.purpose,
        repeat=each.repeat,
    )
    return _with_files(measurement, replayed, Path(order.spec.directory))


async def with_speed(
    place: Place, each: Pass, load: Load, replayed: Replayed, measurement: Measurement, send: Send, note: Note
) -> Measurement:
    """The measurement with the highest speed that keeps the SLO, where that is an objective."""
    prepared = place.prepared
    wanted = capacity.NAME in prepared.study.objectives and each.purpose != "held_out"
    if not wanted or replayed.stopped is not None or measurement.fidelity.failed:
        return measurement

    async def faster(slices: Sequence[Slice], load: Load, judge: Judge) -> Replayed:
        note(f"replaying at speed {load.speed:.3g}")
        return await send(slices, load, judge)

    found, doubts = await capacity.max_speed(faster, each.slices, load, prepared.study.slo)
    for doubt in doubts:
        measurement = _warned(measurement, doubt)
    return replace(measurement, values={**measurement.values, capacity.NAME: found.speed})


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
    """The replay is not to be believed: the sender was late, or the answers were not what was asked for."""

    def __init__(self, measurement: Measurement) -> None:
        gates = "; ".join(measurement.fidelity.failed)
        super().__init__(f"the replay failed its fidelity gate: {gates}", cause="gate")
        self.measurement = measurement


def make(directory: Path) -> None:
    """A directory that is there afterwards. Aborted where it cannot be made."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Aborted(f"cannot make {directory}: {error.strerror}", cause="disk") from error


def _sampled(sampled: Mapping[str, float], replayed: Replayed) -> dict[str, float]:
    """What the GPUs said, under names of measurements; energy per completion token of the windows."""
    found = {name: value for name, value in sampled.items() if name in NAMES}
    tokens = sum(o.output_tokens for part in replayed.slices for o in part.outcomes)
    if tokens and (energy := sampled.get("gpu_energy_j")):
        found["energy_j_per_token"] = energy / tokens
    return found


def flagged(measurement: Measurement, place: Place, sampled: Mapping[str, float]) -> Measurement:
    """The measurement with how the GPUs fared beside it: clocks, heat, power, and what throttled them."""
    beside = {name: value for name, value in sampled.items() if name not in NAMES}
    fidelity = replace(measurement.fidelity, values={**measurement.fidelity.values, **beside})
    measurement = replace(measurement, fidelity=fidelity)
    if throttled(sampled):
        measurement = _warned(measurement, "the GPU held its clocks down in more than 5 % of the time")
    if place.isolated:
        measurement = _warned(measurement, "isolated: other replays of this host may have run beside it")
    return measurement


def _warned(measurement: Measurement, warning: str) -> Measurement:
    fidelity = measurement.fidelity
    return replace(measurement, fidelity=replace(fidelity, warnings=(*fidelity.warnings, warning)))


def _tell_progress(note: Note, progress: Progress) -> None:
    share = f" {progress.done_s:.0f}/{progress.total_s:.0f} s" if progress.total_s else ""
    note(f"{progress.phase} {progress.slice}{share}".replace("  ", " "))
