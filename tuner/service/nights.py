"""How the nights of each node went, for Prometheus: the last success, the last end, what never began."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from prometheus_client.core import GaugeMetricFamily, Metric

from tuner.errors import BadInput, NotFound
from tuner.fleet.window import blacked_out, last_due, window
from tuner.history.entities import Schedule
from tuner.history.store import Store

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
