"""Collects the rows of a foreign trace, repairs or drops odd rows, counts them, and builds the Trace."""

from array import array
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInput
from tuner.records import JSON
from tuner.traffic.importers.stamps import (
    COARSE_S,
    LIMIT_NS,
    UNITS_NS,
    BareClock,
    UnitEvidence,
    resolution_s,
    spread,
)
from tuner.traffic.structure import chain_sessions, fill_think
from tuner.traffic.trace import MOST_ROWS, STATUSES, Trace, build

OK, ERROR, CANCELLED, TIMEOUT = range(len(STATUSES))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What the user asks of an import; an importer gets only what it takes.

    `columns`: what the importer looks for → the name in the file. `unit`: of plain numbers, one of s, ms, us,
    ns. `max_len`: longer requests (tokens of prompt and answer) are left out. `dequantise`: coarse stamps are
    spread. `tokenizer`: the file that counts tokens of texts.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    unit: str | None = None
    max_len: int | None = None
    dequantise: bool = True
    tokenizer: str | Path | None = None


@dataclass(slots=True, kw_only=True)
class Row:
    """One request as a source gives it.

    `key` is its id there. `client`, `session` and `lora` become numbers. `arrival` is in whole nanoseconds.
    With a BareClock it is the number that the clock returns, and `think_s` and `obs_e2e_s` are in the clock's
    unit.
    """

    arrival: int | float
    input_len: int
    output_len: int
    max_tokens: int = -1
    client: Hashable = None
    session: Hashable = None
    turn: int = -1
    key: Hashable = None
    parent: Hashable = None
    think_s: float = float("nan")
    priority: int = 0
    n: int = 1
    beam: int = 0
    lora: Hashable = None
    status: int = OK
    obs_ttft_s: float = float("nan")
    obs_e2e_s: float = float("nan")
    obs_cached: int = -1
    blocks: Sequence[Hashable] = ()


_KINDS = {
    "max_tokens": "i",
    "turn": "i",
    "think_s": "d",
    "priority": "h",
    "n": "h",
    "beam": "h",
    "status": "B",
    "obs_ttft_s": "d",
    "obs_e2e_s": "d",
    "obs_cached": "i",
}
_RANGES = {"max_tokens": 31, "turn": 31, "priority": 15, "n": 15, "beam": 15, "obs_cached": 31}


