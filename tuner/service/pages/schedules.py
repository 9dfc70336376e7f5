"""Schedules with their next windows."""

from dataclasses import dataclass
from datetime import date, datetime

from tuner.errors import BadInput, NotFound
from tuner.fleet.window import Window, blacked_out, next_due, terms, window
from tuner.history.entities import Schedule
from tuner.history.store import Store
from tuner.records import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A schedule as people read it. `problem` says why it can never run."""

    schedule: Schedule
    study: str
    next: Window | None
    blackout: date | None
    last: Run | None
    problem: str


def plans(store: Store, now: datetime) -> list[Plan]:
    """Every schedule, by name."""
    return [_plan(store, schedule, now) for schedule in store.schedules()]


def _plan(store: Store, schedule: Schedule, now: datetime) -> Plan:
    study = schedule.spec.get("study")
    said = study if isinstance(study, str) else "–"
    try:
        terms(schedule.spec)
        due = next_due(schedule, now) if schedule.enabled else None
        opens = window(schedule, due) if due is not None else None
        dark = blacked_out(schedule, opens) if opens is not None else None
    except BadInput as error:
        return Plan(schedule=schedule, study=said, next=None, blackout=None, last=None, problem=str(error))
    return Plan(
        schedule=schedule, study=said, next=opens, blackout=dark, last=_last(store, schedule), problem=""
    )


def _last(store: Store, schedule: Schedule) -> Run | None:
    try:
        return store.run(schedule.last_run_id) if schedule.last_run_id else None
    except NotFound:
        return None
