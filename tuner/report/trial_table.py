"""All trials of a study as one table with a row per trial, for spreadsheets and notebooks."""

import json
from collections.abc import Sequence
from io import BytesIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from tuner.records import Trial, Value


def table_of(trials: Sequence[Trial]) -> pa.Table:
    """All attempts in order of number. Columns: what a trial is; `knob.NAME`, what was asked for (null =
    left to the engine); then everything measured by its name (null if it was not measured or is infinite).
    """
    rows = sorted(trials, key=lambda t: (t.number, t.attempt))
    columns: dict[str, pa.Array] = {
        "number": pa.array([t.number for t in rows], pa.int64()),
        "attempt": pa.array([t.attempt for t in rows], pa.int64()),
        "state": pa.array([t.state.value for t in rows], pa.string()),
        "origin": pa.array([t.origin for t in rows], pa.string()),
        "screened": pa.array([t.screened for t in rows], pa.bool_()),
        "kind": pa.array([t.measurement.kind if t.measurement else None for t in rows], pa.string()),
        "reason": pa.array([t.reason for t in rows], pa.string()),
        "cause": pa.array([t.cause for t in rows], pa.string()),
        "gpu_seconds": pa.array([t.gpu_seconds for t in rows], pa.float64()),
        "started_at": pa.array([t.started_at for t in rows], pa.timestamp("us", tz="UTC")),
        "ended_at": pa.array([t.ended_at for t in rows], pa.timestamp("us", tz="UTC")),
    }
    for name in sorted({n for t in rows for n in t.candidate}):
        columns[f"knob.{name}"] = _knob([t.candidate.get(name) for t in rows])
    values = [t.measurement.values if t.measurement else {} for t in rows]
    for name in sorted({n for v in values for n in v} - set(columns)):
        found = [v.get(name) for v in values]
        columns[name] = pa.array(
            [x if x is not None and abs(x) < float("inf") else None for x in found], pa.float64()
        )
    return pa.table(columns)


def _knob(values: Sequence[Value]) -> pa.Array:
    """A column of numbers or of booleans; mixed values become text."""
    kinds = {type(v) for v in values if v is not None}
    if kinds <= {int, float} and float in kinds:
        return pa.array([None if v is None else float(v) for v in values], pa.float64())
    if len(kinds) == 1 and kinds <= {int, bool}:
        return pa.array(values)
    return pa.array([None if v is None else str(v) for v in values], pa.string())


def as_csv(table: pa.Table) -> bytes:
    """The table as a CSV file."""
    file = BytesIO()
    pa.csv.write_csv(table, file)
    return file.getvalue()


def as_parquet(table: pa.Table) -> bytes:
    """The table as a Parquet file."""
    file = BytesIO()
    pa.parquet.write_table(table, file, compression="zstd")
    return file.getvalue()


def as_json(table: pa.Table) -> bytes:
    """The table as JSON: a list with an object for each trial."""
    return json.dumps(table.to_pylist(), default=lambda at: at.isoformat()).encode()
