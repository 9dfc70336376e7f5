"""`tuner trace reshape` and `forget`: what they write, and what they say of bad input."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from tuner.cli import app
from tuner.errors import BadInput, NotFound
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


def burst(path: Path, count: int, gap_s: float = 0.0) -> Path:
    """A CSV of so many requests, the longest prompt and the longest answer in different ones."""
    rows = [f"{gap_s * row},{900 if row == 0 else 100},{20 if row == 0 else 300}" for row in range(count)]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]) + "\n")
    return path


@pytest.mark.parametrize(("count", "flying"), [(1, {}), (5, 4), (40, 39)])
def test_requests_of_one_moment_have_no_rate(tmp_path: Path, count: int, flying: object) -> None:
    shown = call(tmp_path, "show", burst(tmp_path / "t.csv", count), "--json")
    numbers = json.loads(shown.stdout)
    for name in ("request_rps", "input_tokens_per_s", "output_tokens_per_s"):
        assert numbers[name] is None
    assert set(numbers["peak_rps"].values()) == {None}
    assert (numbers["concurrency"] and numbers["concurrency"]["p50"]) == flying
    assert ",000" not in call(tmp_path, "show", tmp_path / "t.csv").stdout
    refused = call(tmp_path, "slice", tmp_path / "t.csv")
    assert refused.exit_code != 0
    which = (
        "the only request of the trace arrives" if count == 1 else f"all {count} requests of the trace arrive"
    )
    assert f"{which} at one moment" in str(refused.exception)
    assert call(tmp_path, "slice", tmp_path / "t.csv", "--start", 0, "--duration", 5).exit_code == 0


def test_the_longest_request_is_one_that_was_sent(tmp_path: Path) -> None:
    said = call(tmp_path, "show", burst(tmp_path / "t.csv", 40, gap_s=1.0)).stdout
    assert "the longest request has 920 tokens with its answer" in said


@pytest.mark.parametrize("start", [39.2, 40, 1e6])
def test_a_slice_beyond_the_end_is_refused_with_the_end(tmp_path: Path, start: float) -> None:
    refused = call(tmp_path, "slice", burst(tmp_path / "t.csv", 40, 1.003), "--start", start, "--duration", 3)
    assert isinstance(refused.exception, BadInput)
    assert "beyond the end of the trace, whose last request arrives at 39.117 s" in str(refused.exception)


def test_a_slice_that_reaches_beyond_the_end_says_so(tmp_path: Path) -> None:
    done = call(tmp_path, "slice", burst(tmp_path / "t.csv", 40, 1.003), "--start", 30, "--duration", 30)
    assert done.exit_code == 0
    assert "the last 20.88 s of the slice are empty" in done.output


@pytest.mark.parametrize("words", [("show",), ("slice",), ("reshape", "-o", "x.parquet")])
def test_a_trace_that_does_not_exist_is_not_found(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Exit code 4, before and after there is a history."""
    for _ in range(2):
        missing = call(tmp_path, words[0], "nosuch", *words[1:])
        assert isinstance(missing.exception, NotFound)
        assert call(tmp_path, "import", burst(tmp_path / "t.csv", 3, 1.0)).exit_code == 0


def test_an_import_says_how_times_were_read(tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "data" / "cases" / "seconds.jsonl"
    refused = call(tmp_path, "import", source)
    assert isinstance(refused.exception, BadInput)
    done = call(tmp_path, "import", source, "--unit", "s")
    assert "times: read as s (given)" in done.output
    assert json.loads(call(tmp_path, "import", source, "--unit", "ms", "--json").stdout)["unit"] == "ms"


def test_a_diff_names_what_moved(tmp_path: Path) -> None:
    before, after = burst(tmp_path / "a.csv", 300, 1.003), burst(tmp_path / "b.csv", 300, 0.501)
    said = call(tmp_path, "diff", before, after).stdout
    assert "- request rate: 1 → 2.003 requests/s (+100.2%)" in said
    found = json.loads(call(tmp_path, "diff", before, after, "--json").stdout)
    assert [each["name"] for each in found if each["moved"]] == ["request rate"]
    assert "- no number has changed" in call(tmp_path, "diff", before, before).stdout


def test_the_list_names_the_file_that_a_trace_was_taken_from(tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "data" / "public" / "burstgpt_1_head.csv"
    done = call(tmp_path, "import", source, "--name", "burst", "--unit", "s")
    assert done.exit_code == 0, done.output
    told = call(tmp_path, "list").output
    assert source.name in told
    assert ".parquet" not in told, "where the copy is"


def test_a_slice_counts_its_own_rows(tmp_path: Path) -> None:
    """Issue 29, 18: it had the counts of the trace that it was cut from."""
    source = burst(tmp_path / "t.csv", 40, gap_s=1.0)
    assert call(tmp_path, "import", source, "-o", tmp_path / "whole.parquet", "--max-len", 900).exit_code == 0
    whole = traces.read(tmp_path / "whole.parquet")
    quality = whole.meta["quality"]
    assert isinstance(quality, dict)
    assert (quality["rows_read"], len(whole), quality["dropped_over_length"]) == (40, 39, 1)
    cut = (tmp_path / "whole.parquet", "--start", 10, "--duration", 6, "-o", tmp_path / "cut.parquet")
    assert call(tmp_path, "slice", *cut).exit_code == 0
    part = traces.read(tmp_path / "cut.parquet")
    assert 0 < len(part) < len(whole)
    assert (part.meta["rows"], part.meta["quality"]) == (len(part), {"rows_read": len(part)})
