"""A trace that the tuner has written itself (Parquet)."""

from pathlib import Path

import numpy as np

from tuner.records import JSON
from tuner.traffic.importers import Importer, register
from tuner.traffic.importers.trace_builder import ImportOptions
from tuner.traffic.trace import MAGIC, Trace
from tuner.traffic.trace import read as read_trace


def read(path: Path, options: ImportOptions) -> Trace:
    """The trace without requests longer than `max_len` tokens, which are counted as other importers do."""
    trace = read_trace(path)
    over = trace.input_len.astype(np.int64) + trace.output_len > (options.max_len or np.inf)
    if not over.any():
        return trace
    counts = trace.meta.get("quality")
    quality: dict[str, JSON] = dict(counts) if isinstance(counts, dict) else {"rows_read": len(trace)}
    before = quality.get("dropped_over_length", 0)
    quality["dropped_over_length"] = int(over.sum()) + (before if isinstance(before, int) else 0)
    return trace.take(np.flatnonzero(~over)).with_meta(quality=quality)


register(Importer(format="parquet", read=read, fits=lambda start: start.text.startswith(MAGIC)))
