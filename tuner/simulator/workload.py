"""A trace's slices as requests of the core, in the timeline that a replay follows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tuner.records import Slice
from tuner.replay.plan import Plan, priming_rows, schedule
from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import EngineRequest, SchedulerLimits
from tuner.traffic.trace import Trace


@dataclass(slots=True)
class PreparedSlice:
    """One slice: rows in order of arrival (seconds, ≥ 0), which of them are measured, the window's length."""

    name: str
    window_s: float
    start_s: float  # of the window, on the clock of `at_s`
    at_s: list[float]
    rows: NDArray[np.int64]
    lengths: list[tuple[int, int]]
    measured: NDArray[np.bool_]
    filler: list[int]
    priority: list[int]
    primed: NDArray[np.int64]
    segments: dict[int, list[tuple[tuple[int, int], ...]]] = field(default_factory=dict)


class Workload:
    """The slices of one study, ready to be run many times."""

    def __init__(self, trace: Trace, slices: Sequence[Slice], plan: Plan, speed: float = 1.0) -> None:
        self.trace = trace
        self.parts = [self._part(part, plan, speed) for part in slices]

    def _part(self, part: Slice, plan: Plan, speed: float) -> PreparedSlice:
        trace = self.trace
        due = schedule(trace, part, speed=speed, warmup_s=plan.load_warmup_s, tail_s=plan.tail_limit_s)
        shift = max(0.0, -float(due.at_s[0])) if len(due) else 0.0
        rows = due.rows
        inputs, outputs = trace.input_len[rows].tolist(), np.maximum(trace.output_len[rows], 1).tolist()
        primed = np.empty(0, np.int64)
        if len(trace.blocks) and plan.priming_turnovers > 0:
            before = plan.load_warmup_s * speed
            primed = priming_rows(trace, part, before_s=before, tokens=plan.priming_turnovers * 2e6)
        return PreparedSlice(
            name=part.name,
            window_s=due.window_s,
            start_s=shift,
            at_s=(due.at_s + shift).tolist(),
            rows=rows,
            lengths=list(zip(inputs, outputs, strict=True)),
            measured=due.measured,
            filler=due.filler.tolist(),
            priority=trace.priority[rows].tolist(),
            primed=primed,
        )

    def requests(
        self, part: PreparedSlice, limits: SchedulerLimits, delay_s: float = 0.0
    ) -> list[EngineRequest]:
        """Fresh requests of a slice; they reach the engine `delay_s` after they are due."""
        prefixes = self._segments(part, limits) if limits.enable_prefix_caching else None
        return [
            EngineRequest(number, at + delay_s, lengths, prefixes[number] if prefixes else (), priority)
            for number, (at, lengths, priority) in enumerate(
                zip(part.at_s, part.lengths, part.priority, strict=True)
            )
        ]

    def prime(self, part: PreparedSlice, scheduler: Scheduler) -> None:
        """Fill the prefix cache with the prompts before the slice, taking no time."""
        limits, pool = scheduler.limits, scheduler.pool
        if not limits.enable_prefix_caching:
            return
        for row in part.primed:
            length = int(self.trace.input_len[row])
            request = EngineRequest(-1, 0.0, (length, 1), self._row_segments(int(row), limits.block_size, 0))
            blocks = -(-length // limits.block_size)
            hit, found = pool.lookup(request.table, (length - 1) // limits.block_size)
            if blocks - hit + pool.cost_of(found) > pool.free:
                continue
            pool.hold(request.table, hit, found)
            pool.take(blocks - hit)
            request.table.blocks = blocks
            pool.remember(request.table, length // limits.block_size)
            pool.release(request.table, length)

    def _segments(
        self, part: PreparedSlice, limits: SchedulerLimits
    ) -> list[tuple[tuple[int, int], ...]] | None:
        if not len(self.trace.blocks):
            return None
        size = limits.block_size
        if size not in part.segments:
            part.segments[size] = [
                self._row_segments(int(row), size, filler)
                for row, filler in zip(part.rows, part.filler, strict=True)
            ]
        return part.segments[size]

    def _row_segments(self, row: int, size: int, kind: int) -> tuple[tuple[int, int], ...]:
        """(content key, engine blocks) of a prompt. Keys chain, so equal keys mean equal prefixes.

        Trace blocks that are multiples of engine blocks make one run each; otherwise an engine block's
        content is the trace blocks that it overlaps. The last, partial trace block counts as a complete one.
        """
        ids, width = self.trace.row_blocks(row).tolist(), self.trace.block_size
        whole = int(self.trace.input_len[row]) // size
        key, found = hash((kind, width)), []
        if width and width % size == 0:
            each = width // size
            for index, block in enumerate(ids):
                count = min(each, whole - index * each)
                if count <= 0:
                    break
                key = hash((key, block))
                found.append((key, count))
        elif width:
            for number in range(whole):
                first, last = number * size // width, ((number + 1) * size - 1) // width
                if last >= len(ids):
                    break
                key = hash((key, number * size % width, *ids[first : last + 1]))
                found.append((key, 1))
        return tuple(found)
