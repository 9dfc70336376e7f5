"""The log of the engine that measured a trial, as far as it is on this host."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tuner import masking
from tuner.engine import failures
from tuner.engine.failures import KINDS
from tuner.records import Launch, Trial
from tuner.settings import under_home

LAST = 64 * 1024
"""How many bytes from the end are looked at for the last lines."""


def log_path(trial: Trial, launches: Sequence[Launch]) -> Path:
    """Where the log of a trial's engine lies, if it does. A screened trial shares its engine with others; one
    that was not measured (yet) has the log in its own folder, or in that of the engine that ran meanwhile.
    """
    by = trial.measurement.launch_id if trial.measurement else None
    found = next((each.directory for each in launches if each.id == by), None)
    path = under_home(found or trial.directory or "") / "engine.log"
    if found is None and not path.is_file():
        until = trial.ended_at or datetime.max.replace(tzinfo=UTC)
        meanwhile = [
            each
            for each in launches
            if each.started_at <= until and (each.ended_at is None or each.ended_at >= trial.started_at)
        ]
        newest = max(meanwhile, key=lambda each: each.started_at, default=None)
        if newest is not None and newest.directory:
            return under_home(newest.directory) / "engine.log"
    return path


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log, secrets masked; none where it is not on this host."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LAST))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return masking.text(text).splitlines()[-lines:]


def root_cause(trial: Trial, path: Path) -> str:
    """The line of a failed trial's log that shows why; empty where none does."""
    if trial.cause not in KINDS or not path.is_file():
        return ""
    return masking.text(failures.classify(path.read_text(errors="replace"), None, "startup").evidence)
