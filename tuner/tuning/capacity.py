"""The objective `max_speed`: how much faster than recorded a ready engine serves the trace within the SLO."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from tuner.records import Slice, Slo
from tuner.replay.measure import measure
from tuner.replay.plan import Load
from tuner.replay.speed import MET, MaxSpeed, bisect, sure
from tuner.replay.timeline import Judge, Replayed

NAME = "max_speed"
FLOOR, CEILING, MOST = 1 / 16, 16.0, 10
"""Bounds relative to the study's speed, and how many speeds are tried at most."""
SALTS = 100
"""Each speed has prompts of its own: repeat r tries at repeat r × SALTS + 1, …"""

Send = Callable[[Sequence[Slice], Load, Judge], Awaitable[Replayed]]


async def max_speed(
    send: Send, slices: Sequence[Slice], load: Load, slo: Slo
) -> tuple[MaxSpeed, tuple[str, ...]]:
    """Bisect from the load's own speed. A speed is kept when every slice by itself meets the SLO; a replay
    stops as soon as that is decided.

    What failed a gate of fidelity is replayed once more; failed again, that speed is not kept, and a warning
    (second) says so: the ruler ended there, the engine may go on.
    """
    tried, doubts = 0, list[str]()

    async def meets(speed: float) -> bool:
        nonlocal tried
        for part in slices:
            for _ in range(2):
                tried += 1
                faster = replace(load, speed=speed, repeat=load.repeat * SALTS + tried)
                replayed = await send((part,), faster, sure(slo))
                if not (failed := replayed.fidelity.failed):
                    break
            else:
                doubts.append(f"{NAME}: speed {speed:.3g} is not counted: {'; '.join(failed)}")
                return False
            if not _met(replayed, slo):
                return False
        return True

    found = await bisect(
        meets, start=load.speed, floor=FLOOR * load.speed, ceiling=CEILING * load.speed, most=MOST
    )
    return found, tuple(doubts)


def _met(replayed: Replayed, slo: Slo) -> bool:
    if replayed.stopped is not None:
        return replayed.stopped == MET
    return measure(replayed, slo).values.get("slo_attainment", 0.0) >= slo.attainment
