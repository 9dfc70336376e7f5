"""One attempt of one trial, from its row to its end."""

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
from tuner.metrics import CANCELLED, CUT
from tuner.records import Candidate, Launch, Measurement, Run, Trial, TrialState, Value, Violation
from tuner.replay import outcomes
from tuner.search.early_stopping import Judge
from tuner.tuning import quality
from tuner.tuning.context import LaunchResult, Pass, RunContext, RunEvent, ready_of
from tuner.tuning.live import CannotScreen, ScreeningEngine
from tuner.tuning.study import Prepared, flag_name
from tuner.tuning.trial import GateFailed, launch

# More failed requests than this share, and the candidate is infeasible.
ERROR_RATE = 0.01

# How many kinds of failures a reason names, the most frequent first.
KINDS_TOLD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """How an attempt is measured. `live` screens it in a running engine where that can be done (`defaults`
    are what the engine runs with when nothing is asked), or with `own` leaves its own engine running for
    others; `judge` may cut it short.
    """

    live: ScreeningEngine | None = None
    own: bool = False
    defaults: Mapping[str, Value] = field(default_factory=dict)
    judge: Judge | None = None


async def perform(context: RunContext, trial: Trial, earlier: Sequence[Trial], how: MeasureOptions) -> Trial:
    """One attempt, from its RUNNING row to its finished one. `earlier` are this number's attempts before.

    StudyFailed and cancellation are passed on after the row was closed as ABORTED.
    """
    searched = tuple(s for s in context.prepared.study.slices if not s.held_out)
    passes = [Pass(slices=searched, judge=how.judge)]
    started = context.seconds()
    screened = False
    causes = [t.cause for t in earlier]
    try:
        found, screened = await _measure(context, trial, passes, how, causes)
    except EngineError as raised:
        error = blamed(context.prepared, raised, served=bool(ready_of(context.launches())))
        gpu_seconds = (context.seconds() - started) * context.gpus_held(trial.candidate)
        failed = _close(context, _failed(trial, error, causes, gpu_seconds))
        if isinstance(error, StudyFailed):
            raise error from raised
        return failed
    except asyncio.CancelledError:
        reason = "the run was stopped in the middle of this trial"
        _close(context, replace(trial, state=TrialState.ABORTED, reason=reason, cause="stopped"))
        raise
    ended = replace(_judged(context, trial, found), screened=screened)
    return _close(context, _with_estimate(ended, how.judge))


async def _measure(
    context: RunContext, trial: Trial, passes: Sequence[Pass], how: MeasureOptions, causes: list[str | None]
) -> tuple[LaunchResult, bool]:
    """(what was measured, whether inside a running engine). What ended an engine that was to screen, and that
    ran the trial's own candidate, joins the causes: launching it by itself is the second try.
    """
    directory = context.directory(trial.number, str(trial.attempt))
    if how.live is not None:
        try:
            found = await how.live.measure(trial, passes, directory, how.defaults, own=how.own)
            return found, not how.own
        except CannotScreen as error:
            causes += [error.cause] if how.own else []
            context.tell(RunEvent(kind="note", text=f"launched by itself: {error}", trial=trial))
        await how.live.close()
    return await launch(context, trial, passes, directory), False


def _close(context: RunContext, trial: Trial) -> Trial:
    return context.store.finish_trial(replace(trial, ended_at=context.clock()))


def _failed(trial: Trial, error: EngineError, causes: Sequence[str | None], gpu_seconds: float) -> Trial:
    """INFEASIBLE once the cause has used up its retries, else ABORTED: an attempt that decided nothing."""
    ended = replace(trial, reason=str(error), cause=error.cause, gpu_seconds=gpu_seconds)
    if isinstance(error, GateFailed):
        ended = replace(ended, measurements=(replace(error.measurement, launch_id=None, kind="partial"),))
    if not isinstance(error, Infeasible):
        return replace(ended, state=TrialState.ABORTED)
    again = causes.count(error.cause) < retries_of(error)
    state = TrialState.ABORTED if again else TrialState.INFEASIBLE
    return replace(ended, state=state, violation=error.violation)


def retries_of(error: Infeasible) -> int:
    """How often what ended so is tried again before it is the candidate's fault."""
    phase: failures.Phase = "run" if (error.violation.oom or 0.0) > 1.0 else "startup"
    return failures.retries(error.cause, phase)


def failing(values: Mapping[str, float], errors: Mapping[str, int] = MappingProxyType({})) -> str | None:
    """Why what was measured does not serve the traffic: more than ERROR_RATE of the requests failed.
    `errors`: how many requests failed of what (see `errors_of`).
    """
    if _error_rate(values) <= ERROR_RATE:
        return None
    failed, whole = f"{values['failed']:.0f} of {values['requests']:.0f} requests", values["failed"]
    if len(errors) == 1 and sum(errors.values()) == whole:
        return f"{failed}: {next(iter(errors))}"
    if errors:
        most = sorted(errors.items(), key=lambda each: -each[1])[:KINDS_TOLD]
        return f"{failed} failed: {'; '.join(f'{count} {error}' for error, count in most)}"
    if cut := values.get("unfinished"):
        return (
            f"{failed} failed, {cut:.0f} because they still ran at the end of the tail (plan: tail_limit_s)"
        )
    return f"{failed} failed"


