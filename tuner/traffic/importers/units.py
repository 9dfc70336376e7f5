"""The unit of times that a file gives as bare numbers: evidence that leaves one unit, or a question."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInput, nearest
from tuner.traffic import quantise
from tuner.traffic.importers.reading import UNITS_NS, Record, date_unit

FASTEST_TOKEN_S = 2e-4
"""No engine writes one answer faster than this per token."""
MOST_TOKENS_PER_S = 1e7
"""No engine is sent more prompt tokens than this in a second."""
LONGEST_STEP_S = 1000.0
"""No clock ticks in longer steps, but for whole half hours."""
_HALF_HOUR_S = 1800
_FEWEST_TURNS, _FEWEST_STAMPS, _FEWEST_ROWS = 3, 8, 50


def check_unit(unit: str) -> str:
    """The unit itself. BadInput when it is none of s, ms, us, ns."""
    if unit not in UNITS_NS:
        raise BadInput(f"unit '{unit}' is not known{nearest(unit, UNITS_NS)}; use one of {list(UNITS_NS)}")
    return unit


class BareClock:
    """Stamps of one column without a unit, counted from the first one so that floats stay exact."""

    def __init__(self, path: Path, key: str, unit: str | None) -> None:
        self.path, self.key = path, key
        self.first: int | float | None = None
        self._given = unit

    def read(self, record: Record) -> float:
        """The stamp of a record, in the file's own unit since the first stamp read."""
        value = record.plain_number(self.key)
        if self.first is None:
            self.first = value
        return float(value - self.first)

    def unit(self, seen: "Seen") -> tuple[str, str]:
        """(unit, why it is that). BadInput asks for the unit where more than one may be right."""
        if self._given is not None:
            return self._given, "given"
        first, span = self.first or 0, float(np.ptp(seen.stamps))
        if not span and not len(seen.took):
            return "s", "all stamps are the same"
        dated = date_unit(first + float(seen.stamps.min()), first + float(seen.stamps.max()))
        if dated is not None:
            return dated, "the stamps are dates since 1970 in it"
        out = _ruled_out(seen)
        left = [unit for unit in UNITS_NS if unit not in out]
        if len(left) == 1:
            return left[0], "; ".join(dict.fromkeys(out.values()))
        readings = [_reading(unit, span, len(seen.stamps)) for unit in left or UNITS_NS]
        raise BadInput(
            f"{self.path}: '{self.key}' counts in a unit that the file does not name: {'; '.join(readings)}. "
            f"Name it: `tuner trace import {self.path.name} --unit {'|'.join(left or UNITS_NS)}`"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a file shows of its unit. All times in that unit; `took`, `wrote`: times that answers took (or
    that passed until the turn after them came) and the tokens of those answers, one pair each.
    """

    stamps: NDArray[np.float64]
    input_tokens: int
    took: NDArray[np.float64]
    wrote: NDArray[np.float64]


def _ruled_out(seen: Seen) -> dict[str, str]:
    """Unit → why the stamps cannot count in it: too fast for any engine, or too coarse for any clock."""
    out: dict[str, str] = {}
    span, step = float(np.ptp(seen.stamps)), _step(seen.stamps)
    many = span > 0 and len(seen.stamps) >= _FEWEST_ROWS
    for unit, ns in UNITS_NS.items():
        scale = ns / 1e9
        hasty = int((seen.took * scale < seen.wrote * FASTEST_TOKEN_S).sum())
        if hasty >= _FEWEST_TURNS:
            out[unit] = f"in a smaller unit {hasty} answers would come faster than any engine writes"
        elif many and seen.input_tokens > MOST_TOKENS_PER_S * span * scale:
            out[unit] = "in a smaller unit more tokens would come than any engine takes"
        elif step * scale >= LONGEST_STEP_S and step * scale % _HALF_HOUR_S:
            out[unit] = f"in a larger unit its clock would tick in steps of {step * scale:,.0f} s"
    return out


def _step(stamps: NDArray[np.float64]) -> float:
    """How the clock ticks, in its own unit: the number that divides every distance, or the batches' distance;
    0 when stamps have fractions or are few.
    """
    different = np.unique(stamps)
    if len(different) < _FEWEST_STAMPS or (different != np.round(different)).any():
        return 0.0
    return max(float(np.gcd.reduce(np.diff(different).astype(np.int64))), quantise.resolution_s(stamps))


def _reading(unit: str, span: float, rows: int) -> str:
    seconds = span * UNITS_NS[unit] / 1e9
    rate = f" of {rows / seconds:.3g} requests/s" if seconds else ""
    return f"in {unit} it is {seconds:.3g} s{rate}"
