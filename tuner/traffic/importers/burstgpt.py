"""BurstGPT 1 to 3: columns are found by name, stamps are whole seconds, an answer of 0 tokens failed."""

from collections import Counter
from pathlib import Path
from typing import Any

from tuner.traffic.importers.draft import ERROR, OK, Draft, Row
from tuner.traffic.importers.reading import Record, csv_records
from tuner.traffic.importers.units import BareClock
from tuner.traffic.trace import Trace

LICENCE = "CC-BY 4.0, HPMLL (github.com/HPMLL/BurstGPT), when it is the published trace"


def read(
    path: Path, *, unit: str | None = None, max_len: int | None = None, dequantise: bool = True
) -> Trace:
    """Rows of every model and log type; from version 3 on also sessions, and the time from request to end."""
    clock = BareClock(path, "Timestamp", unit)
    draft = Draft(path, max_len=max_len, clock=clock)
    turns: Counter[str] = Counter()
    for record in csv_records(path, draft.quality):
        output = record.whole("Response tokens")
        row = Row(
            arrival=clock.read(record),
            input_len=record.whole("Request tokens"),
            output_len=output,
            status=OK if output else ERROR,
            **_session(record, turns),
        )
        if draft.add(row) and row.session is not None:
            turns[str(row.session)] += 1
    return draft.trace(source="burstgpt", licence=LICENCE, dequantise=dequantise, known_step_s=1.0)


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
