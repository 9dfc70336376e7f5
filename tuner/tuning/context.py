"""The records that a run, its launches and their hosts share; budget, cores, estimates for a launch, and when
to screen.
"""

import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Literal, Protocol, runtime_checkable

from tuner import masking
from tuner.adapters import adapter_of
from tuner.engine import boots
from tuner.engine.boots import FIRST_S, settles
from tuner.engine.gpu import Gpus
from tuner.errors import Aborted
from tuner.history.store import Store
from tuner.knobs.arguments import compile_candidate
from tuner.measures import many
from tuner.records import (
    Candidate,
    Launch,
    LaunchSpec,
    Measurement,
    Purpose,
    Run,
    RunState,
    Slice,
    Study,
    Trial,
    TrialState,
    Value,
    gpus_held,
    repeat_of,
)
from tuner.replay.prepare import Progress
from tuner.replay.timeline import Judge
from tuner.replay.timing import split
from tuner.search import trial_view
from tuner.tuning.quality import CanaryAnswer
from tuner.tuning.study import Clock, Prepared

# How many of a node's studies say how long a launch takes where the study itself has none.
LAST_STUDIES = 5

# Sender processes at most, one for every eight cores; every other core is left to the engine.
SENDERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Which cores serve and which send; None = anywhere (a host with one core)."""

    engine: tuple[int, ...] | None
    sender: tuple[int, ...] | None


def split_cores(available: Sequence[int]) -> Cores:
    """The senders get an eighth of the host, one to four cores; the engine all the others."""
    if len(available) < 2:
        return Cores(engine=None, sender=None)
    engine, sender = split(available, min(SENDERS, max(1, len(available) // 8)))
    return Cores(engine=engine, sender=sender)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """How many seconds the parts of a run take, as far as is known now: a trial with its own launch, the
    rest of the confirmation, and one launch of the confirmation (None: as long as a trial). Also the search
    that comes after the confirmation (infinite: it has no limit of trials), and the time until the deadline
    (None: there is none).
    """

    trial_s: float
    confirm_s: float = 0.0
    confirm_launch_s: float | None = None
    search_s: float = 0.0
    window_s: float | None = None


SEARCH = "search"
EventKind = Literal["run", "started", "phase", "finished", "confirm", "verdict", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """One line of progress of a run: `done` of `total` trials of the search, or launches of another `stage`.
    `trial` is the trial that it is about; an earlier run may have begun it. `progress` is where its replay
    is. `estimate`: what is known from now on.
    """

    kind: EventKind
    text: str
    stage: str = SEARCH
    done: int = 0
    total: int | None = None
    trial: Trial | None = None
    run: str | None = None
    progress: Progress | None = None
    estimate: RunEstimate | None = None


Tell = Callable[[RunEvent], None]


def silent(said: object) -> None:
    """Takes what it is told, and does nothing with it."""


# Launches beside each trial number, for second tries, discarded first boots and the confirmation. A
# confirmation of two finalists takes nine; two for each trial leave room for it from five trials on.
BESIDE = 2


def most_launches(trials: int | None) -> float:
    """How many engines a run with this limit of trials may start; infinite without a limit, and for a run
    that only confirms (0 trials).
    """
    return trials * (1 + BESIDE) if trials else math.inf


def numbers_of(trials: Sequence[Trial], run_id: str) -> set[int]:
    """The trial numbers that a run began, in whatever state they are."""
    return {t.number for t in trials if t.run_id == run_id}


@dataclass(slots=True, kw_only=True)
class LaunchBudget:
    """Counts the engines that a run starts. The one beyond the limit is Aborted before it is started."""

    most: float = math.inf
    begun: int = 0

    @property
    def left(self) -> float:
        """How many more may be started."""
        return self.most - self.begun

    def take(self) -> None:
        """Count one more. Aborted (cause `budget`) when none is left."""
        if self.left < 1:
            sentence = f"the budget of {many(self.most, 'launch')} is spent (three for each trial)"
            raise Aborted(sentence, cause="budget")
        self.begun += 1


def budget_of(run: Run, launches: Sequence[Launch]) -> LaunchBudget:
    """The launch budget of a new or resumed run; engines that it started earlier are counted."""
    ours = [each for each in launches if each.started_at >= run.started_at]
    begun = sum(1 + (FIRST_S in each.timeline) for each in ours)
    return LaunchBudget(most=most_launches(run.trials_limit), begun=begun)


def hours_left(store: Store | None, study_id: str, hours: float | None, now: datetime) -> float | None:
    """What is left of a run's hours. The time that its engines ran before an interruption is spent."""
    open_runs = [run for run in store.runs(study_id) if run.state is RunState.RUNNING] if store else []
    if store is None or hours is None or not open_runs:
        return hours
    begun = open_runs[0].started_at
    ours = [each for each in store.launches(study_id) if each.started_at >= begun]
    spent = sum(max(0.0, ((each.ended_at or now) - each.started_at).total_seconds()) for each in ours)
    return max(hours - spent / 3600, 1 / 3600)


