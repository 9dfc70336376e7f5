"""The writer by itself: files rotate while requests are under way, and nothing is lost over it."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tuner.traffic.capture.files import Rotation, Sink, closed_files
from tuner.traffic.capture.writer import RETIRE_S, Writer
from tuner.traffic.importers import read_any

BODY = b'{"model": "m", "prompt": [1, 2, 3]}'
ANSWER = b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'


def begin(writer: Writer, number: int) -> None:
    writer.take(("b", number, time.monotonic_ns(), None, None, BODY))


def end(writer: Writer, number: int) -> None:
    now = time.monotonic_ns()
    writer.take(("e", number, now, now, None, "application/json", False, ANSWER))


def clocked() -> tuple[list[datetime], Callable[[], datetime]]:
    now = [datetime(2026, 11, 27, 22, 59, tzinfo=UTC)]
    return now, lambda: now[0]


def test_a_request_ends_in_the_file_it_began_in(tmp_path: Path) -> None:
    now, clock = clocked()
    writer = Writer(Sink(tmp_path, "chat", Rotation(every="hour")), now=clock)
    begin(writer, 1)
    begin(writer, 2)
    end(writer, 1)
    now[0] += timedelta(minutes=2)
    writer.flush()
    assert closed_files(tmp_path, "chat") == []  # request 2 is under way
    begin(writer, 3)
    end(writer, 2)
    writer.flush()
    (first,) = closed_files(tmp_path, "chat")
    end(writer, 3)
    writer.close()
    for file, rows in zip(closed_files(tmp_path, "chat"), (2, 1), strict=True):
        trace = read_any(file)
        assert trace.output_len.tolist() == [2] * rows
        assert trace.meta["quality"] == {"rows_read": rows}
    assert first.name == "chat-20261127T225900Z.jsonl"


def test_a_request_that_never_ends_keeps_no_file_open_for_ever(tmp_path: Path) -> None:
    now, clock = clocked()
    writer = Writer(Sink(tmp_path, "chat", Rotation(every="hour")), now=clock)
    begin(writer, 1)
    now[0] += timedelta(minutes=2)
    writer.flush()
    writer.retired[0].until -= RETIRE_S + 1
    writer.flush()
    (file,) = closed_files(tmp_path, "chat")
    assert read_any(file).meta["quality"] == {
        "rows_read": 1,
        "unfinished_when_cut": 1,
        "not_ok_kept": 1,
    }
    end(writer, 1)  # too late: its file is closed, and says so
    writer.close()
    assert writer.counts.unwritten == 1
