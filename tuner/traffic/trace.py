"""The canonical trace: numpy columns with one entry per request, block ids in CSR form, a Parquet file, and a
digest.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tuner.errors import BadInput, Unavailable, nearest
from tuner.records import JSON

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

STATUSES = ("ok", "error", "cancelled", "timeout")

# Column → dtype and the value that means «unknown».
COLUMNS: Mapping[str, tuple[str, float]] = {
    "arrival_s": ("<f8", 0.0),
    "input_len": ("<i4", 0),
    "output_len": ("<i4", 0),
    "max_tokens": ("<i4", -1),
    "client": ("<i4", -1),
    "session": ("<i8", -1),
    "turn": ("<i4", -1),
    "parent": ("<i8", -1),
    "think_s": ("<f8", np.nan),
    "priority": ("<i2", 0),
    "n": ("<i2", 1),
    "beam": ("<i2", 0),
    "lora": ("<i2", -1),
    "status": ("|u1", 0),
    "obs_ttft_s": ("<f8", np.nan),
    "obs_e2e_s": ("<f8", np.nan),
    "obs_cached": ("<i4", -1),
}

# Columns that earlier files lack; one that is unknown throughout is not in the digest.
LATER = frozenset({"beam"})
VERSION = 1

# A larger file is no trace that a replay could send, and would not fit the memory of a small host.
MOST_ROWS, MOST_VALUES = 20_000_000, 500_000_000

# Adapters, and tenants, that are measured by themselves.
MOST_CLASSES = 8

# The most bytes of a Parquet file's footer, which lists its columns.
LARGEST_FOOTER = 16 * 1024**2

# What a Parquet file begins with.
MAGIC = "PAR1"

# Rows that a file keeps together: a reader of some rows of a long trace reads their groups alone.
GROUP_ROWS = 65_536
_METADATA = b"tuner"


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Captured traffic that never changes, sorted by arrival, with the first arrival at 0. It has one entry
    per request.

    `parent` is the row of the turn before (always an earlier row). `think_s` is the pause since this turn
    ended. `status` is an index into STATUSES. `n` is the number of answers. `beam` is the width of a beam
    search (0: none). The prompt blocks of row r are blocks[block_offsets[r]:block_offsets[r + 1]]: ids of
    `block_size` tokens, of which the last may be incomplete. A row without ids has a unique prompt.
    """

    arrival_s: NDArray[np.float64]
    input_len: NDArray[np.int32]
    output_len: NDArray[np.int32]
    max_tokens: NDArray[np.int32]
    client: NDArray[np.int32]
    session: NDArray[np.int64]
    turn: NDArray[np.int32]
    parent: NDArray[np.int64]
    think_s: NDArray[np.float64]
    priority: NDArray[np.int16]
    n: NDArray[np.int16]
    beam: NDArray[np.int16]
    lora: NDArray[np.int16]
    status: NDArray[np.uint8]
    obs_ttft_s: NDArray[np.float64]
    obs_e2e_s: NDArray[np.float64]
    obs_cached: NDArray[np.int32]
    block_size: int = 0
    block_offsets: NDArray[np.int64]
    blocks: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    meta: Mapping[str, JSON] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    def row_blocks(self, row: int) -> NDArray[np.int64]:
        """The block ids of one row's prompt; empty if the row has none."""
        return self.blocks[self.block_offsets[row] : self.block_offsets[row + 1]]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content (columns, blocks, block size), not of the notes in `meta`."""
        sha = hashlib.sha256(f"tuner-trace-{VERSION}:{self.block_size}".encode())
        for name in (*COLUMNS, "block_offsets", "blocks"):
            array = np.ascontiguousarray(getattr(self, name))
            if name in LATER and not array.any():
                continue
            if array.dtype.kind == "f":
                array = np.where(np.isnan(array), np.nan, array)
            sha.update(f"|{name}:{len(array)}:".encode())
            sha.update(array.view(np.uint8).data if len(array) else b"")
        return sha.hexdigest()

    @cached_property
    def classes(self) -> Mapping[str, NDArray[np.bool_]]:
        """Class of requests → the rows in it.

        `interactive` has the most urgent priority (smaller is more urgent), and `bulk` has all others.
        `adapter<N>` and `tenant<N>` come from the columns `lora` and `client` (the MOST_CLASSES with the most
        requests of each). A class is left out if every request is in it.
        """
        found: dict[str, NDArray[np.bool_]] = {}
        if len(self) and self.priority.min() < self.priority.max():
            found["interactive"] = self.priority == self.priority.min()
            found["bulk"] = ~found["interactive"]
        for name, column, least in (("adapter", self.lora, 1), ("tenant", self.client, 2)):
            numbers, counts = np.unique(column[column >= 0], return_counts=True)
            if len(numbers) >= least:
                most = numbers[np.argsort(-counts, kind="stable")][:MOST_CLASSES]
                found |= {f"{name}{number}": column == number for number in sorted(most.tolist())}
        return found

    def classes_of(self, row: int) -> tuple[str, ...]:
        """The classes of a row."""
        return tuple(name for name, rows in self.classes.items() if rows[row])

    def take(self, rows: ArrayLike, *, start_s: float | None = None) -> "Trace":
        """The trace of some rows (ascending). Arrivals count from `start_s`, or from the first of these rows.

        A parent that is not among these rows becomes -1. Block, session and client ids stay the same.
        """
        chosen = np.asarray(rows, np.int64)
        columns = {name: getattr(self, name)[chosen] for name in COLUMNS}
        new_row = np.full(len(self) + 1, -1, np.int64)
        new_row[chosen] = np.arange(len(chosen))
        columns["parent"] = new_row[columns["parent"]]
        origin = start_s if start_s is not None else (columns["arrival_s"][0] if len(chosen) else 0.0)
        columns["arrival_s"] = columns["arrival_s"] - origin
        offsets, blocks = _gather(self.block_offsets, self.blocks, chosen)
        return Trace(
            **columns, block_size=self.block_size, block_offsets=offsets, blocks=blocks, meta=self.meta
        )

    def with_meta(self, **notes: JSON) -> "Trace":
        """The same content with notes added; the digest stays."""
        return self.changed(meta={**self.meta, **notes})

    def changed(self, **parts: Any) -> "Trace":
        """The same trace with some columns replaced. Arrivals must still be sorted."""
        names = (*COLUMNS, "block_size", "block_offsets", "blocks", "meta")
        return Trace(**{name: parts.get(name, getattr(self, name)) for name in names})


def build(
    columns: Mapping[str, ArrayLike],
    *,
    blocks: tuple[ArrayLike, ArrayLike] | None = None,
    block_size: int = 0,
    meta: Mapping[str, JSON] | None = None,
) -> Trace:
    """A trace from columns whose rows may be in any order. They are sorted (stable), the first arrival
    becomes 0, and missing columns are filled.

    `parent` and `blocks` (offsets, ids) are in the given order. A parent that does not come earlier is
    dropped. ValueError if the columns do not fit together.
    """
    if unknown := set(columns) - set(COLUMNS):
        raise ValueError(f"unknown columns: {sorted(unknown)}")
    arrival = np.asarray(columns["arrival_s"], np.float64)
    order = np.argsort(arrival, kind="stable")
    filled: dict[str, NDArray[Any]] = {}
    for name, (dtype, missing) in COLUMNS.items():
        given = columns.get(name)
        array = np.full(len(arrival), missing, dtype) if given is None else np.asarray(given, dtype)
        filled[name] = array[order]
    filled["arrival_s"] = filled["arrival_s"] - (arrival[order[0]] if len(order) else 0.0)
    new_row = np.full(len(order) + 1, -1, np.int64)
    new_row[order] = np.arange(len(order))
    parent = new_row[filled["parent"]]
    filled["parent"] = np.where(parent < np.arange(len(order)), parent, -1)
    offsets, ids = np.zeros(len(order) + 1, np.int64), np.empty(0, np.int64)
    if blocks is not None and block_size > 0:
        offsets, ids = _gather(np.asarray(blocks[0], np.int64), np.asarray(blocks[1], np.int64), order)
    return Trace(**filled, block_size=block_size, block_offsets=offsets, blocks=ids, meta=dict(meta or {}))


def write(trace: Trace, path: str | Path) -> str:
    """Writes a trace as Parquet, completely or not at all, and returns its digest. Unavailable if the disk
    fails.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = Path(path)
    lists = pa.LargeListArray.from_arrays(pa.array(trace.block_offsets), pa.array(trace.blocks))
    table = pa.table({name: pa.array(getattr(trace, name)) for name in COLUMNS} | {"blocks": lists})
    notes = {
        "version": VERSION,
        "digest": trace.digest,
        "block_size": trace.block_size,
        "meta": dict(trace.meta),
    }
    table = table.replace_schema_metadata({_METADATA: json.dumps(notes).encode()})
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    encodings = {"blocks.list.element": "DELTA_BINARY_PACKED"}
    try:
        pq.write_table(
            table, partial, row_group_size=GROUP_ROWS,
            compression="zstd", use_dictionary=False, column_encoding=encodings,
        )  # fmt: skip
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise Unavailable(f"{target}: the trace could not be written: {error.strerror or error}") from error
    return trace.digest


