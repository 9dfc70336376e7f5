"""One attempt of one trial: measure it, decide its state, and decide whose fault a failed launch is.

Where that is faster, one running engine measures several trials in turn (it screens them): its scheduler's
limits change between replays. The engine of a trial stays and screens other candidates that differ only in
limits. If none fits, an engine is launched whose two sizes that limits cannot exceed are as large as the
space allows. A candidate that fails there is measured again in an engine of its own.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from tuner import masking
from tuner.adapters import adapter_of
from tuner.engine import boots, failures, limits
from tuner.engine.failures import KINDS, asks_its_share, mending, refused_flags
from tuner.engine.metrics import differences, identity_of
from tuner.errors import Aborted, EngineError, Infeasible, StudyFailed
from tuner.knobs.catalogue import read_back
from tuner.measures import many
from tuner.metrics import CANCELLED, CUT
from tuner.records import Candidate, Launch, LaunchSpec, Measurement, Trial, TrialState, Value, Violation
from tuner.replay import outcomes
from tuner.search.trial_view import BUDGET, SEQS, encode
from tuner.tuning import quality
from tuner.tuning.context import (
    FAILURES,
    SCHEDULER,
    EngineHost,
    LaunchJob,
    LaunchResult,
    Pass,
    RunContext,
    RunEvent,
    changeable,
    held,
    largest_kv,
    ready_of,
)
from tuner.tuning.early_stopping import Judge
from tuner.tuning.study import Prepared
from tuner.tuning.survey import flag_name
from tuner.tuning.trial import (
    GateFailed,
    LaunchRecorder,
    LimitsRefused,
    LocalHost,
    add_launch,
    launch,
    launch_spec,
    launched,
    make,
)

# A candidate of which a larger share of the requests fails is INFEASIBLE: no candidate may win latency by
# losing requests.
ERROR_RATE = 0.01

AFTER_TAIL = "still ran at the end of the tail (plan: tail_limit_s)"

# Kinds of failures that a reason names, the most frequent first: a sentence with more is not read.
KINDS_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """How an attempt is measured.

    `live` screens it in a running engine if that is possible (`defaults` are what the engine runs with when
    nothing is asked); with `own` it launches an engine and leaves it running for others. `judge` may stop it
    early. `folder` ends the name of the launch's folder (default: the attempt).
    """

    live: "ScreeningEngine | None" = None
    own: bool = False
    defaults: Mapping[str, Value] = field(default_factory=dict)
    judge: Judge | None = None
    folder: str = ""


async def perform(context: RunContext, trial: Trial, earlier: Sequence[Trial], how: MeasureOptions) -> Trial:
    """Measure a RUNNING trial and write its end. `earlier` are the attempts of this number before.

    StudyFailed and cancellation are raised again after the trial was written as ABORTED.
    """
    passes = [Pass(slices=context.prepared.study.searched_slices, judge=how.judge)]
    started = context.seconds()
    screened = False
    causes = [t.cause for t in earlier]
    try:
        found, screened = await _measure(context, trial, passes, how, causes)
    except EngineError as raised:
        error = blamed(context.prepared, raised, served=bool(ready_of(context.launches())))
        trial = replace(trial, gpu_seconds=_held(context, trial, started))
        failed = _close(context, _failed(trial, error, causes))
        if isinstance(error, StudyFailed):
            raise error from raised
        return failed
    except asyncio.CancelledError:
        reason = "the run was stopped in the middle of this trial"
        trial = replace(trial, gpu_seconds=_held(context, trial, started))
        _close(context, replace(trial, state=TrialState.ABORTED, reason=reason, cause="stopped"))
        raise
    ended = replace(_judged(context, trial, found), screened=screened)
    return _close(context, _with_estimate(ended, how.judge))


async def _measure(
    context: RunContext, trial: Trial, passes: Sequence[Pass], how: MeasureOptions, causes: list[str | None]
) -> tuple[LaunchResult, bool]:
    """(the result, whether it was screened). If the candidate's own engine fails because its limits can be
    changed, that counts as a first try (in `causes`), and a plain launch is the second.
    """
    directory = context.directory(trial.number, how.folder or str(trial.attempt))
    if how.live is not None:
        try:
            found = await how.live.measure(trial, passes, directory, how.defaults, own=how.own)
            return found, not how.own
        except CannotScreen as error:
            causes += [error.cause] if how.own else []
            context.tell(RunEvent(kind="note", text=f"launched in its own engine: {error}", trial=trial))
        await how.live.close()
    return await launch(context, trial, passes, directory), False


def _held(context: RunContext, trial: Trial, started: float) -> float:
    """The GPU seconds of an attempt that did not end well."""
    return (context.seconds() - started) * context.gpus_held(trial.candidate)


def _close(context: RunContext, trial: Trial) -> Trial:
    return context.store.finish_trial(replace(trial, ended_at=context.clock()))


def _failed(trial: Trial, error: EngineError, causes: Sequence[str | None]) -> Trial:
    """INFEASIBLE once the cause has no retries left, else ABORTED: the trial is repeated."""
    ended = replace(trial, reason=str(error), cause=error.cause)
    if isinstance(error, GateFailed):
        ended = replace(ended, measurements=(replace(error.measurement, launch_id=None, kind="partial"),))
    if not isinstance(error, Infeasible):
        return replace(ended, state=TrialState.ABORTED)
    again = causes.count(error.cause) < retries_of(error)
    state = TrialState.ABORTED if again else TrialState.INFEASIBLE
    return replace(ended, state=state, violation=error.violation)


def retries_of(error: Infeasible) -> int:
    """How often a launch that failed like this is repeated before the candidate is at fault."""
    phase: failures.Phase = "run" if (error.violation.oom or 0.0) > 1.0 else "startup"
    return failures.retries(error.cause, phase)


def failing(values: Mapping[str, float], errors: Mapping[str, int] = MappingProxyType({})) -> str | None:
    """Why a measurement does not serve the traffic: more than ERROR_RATE of its requests failed. None: it
    does. `errors` counts the failures by kind (`errors_of`).
    """
    if _error_rate(values) <= ERROR_RATE:
        return None
    failed, whole = f"{values['failed']:.0f} of {many(values['requests'], 'request')}", values["failed"]
    if len(errors) == 1 and sum(errors.values()) == whole:
        return f"{failed}: {next(iter(errors))}"
    if errors:
        most = sorted(errors.items(), key=lambda each: -each[1])[:KINDS_NAMED]
        return f"{failed} failed: {'; '.join(f'{count} {error}' for error, count in most)}"
    if cut := values.get("unfinished"):
        return (
            f"{failed} failed, {cut:.0f} because they still ran at the end of the tail (plan: tail_limit_s)"
        )
    return f"{failed} failed"


def errors_of(measurement: Measurement) -> dict[str, int]:
    """How many requests of a measurement failed, by kind of failure; empty if its files are on another
    host.
    """
    found: Counter[str] = Counter()
    for part in measurement.slices:
        if part.outcomes_file is None or not outcomes.is_here(part.outcomes_file):
            return {}
        failed = (o.error for o in outcomes.read(part.outcomes_file) if o.error and o.error != CANCELLED)
        found.update(
            # without request IDs
            re.sub(r"\b[0-9a-f-]{12,}\b", "…", error)[:120] if error != CUT else AFTER_TAIL
            for error in failed
        )
    return dict(found)


def _error_rate(values: Mapping[str, float]) -> float:
    return values["failed"] / values["requests"] if values.get("requests") else 0.0


def _judged(context: RunContext, trial: Trial, found: LaunchResult) -> Trial:
    """The trial with its state: COMPLETE, PRUNED if it was stopped early, INFEASIBLE if too many requests
    failed or its engine runs with other values.
    """
    extra = {"gpu_seconds": found.gpu_seconds}
    measurements = tuple(replace(m, values={**m.values, **extra}) for m in found.measurements)
    ended = replace(
        trial,
        state=TrialState.PRUNED if found.curtailed else TrialState.COMPLETE,
        reason=found.curtailed,
        measurements=measurements,
        effective=found.launch.effective,
        gpu_seconds=found.gpu_seconds,
    )
    _tell_drift(context, ended, found)
    if trial.is_baseline and found.answers:
        quality.keep(quality.path_of(context.home, context.prepared), found.answers)
    values = measurements[-1].values
    if not found.curtailed:  # else requests that were cut count as failed
        ended = replace(ended, violation=Violation(err=_error_rate(values) - ERROR_RATE))
    if (reason := failing(values, errors_of(measurements[-1]))) is not None and not found.curtailed:
        return replace(ended, state=TrialState.INFEASIBLE, reason=reason, cause="errors")
    if (reason := unlike(trial.candidate, found.launch.effective)) is not None:
        return replace(ended, state=TrialState.INFEASIBLE, reason=reason, cause="not_effective")
    return _with_quality(context, ended, found)


def _with_quality(context: RunContext, trial: Trial, found: LaunchResult) -> Trial:
    """A candidate whose answers differ too much from those of the baseline is INFEASIBLE."""
    if not found.answers:
        return trial
    path, baseline = quality.path_of(context.home, context.prepared), context.prepared.baseline
    base, turned = quality.kept(path), quality.changes(trial.candidate, baseline)
    if not base and turned:
        what = f"its answers ({', '.join(turned)})"
        text = f"{what} cannot be judged, because the baseline gave no answers"
        context.tell(RunEvent(kind="note", text=text, trial=trial))
    if not base or not turned:
        return trial
    values = quality.compared(base, found.answers)
    last = trial.measurements[-1]
    last = replace(last, values={**last.values, **values})
    judged = replace(trial, measurements=(*trial.measurements[:-1], last))
    asked = context.prepared.file.quality
    least = 0.0 if asked == "off" else asked.min_token_agreement
    if (reason := quality.verdict(values, least, turned)) is None:
        return judged
    return replace(judged, state=TrialState.INFEASIBLE, reason=reason, cause="quality")


def _tell_drift(context: RunContext, trial: Trial, found: LaunchResult) -> None:
    """A note where this boot's KV cache differs from earlier boots of the same configuration."""
    key = identity_of(found.launch.effective)
    earlier = [
        each.kv_tokens
        for each in context.launches()
        if each.id != found.launch.id and key and identity_of(each.effective) == key
    ]
    drift = boots.kv_drift(found.launch.kv_tokens, earlier)
    if drift is not None:
        text = f"its KV cache differs by {drift:+.0%} from that of earlier boots of this configuration"
        context.tell(RunEvent(kind="note", text=text, trial=trial))


