"""One attempt of one trial: measure it, decide its state, and decide whose fault a failed launch is."""

import asyncio
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tuner.engine import boots, effective, failures
from tuner.engine.failures import KINDS, refused_flags
from tuner.errors import EngineError, Infeasible, StudyFailed
from tuner.knobs.catalogue import read_back
from tuner.measures import many
from tuner.metrics import CANCELLED, CUT
from tuner.records import Candidate, Launch, Measurement, Run, Trial, TrialState, Value, Violation
from tuner.replay import outcomes
from tuner.tuning import quality
from tuner.tuning.context import LaunchResult, Pass, RunContext, RunEvent, ready_of
from tuner.tuning.early_stopping import Judge
from tuner.tuning.live import CannotScreen, ScreeningEngine
from tuner.tuning.study import Prepared, flag_name
from tuner.tuning.trial import GateFailed, launch

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

    live: ScreeningEngine | None = None
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
            context.tell(RunEvent(kind="note", text=f"launched by itself: {error}", trial=trial))
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
    """How many requests of a measurement failed, by kind of failure; empty where its files are on another
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
        text = f"{what} cannot be judged, because there are no answers of the baseline"
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
    key = effective.identity(found.launch.effective)
    earlier = [
        each.kv_tokens
        for each in context.launches()
        if each.id != found.launch.id and key and effective.identity(each.effective) == key
    ]
    drift = boots.kv_drift(found.launch.kv_tokens, earlier)
    if drift is not None:
        text = f"its KV cache is {drift:+.0%} of what earlier boots of this configuration had"
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
    for name, (wanted, reported) in effective.differences(stated, found, read_back()).items():
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
    about = KINDS.get(cause)
    return bool(knobs & named(sentence, knobs)) or (about is not None and bool(knobs & set(about.knobs)))


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
    if not isinstance(error, Infeasible) or served or error.cause not in GENERAL:
        return error
    fixed = {flag_name(key).removeprefix("--").replace("-", "_") for key in prepared.file.engine.args}
    fixed |= {name for name in prepared.baseline if name not in prepared.space.levels}
    if error.cause == "bad_flag":
        fixed |= {flag.replace("-", "_") for flag in refused_flags(error.evidence)}
    if named(sentence, fixed) and not mends(prepared, error.cause, sentence):
        return StudyFailed(str(error), cause=error.cause, evidence=error.evidence)
    return error


def check_start(prepared: Prepared, run: Run, trials: Sequence[Trial], launches: Sequence[Launch]) -> None:
    """StudyFailed if two candidates of a run failed at start-up for one cause that no knob can mend."""
    ours = [t for t in trials if t.run_id == run.id]
    ready = any("ready_s" in each.timeline for each in launches if each.started_at >= run.started_at)
    last = None if ready or any(t.measurements for t in ours) else hopeless(prepared, ours)
    if last is not None:
        raise StudyFailed(f"no candidate can start: {last.reason}", cause=last.cause or "crashed")


def hopeless(prepared: Prepared, trials: Sequence[Trial]) -> Trial | None:
    """The second candidate that failed for a cause that no knob of the study can mend.

    `trials` are those of one run in which no engine was ready yet.
    """
    ended = [t for t in trials if t.state is TrialState.INFEASIBLE and t.cause in KINDS]
    for number, trial in enumerate(ended):
        alike = [t for t in ended[:number] if _root(t) == _root(trial) and t.candidate != trial.candidate]
        if alike and not mends(prepared, trial.cause or "", trial.reason or ""):
            return trial
    return None


def never_started(trials: Sequence[Trial], run_id: str) -> Trial | None:
    """The failed baseline that a run measures again, if no earlier run measured any engine of the study: the
    fault may have been mended since. None: no.
    """
    if any(t.measurements or t.run_id == run_id for t in trials):
        return None
    bases = [t for t in trials if t.is_baseline and t.state is TrialState.INFEASIBLE and t.cause in KINDS]
    return max(bases, key=lambda t: (t.number, t.attempt), default=None)


def _root(trial: Trial) -> tuple[str | None, str]:
    """The cause and text of a failure without numbers: sizes, ports and processes differ."""
    return trial.cause, re.sub(r"0x[0-9a-f]+|\d[\d.,]*", "#", trial.reason or "")