def read(path: str | Path) -> Trace:
    """Reads a trace that `write` wrote. BadInput if the file is absent, foreign, damaged or too new."""
    with _opened(Path(path)) as (parquet, notes):
        trace = _from_table(parquet.read(columns=_known(parquet)), notes)
    if trace.digest != notes["digest"]:
        raise BadInput(f"{path}: damaged trace: its content does not match its digest; import it again")
    return trace


def is_parquet(path: Path) -> bool:
    """Whether a file begins as Parquet does. This needs no importer, because importers take time to load."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC.encode()
    except OSError:
        return False


def read_part(
    path: str | Path, choose: Callable[[NDArray[np.float64]], tuple[int, int]]
) -> tuple[Trace, int]:
    """Some rows of a long trace, and the number of all its rows.

    `choose` gets all arrivals in seconds, and gives the first row and the one after the last. The other
    columns of other rows are hardly read. Errors are those of `read`, but the digest is not checked, because
    it is of the whole trace.
    """
    with _opened(Path(path)) as (parquet, notes):
        arrivals = parquet.read(columns=["arrival_s"]).column(0).to_numpy()
        start, stop = choose(arrivals)
        edges = np.cumsum(
            [0, *(parquet.metadata.row_group(n).num_rows for n in range(parquet.num_row_groups))]
        )
        wanted = [n for n in range(parquet.num_row_groups) if edges[n] < stop and edges[n + 1] > start]
        table = parquet.read_row_groups(wanted, columns=_known(parquet))
        return _from_table(
            table.slice(start - edges[wanted[0]] if wanted else 0, stop - start), notes, start
        ), len(arrivals)


def digest_in(path: str | Path) -> str:
    """The digest that a file names, without a check of its content. Errors are those of `read`."""
    with _opened(Path(path)) as (_, notes):
        return str(notes["digest"])


@contextmanager
def _opened(source: Path) -> Iterator[tuple["pq.ParquetFile", Mapping[str, Any]]]:
    """The file of a trace and its notes, after a check of its footer and columns. BadInput if the check
    fails, or for any error while the file is open.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not source.is_file():
        raise BadInput(f"{source}: no such trace file{_near_file(source)}")
    notes: Mapping[str, Any] = {}
    try:
        _check_footer(source)
        with pq.ParquetFile(source, memory_map=False) as parquet:
            _check_schema(parquet, source)
            notes = _notes(parquet.schema_arrow.metadata[_METADATA], source)
            if notes["version"] > VERSION:
                raise BadInput(
                    f"{source}: trace version {notes['version']}; this tuner reads up to {VERSION}"
                )
            yield parquet, notes
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError, MemoryError) as error:
        what = "damaged trace" if notes else "not a trace in Parquet; `tuner trace import` makes one"
        raise BadInput(f"{source}: {what}: {error}") from error


