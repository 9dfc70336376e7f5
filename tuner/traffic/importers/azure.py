"""Azure's public inference traces (2023, 2024, LMM with images): wall clock with seven digits of fraction."""

from pathlib import Path

from tuner.traffic.importers.draft import Draft, Row
from tuner.traffic.importers.reading import csv_records
from tuner.traffic.trace import Trace

LICENCE = "CC-BY 4.0, Microsoft Azure (github.com/Azure/AzurePublicDataset)"


def read(path: Path, *, max_len: int | None = None, dequantise: bool = True) -> Trace:
    """Columns TIMESTAMP, ContextTokens, GeneratedTokens; NumImages is counted in the quality report."""
    draft = Draft(path, max_len=max_len)
    for record in csv_records(path, draft.quality):
        draft.add(
            Row(
                arrival=record.moment("TIMESTAMP"),
                input_len=record.whole("ContextTokens"),
                output_len=record.whole("GeneratedTokens"),
            )
        )
        if record.has("NumImages") and record.whole("NumImages") > 0:
            draft.quality["images_not_replayed"] += 1
    return draft.trace(source="azure", licence=LICENCE, dequantise=dequantise)
