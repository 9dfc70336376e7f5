"""Outcomes in Parquet: one row per request, exactly what was measured."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tuner.errors import BadInput, Unavailable
from tuner.records import Outcome

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
    ]
)


def write(path: str | Path, outcomes: Sequence[Outcome]) -> None:
    """Write outcomes; the file appears whole or not at all. Unavailable when the disk refuses."""
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    columns = {name: [getattr(o, name) for o in outcomes] for name in SCHEMA.names}
    try:
        pq.write_table(pa.table(columns, schema=SCHEMA), partial, compression="zstd")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise Unavailable(f"cannot write {target}: {error.strerror or error}") from error


def read(path: str | Path) -> list[Outcome]:
    """The outcomes of a file. BadInput when it is not one."""
    try:
        table = pq.read_table(path, schema=SCHEMA)
    except (OSError, pa.ArrowInvalid) as error:
        raise BadInput(f"{path}: not a file of outcomes: {error}") from error
    return [
        Outcome(
            **{
                **row,
                "chunk_s": np.array(row["chunk_s"], np.float64),
                "chunk_tokens": np.array(row["chunk_tokens"], np.int32),
            }
        )
        for row in table.to_pylist()
    ]