def _known(parquet: "pq.ParquetFile") -> list[str]:
    return [name for name in (*COLUMNS, "blocks") if name in parquet.schema_arrow.names]


def _check_footer(source: Path) -> None:
    with source.open("rb") as file:
        file.seek(max(0, source.stat().st_size - 8))
        footer = int.from_bytes(file.read(4), "little")
    if footer > LARGEST_FOOTER:
        raise BadInput(f"{source}: its Parquet footer has {footer:,} bytes; this is not a trace")


def _check_schema(parquet: "pq.ParquetFile", source: Path) -> None:
    """Raises BadInput unless the file has the columns of a trace and an allowed size."""
    import pyarrow as pa

    schema, facts = parquet.schema_arrow, parquet.metadata
    if _METADATA not in (schema.metadata or {}):
        raise BadInput(
            f"{source}: this Parquet file is not a trace of this tool; `tuner trace import` makes one"
        )
    for name in (*COLUMNS, "blocks"):
        if name not in schema.names:
            if name in LATER:
                continue
            raise BadInput(f"{source}: column '{name}' is missing{nearest(name, schema.names)}")
        kind = schema.field(name).type
        wanted = pa.int64() if name == "blocks" else pa.from_numpy_dtype(np.dtype(COLUMNS[name][0]))
        is_list = pa.types.is_large_list(kind) or pa.types.is_list(kind)
        if (kind.value_type if name == "blocks" and is_list else kind) != wanted:
            raise BadInput(f"{source}: column '{name}' is {kind}, not {wanted}: not a trace of this tool")
    groups = [facts.row_group(place) for place in range(facts.num_row_groups)]
    values = sum(group.column(place).num_values for group in groups for place in range(group.num_columns))
    if facts.num_rows > MOST_ROWS or values > MOST_VALUES:
        raise BadInput(
            f"{source}: {facts.num_rows:,} rows with {values:,} values; a trace may have at most"
            f" {MOST_ROWS:,} with {MOST_VALUES:,}"
        )


