"""What Prometheus reads: runs, trials by state and reason, nights, phases, hypervolume, orphans."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tuner.errors import BadInput, NotFound
from tuner.fleet.window import blacked_out, last_due, window
from tuner.history.entities import Schedule
from tuner.history.store import Store
from tuner.records import Run, RunState, Study, Trial
from tuner.search import pareto, trial_view
from tuner.service.runner import Controllers

NEWEST = 50
"""How many runs, the newest first, are looked through for the last one of each node."""


class Watcher(Collector):
    """Reads the history at each scrape; ended trials are counted once and remembered."""

    def __init__(self, store: Store, clock: Callable[[], datetime], runner: Controllers) -> None:
        self._store, self._clock, self._runner = store, clock, runner
        self._settled: Counter[tuple[str, str]] = Counter()
        self._upto = 0
        self._volumes: dict[str, tuple[Run, float | None]] = {}

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand: a registry need not read a history to take this in."""
        return ()

    def collect(self) -> Iterable[Metric]:
        store = self._store
        runs = GaugeMetricFamily("tuner_runs", "Runs by state.", labels=["state"])
        counted = store.run_counts()
        for state in RunState:
            runs.add_metric([state.value], counted.get(state.value, 0))
        yield runs
        yield self._trials()
        yield from nights(store, self._clock())
        yield self._orphans()
        yield from self._last_runs()
        yield from found_by(self._store)

    def _trials(self) -> Metric:
        found = CounterMetricFamily(
            "tuner_trials", "Trials begun, by state and reason.", labels=["state", "reason"]
        )
        counts = self._store.trial_counts(self._upto)
        self._settled.update(counts.settled)
        self._upto = counts.upto
        for key, count in sorted((self._settled + Counter(counts.open)).items()):
            found.add_metric(list(key), count)
        return found

    def _orphans(self) -> Metric:
        """A trial is somebody's while its node is leased, whichever host has the lease, or while its
        controller is at work here.
        """
        leased = {lease.node for lease in self._store.leases(now=self._clock())}
        alive = {run.id for run in self._store.runs(state=RunState.RUNNING) if self._runner.alive(run)}
        left = [trial for trial in self._store.orphans() if trial.run_id not in alive]
        lost = sum(self._store.study(trial.study_id).node not in leased for trial in left)
        return GaugeMetricFamily(
            "tuner_orphan_trials", "Trials RUNNING on a node that nobody has a lease of.", value=lost
        )

    def _last_runs(self) -> Iterable[Metric]:
        """The last run of each node: its phases, the volume of its study's front, its window."""
        phases = GaugeMetricFamily(
            "tuner_phase_seconds", "Start-up phases of the last run, summed.", labels=["node", "phase"]
        )
        volume = GaugeMetricFamily(
            "tuner_hypervolume", "Volume of the study's front (log latencies).", labels=["node", "study"]
        )
        left = GaugeMetricFamily("tuner_window_left_seconds", "Until the run must end.", labels=["node"])
        for study, run in _last(self._store):
            spent: Counter[str] = Counter()
            for launch in self._store.launches(study.id):
                if launch.started_at >= run.started_at:
                    spent.update({name: round(value * 1000) for name, value in launch.timeline.items()})
            for name, milliseconds in sorted(spent.items()):
                phases.add_metric([study.node, name], milliseconds / 1000)
            if (found := self._volume(study, run)) is not None:
                volume.add_metric([study.node, study.name], found)
            if run.state is RunState.RUNNING and run.deadline is not None:
                left.add_metric([study.node], (run.deadline - self._clock()).total_seconds())
        yield from (phases, volume, left)

    def _volume(self, study: Study, run: Run) -> float | None:
        """The volume of a study's front; that of an ended run is reckoned once."""
        kept = self._volumes.get(study.node)
        if kept is None or kept[0] != run or run.state is RunState.RUNNING:
            kept = run, hypervolume(study, self._store.trials(study.id))
            self._volumes[study.node] = kept
        return kept[1]


def _last(store: Store) -> Sequence[tuple[Study, Run]]:
    found: dict[str, tuple[Study, Run]] = {}
    for run in store.runs(limit=NEWEST):
        study = store.study(run.study_id)
        found.setdefault(study.node, (study, run))
    return list(found.values())


def found_by(store: Store) -> Iterable[Metric]:
    """What the newest conclusion of each node found: gain of the winner, values of today's and the best."""
    gain = GaugeMetricFamily(
        "tuner_gain_ratio",
        "Change that the newest run's winner makes, (after - before) / before.",
        labels=["node", "workload", "measurement"],
    )
    value = GaugeMetricFamily(
        "tuner_confirmed_value",
        "What the newest run's confirmation measured, of today's configuration and of the best.",
        labels=["node", "workload", "measurement", "configuration"],
    )
    for study, _ in _last(store):
        said = store.latest_conclusion(study.id)
        if said is None:
            continue
        winner = said.arm(said.winner)
        for name, arm in (("today", said.baseline), ("best", winner or said.baseline)):
            for metric, number in (arm.confirmed if arm else {}).items():
                if number is not None:
                    value.add_metric([study.node, study.workload, metric, name], number)
        for change in winner.changes if winner else ():
            if change.where == "confirm" and change.change is not None:
                gain.add_metric([study.node, study.workload, change.metric], change.change)
    yield from (gain, value)


def hypervolume(study: Study, trials: Sequence[Trial]) -> float | None:
    """The volume of a study's front; None while nothing was measured to hold it against."""
    scale = trial_view.scale_of(trials, study.objectives, study.slo)
    return None if scale is None else pareto.covered(pareto.front(trials, study.objectives), scale)


LATE = timedelta(minutes=15)
"""A due time that is older than this should have become a run."""


def nights(store: Store, now: datetime) -> Iterable[Metric]:
    """Per node when a run last ended, and last with a usable conclusion; per schedule what did not begin."""
    success = GaugeMetricFamily(
        "tuner_last_success_timestamp_seconds",
        "When a run last ended with a winner, or with today's configuration that stays.",
        labels=["node"],
    )
    for node, at in store.last_success().items():
        success.add_metric([node], at.timestamp())
    ended = GaugeMetricFamily("tuner_last_run_timestamp_seconds", "When a run last ended.", labels=["node"])
    for node, at in store.last_end().items():
        ended.add_metric([node], at.timestamp())
    enabled = [each for each in store.schedules() if each.enabled]
    scheduled = GaugeMetricFamily("tuner_schedules", "Schedules that are on.", labels=["node"])
    for node, count in sorted(Counter(each.node for each in enabled).items()):
        scheduled.add_metric([node], count)
    missed = GaugeMetricFamily(
        "tuner_schedule_not_started",
        "1 where the last due time did not become a run.",
        labels=["schedule", "node"],
    )
    for each in enabled:
        missed.add_metric([each.name, each.node], float(not_started(store, each, now)))
    yield from (success, ended, scheduled, missed)


def not_started(store: Store, schedule: Schedule, now: datetime) -> bool:
    """Whether the newest due time, a quarter of an hour ago or more, became no run. A blackout is no miss."""
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
