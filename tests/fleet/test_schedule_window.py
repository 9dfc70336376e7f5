"""Due times and windows on ordinary days, on the days when clocks change, and on days without them."""

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tuner.errors import BadInput
from tuner.fleet import window
from tuner.history.entities import Schedule
from tuner.records import JSON

BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def schedule(cron: str, zone: str = "UTC", *, made: str = "2026-01-01 00:00", **spec: JSON) -> Schedule:
    whole: dict[str, JSON] = {"study": "chat", **spec}
    if "until" not in whole and "hours" not in whole:
        whole["hours"] = 4.0
    return Schedule(name="nightly", node="gpu-1", cron=cron, timezone=zone, spec=whole, created_at=at(made))


def dues(found: Schedule, after: str, count: int) -> list[str]:
    begin = at(after)
    every = window.dues(found, begin, begin + timedelta(days=4000))
    return [f"{due:%Y-%m-%d %H:%M}" for due in islice(every, count)]


def test_a_weekday_has_crontab_s_number() -> None:
    sunday_is_0_and_7 = ["2026-11-29 01:00", "2026-12-06 01:00"]
    assert dues(schedule("0 1 * * 0"), "2026-11-28 00:00", 2) == sunday_is_0_and_7
    assert dues(schedule("0 1 * * 7"), "2026-11-28 00:00", 2) == sunday_is_0_and_7
    assert dues(schedule("0 1 * * sun"), "2026-11-28 00:00", 2) == sunday_is_0_and_7


@pytest.mark.parametrize(
    ("field", "days"),
    [
        ("1-5", "mon tue wed thu fri"),
        ("5-7", "fri sat sun"),
        ("fri-mon", "fri sat sun mon"),
        ("*/2", "sun tue thu sat"),
        ("1-5/2", "mon wed fri"),
        ("1,3", "mon wed"),
        ("2/2", "tue thu sat"),
    ],
)
def test_weekday_ranges_are_crontab_s(field: str, days: str) -> None:
    found = schedule(f"0 12 * * {field}")
    names = {f"{datetime.fromisoformat(day):%a}".lower() for day in dues(found, "2026-11-01 00:00", 30)}
    assert names == set(days.split())


@pytest.mark.parametrize(
    ("cron", "sentence"),
    [
        ("0 1 * *", "five fields"),
        ("0 25 * * *", "cron '0 25 * * *'"),
        ("0 1 * * sunn", "'sunn' is not a day of the week (did you mean 'sun'?)"),
        ("0 1 * * 8", "'8' is not a day of the week"),
        ("0 1 1 * 1", "not both"),
        ("0 1 * * 1-", "is not a day of the week"),
    ],
)
def test_a_wrong_cron_is_refused(cron: str, sentence: str) -> None:
    with pytest.raises(BadInput, match="cron") as refused:
        window.check(schedule(cron))
    assert sentence in str(refused.value)


def test_a_date_that_never_comes_is_refused() -> None:
    with pytest.raises(BadInput, match="is never due"):
        window.check(schedule("0 1 30 2 *"))


