"""Controllers execute the runs. They are processes (`python -m tuner tune …`) that continue when the service
ends.

Before a run has a row in the database, it has an order: a small file with the study file, the limits and the
actor. When a service starts, it reads the orders again. If the controller of a run is gone, the service
starts a new one, which resumes the run.
"""

import logging
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from tuner import SERVICE_VERSION, __version__, processes
from tuner.errors import Conflict, Unavailable
from tuner.fleet import nodes
from tuner.history.store import Store
from tuner.records import Run, RunState, Study, TrialState
from tuner.report.evidence import tail
from tuner.report.words import CONTINUES
from tuner.service.study_requests import write_private
from tuner.settings import Settings
from tuner.tuning.execution import locked, reconcile

log = logging.getLogger("tuner.service")
RESTARTS = 2
COMMANDS = {"tune", "demo", "compare", "upgrade-check"}
"""The commands that a controller may be started with."""
SHORTEST_H = 1 / 3600
TAIL = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """An order for a run of a study within limits. `key` recognises a repeated request. `words` are the
    controller's command if it compares or checks an upgrade.
    """

    study_id: str
    study_file: Path
    trials: int | None
    deadline: datetime | None
    actor: str
    at: datetime
    key: str | None = None
    words: tuple[str, ...] = ()


ORDERS = TypeAdapter(RunOrder)


