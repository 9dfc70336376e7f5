"""What Prometheus reads: runs, trials by state and reason, nights, phases, hypervolume, and trials without a
controller.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tuner.engine.boots import FIRST_DRIFT
from tuner.errors import BadInput, NotFound
from tuner.fleet.window import blacked_out, last_due, window
from tuner.history.entities import Schedule
from tuner.history.run_best import NEWEST
from tuner.history.store import Store
from tuner.records import Run, RunState, Study, Trial
from tuner.report import words
from tuner.search import trial_view
from tuner.service.runner import Controllers


def gauge(name: str, about: str, labels: str, rows: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """A gauge with a value for each row of labels; `labels` are their names, separated by blanks."""
    found = GaugeMetricFamily(name, about, labels=labels.split())
    for values, number in rows:
        found.add_metric(values, number)
    return found


class Watcher(Collector):
    """Reads the history at each scrape. Ended trials are counted once, and the count is kept."""

    def __init__(self, store: Store, clock: Callable[[], datetime], runner: Controllers) -> None:
        self._store, self._clock, self._runner = store, clock, runner
        self._settled: Counter[tuple[str, str]] = Counter()
        self._upto = 0
        self._volumes: dict[str, tuple[Run, float | None]] = {}

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that the history is not read when the collector is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        counted = self._store.run_counts()
        counted = Counter({state.value: counted.get(state.value, 0) for state in RunState})
        stopped = self._store.stopped_runs(now=self._clock())
        counted.update({RunState.RUNNING.value: -len(stopped), words.STOPPED: len(stopped)})
        states = [([state], count) for state, count in counted.items()]
        yield gauge(
            "tuner_runs",
            "Runs by state; stopped: the run has not ended, but its process is gone.",
            "state",
            states,
        )
        yield self._trials(stopped)
        yield from nights(self._store, self._clock())
        yield self._orphans()
        yield from self._last_runs()
        yield from found_by(self._store)

    def _trials(self, stopped: Collection[str]) -> Metric:
        about = "Attempts of trials by state and reason; interrupted: its run is stopped."
        found = CounterMetricFamily("tuner_trials", about, labels=["state", "reason"])
        counts = self._store.trial_counts(self._upto)
        self._settled.update(counts.settled)
        self._upto = counts.upto
        told = self._settled + Counter(counts.open)
        for trial in self._store.orphans() if stopped else ():
            if trial.run_id in stopped:
                told.update({(trial.state.value, ""): -1, (words.trial_state(trial, stopped), ""): 1})
        for key, count in sorted((+told).items()):
            found.add_metric(list(key), count)
        return found

    def _orphans(self) -> Metric:
        """The trials in state RUNNING without an owner. A trial has an owner if its node is leased (from any
        host), or if its controller runs on this host.
        """
        leased = {lease.node for lease in self._store.leases(now=self._clock())}
        alive = {run.id for run in self._store.runs(state=RunState.RUNNING) if self._runner.alive(run)}
        left = [trial for trial in self._store.orphans() if trial.run_id not in alive]
        lost = sum(self._store.study(trial.study_id).node not in leased for trial in left)
        return GaugeMetricFamily(
            "tuner_orphan_trials", "Trials in state RUNNING on a node without a lease.", value=lost
        )

    def _last_runs(self) -> Iterable[Metric]:
        """The last run of each node: its phases, the volume of its study's front, its window."""
        last = _last(self._store)
        spent: Counter[tuple[str, str]] = Counter()
        for study, run in last:
            for launch in self._store.launches(study.id):
                if launch.started_at >= run.started_at:
                    known = {n: v for n, v in launch.timeline.items() if n != FIRST_DRIFT}  # a share
                    spent.update({(study.node, n): round(v * 1000) for n, v in known.items()})
        phases = [(key, milliseconds / 1000) for key, milliseconds in sorted(spent.items())]
        yield gauge(
            "tuner_phase_seconds",
            "Start-up phases of the last run, summed; they overlap.",
            "node phase",
            phases,
        )
        volumes = [((s.node, s.name), v) for s, run in last if (v := self._volume(s, run)) is not None]
        about = "Hypervolume of the study's front, in units of the baseline's objectives."
        yield gauge("tuner_hypervolume", about, "node study", volumes)
        left = [
            ([study.node], (run.deadline - self._clock()).total_seconds())
            for study, run in last
            if run.state is RunState.RUNNING and run.deadline is not None
        ]
        yield gauge("tuner_window_left_seconds", "Seconds until the run must end.", "node", left)

    def _volume(self, study: Study, run: Run) -> float | None:
        """The hypervolume of a study's front. After a run has ended, it is computed only once."""
        kept = self._volumes.get(study.node)
        if kept is None or kept[0] != run or run.state is RunState.RUNNING:
            kept = run, hypervolume(study, self._store.trials(study.id))
            self._volumes[study.node] = kept
        return kept[1]