def _notes(packed: bytes, source: Path) -> Mapping[str, Any]:
    """The trace's notes. BadInput if they are damaged."""
    kinds = {"version": int, "digest": str, "block_size": int, "meta": dict}
    try:
        found = json.loads(packed)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(found.get(k), kind) for k, kind in kinds.items()):
        raise BadInput(f"{source}: damaged trace: its notes cannot be read; import it again")
    return found


def bundled() -> Trace:
    """The slice of the Azure conversation trace that ships with the package (CC-BY 4.0, see `meta`)."""
    return read(Path(__file__).parents[1] / "data" / "traces" / "azure-conversation-slice.parquet")


def _from_table(table: "pa.Table", notes: Mapping[str, Any], start: int = 0) -> Trace:
    """The trace of a table whose first row is row `start` of the whole."""
    import pyarrow as pa

    columns = {
        name: table.column(name).to_numpy()
        if name in table.column_names
        else np.full(len(table), missing, kind)
        for name, (kind, missing) in COLUMNS.items()
    }
    if start:
        columns["parent"] = np.maximum(columns["parent"] - start, -1)
        columns["arrival_s"] = columns["arrival_s"] - columns["arrival_s"][:1].sum()  # of no rows: 0
    lists = table.column("blocks").combine_chunks()
    if isinstance(lists, pa.ChunkedArray):
        lists = lists.chunk(0) if lists.num_chunks else pa.array([], lists.type)
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return Trace(
        **columns,
        block_size=notes["block_size"],
        block_offsets=offsets - offsets[0],
        blocks=lists.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]],
        meta=cast(Mapping[str, JSON], notes["meta"]),
    )


def _gather(
    offsets: NDArray[np.int64], values: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """CSR rows in another order, or some of them."""
    lengths = (offsets[1:] - offsets[:-1])[rows]
    new = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    source = np.repeat(offsets[:-1][rows] - new[:-1], lengths) + np.arange(new[-1])
    return new, values[source]


def _check_blocks(trace: Trace) -> None:
    rows = len(trace.arrival_s)
    offsets = trace.block_offsets
    if offsets.shape != (rows + 1,) or offsets[0] != 0 or offsets[-1] != len(trace.blocks):
        raise ValueError("block offsets do not fit the blocks")
    if (np.diff(offsets) < 0).any() or (len(trace.blocks) and trace.block_size < 1):
        raise ValueError("block offsets must ascend and blocks need a block size")


def _check(trace: Trace) -> None:
    rows = len(trace.arrival_s)
    for name, (dtype, _) in COLUMNS.items():
        array = getattr(trace, name)
        if array.shape != (rows,) or array.dtype != np.dtype(dtype):
            raise ValueError(
                f"column {name}: {array.dtype}{list(array.shape)}, expected {np.dtype(dtype)}[{rows}]"
            )
    if not np.isfinite(trace.arrival_s).all() or (np.diff(trace.arrival_s) < 0).any():
        raise ValueError("arrivals must be finite and sorted")
    if (trace.parent >= np.arange(rows)).any():
        raise ValueError("a row's parent must be an earlier row")
    if rows and min(trace.parent.min() + 1, trace.input_len.min(), trace.output_len.min()) < 0:
        raise ValueError("lengths and parents must not be negative")
    _check_blocks(trace)
    if (trace.status >= len(STATUSES)).any():
        raise ValueError(f"status must be below {len(STATUSES)}")
    for name in (*COLUMNS, "block_offsets", "blocks"):
        array = getattr(trace, name)
        if array.flags.writeable:
            array = array.view()
            array.flags.writeable = False
            object.__setattr__(trace, name, array)


def _near_file(path: Path) -> str:
    try:
        return nearest(path.name, [entry.name for entry in path.parent.iterdir()])
    except OSError:
        return ""
