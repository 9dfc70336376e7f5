"""LiteLLM's SpendLogs straight from a database of its shape."""

import sqlite3
from pathlib import Path

import pytest

from tests.tuning.studies import tuner
from tuner.errors import BadInput, NotFound, Unavailable
from tuner.traffic.importers import detect, litellm, read_any

CREATE = """CREATE TABLE "LiteLLM_SpendLogs" (
  request_id TEXT PRIMARY KEY, call_type TEXT NOT NULL, api_key TEXT, spend REAL, total_tokens INTEGER,
  prompt_tokens INTEGER, completion_tokens INTEGER, "startTime" TIMESTAMP, "endTime" TIMESTAMP,
  "completionStartTime" TIMESTAMP, model TEXT, "user" TEXT, metadata TEXT, cache_hit TEXT, end_user TEXT,
  messages TEXT, response TEXT, session_id TEXT, status TEXT)"""
ROWS = [
    ("b", "acompletion", 120, 30, "2026-11-27 10:00:02.500", "2026-11-27 10:00:04.000", "s1", "success"),
    ("a", "acompletion", 100, 20, "2026-11-27 10:00:00.000", "2026-11-27 10:00:01.250", "s1", "success"),
    ("c", "aembedding", 9, 0, "2026-11-27 10:00:03.000", "2026-11-27 10:00:03.100", None, "success"),
    ("d", "acompletion", 50, 0, "2026-11-27 10:00:09.000", "2026-11-27 10:00:09.500", None, "failure"),
]


@pytest.fixture
def database(tmp_path: Path) -> str:
    with sqlite3.connect(tmp_path / "litellm.db") as connection:
        connection.execute(CREATE)
        connection.executemany(
            'INSERT INTO "LiteLLM_SpendLogs" (request_id, call_type, prompt_tokens, completion_tokens,'
            ' "startTime", "endTime", session_id, status, messages, response)'
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'a secret', 'another')",
            ROWS,
        )
    connection.close()
    return f"sqlite:///{tmp_path / 'litellm.db'}"


def test_rows_come_without_their_text(database: str, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    assert litellm.export(database, file) == 4
    assert "secret" not in file.read_text()
    assert detect(file) == "litellm"
    trace = read_any(file)
    assert trace.input_len.tolist() == [100, 120, 50]
    assert trace.arrival_s.tolist() == [0.0, 2.5, 9.0]
    assert trace.obs_e2e_s.tolist() == [1.25, 1.5, 0.5]
    assert trace.parent.tolist() == [-1, 0, -1]
    assert trace.think_s[1] == 1.25
    assert trace.status.tolist() == [0, 0, 1]


def test_the_command_line_takes_a_database(database: str, tmp_path: Path) -> None:
    done = tuner(tmp_path, "trace", "import", database, "--name", "spend")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("spend: 3 requests over 9 s")
    assert "dropped_other_call 1" in done.stdout


def test_what_is_no_such_database_is_told_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="this database cannot be read"):
        litellm.export("oracle://u:pw@host/db", tmp_path / "x")
    with sqlite3.connect(tmp_path / "empty.db") as connection:
        connection.execute("CREATE TABLE a (b)")
    connection.close()
    with pytest.raises(NotFound, match="no table LiteLLM_SpendLogs"):
        litellm.export(f"sqlite:///{tmp_path / 'empty.db'}", tmp_path / "x")
    with pytest.raises(Unavailable) as found:
        litellm.export("postgresql://u:hush@127.0.0.1:9/db", tmp_path / "x")
    assert "hush" not in str(found.value)
    assert "u:***@127.0.0.1:9/db" in str(found.value)
