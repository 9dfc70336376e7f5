"""Outcomes as Parquet: one row per request, with everything that was measured."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tuner.errors import BadInput, Unavailable
from tuner.records import Outcome
from tuner.settings import under_home

SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("scheduled_s", pa.float64()),
        ("sent_s", pa.float64()),
        ("first_token_s", pa.float64()),
        ("last_token_s", pa.float64()),
        ("end_s", pa.float64()),
        ("input_tokens", pa.int32()),
        ("expected_input", pa.int32()),
        ("output_tokens", pa.int32()),
        ("expected_output", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("chunk_s", pa.list_(pa.float64())),
        ("chunk_tokens", pa.list_(pa.int32())),
        ("error", pa.string()),
        ("classes", pa.list_(pa.string())),
    ]
)


def write(path: str | Path, outcomes: Sequence[Outcome]) -> None:
    """Write outcomes; the file appears complete or not at all. Unavailable when the disk refuses."""
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    columns = {name: [getattr(o, name) for o in outcomes] for name in SCHEMA.names}
    try:
        pq.write_table(pa.table(columns, schema=SCHEMA), partial, compression="zstd")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise Unavailable(f"cannot write {target}: {error.strerror or error}") from error


def is_here(path: str | Path | None) -> bool:
    """Whether the file of a slice's outcomes is on this host."""
    return path is not None and os.path.isfile(under_home(str(path)))


def series_path(path: str | Path) -> Path:
    """The file of the engine's scrapes of a slice: beside its outcomes."""
    return Path(path).with_suffix(".engine.json")


def write_series(path: str | Path, series: Mapping[str, Sequence[float | None]]) -> None:
    """Write the scrapes of a slice beside the file of its outcomes. Unavailable when the disk refuses."""
    target = series_path(path)
    try:
        target.write_text(json.dumps({name: list(row) for name, row in series.items()}), encoding="utf-8")
    except OSError as error:
        raise Unavailable(f"cannot write {target}: {error.strerror or error}") from error


def read_series(path: str | Path) -> dict[str, list[float]]:
    """The scrapes beside a file of outcomes, NaN if the engine exported nothing; empty without a file."""
    try:
        told = json.loads(under_home(str(series_path(path))).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    rows = told.items() if isinstance(told, dict) else ()
    return {
        str(name): [math.nan if value is None else float(value) for value in row]
        for name, row in rows
        if isinstance(row, list)
    }


def read(path: str | Path) -> list[Outcome]:
    """The outcomes of a file, wherever the home lay when its path was written. BadInput: it is not one."""
    try:
        table = pq.read_table(under_home(str(path)), schema=SCHEMA)
    except (OSError, pa.ArrowInvalid) as error:
        raise BadInput(f"{path}: not a file of outcomes: {error}") from error
    return [
        Outcome(
            **{
                **row,
                "chunk_s": np.array(row["chunk_s"], np.float64),
                "chunk_tokens": np.array(row["chunk_tokens"], np.int32),
                "classes": tuple(row["classes"] or ()),
            }
        )
        for row in table.to_pylist()
    ]
