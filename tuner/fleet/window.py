"""Computes when a schedule is due and how long its run may last (rules: docs/schedules.md)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from apscheduler.triggers.cron import CronTrigger
from pydantic import BeforeValidator, Field, field_validator, model_validator

from tuner import yamltext
from tuner.errors import BadInput, nearest
from tuner.history.entities import Schedule
from tuner.records import JSON

DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
LONGEST_H = 24.0
GRACE_S = 300.0
"""Seconds that a start may be late before it counts as missed."""
MOST = 1_000_000_000
"""Seconds and trials beyond this (32 years) are a mistake."""
MOST_RANGES, LONGEST_TEXT = 1000, 4096
"""Blackout ranges, and characters of a text; every look at a schedule reads them all."""
_TICK = timedelta(microseconds=1)
# A time of day that does not exist is due after the clocks went forward: by an hour at most, a day where a
# country changed its side of the date line.
_GAP = timedelta(days=1)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        raise ValueError(f"give a number from 0 to {MOST}, not {value!r}")
    return float(value)


def _above_zero(value: object) -> float | None:
    if value is not None and _number(value) == 0:
        raise ValueError(f"give more than 0, not {value!r}")
    return None if value is None else _number(value)


def _count(value: object) -> int | None:
    found = _above_zero(value)
    return None if found is None else int(found)


def _time_of_day(value: object) -> time | None:
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch(r"([01]?\d|2[0-3]):[0-5]\d", value):
        raise ValueError(f"give a time of day such as 05:30, not {value!r}")
    hour, minute = value.split(":")
    return time(int(hour), int(minute))


def _ranges(value: object) -> tuple[tuple[date, date], ...]:
    if not isinstance(value, list) or len(value) > MOST_RANGES:
        raise ValueError(
            f"give a list of at most {MOST_RANGES} dates or ranges such as"
            " [2026-12-24, 2026-12-24/2026-12-26]"
        )
    found = []
    for item in value:
        first, _, last = str(item).partition("/")
        try:
            span = date.fromisoformat(first), date.fromisoformat(last or first)
        except ValueError:
            raise ValueError(f"'{item}' is not a date such as 2026-12-24 or 2026-12-24/2026-12-26") from None
        if span[1] < span[0]:
            raise ValueError(f"'{item}' ends before it begins")
        found.append(span)
    return tuple(found)


Number = Annotated[float, BeforeValidator(_number)]


class UpgradeTerms(yamltext.Section):
    """What a schedule of upgrade checks compares. `to` is the engine that may be new, as `upgrade-check
    --to` takes it. `old` (key `from`) is the engine to compare with (empty: the study's). `alias` is the
    configuration that runs.
    """

    to: str = Field(min_length=1, max_length=LONGEST_TEXT)
    old: str = Field(default="", max_length=LONGEST_TEXT, alias="from")
    alias: str = Field(default="champion", max_length=LONGEST_TEXT)


class Terms(yamltext.Section):
    """The `spec` of a schedule. Exactly one of `until` (local time of day) and `hours` is set.

    `study` is the path of a study file if the schedule was made on the command line. `min_trials` must fit
    into the window. `trials` limits a run; without it the study's own budget does. `reserve_s` seconds at the
    end of the window are kept to stop the engine. `blackout` are ranges of local dates, both ends included.
    With `upgrade` it does not tune, but checks a new version of the engine once.
    """

    study: str
    until: Annotated[time | None, BeforeValidator(_time_of_day)] = None
    hours: Annotated[float | None, BeforeValidator(_above_zero)] = None
    missed: Literal["run", "skip"] = "run"
    grace_s: Number = GRACE_S
    blackout: Annotated[tuple[tuple[date, date], ...], BeforeValidator(_ranges)] = ()
    min_trials: Annotated[int, BeforeValidator(lambda value: int(_number(value)))] = 3
    trials: Annotated[int | None, BeforeValidator(_count)] = None
    reserve_s: Number = 60.0
    upgrade: UpgradeTerms | None = None

    @field_validator("study", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        if not isinstance(value, str) or not value:
            raise ValueError("name the study")
        return value

    @field_validator("hours")
    @classmethod
    def _short(cls, value: float | None) -> float | None:
        if value is not None and value > LONGEST_H:
            raise ValueError(f"a window is at most {LONGEST_H:g} hours long, not {value:g}")
        return value

    @model_validator(mode="after")
    def _one_end(self) -> "Terms":
        if (self.until is None) == (self.hours is None):
            raise ValueError("give the window's end: `until` (HH:MM) or `hours`, not both")
        return self

    def spec(self) -> dict[str, JSON]:
        """The JSON that `terms` reads back."""
        without = {"until", "blackout"} | ({"upgrade"} if self.upgrade is None else set())
        kept: dict[str, JSON] = self.model_dump(mode="json", by_alias=True, exclude=without)
        return {
            **kept,
            "until": None if self.until is None else f"{self.until:%H:%M}",
            "blackout": [str(a) if a == b else f"{a}/{b}" for a, b in self.blackout],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window [due, end) in UTC. Production serves again by `end`."""

    due: datetime
    end: datetime

    def left_s(self, now: datetime) -> float:
        """Seconds until the end, 0 after it."""
        return max(0.0, (self.end - now).total_seconds())


def terms(spec: Mapping[str, JSON]) -> Terms:
    """The checked spec of a schedule. BadInput names the key and what it may be."""
    return yamltext.validated(Terms, {"study": None, **spec}, "schedule")


def zone(name: str) -> ZoneInfo:
    """A time zone by its IANA name. BadInput with the nearest one."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        close = nearest(name, available_timezones())
        raise BadInput(f"there is no time zone '{name}'{close}; give a name such as Europe/Berlin") from None


def trigger(cron: str, timezone: str, until: datetime | None = None) -> CronTrigger:
    """A crontab line of five fields as APScheduler's trigger: minute hour day month weekday (0 or 7 =
    Sunday). Without `until` it looks for the 30th of February up to the year 9999.
    """
    fields = cron.split()
    if len(fields) != 5:
        raise BadInput(
            f"cron '{cron}': write five fields, minute hour day month weekday, such as '0 1 * * 1-5'"
        )
    minute, hour, day, month, weekday = fields
    if day != "*" and weekday != "*":
        raise BadInput(f"cron '{cron}': give days of the month or of the week, not both")
    try:
        return CronTrigger(
            minute=minute,
            hour=hour,
            day=day,
            month=month,
            day_of_week=_weekdays(weekday.lower(), cron),
            timezone=zone(timezone),
            end_date=until,
        )
    except ValueError as error:
        raise BadInput(f"cron '{cron}': {error}") from error


def _weekdays(field: str, cron: str) -> str:
    """The weekdays of a crontab field by name, since APScheduler counts from Monday and crontab
    from Sunday.
    """
    if field == "*":
        return field
    chosen: set[int] = set()
    for part in field.split(","):
        match = re.fullmatch(r"(\*|\w+)(?:-(\w+))?(?:/([1-9]\d*))?", part)
        if match is None:
            raise BadInput(f"cron '{cron}': '{part}' is not a day of the week")
        first, last, step = match.groups()
        begin = 0 if first == "*" else _weekday(first, cron)
        final = 6 if first == "*" or (step and not last) else begin
        if last:
            final = _weekday(last, cron)
            final += 7 if final < begin else 0
        chosen.update(day % 7 for day in range(begin, final + 1, int(step or 1)))
    return ",".join(DAYS[day] for day in sorted(chosen))


def _weekday(word: str, cron: str) -> int:
    if word in DAYS:
        return DAYS.index(word)
    if word.isdigit() and int(word) <= 7:
        return int(word)
    raise BadInput(f"cron '{cron}': '{word}' is not a day of the week{nearest(word, DAYS)}")


def dues(schedule: Schedule, after: datetime, until: datetime) -> Iterator[datetime]:
    """The due times in (after, until], UTC, the earliest first.

    If the clock is set back, a time of day can come twice. Then only the first time is due. If the clock is
    set forward, a time of day may not exist. Then the run is due later, by as much as the clock was moved.
    """
    hourly = schedule.cron.split()[1].startswith("*")
    local = zone(schedule.timezone)
    # Times of day are counted on a clock that is never set: APScheduler adds 24 hours to reach the next day,
    # and so skips the midnight after a day of 23 hours. Every hour is counted on the zone's own clock.
    clock = local if hourly else UTC
    # A local time counted in UTC may be a day beyond the moment.
    cron = trigger(schedule.cron, str(clock), until + 2 * _GAP)
    begin = (after.astimezone(local) - _GAP).replace(tzinfo=clock)
    newest = after
    while True:
        found: datetime | None = cron.get_next_fire_time(None, begin)
        at = found.replace(tzinfo=local).astimezone(UTC) if found else None
        if found is None or at is None or at > until:
            return
        begin = (found.astimezone(UTC) + _TICK).astimezone(clock)
        if at > newest:
            newest = at
            yield at


def check(schedule: Schedule) -> None:
    """BadInput when a schedule can never run. Call it before the schedule is stored."""
    terms(schedule.spec)
    trigger(schedule.cron, schedule.timezone)
    if next_due(schedule, schedule.created_at) is None:
        raise BadInput(f"cron '{schedule.cron}' is never due in the next five years")


def next_due(schedule: Schedule, after: datetime) -> datetime | None:
    """The next due time, None when there is none within five years."""
    return next(dues(schedule, after, after + timedelta(days=5 * 366)), None)


def last_due(schedule: Schedule, now: datetime) -> datetime | None:
    """The newest due time up to now that came after the schedule was made and was not claimed yet."""
    begin = max(filter(None, (schedule.created_at, schedule.last_due)))
    for hours in (1, 24, 8 * 24, 32 * 24, 5 * 366 * 24):
        start = max(begin, now - timedelta(hours=hours))
        found = max(dues(schedule, start, now), default=None)
        if found is not None or start == begin:
            return found
    return None


def window(schedule: Schedule, due: datetime) -> Window:
    """The window that begins at a due time.

    Where clocks change and the local end does not exist or comes twice, the earliest end counts.
    """
    found = terms(schedule.spec)
    if found.until is None:
        return Window(due=due, end=due + timedelta(hours=found.hours or 0.0))
    local = zone(schedule.timezone)
    day = due.astimezone(local).date()
    ends = [
        datetime.combine(day + timedelta(days=later), found.until, local).replace(fold=fold).astimezone(UTC)
        for later in (0, 1)
        for fold in (0, 1)
    ]
    return Window(due=due, end=min(end for end in ends if end > due))


def blacked_out(schedule: Schedule, window: Window) -> date | None:
    """The first blackout date that the window touches, None when it touches none."""
    local = zone(schedule.timezone)
    first = window.due.astimezone(local).date()
    last = (window.end - _TICK).astimezone(local).date()
    ranges: Sequence[tuple[date, date]] = terms(schedule.spec).blackout
    days = (first + timedelta(days=n) for n in range((last - first).days + 1))
    return next((day for day in days if any(a <= day <= b for a, b in ranges)), None)