def steady(clock: Clock) -> Clock:
    """A clock that starts at the host's time and then follows a monotonic one: changes of the host's clock
    do not matter.
    """
    begun, mark = clock(), time.monotonic()
    return lambda: begun + timedelta(seconds=time.monotonic() - mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEstimates:
    """How long to wait for the next launch (`serve`'s `ready_timeout_s`), and environment variables that the
    study's own override.
    """

    ready_timeout_s: float = boots.UNKNOWN_S
    env: Mapping[str, str] = field(default_factory=dict)


def launch_estimates(store: Store, prepared: Prepared, *, home: Path | None) -> LaunchEstimates:
    """The estimates for a study's next launch. Compiled code is cached under `home`; None: another host
    launches.
    """
    launches = store.launches(prepared.study.id)
    env: Mapping[str, str] = {}
    facts = prepared.facts
    if home is not None and adapter_of(facts.kind).compile_cache:
        root = boots.cache_root(
            home, version=facts.version, platform=facts.platform, gpu_name=facts.gpu_name,
            command=prepared.command,
        )  # fmt: skip
        env = boots.cache_environment(root, facts.kind)
    ready = readied(store, prepared.study, launches)
    return LaunchEstimates(ready_timeout_s=boots.ready_deadline(ready), env=env)


def readied(store: Store, study: Study, launches: Sequence[Launch]) -> list[float]:
    """Seconds until engines were ready: the study's own launches, and while these are too few also those of
    the node's other studies of the same model and engine version.
    """
    found = ready_of(launches)
    if len(found) >= boots.ENOUGH:
        return found
    others = [s for s in store.studies(node=study.node, model=study.model) if s.id != study.id]
    alike = [s for s in others if s.engine_version == study.engine_version]
    return found + [t for each in alike for t in ready_of(store.launches(each.id))]


# Seconds of a launch while no trial says: a guess, replaced by what launches took.
LAUNCH_S = 57.0

# The same for the simulated engine, which has nothing to load (on the virtual clock it stays: runs repeat).
SIMULATED_LAUNCH_S = 2.0


def usual_launch_s(store: Store | None, prepared: Prepared) -> float:
    """About how many seconds a launch takes on this node. This is the median of the study's own launches
    and of launches like them. If there are none, it is the median of the node's last studies on this engine
    version; otherwise a guess.
    """
    study = prepared.study
    if store is not None:
        found = readied(store, study, store.launches(study.id))
        if not found:
            others = [s for s in store.studies(node=study.node) if s.engine_version == study.engine_version]
            found = [t for each in others[:LAST_STUDIES] for t in ready_of(store.launches(each.id))]
        if found:
            return median(found)
    quick = adapter_of(prepared.facts.kind).simulated and prepared.file.engine.clock != "virtual"
    return SIMULATED_LAUNCH_S if quick else LAUNCH_S


def ready_of(launches: Sequence[Launch]) -> list[float]:
    """Seconds to ready of the launches that got ready."""
    return [t for each in launches if (t := each.timeline.get("ready_s")) is not None]


def largest_kv(launches: Sequence[Launch]) -> int | None:
    """The largest KV cache of these launches in tokens; None while none is known."""
    return max((each.kv_tokens for each in launches if each.kv_tokens), default=None)


# A trial that was ABORTED three times shows a fault of the node or of the study: the run ends.
ABORTED_RETRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HostContext:
    """What a host needs for a launch job. `isolated`: it does not wait for other replays on its host."""

    prepared: Prepared
    cores: Cores
    gpus: Gpus
    isolated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What all launches of a run share. `home` is TUNER_HOME; `work` does jobs elsewhere (None: here)."""

    prepared: Prepared
    store: Store
    home: Path
    clock: Clock
    tell: Tell
    cores: Cores = field(default_factory=lambda: split_cores(sorted(os.sched_getaffinity(0))))
    gpus: Gpus = field(default_factory=lambda: Gpus(nvml=None))
    work: "Executor | None" = None
    budget: LaunchBudget = field(default_factory=LaunchBudget)
    seconds: Callable[[], float] = time.monotonic
    """Reads a clock that only goes forward; a virtual engine brings its own."""

    def gpus_held(self, candidate: Candidate) -> int:
        """How many GPUs the candidate's engine holds; wall time times this is GPU-seconds."""
        prepared = self.prepared
        own = compile_candidate(candidate, prepared.facts, env=prepared.file.engine.env).argv
        return held(prepared, (*prepared.fixed, *own))

    def launches(self) -> Sequence[Launch]:
        """The study's launches so far."""
        return self.store.launches(self.prepared.study.id)

    def estimates(self) -> LaunchEstimates:
        """The estimates for the next launch."""
        return launch_estimates(self.store, self.prepared, home=self.home if self.work is None else None)

    def settles(self, argv: Sequence[str]) -> bool | None:
        """Whether a first boot of these arguments is thrown away, as `serve` takes it."""
        seen = [(each.argv, each.timeline) for each in self.launches()]
        return False if self.budget.left < 1 else settles(seen, masking.arguments(tuple(argv)))

    @property
    def host(self) -> HostContext:
        return HostContext(prepared=self.prepared, cores=self.cores, gpus=self.gpus)

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
class LaunchResult:
    """The result of a launch. `curtailed` is why a replay was stopped early, None if none was."""

    launch: Launch
    measurements: tuple[Measurement, ...]
    gpu_seconds: float
    curtailed: str | None = None
    answers: tuple[CanaryAnswer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """One launch and its replays, for the host that does them; that host has no access to the history.

    `kv_tokens` is the largest KV cache that a launch of the study had so far; `settle` as `serve` takes it.
    `stay`: the engine goes on running for later jobs of the same launch, until `EngineHost.release`. `limits`
    (with `stay`) are set in an engine that runs already; None: the job launches it.
    """

    spec: LaunchSpec
    passes: tuple[Pass, ...]
    number: int
    kv_tokens: int | None = None
    settle: bool | None = None
    stay: bool = False
    limits: Mapping[str, Value] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a ready engine reported: its configuration, seconds of its start-up phases, KV cache in tokens."""

    effective: Mapping[str, Value]
    timeline: Mapping[str, float]
    kv_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One pass: its measurement, why it was stopped early (None: it was not), answers to canary prompts."""

    measurement: Measurement
    curtailed: str | None
    answers: tuple[CanaryAnswer, ...] = ()


News = str | Serving | Progress

Note = Callable[[News], None]

Executor = Callable[[LaunchJob, Note], Awaitable[Sequence[Measured]]]


@runtime_checkable
class EngineHost(Protocol):
    """An `Executor` on which an engine can stay between jobs: this host, or a node of a cluster."""

    async def __call__(self, job: LaunchJob, note: Note) -> Sequence[Measured]:
        """Do a launch job. LimitsRefused, beside the errors of a launch."""

    async def holds(self, launch_id: str) -> bool:
        """Whether the engine of this launch still runs."""

    async def release(self) -> None:
        """Stop the engine that stayed, if any. Returns when it is gone."""


def held(prepared: Prepared, argv: Sequence[str]) -> int:
    """How many GPUs an engine of the study with these arguments is charged for; 1 on a CPU."""
    return 1 if prepared.facts.platform == "cpu" else gpus_held(argv)


# About how many seconds of a replay are not its window: warm-up requests before it, open requests after it.
# Used to estimate times only, so its error moves no decision by more than one replay.
SETTLE_S = 15.0


def usual_replays_s(store: Store | None, prepared: Prepared) -> tuple[float, float]:
    """About how many seconds the replays of a trial and of a launch of the confirmation take: the medians of
    this study. What was not measured yet is computed from the slices.
    """
    study = prepared.study
    searched, every = (replays_s(prepared, parts) for parts in (study.searched_slices, study.slices))
    if store is None:
        return searched, every
    spans = [
        (t.ended_at - t.started_at).total_seconds() - s
        for t, s in _ready(store.trials(study.id))
        if t.ended_at is not None and repeat_of(t.directory) is None
    ]
    again = [
        each.measuring_s
        for each in store.launches(study.id)
        if repeat_of(each.directory) and each.verdict is None and each.measuring_s is not None
    ]
    if spans:
        searched, every = median(spans), every * median(spans) / searched
    return searched, median(again) if again else every


def replays_s(prepared: Prepared, parts: Sequence[Slice]) -> float:
    """About how many seconds the replays of these slices take in one engine, as far as the plan tells."""
    plan = prepared.plan
    outside = plan.load_warmup_s + min(SETTLE_S, plan.warmup_limit_s + plan.tail_limit_s)
    return sum(s.duration_s for s in parts) / prepared.file.speed + len(parts) * outside


def held_out_s(prepared: Prepared) -> float:
    """About how much longer a launch of the confirmation replays than a trial."""
    study = prepared.study
    return replays_s(prepared, study.slices) - replays_s(prepared, study.searched_slices)


SCHEDULER = "--scheduler-cls"

# After this many failures of running engines in a row every candidate gets an engine of its own: each failure
# cost a launch.
FAILURES = 3

# Origin of a trial that measures a screened candidate again, in an engine of its own.
RELAUNCHED = "relaunched"

# Origin of the candidate that the SLO policy would pick by the simulator's predictions.
PICKED = "simulator: SLO"

# Origins of trials that always have an engine of their own. PICKED is the likeliest finalist, so it would be
# relaunched anyway.
OWN_ENGINE = (RELAUNCHED, PICKED)


def changeable(prepared: Prepared) -> bool:
    """Whether the study asks for live limits, turns any, and its engine takes a scheduler class."""
    turned = any(name in prepared.space.levels for name in adapter_of(prepared.facts.kind).live_knobs)
    asked = prepared.file.live_limits == "auto"
    return asked and turned and SCHEDULER in prepared.facts.flags


def screens(prepared: Prepared, trials: Sequence[Trial]) -> bool:
    """Whether the next candidate is screened in a running engine. The engine must be able to do it. A good
    candidate is replayed a second time in its own engine, so a launch must also take longer than this
    second replay. A study cannot screen if FAILURES trials had an engine of their own and none was
    screened.
    """
    if not changeable(prepared):
        return False
    own = [t for t in trial_view.latest(trials) if not t.is_baseline and t.origin not in OWN_ENGINE]
    alone = sum(not t.screened and t.measurement is not None for t in own)
    cannot = alone >= FAILURES and not any(t.screened for t in own)
    return launch_cost(prepared, trials) > 2 and not cannot


def launch_cost(prepared: Prepared, trials: Sequence[Trial]) -> float:
    """How many times as long a trial with a launch takes as a replay alone."""
    replay = replay_s(trials) or replays_s(prepared, prepared.study.searched_slices)
    return 1 + launch_s(trials) / replay


def _ready(trials: Sequence[Trial]) -> list[tuple[Trial, float]]:
    """The complete trials with an engine of their own, and after how many seconds it answered."""
    own = [t for t in trials if t.state is TrialState.COMPLETE and not t.screened]
    return [(t, ready) for t in own if t.measurement and (ready := t.measurement.values.get("ready_s"))]


def replay_s(trials: Sequence[Trial]) -> float | None:
    """About how many seconds a replay takes, including its last requests. This is the least of the trials
    with an engine of their own, because a trial may have waited or started its engine twice. None: there is
    no such trial.
    """
    spans = [(t.ended_at - t.started_at).total_seconds() - s for t, s in _ready(trials) if t.ended_at]
    return min(spans, default=None)


def launch_s(trials: Sequence[Trial]) -> float:
    """About how many seconds a launch takes until the engine answers: the median of the trials that had an
    engine of their own, without the baseline, whose launch compiles.
    """
    spans = [ready for t, ready in _ready(trials) if not t.is_baseline]
    return median(spans) if spans else LAUNCH_S
