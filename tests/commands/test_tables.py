"""Tables: nothing is cut at any width; a narrow terminal gets a block per row, a pipe whole lines."""

import os
import pty
import re
import select
import struct
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.commands.test_care import call
from tests.history.records import NOW, a_measurement, a_run, a_study, finished, start
from tests.tuning.studies import environment
from tuner.commands.common import escaped, print_table, table, text
from tuner.history.store import Store

HOSTILE = (
    "a",
    "gpu-node-0123456789.rack-17.zone-eu-central-1.example.org", "模型名称很长很长很长很长很长", "x" * 90,
    "[bold]not markup[/bold]", "two\nlines\tand \x1b[31mred\x1b[0m", "\u202eright to left", "emoji 🦙 llama",
    "",
    "max_num_seqs=64 max_num_batched_tokens=8192 enable_prefix_caching=True gpu_memory_utilization=0.92",
)  # fmt: skip
COLUMNS = ["<name", "value", "<node", "<configuration"]
ROWS = [
    [escaped(text(each)) for each in (name, 0.123456 * n, "local", HOSTILE[-n])]
    for n, name in enumerate(HOSTILE)
]


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize("width", [80, 100, 160, None])
def test_every_word_of_every_cell_is_shown_whole(width: int | None) -> None:
    for rows in (ROWS, ROWS[:1], [row[:] for row in ROWS if max(map(len, row)) < 40]):
        lines = [line.plain for line in table(COLUMNS, rows, width)]
        shown = [word for line in lines for word in words(line)]
        for row in rows:
            for cell in row:
                assert set(words(cell)) <= set(shown), cell
        for line in lines:
            assert width is None or cell_len(line) <= width or max(map(cell_len, words(line))) > width - 20
        if width is None:
            assert len(lines) == len(rows) + 1, "in a pipe a row is one line"


def test_a_narrow_terminal_gets_a_block_per_row() -> None:
    wide = [["r" * 30, 1.5, "n" * 30, "k=1 " * 20]]
    rows = [[escaped(text(each)) for each in row] for row in wide]
    assert len(table(COLUMNS, rows, 300)) == 2
    lines = [line.plain for line in table(COLUMNS, rows, 80)]
    assert lines[0] == f"name           {'r' * 30}"
    assert lines[1] == "value          1.5"
    assert all(len(line) <= 80 for line in lines)
    both = [line.plain for line in table(COLUMNS, rows * 2, 80)]
    assert both == [*lines, "", *lines]


def test_the_last_column_wraps_between_words_where_the_others_fit() -> None:
    rows = [["local", "1.5", "n", "max_num_seqs=64 max_num_batched_tokens=8192 kv_cache_dtype=fp8 a=1"]]
    head, first, *more = (line.plain for line in table(COLUMNS, rows, 60))
    assert head.split() == ["name", "value", "node", "configuration"]
    at = head.index("configuration")
    assert more
    assert all(not line[:at].strip() and len(line) <= 60 for line in more)
    assert " ".join(line[at:] for line in (first, *more)) == rows[0][-1]


def test_control_characters_never_reach_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["<name", "<node"], [[name, "local"] for name in HOSTILE])
    said = capsys.readouterr().out
    assert said.count("\n") == len(HOSTILE) + 1
    assert all(c.isprintable() or c == "\n" for c in said)
    assert "two\\nlines" in said
    assert "[bold]not markup[/bold]" in said


def on_a_terminal(width: int, home: Path, *args: str, **more: str) -> str:
    """What a command prints on a terminal of that width."""
    pid, master = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "tuner", *args], environment(home, more))
    ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    said = b""
    while select.select([master], [], [], 60)[0]:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        said += part
        if not part:
            break
    os.waitpid(pid, 0)
    os.close(master)
    return said.decode().replace("\r\n", "\n")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    study = a_study(name="a-study-whose-name-is-rather-long-as-names-go", node=HOSTILE[1])
    run = a_run(store, study)
    finished(store, start(store, run, 0, origin="baseline"), a_measurement())
    finished(store, start(store, run, 1), a_measurement())
    store.add_trace("d" * 64, "a-trace-" * 7, "/a/long/path/" * 9, {"requests": 5}, NOW)
    store.close()
    return tmp_path


def test_a_terminal_shows_the_same_words_as_a_pipe_and_colours_only_there(home: Path) -> None:
    piped = call(home, "study", "list").stdout
    assert "\x1b" not in piped
    assert len(piped.splitlines()) == 2
    said = on_a_terminal(80, home, "study", "list")
    assert "\x1b[1m" in said, "heads are bold"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    assert set(words(piped)) == set(words(plain))
    assert max(map(len, plain.splitlines())) <= 80


@pytest.mark.slow
def test_no_color_is_kept_in_both_ways(home: Path) -> None:
    asked = ["doctor"]
    assert "\x1b[32m" in on_a_terminal(160, home, *asked)
    assert "\x1b[32m" not in on_a_terminal(160, home, *asked, NO_COLOR="1")
    assert "\x1b[32m" not in on_a_terminal(160, home, "--no-color", *asked)
