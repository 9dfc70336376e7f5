"""Time stamps of foreign files: dates, the unit of plain numbers, the step of the clock, and the spreading of
arrivals.

If a file does not name a unit, it is never guessed. Either the stamps are possible in only one unit, or the
user is asked.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInput, nearest

_STAMP = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?)?"
    r"\s*(Z|UTC|[+-]\d\d:?(?:\d\d)?)?",
    re.ASCII,
)
UNITS_NS: Mapping[str, int] = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_DATES_NS = tuple(int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000_000 for year in (2010, 2040))

# Times beyond this do not fit the 64 bits of a trace.
LIMIT_NS = 9_000_000_000_000_000_000

# No engine writes one answer faster than this per token.
FASTEST_TOKEN_S = 2e-4

# No engine is sent more prompt tokens than this in a second.
MOST_TOKENS_PER_S = 1e7

# Numbers since 1970 that lie farther apart are hardly dates of one trace: microseconds of minutes look so.
LONGEST_TRACE_S = 366 * 86_400

# No clock ticks in longer steps, except steps of whole half hours.
LONGEST_STEP_S = 1000.0
_HALF_HOUR_S = 1800

# Fewer turns, different stamps or rows may follow a rule by chance.
_FEWEST_TURNS, _FEWEST_STAMPS, _FEWEST_ROWS = 3, 8, 50

# Stamps coarser than this fire requests together that came apart; they are spread at import.
COARSE_S = 0.005

# So many distances must agree before their common divisor counts as the clock's step, and the usual steps.
_FEWEST_GAPS = 4
_NATURAL_US = (60_000_000, 1_000_000, 100_000, 10_000)


def date_unit(low: float, high: float) -> str | None:
    """The unit in which both numbers, counted since 1970, are dates between 2010 and 2040; None if there is
    none.
    """
    for unit, ns in UNITS_NS.items():
        if _DATES_NS[0] <= low * ns and high * ns < _DATES_NS[1]:
            return unit
    return None


def parse_stamp(text: str) -> int | None:
    """Nanoseconds since 1970 of an ISO 8601 stamp with up to nine digits of fraction; None for
    other texts.
    """
    head, _, fraction = text.partition(".")
    if len(head) == 19 and fraction.isascii() and fraction.isdigit() and len(fraction) <= 9:
        seconds = _seconds(head)
        return None if seconds is None else seconds * 1_000_000_000 + int(fraction.ljust(9, "0"))
    match = _STAMP.fullmatch(text.strip())
    if match is None:
        return None
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    at = f"{year}-{month}-{day} {hour or '00'}:{minute or '00'}:{second or '00'}"
    seconds = _seconds(at)
    if seconds is None:
        return None
    if zone and zone[0] in "+-":
        digits = zone[1:].replace(":", "").ljust(4, "0")
        shift = int(digits[:2]) * 3600 + int(digits[2:]) * 60
        seconds -= shift if zone[0] == "+" else -shift
    return seconds * 1_000_000_000 + int((fraction or "0").ljust(9, "0"))


@lru_cache(maxsize=4096)
def _seconds(head: str) -> int | None:
    """Seconds since 1970 of `YYYY-MM-DD?HH:MM:SS`, read as UTC."""
    leap = head.endswith(":60")
    try:
        moment = datetime.fromisoformat(head[:-2] + "59" if leap else head).replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(moment.timestamp()) + leap


def guess_year(month_day: str, before: datetime) -> int:
    """The year of a stamp without a year: the newest year in which the stamp is at most one day after
    `before`.
    """
    month, day = (int(part) for part in month_day.split("-"))
    year = before.year
    while True:
        try:
            if datetime(year, month, day, tzinfo=UTC) <= before + timedelta(days=1):
                return year
        except ValueError:
            if year < before.year - 8:
                raise
        year -= 1


def check_unit(unit: str) -> str:
    """The unit itself. BadInput if it is not one of s, ms, us, ns."""
    if unit not in UNITS_NS:
        raise BadInput(f"unit '{unit}' is not known{nearest(unit, UNITS_NS)}; use one of {list(UNITS_NS)}")
    return unit


class BareClock:
    """Time stamps of one column without a unit. They are counted from the first one, so that floats stay
    exact.
    """

    def __init__(self, path: Path, key: str, unit: str | None) -> None:
        self.path, self.key = path, key
        self.first: int | float | None = None
        self._given = unit

    def since_first(self, value: int | float) -> float:
        """The stamp in the unit of the file, counted from the first stamp."""
        if self.first is None:
            self.first = value
        return float(value - self.first)

    def unit(self, seen: "UnitEvidence") -> tuple[str, str]:
        """(unit, the reason). BadInput asks for the unit if more than one is possible."""
        if self._given is not None:
            return self._given, "given"
        first, span = self.first or 0, float(np.ptp(seen.stamps))
        if not span and not len(seen.took):
            return "s", "all stamps are the same"
        dated = date_unit(first + float(seen.stamps.min()), first + float(seen.stamps.max()))
        out = _ruled_out(seen)
        if dated is not None and dated not in out:
            return dated, "in this unit the stamps are dates since 1970"
        left = [unit for unit in UNITS_NS if unit not in out]
        if len(left) == 1:
            return left[0], "; ".join(dict.fromkeys(out.values()))
        readings, rows = [], len(seen.stamps)
        for unit in left or UNITS_NS:
            seconds = span * UNITS_NS[unit] / 1e9
            rate = f" of {rows / seconds:.3g} requests/s" if seconds else ""
            readings.append(f"in {unit} it is {seconds:.3g} s{rate}")
        raise BadInput(
            f"{self.path}: the file does not say the unit of '{self.key}': {'; '.join(readings)}. "
            f"Name it: `tuner trace import {self.path.name} --unit {'|'.join(left or UNITS_NS)}`"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitEvidence:
    """What a file shows about its unit.

    All times are in this unit. `took` and `wrote` are pairs: the time of an answer (or the time until the
    next turn came), and the tokens of this answer.
    """

    stamps: NDArray[np.float64]
    input_tokens: int
    took: NDArray[np.float64]
    wrote: NDArray[np.float64]


def _ruled_out(seen: UnitEvidence) -> dict[str, str]:
    """Unit → why the stamps cannot be in this unit: answers would be faster than any engine, or the clock
    coarser than any clock.
    """
    out: dict[str, str] = {}
    span, step = float(np.ptp(seen.stamps)), _step(seen.stamps)
    many = span > 0 and len(seen.stamps) >= _FEWEST_ROWS
    for unit, ns in UNITS_NS.items():
        scale = ns / 1e9
        hasty = int((seen.took * scale < seen.wrote * FASTEST_TOKEN_S).sum())
        if hasty >= _FEWEST_TURNS:
            out[unit] = f"in a smaller unit {hasty} answers would be faster than any engine"
        elif many and seen.input_tokens > MOST_TOKENS_PER_S * span * scale:
            out[unit] = "in a smaller unit there would be more tokens than any engine can read"
        elif step * scale >= LONGEST_STEP_S and step * scale % _HALF_HOUR_S:
            out[unit] = f"in a larger unit its clock would tick in steps of {step * scale:,.0f} s"
    return out


def _step(stamps: NDArray[np.float64]) -> float:
    """The step of the clock, in the unit of the file: the number that divides every distance, or the distance
    of batches; 0 if the stamps have fractions or are few.
    """
    different = np.unique(stamps)
    if len(different) < _FEWEST_STAMPS or (different != np.round(different)).any():
        return 0.0
    return max(float(np.gcd.reduce(np.diff(different).astype(np.int64))), resolution_s(stamps))


def resolution_s(arrival_s: NDArray[np.float64]) -> float:
    """The step of the clock of these arrivals, in seconds; 0.0 if they do not show it, or if there are fewer
    than three rows.

    For a batch clock (many equal stamps at regular distances, as in Mooncake's trace), the step is the usual
    distance. Otherwise it is the largest of 60 s, 1 s, 100 ms and 10 ms that divides every distance.
    """
    if len(arrival_s) < 3:
        return 0.0
    stamps = np.unique(np.round(np.sort(arrival_s) * 1e6).astype(np.int64))
    gaps = np.diff(stamps)
    if not len(gaps):
        return 0.0
    equal = 1.0 - len(stamps) / len(arrival_s)
    low, usual, high = np.percentile(gaps, [10, 50, 90])
    if equal > 0.3 and usual >= COARSE_S * 1e6 and high <= 1.5 * low:
        return float(usual) / 1e6
    step = int(np.gcd.reduce(gaps))
    if len(gaps) < _FEWEST_GAPS:
        return 0.0
    for natural in _NATURAL_US:
        if step % natural == 0 and (natural < 60_000_000 or equal > 0.05):
            return natural / 1e6
    return 0.0


def spread(arrival_s: NDArray[np.float64], step_s: float, seed: int = 0) -> NDArray[np.float64]:
    """Sorted arrivals, each with a random number from 0 to `step` added. The rows keep their order.

    Rows of one stamp get sorted numbers. A number is at most the distance to the next stamp. So the order
    within a stamp and between stamps does not change. The numbers depend only on the seed.
    """
    draws = np.random.default_rng(seed).random(len(arrival_s))
    stamps = np.unique(arrival_s)
    group = np.searchsorted(stamps, arrival_s)
    draws = draws[np.lexsort((draws, group))]
    room = np.full(len(stamps), step_s)
    room[:-1] = np.minimum(step_s, np.diff(stamps))
    return np.asarray(arrival_s + draws * room[group])