def _last(store: Store) -> Sequence[tuple[Study, Run]]:
    """The newest run of each node."""
    found: dict[str, tuple[Study, Run]] = {}
    for run in store.runs(limit=NEWEST):
        study = store.study(run.study_id)
        found.setdefault(study.node, (study, run))
    return list(found.values())


def found_by(store: Store) -> Iterable[Metric]:
    """What the last night of each node and workload found: the winner's gain, and the values of baseline and
    winner.
    """
    told = store.last_conclusions()
    won = [(place, winner) for place, said in told.items() if (winner := said.arm(said.winner)) is not None]
    arms = [
        (place, name, arm)
        for place, said in told.items()
        for name, arm in (("today", said.baseline), ("best", said.arm(said.winner) or said.baseline))
        if arm is not None
    ]
    yield gauge(
        "tuner_gain_ratio",
        "Change from today's configuration to the winner of the last night, (after - before) / before.",
        "node workload measurement",
        (
            ((*place, each.metric), each.change)
            for place, winner in won
            for each in winner.changes
            if each.where == "confirm" and each.change is not None
        ),
    )
    yield gauge(
        "tuner_confirmed_value",
        "Values of today's configuration and of the best one, in the confirmation of the last night.",
        "node workload measurement configuration",
        (
            ((*place, metric, name), number)
            for place, name, arm in arms
            for metric, number in arm.confirmed.items()
            if number is not None
        ),
    )


def hypervolume(study: Study, trials: Sequence[Trial]) -> float | None:
    """The hypervolume of a study's front; None until there is a measurement to compare with."""
    scale = trial_view.scale_of(trials, study.objectives, study.slo)
    return None if scale is None else trial_view.covered(trial_view.front(trials, study.objectives), scale)


LATE = timedelta(minutes=15)
"""A due time that is older than this counts as missed if no run was started for it."""


def nights(store: Store, now: datetime) -> Iterable[Metric]:
    """For each node: when a run last ended, and when one last ended with a usable conclusion. For each
    schedule: whether its last due time started no run.
    """
    enabled = [each for each in store.schedules() if each.enabled]
    yield gauge(
        "tuner_last_success_timestamp_seconds",
        "The last time that a run ended with a winner, or kept today's configuration.",
        "node",
        (([node], at.timestamp()) for node, at in store.last_success().items()),
    )
    ended = (([node], at.timestamp()) for node, at in store.last_end().items())
    yield gauge(
        "tuner_last_run_timestamp_seconds", "When a run last ended that was not cancelled.", "node", ended
    )
    counts = sorted(Counter(each.node for each in enabled).items())
    scheduled = (([node], count) for node, count in counts)
    yield gauge("tuner_schedules", "Schedules that are on.", "node", scheduled)
    yield gauge(
        "tuner_schedule_not_started",
        "1 if the last due time did not start a run.",
        "schedule node",
        (([each.name, each.node], float(not_started(store, each, now))) for each in enabled),
    )


def not_started(store: Store, schedule: Schedule, now: datetime) -> bool:
    """Whether the newest due time, a quarter of an hour ago or more, started no run. A due time in a blackout
    does not count.
    """
    due = last_due(replace(schedule, last_due=None), now - LATE)
    if due is None:
        return False
    try:
        if blacked_out(schedule, window(schedule, due)) is not None:
            return False
    except BadInput:  # a spec that cannot be read starts nothing
        return True
    if schedule.last_due is None or schedule.last_due < due or schedule.last_run_id is None:
        return True
    try:
        run = store.run(schedule.last_run_id)
    except NotFound:
        return True
    return run.started_at < due and run.ended_at is not None and run.ended_at <= due
