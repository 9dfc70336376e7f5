"""The content of the pages of a study and of a trial. For a run that has not ended: its phase, its expected
end, the engine's curves, and the end of the log.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from markupsafe import Markup

from tuner.errors import BadInput, NotFound, nearest
from tuner.history.store import Store
from tuner.measures import in_order
from tuner.records import Run, RunState, Study, Trial, TrialState
from tuner.report import board as boards
from tuner.report import evidence
from tuner.report.board import Board, values
from tuner.report.charts import bars, panels
from tuner.report.evidence import engine_panels, log_path, tail
from tuner.report.words import run_state, told_counts
from tuner.service.context import ServiceContext
from tuner.service.pages import bench
from tuner.service.pages.bench import Bench
from tuner.service.pages.render import kept, marked, measurement
from tuner.service.pages.session import Visitor, reason_of
from tuner.tuning.now import RunNow, left_s, path_of, read

LOG_LINES = 20
QUIET = timedelta(minutes=2)
"""A file that is older than this is not used for the live part."""
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
    """The state of a run now.

    `phase` is a sentence. `stage` names what `confirming` counts. `ends` is the expected end of the run, from
    the time that its trials took so far (None: not known). `said` is the reason if nothing is known;
    otherwise it is empty.
    """

    phase: str
    trial: Trial | None
    ends: datetime | None
    left_s: float | None
    stage: str
    confirming: tuple[int, int] | None
    curves: Sequence[Markup]
    log: Sequence[str]
    said: str


def live_run(store: Store, home: Path, run: Run, trials: Sequence[Trial], now: datetime) -> LiveRun:
    """What a run does now. `trials` are the study's: a run may measure those of earlier runs again."""
    ours = [t for t in trials if t.run_id == run.id]
    found = read(home, run.id)
    said = (
        ""
        if found is not None
        else f"The controller runs on {run.host or 'another host'}: no live curves here."
    )
    if found is not None and now - found.at > QUIET:
        said = f"The controller has said nothing since {found.at:%H:%M:%S} UTC."
    current = next((t for t in ours if t.state is TrialState.RUNNING), None)
    left = left_s(run, ours, found, now)
    again = next((t for t in reversed(trials) if found is not None and t.number == found.trial), None)
    known = found is not None and found.trial is not None and (not current or found.trial == current.number)
    return LiveRun(
        phase="measuring" if current is not None and not known else phase_of(found),
        trial=current or again,
        ends=now + timedelta(seconds=left) if left is not None else run.deadline,
        left_s=left,
        stage=stage_word(found) if found else "",
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
        told = f"{stage_word(now)} {min(done + 1, whole)} of {whole}: {told}"
    return told


def stage_word(now: RunNow) -> str:
    """The stage of a run that counts launches, in a word."""
    return "confirming" if now.stage in ("", "confirmation") else now.stage


def phase_in(home: Path, trial: Trial) -> str:
    """The phase of the run that measures a trial now, in the same words; empty if it is not known."""
    found = read(home, trial.run_id)
    return phase_of(found) if found is not None and found.trial in (None, trial.number) else ""


def _curves(found: RunNow | None) -> Sequence[Markup]:
    """Two drawings with two strips each. They are side by side if the screen is wide."""
    strips = engine_panels(found.engine, CURVES) if found else []
    if found is None or not strips or len(strips[0].x) < 2:
        return ()
    span, name = max(found.total_s, strips[0].x[-1]), "seconds since the slice began"
    return [marked(panels(strips[n : n + 2], name, span, "the engine now")) for n in range(0, len(strips), 2)]


def _log(store: Store, run: Run, current: Trial | None) -> Sequence[str]:
    """The end of the engine's log. Between two trials it is the log of the last launch."""
    launches = store.launches(run.study_id)
    ours = [each for each in launches if each.started_at >= run.started_at and each.directory]
    if ours:
        return tail(Path(ours[-1].directory or "") / "engine.log", LOG_LINES)
    return tail(log_path(current, launches), LOG_LINES) if current is not None else ()


def board_of(store: Store, study: Study) -> tuple[Board, int]:
    """The board of a study and the pulse of the history that it was read at."""
    return kept(store, f"board {study.id}", lambda: boards.board_of(store, study))


def bench_of(store: Store, study: Study) -> Bench:
    """The workbench of a study."""
    return kept(store, f"bench {study.id}", lambda: bench.bench_of(board_of(store, study)[0]))[0]


LISTED = 50
NEWEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePart:
    """The part of a study's page that changes during a run."""

    board: Board
    run: Run | None
    done: int
    counts: str
    current: Trial | None
    newest: Sequence[Trial]
    pictures: Sequence[Markup]
    tag: str
    stopped: frozenset[str]
    now: LiveRun | None = None

    @property
    def unended(self) -> bool:
        """Whether the run has not ended, or can be continued."""
        return self.run is not None and self.run.state is RunState.RUNNING

    @property
    def running(self) -> bool:
        return self.unended and self.run is not None and self.run.id not in self.stopped


def cancel(looks: Visitor, study: Study, fields: Mapping[str, str]) -> None:
    """Asks the shown run to stop. NotAllowed without scope run; Conflict if it has ended."""
    looks.needs("run")
    reason, store = reason_of(fields), looks.service.store
    run = store.run(fields.get("run", ""))
    if run.study_id != study.id:
        raise BadInput("This run belongs to another study: load the page again.")
    looks.service.runner.cancel(run.id)
    looks.service.audit(looks.actor, "cancel", run.id, reason)


def find(store: Store, ref: str) -> Study:
    """A study by id or the beginning of it; NotFound names the nearest."""
    try:
        return store.study(ref)
    except NotFound as error:
        names = nearest(ref, [study.name for study in store.studies()])
        raise NotFound(f"{error}{names}") if names and names not in str(error) else error from None


def link(study: Study, trial: Trial) -> str:
    """The address of a trial's page."""
    return f"/studies/{study.id[:16]}/trials/{trial.number}"


def card_links(study: Study, board: Board) -> dict[str, str]:
    """The links of a study's answer card: to its trial, and to its profile as a file."""
    made = board.cards[0].profile if board.cards else None
    return {
        "trial": f"/studies/{study.id[:16]}/trials/",
        "download": f"/profiles/{made.id}/file" if made else "",
        "profile": f"/profiles/{made.id}" if made else "",
    }


def live(service: ServiceContext, study: Study, axes: tuple[str, str] | None) -> LivePart:
    """The newest run, its trials, and the front (`axes`: only these two measurements)."""
    store, home = service.store, service.settings.home
    board, pulse = board_of(store, study)
    run = next(iter(store.runs(study.id)), None)
    ours = [t for t in board.trials if run is not None and t.run_id == run.id]
    pairs = [axes] if axes else board.pairs
    drawn = [_drawing(store, board, x, y) for x, y in pairs]
    stopped = service.stopped_runs()
    going = run is not None and run.state is RunState.RUNNING and run.id not in stopped
    return LivePart(
        board=board,
        run=run,
        done=len({t.number for t in ours if t.state not in (TrialState.RUNNING, TrialState.ABORTED)}),
        counts=told_counts(ours, stopped),
        current=next((t for t in ours if t.state is TrialState.RUNNING), None),
        newest=[t for t in reversed(ours) if t.state is not TrialState.RUNNING][:NEWEST],
        pictures=drawn,
        tag=_tag(pulse, run, home, stopped),
        stopped=stopped,
        now=live_run(store, home, run, board.trials, service.clock()) if going and run is not None else None,
    )


def _drawing(store: Store, board: Board, x: str, y: str) -> Markup:
    """The front in two measurements, drawn once after each change of the history."""
    study = board.study
    name = f"drawing {study.id} {x} {y}"
    return kept(store, name, lambda: marked(board.drawing(x, y, lambda t: link(study, t))))[0]


def tag_of(service: ServiceContext, study: Study) -> tuple[str, bool]:
    """The ETag of the live part, and whether the run has not ended. This draws nothing."""
    store = service.store
    run = next(iter(store.runs(study.id)), None)
    tag = _tag(store.change_token(), run, service.settings.home, service.stopped_runs())
    return tag, run is not None and run.state is RunState.RUNNING


def _tag(pulse: int, run: Run | None, home: Path, stopped: frozenset[str]) -> str:
    """An ETag that changes with the history, the run's state, and the phase of the run."""
    try:
        now = path_of(home, run.id).stat().st_mtime_ns if run and run.state is RunState.RUNNING else 0
    except OSError:
        now = 0
    return f'"{pulse}-{run_state(run, stopped) if run else "none"}-{now}"'


def axes_of(x: str, y: str) -> tuple[str, str] | None:
    """Two measurements asked for by name; None for the study's own pairs."""
    if not x and not y:
        return None
    return measurement(x), measurement(y)


def measured_names(board: Board) -> list[str]:
    """The measurements that at least one complete trial of a study has, objectives first."""
    names = {n for t in board.trials[:200] for n in values(t)}
    return [*board.study.objectives, *sorted(names - set(board.study.objectives))]


def pictures(board: Board, trial: Trial) -> tuple[list[tuple[str, Markup]], list[tuple[str, Markup]]]:
    """(latencies, timelines) of baseline and trial, if the records of their requests are on this host."""
    if not evidence.samples(trial):
        return [], []
    beside = {t.id: t for t in (board.base, trial) if t is not None}
    shown = evidence.named(board, beside.values())
    lines = [(name, marked(text)) for name, text in evidence.latencies(shown)]
    return lines, [(name, marked(text)) for name, text in evidence.timelines(shown)]


def budget(board: Board) -> Markup:
    """Seconds of attempts by how they ended, as bars."""
    found = boards.spent(board.trials, ())
    named = {f"{count} {state}": found.trial_seconds[state] for state, count in found.trials.items()}
    return marked(bars(named, "gpu_seconds"))


INTERNAL = ("kv_", "blocks_", "batch_", "step_", "queue_", "offload_", "gpu_", "energy_", "prefix_")
"""Beginnings of names of the engine's own measurements. They are shown apart from those that a user notices.
"""


def numbers(board: Board, trial: Trial) -> Mapping[str, Sequence[str]]:
    """Names of a trial's measurements: first objectives, then what users notice, then the engine's own."""
    known = {name for m in trial.measurements for name in m.values}
    objectives = board.study.objectives
    names = in_order(known, first=objectives)
    inside = [name for name in names if name.startswith(INTERNAL) and name not in objectives]
    return {"Numbers": [name for name in names if name not in inside], "Inside the engine": inside}
