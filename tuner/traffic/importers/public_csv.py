"""Public traces as CSV, lengths only: Azure's (2023, 2024, LMM with images) and BurstGPT 1 to 3."""

from collections import Counter
from pathlib import Path
from typing import Any

from tuner.traffic.importers import Importer, register
from tuner.traffic.importers.reading import Record, csv_records
from tuner.traffic.importers.stamps import BareClock
from tuner.traffic.importers.trace_builder import ERROR, OK, ImportOptions, Row, TraceBuilder
from tuner.traffic.trace import Trace


def read_azure(path: Path, options: ImportOptions) -> Trace:
    """Columns TIMESTAMP, ContextTokens, GeneratedTokens; NumImages is counted in the quality report."""
    builder = TraceBuilder(path, options)
    for record in csv_records(path, builder.quality):
        builder.add(
            Row(
                arrival=record.moment("TIMESTAMP"),
                input_len=record.whole("ContextTokens"),
                output_len=record.whole("GeneratedTokens"),
            )
        )
        if record.has("NumImages") and record.whole("NumImages") > 0:
            builder.quality["images_not_replayed"] += 1
    return builder.trace("azure", licence="CC-BY 4.0, Microsoft Azure (github.com/Azure/AzurePublicDataset)")


def read_burstgpt(path: Path, options: ImportOptions) -> Trace:
    """Rows of every model and log type; from version 3 on also sessions, and the time from request to end."""
    clock = BareClock(path, "Timestamp", options.unit)
    builder = TraceBuilder(path, options, clock=clock)
    turns: Counter[str] = Counter()
    for record in csv_records(path, builder.quality):
        output = record.whole("Response tokens")
        row = Row(
            arrival=clock.since_first(record.plain_number("Timestamp")),
            input_len=record.whole("Request tokens"),
            output_len=output,
            status=OK if output else ERROR,
            **_session(record, turns),
        )
        if builder.add(row) and row.session is not None:
            turns[str(row.session)] += 1
    return builder.trace(
        "burstgpt",
        licence="CC-BY 4.0, HPMLL (github.com/HPMLL/BurstGPT), when it is the published trace",
        known_step_s=1.0,
    )


def _session(record: Record, turns: "Counter[str]") -> dict[str, Any]:
    found: dict[str, Any] = {}
    if record.has("Session ID"):
        session = str(record.data["Session ID"])
        turn = turns[session]
        found |= {"session": session, "turn": turn, "key": (session, turn)}
        if turn:
            found["parent"] = (session, turn - 1)
    if record.has("Elapsed time"):
        found["obs_e2e_s"] = record.number("Elapsed time")
    return found


register(
    Importer(format="azure", read=read_azure, csv_columns=("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
)
register(
    Importer(
        format="burstgpt",
        read=read_burstgpt,
        csv_columns=("Timestamp", "Request tokens", "Response tokens"),
        takes_unit=True,
    )
)
