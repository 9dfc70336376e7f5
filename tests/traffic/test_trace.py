"""The canonical trace: sorted, rebased, digested, and the same after a round through Parquet."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traffic.conftest import make
from tuner.errors import BadInput, Unavailable
from tuner.traffic import trace as traces
from tuner.traffic.trace import COLUMNS, Trace, build, bundled, read, write

ROW = st.tuples(
    st.floats(0, 1e6), st.integers(1, 10_000), st.integers(0, 5_000), st.lists(st.integers(0, 99), max_size=4)
)


def same(one: Trace, other: Trace) -> bool:
    """Equal in every column and block."""
    names = (*COLUMNS, "block_offsets", "blocks")
    return one.block_size == other.block_size and all(
        np.array_equal(getattr(one, name), getattr(other, name), equal_nan=name.endswith("_s"))
        for name in names
    )


@given(st.lists(ROW, min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_a_round_through_parquet_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, int, int, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    trace = make(
        [row[1] for row in rows],
        ids=[row[3] for row in rows],
        columns={"arrival_s": [row[0] for row in rows], "output_len": [row[2] for row in rows]},
    )
    digest = write(trace, path)
    again = read(path)
    assert same(trace, again)
    assert again.digest == digest == trace.digest


def test_rows_are_sorted_and_rebased_and_parents_follow() -> None:
    trace = build(
        {
            "arrival_s": [30.0, 10.0, 20.0],
            "input_len": [3, 1, 2],
            "output_len": [1, 1, 1],
            "parent": [2, -1, 1],
        },
        blocks=([0, 1, 2, 4], [7, 8, 9, 9]),
        block_size=16,
    )
    assert trace.arrival_s.tolist() == [0.0, 10.0, 20.0]
    assert trace.input_len.tolist() == [1, 2, 3]
    assert trace.parent.tolist() == [-1, 0, 1]
    assert [trace.row_blocks(row).tolist() for row in range(3)] == [[8], [9, 9], [7]]


def test_taking_rows_keeps_what_belongs_together() -> None:
    trace = make([16, 32, 48], ids=[[1], [1, 2], [1, 2, 3]], columns={"parent": [-1, 0, 1]})
    part = trace.take([1, 2])
    assert part.arrival_s.tolist() == [0.0, 1.0]
    assert part.parent.tolist() == [-1, 0]
    assert part.row_blocks(1).tolist() == [1, 2, 3]
    assert trace.take([1, 2], start_s=0.5).arrival_s.tolist() == [0.5, 1.5]


def test_the_digest_is_of_content_and_not_of_notes() -> None:
    trace = make([16, 32], ids=[[1], [1, 2]])
    assert trace.with_meta(note="x").digest == trace.digest
    assert trace.changed(priority=np.array([0, 1], np.int16)).digest != trace.digest
    assert make([16, 32], ids=[[1], [1, 3]]).digest != trace.digest
    assert make([16, 32], ids=[[1], [1, 2]], block_size=32).digest != trace.digest


def test_the_digest_is_the_same_in_another_process() -> None:
    code = "from tuner.traffic.trace import bundled; print(bundled().digest)"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert said.stdout.strip() == bundled().digest


def test_a_trace_cannot_be_changed_in_place() -> None:
    trace = make([16])
    with pytest.raises(ValueError, match="read-only"):
        trace.input_len[0] = 3


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"arrival_s": [0.0, np.nan]}, "finite"),
        ({"status": [0, 9]}, "status"),
        ({"colour": [1, 2]}, "unknown"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns: dict[str, list[float]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make([1, 2], columns=columns)


def test_what_is_not_a_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat.parquet").write_bytes(b"no")
    with pytest.raises(BadInput, match=r"no such trace file.*chat\.parquet"):
        read(tmp_path / "chat.parque")
    with pytest.raises(BadInput, match="not a trace in Parquet"):
        read(tmp_path / "chat.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign.parquet")
    with pytest.raises(BadInput, match="not a trace of this tool"):
        read(tmp_path / "foreign.parquet")


def test_a_changed_cell_is_found_by_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write(make([16, 32]), path)
    table = pq.read_table(path)
    changed = table.set_column(1, "input_len", pa.array([16, 33], pa.int32()))
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
    with pytest.raises(BadInput, match="does not match its digest"):
        read(path)
    pq.write_table(table.drop_columns(["think_s"]), path)
    with pytest.raises(BadInput, match="'think_s' is missing"):
        read(path)


def test_a_trace_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="could not be written"):
        write(make([16]), tmp_path / "absent" / "t.parquet")
    write(make([16]), tmp_path / "t.parquet")
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.parquet"]


def test_the_bundled_slice_names_its_licence() -> None:
    trace = bundled()
    assert 500 < len(trace) < 1000
    assert "CC-BY 4.0" in str(trace.meta["licence"])
    assert trace.duration_s < 120


def test_rows_of_a_long_trace_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "GROUP_ROWS", 100)
    count = 1000
    ids = np.arange(2 * count)
    columns = {
        "arrival_s": np.arange(count) * 0.5,
        "input_len": np.arange(count) + 1,
        "output_len": np.full(count, 3),
        "parent": np.arange(count) - 7,
    }
    whole = traces.build(columns, blocks=(np.arange(count + 1) * 2, ids), block_size=16)
    path = tmp_path / "long.parquet"
    write(whole, path)
    assert pq.ParquetFile(path).num_row_groups == 10
    for rows in ((0, 1000), (0, 5), (95, 205), (100, 200), (340, 341), (990, 1000)):
        cuts = iter([rows])
        part, total = traces.read_part(path, lambda at, cuts=cuts: next(cuts))  # type: ignore[misc]
        assert total == count
        assert part.digest == whole.take(np.arange(*rows)).digest
    assert traces.digest_in(path) == whole.digest
    with pytest.raises(BadInput, match="no such trace file"):
        traces.read_part(tmp_path / "absent.parquet", lambda at: (0, 1))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(BadInput, match="not a trace"):
        traces.read_part(path, lambda at: (0, 1))
