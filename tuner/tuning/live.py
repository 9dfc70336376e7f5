"""One running engine that measures several trials in turn: its scheduler's limits change between replays.

The engine of a trial stays and screens other candidates that differ only in limits. If none fits, an engine
is launched whose two sizes that limits cannot exceed are as large as the space allows. A candidate that fails
here is measured again in an engine of its own.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from tuner import masking
from tuner.adapters import adapter_of
from tuner.engine import limits
from tuner.engine.failures import KINDS
from tuner.errors import Aborted, EngineError, Infeasible, StudyFailed
from tuner.records import Candidate, Launch, LaunchSpec, Trial, TrialState, Value
from tuner.search import trial_view
from tuner.search.trial_view import BUDGET, SEQS, encode
from tuner.tuning.context import (
    LAUNCH_S,
    EngineHost,
    LaunchJob,
    LaunchResult,
    Pass,
    RunContext,
    held,
    largest_kv,
    replays_s,
)
from tuner.tuning.study import Prepared, flag_name
from tuner.tuning.trial import (
    LaunchRecorder,
    LimitsRefused,
    LocalHost,
    add_launch,
    launch_spec,
    launched,
    make,
)

SCHEDULER = "--scheduler-cls"

# Limits that may only be lowered in a running engine: buffers are as large as they were at its launch.
SIZES = ("max_num_seqs", "max_num_batched_tokens")


# After this many failures of running engines in a row every candidate gets an engine of its own: each failure
# cost a launch.
FAILURES = 3


class CannotScreen(Exception):
    """This candidate needs an engine of its own; the message is the reason, `cause` what ended the running
    engine.
    """

    def __init__(self, reason: str, cause: str | None = None) -> None:
        super().__init__(reason)
        self.cause = cause


def changeable(prepared: Prepared) -> bool:
    """Whether the study asks for live limits, turns any, and its engine takes a scheduler class."""
    turned = any(name in prepared.space.levels for name in adapter_of(prepared.facts.kind).live_knobs)
    asked = prepared.file.live_limits == "auto"
    return asked and turned and SCHEDULER in prepared.facts.flags


def widest(prepared: Prepared, candidate: Candidate) -> tuple[Candidate, ...]:
    """What to launch so that the candidate and as much else as possible can be screened: the sizes of the
    space's last levels, every other limit as the engine has it. The widest first, known failures left out.
    """
    tops = {
        name: max(v for v in levels if isinstance(v, int))
        for name in SIZES
        if (levels := prepared.space.levels.get(name)) and any(isinstance(v, int) for v in levels)
    }
    kept = {
        name: value
        for name, value in candidate.items()
        if name not in adapter_of(prepared.facts.kind).live_knobs
    }
    asked = {name: candidate[name] for name in SIZES if name in candidate}
    found: list[Candidate] = []
    for sizes in (tops, {**tops, **{n: v for n, v in asked.items() if n != "max_num_seqs"}}):
        wide = Candidate({**kept, **sizes, **prepared.space.inherited})
        if prepared.known_failure(wide) is None and wide not in found:
            found.append(wide)
    return tuple(found)


def fits(
    prepared: Prepared,
    launched: Candidate,
    candidate: Candidate,
    defaults: Mapping[str, Value],
    effective: Mapping[str, Value] | None = None,
) -> dict[str, Value] | None:
    """The limits that turn a running engine, which reports `effective`, into what a launch of the candidate
    would be; None where that is not enough, or not known.
    """
    # What the candidate does not set is not today's value, but the engine's own.
    encoding = encode(prepared.space, defaults, unset=prepared.baseline.keys() - candidate.keys())
    knobs = adapter_of(prepared.facts.kind).live_knobs
    before, after = encoding.completed(launched), encoding.completed(candidate)
    found = limits.changeable(before, after, knobs)
    set_by_hand = BUDGET in candidate or flag_name(BUDGET) in masking.arguments(prepared.fixed)
    moved = BUDGET in launched or before.get(SEQS) != after.get(SEQS)
    if found is None or set_by_hand or not moved or encoding.defaults.budgets is None:
        return found
    own, most = encoding.budget(after), launched.get(BUDGET, (effective or {}).get(BUDGET))
    if not isinstance(own, int) or not isinstance(most, int) or own > most:
        return None
    return {**found, BUDGET: own}


class ScreeningEngine:
    """The running engine that screens the candidates of a run, one after the other; none before the first
    trial.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        found = LocalHost(context.host) if context.work is None else context.work
        self._host: EngineHost | None = found if isinstance(found, EngineHost) else None
        self._spec: LaunchSpec | None = None
        self._row: LaunchRecorder | None = None
        self._launched: Candidate = Candidate()
        self._charged_s = 0.0
        self._in_a_row = 0
        self._served = False
        self.failures: list[str] = []

    @property
    def possible(self) -> bool:
        """Whether this study's engines can be changed while they run, as far as is known by now."""
        can_stay = self._host is not None and self._in_a_row < FAILURES
        return can_stay and changeable(self._context.prepared)

    async def measure(
        self,
        trial: Trial,
        passes: Sequence[Pass],
        directory: Path,
        defaults: Mapping[str, Value],
        *,
        own: bool = False,
    ) -> LaunchResult:
        """Measure a candidate inside the running engine; launch a wide one if none fits. With `own`, launch
        one for this candidate, which stays to screen others.

        CannotScreen if it needs an engine of its own; else as `launch`. An engine that ends while it screens
        is Aborted: only a launch of its own shows whose fault that was.
        """
        if self._host is None or not self.possible:
            raise CannotScreen("live limits are off")
        make(directory)
        begun = time.monotonic()
        wanted = None if own else await self._limits(self._host, trial.candidate, defaults)
        if wanted is None:
            await self.close()
            self._charged_s = begun
            await self._launch(self._host, trial, own)
            wanted = {} if own else await self._limits(self._host, trial.candidate, defaults)
        if wanted is None or self._spec is None or self._row is None:
            raise CannotScreen("its sizes are larger than the running engine's")
        job = LaunchJob(
            spec=replace(self._spec, directory=str(directory)), passes=tuple(passes), number=trial.number,
            kv_tokens=largest_kv(self._context.launches()), stay=True, limits=wanted,
        )  # fmt: skip
        try:
            return await self._replay(self._host, self._row, trial, job)
        except Infeasible as error:
            await self.close(f"{error.cause}: {error}")
            raise Aborted(
                f"in a running engine: {error}", cause=error.cause, evidence=error.evidence
            ) from error
        except EngineError as error:
            if error.cause not in ("gate", "disk"):
                await self.close(f"{error.cause}: {error}")
            raise

    async def _replay(
        self, host: EngineHost, row: LaunchRecorder, trial: Trial, job: LaunchJob
    ) -> LaunchResult:
        row.trial = trial
        try:
            measured = await host(job, row.note)
            self._in_a_row = 0
        except LimitsRefused as error:
            await self._give_up(str(error))
            raise CannotScreen(str(error)) from error
        finally:
            begun, self._charged_s = self._charged_s, time.monotonic()
        ended = replace(row.row, effective={**row.row.effective, **_shown(job.limits or {})})
        return launched(
            ended, measured, (self._charged_s - begun) * held(self._context.prepared, job.spec.argv)
        )

    async def _limits(
        self, host: EngineHost, candidate: Candidate, defaults: Mapping[str, Value]
    ) -> dict[str, Value] | None:
        """What turns the running engine into the candidate; None where that is not enough."""
        if self._spec is None or not await host.holds(self._spec.launch_id):
            return None
        effective = {} if self._row is None else self._row.row.effective
        return fits(self._context.prepared, self._launched, candidate, defaults, effective)

    async def _launch(self, host: EngineHost, trial: Trial, own: bool) -> None:
        """Launch the trial's own engine, or the widest that it can be screened in. CannotScreen when none
        comes up.
        """
        context = self._context
        wide, spec = self._wide(trial, own)
        row = self._row = LaunchRecorder(context, add_launch(context, spec), trial)
        settle = context.settles(spec.argv) if own else False
        job = LaunchJob(spec=spec, passes=(), number=trial.number, settle=settle, stay=True)
        try:
            await host(job, row.note)
        except (Infeasible, StudyFailed) as error:
            if _certain(error, own=own) or (own and self._served and isinstance(error, Infeasible)):
                await self.close(f"{error.cause}: {error}")
                raise
            await self._give_up(f"{error.cause}: {error}")
            sentence = f"an engine whose limits can change failed: {error}"
            raise CannotScreen(sentence, error.cause) from error
        except EngineError as error:
            await self.close(f"{error.cause}: {error}")
            raise Aborted(str(error), cause=error.cause, evidence=error.evidence) from error
        except BaseException:
            row.close("stopped")
            self._row = None
            raise
        self._spec, self._launched, self._served = spec, wide, True
        context.store.finish_launch(row.row)

    def _wide(self, trial: Trial, own: bool) -> tuple[Candidate, LaunchSpec]:
        """What to launch, and how: the first that is not known to fail. CannotScreen when there is none."""
        prepared, context = self._context.prepared, self._context
        directory = context.directory(trial.number, f"live-{trial.attempt}")
        known, launches = context.estimates(), context.launches()
        changing = adapter_of(prepared.facts.kind).live_limits
        for wide in (trial.candidate,) if own else widest(prepared, trial.candidate):
            spec = launch_spec(prepared, wide, directory, context.cores, known=known)
            if changing is not None and not _failed(launches, spec.argv):
                make(directory)
                return wide, replace(spec, argv=(*spec.argv, *changing.argv))
        raise CannotScreen("no larger engine is known to work")

    async def _give_up(self, reason: str) -> None:
        self._in_a_row += 1
        self.failures.append(reason)
        await self.close(reason)

    async def close(self, verdict: str | None = None) -> None:
        """Stop the running engine, if any, and close its row."""
        row, self._row, self._spec = self._row, None, None
        try:
            if self._host is not None:
                await self._host.release()
        finally:
            if row is not None:
                row.close(verdict)