def test_an_unknown_zone_names_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"did you mean 'Europe/Berlin'\?"):
        window.check(schedule("0 1 * * *", "Europe/Berln"))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"hours": 4, "blackot": []}, "unknown key 'blackot' (did you mean 'blackout'?)"),
        ({"hours": 4, "until": "05:30"}, "`until` (HH:MM) or `hours`, not both"),
        ({"hours": 25}, "at most 24 hours"),
        ({"hours": 0}, "more than 0"),
        ({"hours": 4, "trials": 0}, "trials: give more than 0"),
        ({"until": "5.30"}, "a time of day such as 05:30"),
        ({"until": "24:00"}, "a time of day such as 05:30"),
        ({"hours": 4, "missed": "maybe"}, "run or skip"),
        ({"hours": 4, "blackout": ["24.12."]}, "not a date such as 2026-12-24"),
        ({"hours": 4, "blackout": ["2026-12-26/2026-12-24"]}, "ends before it begins"),
        ({"hours": 4, "min_trials": -1}, "from 0 to"),
        ({"hours": 4, "reserve_s": float("nan")}, "reserve_s: give a number from 0 to"),
        ({"hours": float("inf")}, "hours: give a number from 0 to"),
        ({"hours": 4, "study": ""}, "name the study"),
    ],
)
def test_a_wrong_spec_names_its_key(spec: dict[str, JSON], sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        window.terms({"study": "chat", **spec})
    assert sentence in str(refused.value)


def test_a_spec_is_read_back_as_it_was() -> None:
    spec: dict[str, JSON] = {
        "study": "chat", "until": "05:30", "blackout": ["2026-12-24/2026-12-26", "2027-01-01"], "trials": 20,
        "missed": "skip",
    }  # fmt: skip
    found = window.terms(spec)
    assert window.terms(found.spec()) == found


@pytest.mark.parametrize(
    ("zone", "cron", "after", "expected"),
    [
        # Clocks go from 02:00 to 03:00 on 2026-03-29: 02:30 does not exist and is an hour later.
        (BERLIN, "30 2 * * *", "2026-03-28 12:00", ["2026-03-29 01:30", "2026-03-30 00:30"]),
        # The midnight after a day of 23 hours, and after one of 25.
        (BERLIN, "0 0 * * *", "2025-03-29 12:00", ["2025-03-29 23:00", "2025-03-30 22:00"]),
        (BERLIN, "30 0 * * *", "2025-03-29 12:00", ["2025-03-29 23:30", "2025-03-30 22:30"]),
        (BERLIN, "0 0 * * *", "2025-10-25 12:00", ["2025-10-25 22:00", "2025-10-26 23:00"]),
        # Clocks go from 03:00 to 02:00 on 2026-10-25: 02:30 comes twice and counts once.
        (BERLIN, "30 2 * * *", "2026-10-24 12:00", ["2026-10-25 00:30", "2026-10-26 01:30"]),
        (NEW_YORK, "30 1 * * *", "2026-10-31 12:00", ["2026-11-01 05:30", "2026-11-02 06:30"]),
        # Every hour is every hour, also the one that comes twice.
        (NEW_YORK, "30 * * * *", "2026-11-01 05:00", ["2026-11-01 05:30", "2026-11-01 06:30"]),
        # Half an hour only: 01:45 comes twice on 2026-04-05 in Lord Howe.
        (LORD_HOWE, "45 1 * * *", "2026-04-03 20:00", ["2026-04-04 14:45", "2026-04-05 15:15"]),
    ],
)  # fmt: skip
def test_a_night_is_one_night_when_clocks_change(
    zone: str, cron: str, after: str, expected: list[str]
) -> None:
    assert dues(schedule(cron, zone), after, len(expected)) == expected


@pytest.mark.parametrize(
    ("zone", "due", "until", "end"),
    [
        (BERLIN, "2026-11-27 00:00", "05:30", "2026-11-27 04:30"),
        (BERLIN, "2026-11-26 22:00", "05:30", "2026-11-27 04:30"),
        # The night that is an hour shorter, and the one that is an hour longer: the wall clock counts.
        (BERLIN, "2026-03-29 00:00", "05:30", "2026-03-29 03:30"),
        (BERLIN, "2026-10-25 00:00", "05:30", "2026-10-25 04:30"),
        # An end that comes twice is the first; one that does not exist is the earlier reading of it.
        (BERLIN, "2026-10-24 22:00", "02:30", "2026-10-25 00:30"),
        (BERLIN, "2026-03-28 22:00", "02:30", "2026-03-29 00:30"),
    ],
)
def test_the_end_is_a_local_time(zone: str, due: str, until: str, end: str) -> None:
    found = schedule("0 1 * * *", zone, until=until)
    assert window.window(found, at(due)).end == at(end)


def test_hours_are_hours_when_clocks_change() -> None:
    found = schedule("0 1 * * *", BERLIN, hours=4.0)
    assert window.window(found, at("2026-03-29 00:00")).end == at("2026-03-29 04:00")


zones = st.sampled_from([BERLIN, NEW_YORK, LORD_HOWE, "UTC", "Asia/Kathmandu", "America/St_Johns"])
moments = st.datetimes(datetime(2025, 1, 1), datetime(2028, 1, 1)).map(lambda d: d.replace(tzinfo=UTC))


@settings(max_examples=60, deadline=None)
@example(BERLIN, datetime(2025, 3, 12, tzinfo=UTC), 0, 0, 0, 0)
@given(zones, moments, st.integers(0, 23), st.integers(0, 59), st.integers(0, 23), st.integers(0, 59))
def test_a_daily_schedule_is_due_once_a_day_and_its_window_ends_within_a_day(
    zone: str, start: datetime, hour: int, minute: int, to_hour: int, to_minute: int
) -> None:
    found = schedule(f"{minute} {hour} * * *", zone, until=f"{to_hour:02}:{to_minute:02}")
    every = list(window.dues(found, start, start + timedelta(days=20)))
    local = window.zone(zone)
    days = [due.astimezone(local).date() for due in every]
    assert len(set(days)) == len(days)
    assert all((b - a).days == 1 for a, b in pairwise(days))
    for due in every:
        end = window.window(found, due).end
        assert timedelta(0) < end - due <= timedelta(hours=25)


@settings(max_examples=40, deadline=None)
@given(moments, st.integers(0, 3000))
def test_the_newest_due_time_is_the_last_of_all(now: datetime, hours: int) -> None:
    found = schedule("15 */6 * * *", NEW_YORK, made=f"{now - timedelta(hours=hours):%Y-%m-%d %H:%M}")
    every = list(window.dues(found, found.created_at, now))
    assert window.last_due(found, now) == (every[-1] if every else None)


@pytest.mark.parametrize(
    ("due", "blackout", "day"),
    [
        ("2026-12-23 23:00", ["2026-12-24"], "2026-12-24"),  # begins the evening before, ends on the day
        ("2026-12-24 22:00", ["2026-12-24/2026-12-26"], "2026-12-24"),
        ("2026-12-26 22:00", ["2026-12-24/2026-12-26"], "2026-12-26"),
        ("2026-12-27 00:00", ["2026-12-24/2026-12-26"], None),
        ("2026-12-23 18:00", ["2026-12-24"], None),  # ends at midnight, not on the day
    ],
)
def test_a_window_may_not_touch_a_blackout_date(due: str, blackout: list[JSON], day: str | None) -> None:
    found = schedule("0 22 * * *", hours=6.0 if due.endswith("18:00") else 5.0, blackout=blackout)
    touched = window.blacked_out(found, window.window(found, at(due)))
    assert (str(touched) if touched else None) == day