def errors_of(measurement: Measurement) -> dict[str, int]:
    """What requests of a measurement failed of, and how many; empty where its outcomes are not here."""
    found: Counter[str] = Counter()
    for part in measurement.slices:
        if part.outcomes_file is None or not outcomes.is_here(part.outcomes_file):
            return {}
        failed = (o.error for o in outcomes.read(part.outcomes_file) if o.error not in (None, CANCELLED))
        found.update(_kind_of(error) for error in failed if error)
    return dict(found)


def _kind_of(error: str) -> str:
    """An error without what differs from request to request."""
    if error == CUT:
        return "still ran at the end of the tail (plan: tail_limit_s)"
    return re.sub(r"\b[0-9a-f-]{12,}\b", "…", error)[:120]


def _error_rate(values: Mapping[str, float]) -> float:
    return values["failed"] / values["requests"] if values.get("requests") else 0.0


def _judged(context: RunContext, trial: Trial, found: LaunchResult) -> Trial:
    """COMPLETE, PRUNED when the judge cut it, or INFEASIBLE when more than 1 % of the requests failed."""
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
    if not found.curtailed:  # else what was cut short counts as failed
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
        text = f"its answers ({', '.join(turned)}) are not judged: the baseline's own are missing"
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
    """A PRUNED trial carries its partial measurement, and last the estimate of where it would have ended."""
    if trial.state is not TrialState.PRUNED or by is None or not trial.measurements:
        return trial
    partial = replace(trial.measurements[-1], kind="partial")
    estimated = by.estimate()
    last = (Measurement(values=estimated, kind="estimate", launch_id=partial.launch_id),) if estimated else ()
    return replace(trial, measurements=(*trial.measurements[:-1], partial, *last))


def unlike(asked: Candidate, found: Mapping[str, Value]) -> str | None:
    """Why the engine does not run what was asked, by the first knob of which it reports another value."""
    stated = Candidate({name: value for name, value in asked.items() if value is not None})
    for name, (wanted, reported) in effective.differences(stated, found, read_back()).items():
        return f"the engine runs {name} = {reported}, not {wanted}"
    return None


# Causes that do not tell by themselves whether a knob or something fixed is at fault.
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
    """Which knobs a sentence names, with underscores or as a flag."""
    return frozenset(
        name
        for name in names
        if re.search(rf"(?<![\w-])(--(no-)?)?{name.replace('_', '[-_]')}(?![\w-])", text)
    )


def mends(prepared: Prepared, cause: str, sentence: str) -> bool:
    """Whether a knob that the study turns acts on what ended a launch."""
    knobs = turned(prepared)
    about = KINDS.get(cause)
    return bool(knobs & named(sentence, knobs)) or (about is not None and bool(knobs & set(about.knobs)))


def blamed(prepared: Prepared, error: EngineError, *, served: bool) -> EngineError:
    """The error as it counts for this study. `served`: an engine of the study has been ready before.

    What no knob of the study can mend is StudyFailed; what one can mend, or what a candidate may have brought
    about where another one served, is Infeasible. Everything else stays what it was.
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
    """StudyFailed when candidates of a run failed alike at start-up, by what no knob of the study acts on."""
    ours = [t for t in trials if t.run_id == run.id]
    ready = any("ready_s" in each.timeline for each in launches if each.started_at >= run.started_at)
    last = None if ready or any(t.measurements for t in ours) else hopeless(prepared, ours)
    if last is not None:
        raise StudyFailed(f"no candidate can start: {last.reason}", cause=last.cause or "crashed")


def hopeless(prepared: Prepared, trials: Sequence[Trial]) -> Trial | None:
    """The second candidate that ended as another one did, by a cause on which no knob of the study acts.

    `trials` are those of one run in which no engine was ready yet.
    """
    ended = [t for t in trials if t.state is TrialState.INFEASIBLE and t.cause in KINDS]
    for number, trial in enumerate(ended):
        alike = [t for t in ended[:number] if _root(t) == _root(trial) and t.candidate != trial.candidate]
        if alike and not mends(prepared, trial.cause or "", trial.reason or ""):
            return trial
    return None


def never_started(trials: Sequence[Trial], run_id: str) -> Trial | None:
    """The baseline to begin a run with again: earlier runs measured no engine of the study at all, and what
    hindered that may have been mended since.
    """
    if any(t.measurements or t.run_id == run_id for t in trials):
        return None
    bases = [t for t in trials if t.is_baseline and t.state is TrialState.INFEASIBLE and t.cause in KINDS]
    return max(bases, key=lambda t: (t.number, t.attempt), default=None)


def _root(trial: Trial) -> tuple[str | None, str]:
    """What ended a trial, but for the numbers in it: sizes, ports and processes differ."""
    return trial.cause, re.sub(r"0x[0-9a-f]+|\d[\d.,]*", "#", trial.reason or "")