class TraceBuilder:
    """Builds a trace from rows: `add` returns whether it keeps a row, `trace` ends it (call it once)."""

    def __init__(
        self,
        path: Path,
        options: ImportOptions,
        *,
        block_size: int = 0,
        clock: BareClock | None = None,
        waits: bool = False,
    ) -> None:
        """`clock`: times are in its unit, which is decided at the end. `waits`: a turn waits for the answer
        before it.
        """
        self.path = path
        self._clock, self._waits = clock, waits
        self.quality: Counter[str] = Counter()
        self.block_size = block_size
        self._options = options
        self._arrival: array[Any] = array("q" if clock is None else "d")
        self._input, self._output = array("i"), array("i")
        self._rest = {name: array(kind) for name, kind in _KINDS.items()}
        self._names: dict[str, dict[Hashable, int]] = {"client": {}, "session": {}, "lora": {}, "blocks": {}}
        self._named = {name: array("q") for name in ("client", "session", "lora")}
        self._row_of: dict[Hashable, int] = {}
        self._parent_keys: dict[int, Hashable] = {}
        self._offsets, self._blocks = array("q", [0]), array("q")

    def __len__(self) -> int:
        return len(self._arrival)

    def add(self, row: Row) -> bool:
        """Adds a row, or drops it and counts the reason."""
        if why := self._unfit(row):
            self.drop(why)
            return False
        self.quality["rows_read"] += 1
        self._count(row)
        if self._arrival and row.arrival < self._arrival[-1]:
            self.quality["unsorted"] += 1
        number = len(self._arrival)
        if number >= MOST_ROWS:
            raise BadInput(f"{self.path}: more than {MOST_ROWS:,} requests; import parts of it")
        if row.key is not None:
            self._row_of[row.key] = number
        if row.parent is not None:
            self._parent_keys[number] = row.parent
        self._arrival.append(row.arrival)
        self._input.append(row.input_len)
        self._output.append(row.output_len)
        for name, column in self._rest.items():
            column.append(self._fitted(name, getattr(row, name)))
        for name, numbers in self._named.items():
            value = getattr(row, name)
            known = self._names[name]
            numbers.append(-1 if value is None else known.setdefault(value, len(known)))
        self._add_blocks(row)
        return True

    def _count(self, row: Row) -> None:
        """Counts what is odd in a row that is kept. An answer without tokens counts as failed."""
        if row.output_len == 0 and row.status == OK:
            row.status = ERROR
            self.quality["no_output_flagged"] += 1
        if row.status != OK:
            self.quality["not_ok_kept"] += 1
        if row.beam:
            self.quality["beam_search"] += 1

    def drop(self, why: str) -> None:
        """Counts a dropped row. `rows_read` is always the number of kept rows plus all `dropped_*`."""
        self.quality["rows_read"] += 1
        self.quality[why] += 1

    def trace(self, source: str, *, known_step_s: float | None = None, **notes: JSON) -> Trace:
        """The trace, sorted and with its first arrival at 0. Coarse time stamps are spread. BadInput if no
        row is left.

        `source` names the format. `known_step_s` is the step of its clock if the format defines it; otherwise
        the stamps show it. `notes` become part of the trace's metadata.
        """
        if not len(self):
            dropped = ", ".join(f"{count} {why}" for why, count in self.quality.items() if why != "rows_read")
            raise BadInput(f"{self.path}: no request in it" + (f" ({dropped})" if dropped else ""))
        parents = self._parents()
        arrival, unit = self._in_nanoseconds(parents)
        order = np.argsort(arrival, kind="stable")
        arrival_s = (arrival - arrival[order[0]]) / 1e9
        step = resolution_s(arrival_s) if known_step_s is None else known_step_s
        coarse = self._options.dequantise and step > COARSE_S
        if coarse:
            arrival_s[order] = spread(arrival_s[order], step)
            self.quality["arrivals_spread"] = len(self)
        columns: dict[str, Any] = {
            "arrival_s": arrival_s,
            "input_len": self._input,
            "output_len": self._output,
        }
        columns |= self._rest | self._named | {"parent": parents}
        self._count_block_oddities()
        meta: dict[str, JSON] = {"source": source, "file": self.path.name, "rows": len(self), **notes}
        meta |= {"resolution_s": step, "spread_s": step if coarse else 0.0, **unit}
        meta["quality"] = dict(self.quality)
        if "start_ns" not in meta:
            meta["start_ns"] = int(arrival[order[0]])
        made = build(columns, blocks=(self._offsets, self._blocks), block_size=self.block_size, meta=meta)
        return fill_think(chain_sessions(made))

    def _in_nanoseconds(self, parents: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[str, JSON]]:
        """(arrivals, notes on their unit). The other times are converted to seconds. BadInput asks for the
        unit.
        """
        if self._clock is None:
            return np.frombuffer(self._arrival, np.int64), {}
        stamps = np.frombuffer(self._arrival, np.float64)
        took, wrote = np.frombuffer(self._rest["obs_e2e_s"]), np.frombuffer(self._output, np.int32)
        known = took > 0
        took, wrote = took[known], wrote[known]
        if self._waits and (turns := parents >= 0).any():
            took = np.concatenate([took, stamps[turns] - stamps[parents[turns]]])
            wrote = np.concatenate([wrote, np.frombuffer(self._output, np.int32)[parents[turns]]])
        tokens = int(np.frombuffer(self._input, np.int32).sum(dtype=np.int64))
        seen = UnitEvidence(stamps=stamps, input_tokens=tokens, took=took, wrote=wrote.astype(np.float64))
        unit, why = self._clock.unit(seen)
        scale = UNITS_NS[unit]
        for name in ("think_s", "obs_e2e_s"):
            self._rest[name] = array("d", (np.frombuffer(self._rest[name]) * (scale / 1e9)).tolist())
        first = self._clock.first or 0
        longest = max(abs(first), float(np.abs(stamps).max())) * scale
        if longest > LIMIT_NS:
            raise BadInput(
                f"{self.path}: '{self._clock.key}' in {unit} is outside the times that a trace can store;"
                " is the unit right?"
            )
        notes: dict[str, JSON] = {"unit": unit, "unit_known_by": why}
        return np.rint(stamps * scale).astype(np.int64) + round(first * scale), notes

    def _unfit(self, row: Row) -> str:
        if row.input_len < 0 or row.output_len < 0:
            return "dropped_negative_length"
        if row.input_len == 0:
            return "dropped_no_input"
        if (most := self._options.max_len) is not None and row.input_len + row.output_len > most:
            return "dropped_over_length"
        if row.key is not None and row.key in self._row_of:
            return "dropped_duplicate"
        return ""

    def _fitted(self, name: str, value: Any) -> Any:
        bits = _RANGES.get(name)
        if bits is None or -(2**bits) <= value < 2**bits:
            return value
        self.quality[f"{name}_clamped"] += 1
        return max(-(2**bits), min(value, 2**bits - 1))

    def _add_blocks(self, row: Row) -> None:
        ids: Sequence[Hashable] = row.blocks
        if ids and self.block_size:
            most = -(-row.input_len // self.block_size)
            if len(ids) > most:
                self.quality["blocks_beyond_length_cut"] += 1
                ids = ids[:most]
            elif len(ids) < row.input_len // self.block_size:
                self.quality["blocks_short_of_length"] += 1
            known = self._names["blocks"]
            self._blocks.extend([known.setdefault(one, len(known)) for one in ids])
        self._offsets.append(len(self._blocks))

    def _parents(self) -> NDArray[np.int64]:
        parents = np.full(len(self), -1, np.int64)
        for number, key in self._parent_keys.items():
            found = self._row_of.get(key)
            if found is None:
                self.quality["parent_not_found"] += 1
            else:
                parents[number] = found
        return parents

    def _count_block_oddities(self) -> None:
        """Counts block ids that are incomplete in one row and complete in another."""
        if not self._blocks:
            return
        offsets = np.frombuffer(self._offsets, np.int64)
        blocks = np.frombuffer(self._blocks, np.int64)
        lengths, inputs = np.diff(offsets), np.frombuffer(self._input, np.int32)
        partial = (lengths > 0) & (lengths * self.block_size > inputs)
        last = offsets[1:][partial] - 1
        whole = np.ones(len(blocks), bool)
        whole[last] = False
        both = np.intersect1d(blocks[last], blocks[whole])
        if len(both):
            self.quality["blocks_partial_and_whole"] = len(both)
