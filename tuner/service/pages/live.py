"""What a run does right now: its phase, when it will end, the engine's curves, the end of the log."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from markupsafe import Markup

from tuner.history.store import Store
from tuner.records import Run, Trial, TrialState
from tuner.report.charts import panels
from tuner.report.evidence import engine_panels
from tuner.report.logs import log_path, tail
from tuner.service.pages.render import marked
from tuner.tuning.now import RunNow, left_s, read

TAIL = 20
QUIET = timedelta(minutes=2)
"""A file that is older than this says nothing of now."""
PHASES = {
    "launching": "launching the engine", "warm-up": "warming the engine up", "priming": "filling the cache",
    "load warm-up": "bringing the load up", "window": "replaying",
    "last answers": "waiting for the last answers",
}  # fmt: skip
CURVES = {
    "running": ("running (requests)", 1.0, "front"),
    "waiting": ("waiting (requests)", 1.0, "baseline"),
    "kv_usage": ("KV cache in use (%)", 100.0, "three"),
    "preemptions": ("preemptions since the engine started", 1.0, "four"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A run at this moment. `phase` is a sentence, `ends` when all of it will be over by what its trials took
    so far (None: not known), `said` why nothing is known (empty: something is).
    """

    phase: str
    trial: int | None
    ends: datetime | None
    left_s: float | None
    confirming: tuple[int, int] | None
    curves: Sequence[Markup]
    log: Sequence[str]
    said: str


def live_run(store: Store, home: Path, run: Run, trials: Sequence[Trial], now: datetime) -> LiveRun:
    """What a running run does. `trials` are the run's."""
    found = read(home, run.id)
    said = (
        ""
        if found is not None
        else f"The controller runs on {run.host or 'another host'}: no live curves here."
    )
    if found is not None and now - found.at > QUIET:
        said = f"The controller has said nothing since {found.at:%H:%M:%S} UTC."
    current = next((t for t in trials if t.state is TrialState.RUNNING), None)
    left = left_s(run, trials, found, now)
    return LiveRun(
        phase=phase_of(found),
        trial=found.trial if found else current.number if current else None,
        ends=now + timedelta(seconds=left) if left is not None else run.deadline,
        left_s=left,
        confirming=found.confirming if found else None,
        curves=_curves(found),
        log=_log(store, run, current),
        said=said,
    )


def phase_of(now: RunNow | None) -> str:
    """The phase in words: `replaying peak, 34 of 60 s`, `confirming 2 of 6: launching the engine`."""
    if now is None:
        return ""
    told = PHASES.get(now.phase, now.phase)
    if now.phase == "window":
        told = f"{told} {now.slice}, {now.done_s:.0f} of {now.total_s:.0f} s"
    if now.confirming is not None:
        done, whole = now.confirming
        stage = {"": "confirming", "confirmation": "confirming"}.get(now.stage, now.stage)
        told = f"{stage} {min(done + 1, whole)} of {whole}: {told}"
    return told


def phase_in(home: Path, trial: Trial) -> str:
    """The phase of the run that measures a trial now, in the same words; empty where it is not known."""
    found = read(home, trial.run_id)
    return phase_of(found) if found is not None and found.trial in (None, trial.number) else ""


def _curves(found: RunNow | None) -> Sequence[Markup]:
    """Two drawings of two strips each, beside each other where the screen is wide."""
    strips = engine_panels(found.engine, CURVES) if found else []
    if found is None or not strips or len(strips[0].x) < 2:
        return ()
    span, name = max(found.total_s, strips[0].x[-1]), "seconds since the window began"
    return [marked(panels(strips[n : n + 2], name, span, "the engine now")) for n in range(0, len(strips), 2)]


def _log(store: Store, run: Run, current: Trial | None) -> Sequence[str]:
    """The end of the log of the engine that runs; of the last launch between trials."""
    launches = store.launches(run.study_id)
    ours = [each for each in launches if each.started_at >= run.started_at and each.directory]
    if ours:
        return tail(Path(ours[-1].directory or "") / "engine.log", TAIL)
    return tail(log_path(current, launches), TAIL) if current is not None else ()
