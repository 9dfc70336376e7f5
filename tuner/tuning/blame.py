"""Whose fault a failed launch is: what the engine room says, held against what this study may turn."""

import re
from collections.abc import Collection, Sequence

from tuner.engine.failures import KINDS, refused_flags
from tuner.errors import EngineError, Infeasible, StudyFailed
from tuner.records import Launch, Run, Trial, TrialState, Violation
from tuner.tuning.study import Prepared, flag_name

GENERAL = ("crashed", "engine_dead", "config_invalid", "bad_flag")
"""Causes that do not tell by themselves whether a knob or something fixed is at fault."""


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