def _certain(error: Infeasible | StudyFailed, *, own: bool) -> bool:
    """Whether the class that changes limits has nothing to do with it: a fault of the study, or, of the
    trial's own engine, one that a knob acts on.
    """
    words = f"{error} {error.evidence}".lower()
    if isinstance(error, StudyFailed):
        return "scheduler" not in words and "live_limits" not in words
    return own and error.cause in KINDS and bool(KINDS[error.cause].knobs) and error.cause != "v0_fallback"


def _failed(launches: Sequence[Launch], argv: Sequence[str]) -> bool:
    """Whether an engine of these arguments and with limits to change failed to start by its own fault."""
    for each in launches:
        kind = KINDS.get((each.verdict or "").partition(":")[0])
        ours = kind is not None and kind.outcome == "infeasible" and "ready_s" not in each.timeline
        changing = each.argv.index(SCHEDULER) if SCHEDULER in each.argv else None
        if ours and changing is not None and each.argv[:changing] == masking.arguments(argv):
            return True
    return False


def _shown(wanted: Mapping[str, Value]) -> dict[str, Value]:
    """The limits as effective values: they were read back after they were set."""
    return {name: value for name, value in wanted.items() if value is not None}


# Origin of a trial that measures a screened candidate again, in an engine of its own.
RELAUNCHED = "relaunched"


def screens(prepared: Prepared, trials: Sequence[Trial]) -> bool:
    """Whether the next candidate is to be screened in a running engine: the engine can do it, and a launch
    takes longer than the second replay that a good candidate costs then. A study cannot screen if FAILURES
    trials had an engine of their own and none was screened.
    """
    if not changeable(prepared):
        return False
    replay = replays_s(prepared, prepared.study.searched_slices)
    own = [t for t in trial_view.latest(trials) if not t.is_baseline and t.origin != RELAUNCHED]
    alone = sum(not t.screened and t.measurement is not None for t in own)
    cannot = alone >= FAILURES and not any(t.screened for t in own)
    return launch_s(trials, replay) > replay and not cannot


def launch_s(trials: Sequence[Trial], replay: float) -> float:
    """About how many seconds a launch takes: the median of the trials that had an engine of their own."""
    done = (t for t in trials if t.state is TrialState.COMPLETE and not t.screened and not t.is_baseline)
    spans = [t.gpu_seconds - replay for t in done]
    return max(1.0, median(spans)) if spans else LAUNCH_S
