"""What Prometheus reads: runs, trials by state and reason, phases, hypervolume, window left, orphans."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tuner.history.store import Store
from tuner.records import Run, RunState, Study, Trial
from tuner.search import pareto, trial_view
from tuner.service.nights import nights
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


def hypervolume(study: Study, trials: Sequence[Trial]) -> float | None:
    """The volume of a study's front; None while nothing was measured to hold it against."""
    scale = trial_view.scale_of(trials, study.objectives, study.slo)
    return None if scale is None else pareto.covered(pareto.front(trials, study.objectives), scale)
