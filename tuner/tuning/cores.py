"""Which cores of a host serve and which send."""

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.replay import contention

SENDERS = 4
"""Sender processes at most; one for every eight cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Which cores serve and which send; None = anywhere (a host with one core)."""

    engine: tuple[int, ...] | None
    sender: tuple[int, ...] | None


def split_cores(available: Sequence[int]) -> Cores:
    """The senders get an eighth of the host, one to four cores; the engine all the others."""
    if len(available) < 2:
        return Cores(engine=None, sender=None)
    engine, sender = contention.split(available, min(SENDERS, max(1, len(available) // 8)))
    return Cores(engine=engine, sender=sender)
