"""How much of its prompts an engine found in its cache, and how much an LRU cache of its size would have."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.records import Outcome
from tuner.replay.schedule import SendSchedule
from tuner.traffic.structure import predicted_hits
from tuner.traffic.trace import Trace


@dataclass(slots=True)
class Prefix:
    """Prompt tokens of answered requests that tell their cached ones: all, cached, predicted."""

    tokens: int = 0
    cached: int = 0
    predicted: int = 0

    def add(
        self,
        trace: Trace,
        sent: tuple[NDArray[np.int64], SendSchedule],
        outcomes: Sequence[Outcome],
        engine: tuple[int, int | None],
    ) -> None:
        """Count one slice: `sent` are the primed rows and the timetable, `engine` its block size and KV
        capacity in tokens. Filler and warm-up have other tokens: that they push blocks out is not told."""
        told = {o.row: o for o in outcomes if o.ok and o.cached_tokens is not None}
        if not told or not len(trace.blocks):
            return
        primed, timetable = sent
        own = timetable.filler == 0
        rows = np.concatenate([primed, timetable.rows[own]])
        counted = np.concatenate([np.zeros(len(primed), bool), timetable.measured[own]])
        found = predicted_hits(trace, rows, engine[0], engine[1])
        for row, hits in zip(rows[counted].tolist(), found[counted].tolist(), strict=True):
            if (outcome := told.get(row)) is not None:
                self.tokens += outcome.input_tokens
                self.cached += outcome.cached_tokens or 0
                self.predicted += hits

    def values(self) -> dict[str, float | None]:
        """For the fidelity report; nothing where nothing was told."""
        if not self.tokens:
            return {}
        return {
            "prefix_cached_share": self.cached / self.tokens,
            "prefix_predicted_share": self.predicted / self.tokens,
        }