def _with_estimate(trial: Trial, by: Judge | None) -> Trial:
    """A PRUNED trial has its partial measurement, and after it the estimate of its final values."""
    if trial.state is not TrialState.PRUNED or by is None or not trial.measurements:
        return trial
    partial = replace(trial.measurements[-1], kind="partial")
    estimated = by.estimate()
    last = (Measurement(values=estimated, kind="estimate", launch_id=partial.launch_id),) if estimated else ()
    return replace(trial, measurements=(*trial.measurements[:-1], partial, *last))


def unlike(asked: Candidate, found: Mapping[str, Value]) -> str | None:
    """Why the engine does not run the candidate: the first knob with another value. None: it does."""
    stated = Candidate({name: value for name, value in asked.items() if value is not None})
    for name, (wanted, reported) in differences(stated, found, read_back()).items():
        return f"the engine runs {name} = {reported}, not {wanted}"
    return None


# Causes that can come from a knob as well as from a fixed argument.
GENERAL = ("crashed", "engine_dead", "config_invalid", "bad_flag")


def turned(prepared: Prepared) -> frozenset[str]:
    """The knobs that differ between candidates of the study."""
    levels, today = prepared.space.levels, prepared.baseline
    return frozenset(
        name
        for name, values in levels.items()
        if len(values) > 1 or (name in today and today[name] not in values)
    )


