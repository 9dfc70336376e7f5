"""A format is added in one file: the example of docs/extending.md, put beside the others as it stands."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.traffic.test_importers import conserved, put, quality
from tuner.cli import app
from tuner.errors import BadInput
from tuner.traffic import importers
from tuner.traffic.importers import Importer, detect, read_any
from tuner.traffic.importers.trace_builder import ImportOptions

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = next(
    part for part in (DOCS / "extending.md").read_text().split("```") if "register(Importer(" in part
)
LINES = (
    {"began": "2026-11-02T10:00:00.25Z", "tokens_in": 40, "tokens_out": 9, "chat": "a", "http": 200},
    {"began": "2026-11-02T10:00:01.5Z", "tokens_in": 60, "tokens_out": 0, "chat": "b", "http": 503},
    {"began": "2026-11-02T10:00:02Z", "tokens_in": 3, "tokens_out": 1, "http": 200, "warmup": True},
    {"began": "2026-11-02T10:00:04.75Z", "tokens_in": 55, "tokens_out": 7, "chat": "a", "http": 200},
)
TEXT = "\n".join(map(json.dumps, LINES))


@pytest.fixture
def madeup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package with one more file."""
    folder = tmp_path / "importers"
    folder.mkdir()
    (folder / "madeup.py").write_text(EXAMPLE.removeprefix("python"))
    monkeypatch.setattr(importers, "__path__", [*importers.__path__, str(folder)])
    importers.importers.cache_clear()
    yield
    importers._registered.pop("madeup", None)
    sys.modules.pop("tuner.traffic.importers.madeup", None)
    importers.importers.cache_clear()


def test_22_4_an_importer_of_one_file_is_detected_read_and_named_in_help(
    madeup: None, tmp_path: Path
) -> None:
    path = put(tmp_path, TEXT)
    assert detect(path) == "madeup"
    trace = read_any(path)
    assert trace.arrival_s.tolist() == pytest.approx([0, 1.25, 4.5])
    assert trace.input_len.tolist() == [40, 60, 55]
    assert trace.status.tolist() == [0, 1, 0]
    assert trace.parent.tolist() == [-1, -1, 0]
    assert conserved(trace)
    assert quality(trace)["dropped_warmup"] == 1
    assert len(read_any(path, max_len=50)) == 1
    with pytest.raises(BadInput, match="line 1: 'tokens_in' is 'x'"):
        read_any(put(tmp_path, TEXT.replace("40", '"x"', 1)))
    with pytest.raises(BadInput, match="leave --unit out"):
        read_any(path, unit="ms")
    with pytest.raises(BadInput, match=r"format 'madup' is not known.*'madeup'"):
        read_any(path, format="madup")
    said = CliRunner().invoke(app, ["trace", "import", "--help"]).stdout
    assert "madeup" in " ".join(said.split())


def test_22_4_the_format_that_names_most_keys_is_chosen(
    madeup: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bailian's lines have Mooncake's two keys too; more marks win, whatever the order of files."""
    path = put(tmp_path, TEXT)
    fewer = Importer(format="aa", read=importers.importers()["madeup"].read, json_keys=(("began",),))
    monkeypatch.setitem(importers._registered, "aa", fewer)
    importers.importers.cache_clear()
    assert next(iter(importers.importers())) == "aa"
    assert detect(path) == "madeup"


def test_22_4_named_columns_choose_the_format_that_looks_for_them(tmp_path: Path) -> None:
    text = "when,tokens_in,tokens_out\n1.5,3,4\n2.5,5,6\n"
    columns = {"arrival_s": "when", "input_len": "tokens_in", "output_len": "tokens_out"}
    assert read_any(put(tmp_path, text), columns).input_len.tolist() == [3, 5]
    line = {
        "at": "2026-11-02T10:00:00Z",
        "req": {"prompt": [1, 2, 3]},
        "res": {"usage": {"completion_tokens": 2}},
    }
    trace = read_any(put(tmp_path, json.dumps(line)), {"arrival": "at", "request": "req", "response": "res"})
    assert (trace.meta["source"], trace.input_len.tolist(), trace.output_len.tolist()) == ("openai", [3], [2])
    with pytest.raises(BadInput, match=r"format 'generic' has no column 'inputlen'.*'input_len'"):
        read_any(put(tmp_path, text), {"inputlen": "tokens_in"})


def test_22_4_every_format_has_a_row_in_the_table_of_the_documentation() -> None:
    table = (DOCS / "traffic.md").read_text()
    assert [name for name in importers.importers() if f"\n| `{name}` |" not in table] == []


def test_an_option_that_no_importer_takes_is_refused(tmp_path: Path) -> None:
    assert ImportOptions() == ImportOptions(columns={}, max_len=None, dequantise=True)
    for name, each in importers.importers().items():
        if not each.takes_tokenizer:
            with pytest.raises(BadInput, match="a tokenizer works only with format 'openai', not with"):
                read_any(put(tmp_path, TEXT), format=name, tokenizer=tmp_path)
