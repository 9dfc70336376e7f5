"""Coarse timestamps: how coarse they are, and spreading them without changing the order of rows."""

import numpy as np
from numpy.typing import NDArray

COARSE_S = 0.005
"""Stamps coarser than this fire requests together that came apart; they are spread at import."""

_FEWEST_GAPS = 4
_NATURAL_US = (60_000_000, 1_000_000, 100_000, 10_000)


def resolution_s(arrival_s: NDArray[np.float64]) -> float:
    """The step of the clock that stamped these arrivals, seconds; 0.0 when it cannot be told (or < 3 rows).

    A batch clock (many equal stamps at regular distances, as in Mooncake's trace) gives the usual
    distance; else the largest of 60 s, 1 s, 100 ms and 10 ms that divides every distance.
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
    """Arrivals (sorted) with U(0, step) added, drawn once from the seed; rows keep their order.

    Rows of one stamp get sorted draws, so order among them stays; a draw is limited to the distance to the
    next stamp, so order between stamps stays too.
    """
    draws = np.random.default_rng(seed).random(len(arrival_s))
    stamps = np.unique(arrival_s)
    group = np.searchsorted(stamps, arrival_s)
    draws = draws[np.lexsort((draws, group))]
    room = np.full(len(stamps), step_s)
    room[:-1] = np.minimum(step_s, np.diff(stamps))
    return np.asarray(arrival_s + draws * room[group])