def named(text: str, names: Collection[str]) -> frozenset[str]:
    """The knobs that a text names, with underscores or as a flag."""
    return frozenset(
        name
        for name in names
        if re.search(rf"(?<![\w-])(--(no-)?)?{name.replace('_', '[-_]')}(?![\w-])", text)
    )


def mends(prepared: Prepared, cause: str, sentence: str) -> bool:
    """Whether a knob that the study turns can mend what ended a launch."""
    knobs = turned(prepared)
    return bool(knobs & (named(sentence, knobs) | mending(cause, sentence)))


def blamed(prepared: Prepared, error: EngineError, *, served: bool) -> EngineError:
    """The error as it counts for this study. `served`: an engine of the study has been ready before.

    A fault that no knob of the study can mend is StudyFailed. One that a knob can mend is Infeasible, and so
    is one that the candidate may have caused if another candidate served. Other errors stay as they are.
    """
    sentence = f"{error} {error.evidence}"
    if isinstance(error, StudyFailed):
        about = KINDS.get(error.cause)
        own = about is not None and about.by_candidate and served
        if not own and not mends(prepared, error.cause, sentence):
            return error
        return Infeasible(
            str(error), cause=error.cause, evidence=error.evidence, violation=Violation(err=1.0)
        )
    if not isinstance(error, Infeasible) or served:
        return error
    if asks_its_share(error.cause, sentence) and not mends(prepared, error.cause, sentence):
        return StudyFailed(str(error), cause=error.cause, evidence=error.evidence)
    if error.cause not in GENERAL:
        return error
    fixed = {flag_name(key).removeprefix("--").replace("-", "_") for key in prepared.file.engine.args}
    fixed |= {name for name in prepared.baseline if name not in prepared.space.levels}
    if error.cause == "bad_flag":
        fixed |= {flag.replace("-", "_") for flag in refused_flags(error.evidence)}
    if named(sentence, fixed) and not mends(prepared, error.cause, sentence):
        return StudyFailed(str(error), cause=error.cause, evidence=error.evidence)
    return error


# ---- a running engine that screens

# Limits that may only be lowered in a running engine: buffers are as large as they were at its launch.
SIZES = ("max_num_seqs", "max_num_batched_tokens")


class CannotScreen(Exception):
    """This candidate needs an engine of its own; the message is the reason, `cause` what ended the running
    engine.
    """

    def __init__(self, reason: str, cause: str | None = None) -> None:
        super().__init__(reason)
        self.cause = cause


def widest(prepared: Prepared, candidate: Candidate) -> tuple[Candidate, ...]:
    """What to launch so that the candidate and as many others as possible can be screened: the sizes of the
    space's last levels, with every other limit as the engine has it. The widest comes first. Known failures
    are left out.
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
    """The limits that make a running engine, which reports `effective`, equal to a launch of the candidate.
    None if other limits are not enough for this, or if it is not known.
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
        """What turns the running engine into the candidate; None if that is not enough."""
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
            if changing is not None and not _failed_before(launches, spec.argv):
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


def _failed_before(launches: Sequence[Launch], argv: Sequence[str]) -> bool:
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
