"""Read a measured table: rows("h200-7b"), and the requests of one of them, outcomes("h200-7b", key).

Needs pyarrow and nothing of the tuner, so that it can be copied beside the two files.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

HERE = Path(__file__).parent


def rows(table: str, folder: Path = HERE) -> list[dict[str, Any]]:
    """Every row; `knobs`, `launched` and `effective` as mappings, None where nothing was measured."""
    found = pq.read_table(folder / table / "rows.parquet").to_pylist()
    texts = ("knobs", "launched", "effective")
    return [row | {name: json.loads(row[name]) for name in texts if row.get(name)} for row in found]


def outcomes(table: str, key: str, folder: Path = HERE) -> list[dict[str, Any]]:
    """What happened to each request of the row with that key, in order of the trace; times in seconds."""
    return pq.read_table(folder / table / "outcomes.parquet", filters=[("key", "=", key)]).to_pylist()
