"""What the pages of a study and of a trial show."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from tuner.errors import BadInput, NotFound, nearest
from tuner.history.store import Store
from tuner.measures import in_order
from tuner.records import Run, RunState, Study, Trial, TrialState
from tuner.report import board as boards
from tuner.report import evidence
from tuner.report.board import Board, values
from tuner.report.charts import bars
from tuner.report.words import run_state, trial_state
from tuner.service.context import ServiceContext
from tuner.service.pages import bench
from tuner.service.pages.bench import Bench
from tuner.service.pages.kept import kept
from tuner.service.pages.live import LiveRun, live_run
from tuner.service.pages.query import measurement
from tuner.service.pages.render import marked
from tuner.service.pages.session import Visitor, reason_of
from tuner.tuning.now import path_of


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
    """The part of a study's page that changes while a run goes on."""

    board: Board
    run: Run | None
    done: int
    states: Mapping[str, int]
    current: Trial | None
    newest: Sequence[Trial]
    pictures: Sequence[Markup]
    tag: str
    stopped: frozenset[str]
    now: LiveRun | None = None

    @property
    def unended(self) -> bool:
        """Whether the run goes on, or may be continued."""
        return self.run is not None and self.run.state is RunState.RUNNING

    @property
    def running(self) -> bool:
        return self.unended and self.run is not None and self.run.id not in self.stopped


def cancel(looks: Visitor, study: Study, fields: Mapping[str, str]) -> None:
    """Asks the run that was looked at to stop. NotAllowed without scope run; Conflict when it has ended."""
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
    """Where a trial's page is."""
    return f"/studies/{study.id[:16]}/trials/{trial.number}"


def card_links(study: Study, board: Board) -> dict[str, str]:
    """Where the answer card of a study leads: to its trial, and to its profile as a file."""
    made = board.cards[0].profile if board.cards else None
    return {
        "trial": f"/studies/{study.id[:16]}/trials/",
        "download": f"/profiles/{made.id}/file" if made else "",
        "profile": f"/profiles/{made.id}" if made else "",
    }


def live(service: ServiceContext, study: Study, axes: tuple[str, str] | None) -> LivePart:
    """The newest run, its trials, and the front drawn anew (`axes`: only these two measurements)."""
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
        states=Counter(trial_state(t, stopped) for t in ours),
        current=next((t for t in ours if t.state is TrialState.RUNNING), None),
        newest=[t for t in reversed(ours) if t.state is not TrialState.RUNNING][:NEWEST],
        pictures=drawn,
        tag=_tag(pulse, run, home, stopped),
        stopped=stopped,
        now=live_run(store, home, run, ours, service.clock()) if going and run is not None else None,
    )


def _drawing(store: Store, board: Board, x: str, y: str) -> Markup:
    """The front in two measurements, drawn once for each state of the history."""
    study = board.study
    name = f"drawing {study.id} {x} {y}"
    return kept(store, name, lambda: marked(board.drawing(x, y, lambda t: link(study, t))))[0]


def tag_of(service: ServiceContext, study: Study) -> tuple[str, bool]:
    """The live part's validator, and whether a run has no end yet; costs no drawing."""
    store = service.store
    run = next(iter(store.runs(study.id)), None)
    tag = _tag(store.change_token(), run, service.settings.home, service.stopped_runs())
    return tag, run is not None and run.state is RunState.RUNNING


def _tag(pulse: int, run: Run | None, home: Path, stopped: frozenset[str]) -> str:
    """Another one as soon as the history, the run's state, or what the run does right now changes."""
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
    """The measurements that some completed trial of a study has, objectives first."""
    names = {n for t in board.trials[:200] for n in values(t)}
    return [*board.study.objectives, *sorted(names - set(board.study.objectives))]


def pictures(board: Board, trial: Trial) -> tuple[list[tuple[str, Markup]], list[tuple[str, Markup]]]:
    """(latencies, timelines) of the baseline and a trial, as far as their outcomes are on this host."""
    if not evidence.samples(trial):
        return [], []
    beside = {t.id: t for t in (board.base, trial) if t is not None}
    shown = evidence.named(board, beside.values())
    lines = [(name, marked(text)) for name, text in evidence.latencies(shown)]
    return lines, [(name, marked(text)) for name, text in evidence.timelines(shown)]


def budget(board: Board, stopped: frozenset[str]) -> Markup:
    """Seconds of trials by how they ended, as bars."""
    found = boards.spent(board.trials, (), stopped)
    named = {f"{count} {state}": found.trial_seconds[state] for state, count in found.trials.items()}
    return marked(bars(named, "gpu_seconds"))


INTERNAL = ("kv_", "blocks_", "batch_", "step_", "queue_", "offload_", "gpu_", "energy_", "prefix_")
"""Beginnings of names that speak of the engine's inside; shown apart from what a user feels."""


def numbers(board: Board, trial: Trial) -> Mapping[str, Sequence[str]]:
    """The names that some pass of a trial measured: objectives, what users feel, the engine's inside."""
    known = {name for m in trial.measurements for name in m.values}
    objectives = board.study.objectives
    names = in_order(known, first=objectives)
    inside = [name for name in names if name.startswith(INTERNAL) and name not in objectives]
    return {"Numbers": [name for name in names if name not in inside], "Inside the engine": inside}
