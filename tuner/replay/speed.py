"""`max_speed`: the highest speed of a trace that still meets the SLO, by bisection over the same rows."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tuner.metrics import counted, is_good
from tuner.records import Slo
from tuner.replay.timeline import Judge, Partial

# The largest relative distance between the reported speed and the next one that failed.
TOLERANCE = 0.05
MET, LOST = "the SLO is certain to be met", "the SLO cannot be met any more"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxSpeed:
    """`speed` met the SLO and `above` did not (None: nothing tried failed). 0.0 when not even `floor` met it.

    `tried` holds every speed in order with its answer.
    """

    speed: float
    above: float | None
    tried: tuple[tuple[float, bool], ...]


async def bisect(
    measure_at: Callable[[float], Awaitable[bool]],
    *,
    start: float = 1.0,
    floor: float = 0.1,
    ceiling: float = 16.0,
    tolerance: float = TOLERANCE,
    most: int = 12,
) -> MaxSpeed:
    """Double or halve from `start` until the answer flips, then bisect geometrically.

    `measure_at(speed)` replays the same rows at that speed and returns whether the SLO was met; `sure` may
    stop it early. Ends when the two speeds are within `tolerance` (relative), at the bounds, or after `most`.
    """
    tried: list[tuple[float, bool]] = []
    low, high, speed = 0.0, None, start
    while len(tried) < most:
        met = await measure_at(speed)
        tried.append((speed, met))
        if met:
            low = speed
        else:
            high = speed
        following = _next(low, high, floor, ceiling, tolerance)
        if following is None:
            break
        speed = following
    return MaxSpeed(speed=low, above=high, tried=tuple(tried))


def _next(low: float, high: float | None, floor: float, ceiling: float, tolerance: float) -> float | None:
    if high is None:
        return min(ceiling, 2 * low) if low < ceiling else None
    if low == 0.0:
        return max(floor, high / 2) if high > floor else None
    return (low * high) ** 0.5 if high / low > 1 + tolerance else None


def sure(slo: Slo) -> Judge:
    """A judge that ends a replay as soon as it is certain whether the whole window reaches the attainment.

    Pass it to `replay`; `Replayed.stopped` is then MET or LOST. A request past the E2E limit counts as bad
    before it ends.
    """

    def judge(partial: Partial) -> str | None:
        kept = counted(partial.outcomes)
        good = sum(is_good(o, slo) for o in kept)
        cancelled = len(partial.outcomes) - len(kept)
        bad = len(kept) - good
        if slo.e2e_ms is not None:
            bad += sum((partial.now_s - at) * 1000 > slo.e2e_ms for at in partial.waiting_s)
        planned = partial.planned - cancelled
        if planned - bad < slo.attainment * planned:
            return LOST
        return MET if planned and good >= slo.attainment * partial.planned else None

    return judge
