"""A trace that the tuner has written itself (Parquet)."""

from pathlib import Path

from tuner.traffic.importers import Importer, register
from tuner.traffic.importers.trace_builder import ImportOptions
from tuner.traffic.reshape import up_to
from tuner.traffic.trace import MAGIC, Trace
from tuner.traffic.trace import read as read_trace


def read(path: Path, options: ImportOptions) -> Trace:
    """The trace without requests longer than `max_len` tokens, which are counted as other importers do."""
    trace = read_trace(path)
    return trace if options.max_len is None else up_to(trace, options.max_len)


register(Importer(format="parquet", read=read, fits=lambda start: start.text.startswith(MAGIC)))