class Controllers:
    """Starts controllers, and replaces controllers that died before the end of their run."""

    def __init__(self, store: Store, settings: Settings, clock: Callable[[], datetime]) -> None:
        self._store, self._settings, self._clock = store, settings, clock
        self._host = socket.gethostname()
        self._folder = settings.home / "controllers"
        self._ours: dict[str, processes.Detached] = {}
        self._restarts: dict[str, int] = {}
        self._lock = threading.Lock()

    def start(self, order: RunOrder) -> tuple[Run, bool]:
        """The run's row, with a controller that executes it; and whether the run is new. If an earlier order
        has the same key, its run is returned. Conflict if the study or its node has another run.
        """
        with self._lock:
            if (run := self._begun(order)) is not None:
                return run, False
            self.refuse_busy(self._store.study(order.study_id))
            write_private(self._order_file(order.study_id), ORDERS.dump_json(order))
            run = self._store.open_run(
                order.study_id,
                trials_limit=order.trials,
                deadline=order.deadline,
                now=self._clock(),
                pid=None,
                host=self._host,
            )
            return self._spawn(run, order), True

    def _begun(self, order: RunOrder) -> Run | None:
        """The run of the study's last order, if it has the same key. The client may not have got the answer
        to its first request.
        """
        before = self._order(order.study_id)
        if before is None or before.key is None or before.key != order.key:
            return None
        runs = self._store.runs(order.study_id, limit=1)
        return next((run for run in runs if run.started_at >= before.at), None)

    def refuse_busy(self, study: Study) -> None:
        """Raises Conflict if the study or its node has another run."""
        node = study.node
        stopped = self._store.stopped_runs(now=self._clock())
        for run in self._store.runs(state=RunState.RUNNING):
            way = f"it was stopped: {CONTINUES}, or cancel it" if run.id in stopped else "cancel it, or wait"
            if run.study_id == study.id:
                raise Conflict(f"run '{run.id}' of this study has not ended; {way}")
            if self._store.study(run.study_id).node == node:
                raise Conflict(f"node '{node}' is busy with run '{run.id}'; {way}")

    def _spawn(self, run: Run, order: RunOrder) -> Run:
        what = order.words or ("tune", str(order.study_file))
        words = [sys.executable, "-m", "tuner", *what, "--json", "--run", run.id]
        if order.trials is not None:
            words += ["--trials", str(order.trials)]
        if order.deadline is not None:
            hours = (order.deadline - self._clock()).total_seconds() / 3600
            words += ["--hours", f"{max(hours, SHORTEST_H):.6f}"]
        env = {"TUNER_HOME": str(self._settings.home), "TUNER_DATABASE_URL": self._settings.url}
        env |= {SERVICE_VERSION: __version__}
        try:
            process = processes.detach(words, env=env, log=self.log_of(run.id))
        except OSError as error:
            raise Unavailable(f"a controller cannot be started: {error.strerror or error}") from error
        self._ours[run.id] = process
        now = self._store.run(run.id)
        if now.state != RunState.RUNNING or now.pid is not None:
            return now
        return self._store.save_run(replace(now, pid=process.pid, host=self._host))

    def log_of(self, run_id: str) -> Path:
        """The file with a controller's output."""
        return self._folder / f"{run_id}.log"

    def _order_file(self, study_id: str) -> Path:
        return self._folder / f"{study_id}.json"

    def _order(self, study_id: str) -> RunOrder | None:
        """The last order of a study; None if there is none, or if its file is not complete."""
        try:
            return ORDERS.validate_json(self._order_file(study_id).read_bytes())
        except (OSError, ValueError):
            return None

    def look_after(self) -> list[Run]:
        """Gives each ordered run that has lost its controller a new one, and returns these runs.

        If a controller ended by itself without ending its run, or was lost too often, the run is ended.
        """
        touched: list[Run] = []
        with self._lock:
            running = self._store.runs(state=RunState.RUNNING)
            for run in running:
                order = self._order(run.study_id) if run.host == self._host else None
                if order is not None and not self.alive(run) and not _at_work(order.study_file):
                    touched.append(self._recover(run, order))
            ids = {run.id for run in running}
            for run_id in [each for each, process in self._ours.items() if process.poll() is not None]:
                if run_id not in ids:
                    del self._ours[run_id]
        return touched

    def alive(self, run: Run) -> bool:
        """Whether a controller of a run is alive, as far as this host can know."""
        process = self._ours.get(run.id)
        if process is not None:
            return process.poll() is None
        return run.pid is not None and is_controller(run.pid)

    def cancel(self, run_id: str, say: Callable[[str], object] = log.warning) -> Run:
        """Asks a run to stop. If it has no controller, it is ended here. Conflict if it has already ended."""
        with self._lock:
            run = self._store.cancel_run(run_id)
            study = self._store.study(run.study_id)
            if run.host != self._host:
                leased = any(lease.node == study.node for lease in self._store.leases(now=self._clock()))
                return run if leased else self._close(run, None)
            order = self._order(study.id)
            if self.alive(run) or (order is not None and _at_work(order.study_file)):
                return run
            try:
                with locked(self._settings.home, study.id):
                    self._clear(study, say)
                    return self._close(self._store.run(run.id), None)
            except Conflict:
                # A controller has it, or has just ended it.
                return self._store.run(run.id)

    def _clear(self, study: Study, say: Callable[[str], object]) -> None:
        """Removes what a dead controller of a study left on this host. If another process has the node now,
        it has already removed this.
        """
        # An earlier release stored no host for a node that nobody had registered.
        hosts = ("", self._host)
        here = any(node.name == study.node and node.host in hosts for node in self._store.nodes())
        if here:
            with suppress(Conflict), nodes.held(self._store, study.node, clock=self._clock) as held:
                reconcile(held, self._settings.home, node=study.node, clock=self._clock, say=say)

    def _recover(self, run: Run, order: RunOrder) -> Run:
        process = self._ours.pop(run.id, None)
        code = None if process is None else process.returncode
        restarts = self._restarts.get(run.id, 0)
        if run.cancel_requested or (code is not None and code > 0) or restarts >= RESTARTS:
            return self._close(run, code)
        self._restarts[run.id] = restarts + 1
        return self._spawn(replace(run, pid=None), order)

    def _close(self, run: Run, code: int | None) -> Run:
        cancelled = run.cancel_requested
        reason = "cancelled; its controller was gone" if cancelled else self._last_words(run.id, code)
        state = RunState.CANCELLED if cancelled else RunState.FAILED
        now = self._clock()
        for trial in self._store.trials(run.study_id, (TrialState.RUNNING,), run_id=run.id):
            why = "the controller died in the middle of this trial"
            with suppress(Conflict):  # whoever has the node by now has ended it
                self._store.finish_trial(
                    replace(trial, state=TrialState.ABORTED, cause="controller", reason=why, ended_at=now)
                )
        return self._store.save_run(replace(run, state=state, reason=reason, ended_at=now, pid=None))

    def _last_words(self, run_id: str, code: int | None) -> str:
        lines = tail(self.log_of(run_id), TAIL)
        said = [line for line in lines if line.startswith("tuner: ")] or [line for line in lines if line]
        told = f": {said[-1].removeprefix('tuner: ')}" if said else ""
        return f"its controller ended with exit code {code}{told}"


def is_controller(pid: int) -> bool:
    """Whether a process is one of our controllers. Another process may have got the same process id."""
    try:
        return _is_ours(psutil.Process(pid))
    except psutil.Error:
        return False


def _is_ours(process: psutil.Process) -> bool:
    words = process.cmdline()
    ours = any(Path(word).name == "tuner" for word in words) and bool(COMMANDS & set(words))
    return ours and process.status() != psutil.STATUS_ZOMBIE


def _at_work(study_file: Path) -> bool:
    """Whether some process tunes a study file. It may have been started just before this service died."""
    for process in psutil.process_iter():
        try:
            if str(study_file) in process.cmdline() and _is_ours(process):
                return True
        except psutil.Error:
            continue
    return False
