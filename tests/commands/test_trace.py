"""`tuner trace reshape` and `forget`: what they write, and what they say of bad input."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from tuner.cli import app
from tuner.traffic import trace as traces
from tuner.traffic.trace import COLUMNS, Trace, build

BLOCK = 16


def call(home: Path, *words: object) -> Result:
    return CliRunner().invoke(app, ["trace", *(str(word) for word in words)], env={"TUNER_HOME": str(home)})


def talks(path: Path, count: int = 40) -> Trace:
    """Conversations of two turns each, one second apart, told by blocks alone."""
    rows = 2 * count
    columns = {name: np.full(rows, unknown, kind) for name, (kind, unknown) in COLUMNS.items()}
    columns["arrival_s"] = np.arange(rows, dtype=float)
    lengths = np.where(np.arange(rows) < count, 3, 5)
    columns["input_len"], columns["output_len"] = lengths * BLOCK, np.full(rows, 4)
    blocks = [1000 * (row % count) + depth for row in range(rows) for depth in range(lengths[row])]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    made = build(columns, blocks=(offsets, np.array(blocks)), block_size=BLOCK, meta={})
    traces.write(made, path)
    return made


def test_a_trace_is_reshaped_in_the_order_that_is_told(tmp_path: Path) -> None:
    source, out = tmp_path / "talks.parquet", tmp_path / "out.parquet"
    whole = talks(source)
    done = call(tmp_path, "reshape", source, "--infer-sessions", "--share", 0.5, "--seed", 3, "-o", out)
    assert done.exit_code == 0, done.output
    thin = traces.read(out)
    assert 0 < len(thin) < len(whole)
    assert np.unique(thin.session, return_counts=True)[1].tolist() == [2] * (len(thin) // 2)

    done = call(tmp_path, "reshape", source, "--with", source, "--copies", 2, "--speed", 4, "-o", out)
    assert done.exit_code == 0, done.output
    dense = traces.read(out)
    assert len(dense) == 4 * len(whole)
    assert dense.duration_s < whole.duration_s / 3.5
    assert len(np.unique(dense.blocks)) == 4 * len(np.unique(whole.blocks))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--share", 0), "share is 0"),
        (("--copies", 0), "copies is 0"),
        (("--speed", -1), "speed is -1"),
        (("--with", "nothing.parquet"), "no file nothing.parquet"),
    ],
)
def test_a_trace_is_not_reshaped_by_what_makes_no_sense(
    tmp_path: Path, words: tuple[object, ...], said: str
) -> None:
    talks(tmp_path / "talks.parquet")
    refused = call(tmp_path, "reshape", tmp_path / "talks.parquet", *words, "-o", tmp_path / "out.parquet")
    assert refused.exit_code != 0
    assert said in (refused.output + str(refused.exception))
    assert not (tmp_path / "out.parquet").exists()


def test_a_forgotten_trace_leaves_its_file(tmp_path: Path) -> None:
    talks(tmp_path / "talks.parquet")
    kept = tmp_path / "kept.parquet"
    assert call(tmp_path, "reshape", tmp_path / "talks.parquet", "-o", kept).exit_code == 0
    assert "kept" in call(tmp_path, "list").output
    assert call(tmp_path, "forget", "kept").exit_code == 0
    assert "kept" not in call(tmp_path, "list").output
    assert kept.exists()
