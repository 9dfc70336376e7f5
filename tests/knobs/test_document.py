"""The catalogue is whole, and docs/knobs.md is what it says."""

from pathlib import Path

import pytest

from benchmarks.knobs.page import document, terms
from tests.knobs.conftest import DRIVEN, engine
from tuner.errors import BadInput
from tuner.knobs import catalogue
from tuner.knobs.catalogue import CATALOGUE, knob, table
from tuner.knobs.space import check_space, knob_rows, names, parse

PAGE = Path(__file__).parents[2] / "docs" / "knobs.md"
ISSUE_TERMS = {
    *("global page budget", "max blocks per sequence", "batch wait window", "swap thresholds and hysteresis"),
    *(
        "background swap bandwidth",
        "selective batching",
        "prompt grouping",
        "padding policy",
        "decode priority",
    ),
    "eviction order",
}


def test_the_page_is_made_from_the_catalogue() -> None:
    assert PAGE.read_text() == document(), "run: python -m benchmarks.knobs.page > docs/knobs.md"


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_knob_is_described_in_full(name: str) -> None:
    entry = CATALOGUE[name]
    assert entry.trades.endswith(".")
    assert entry.source
    assert f"**{name}**" in PAGE.read_text()
    assert entry.substitute is None or entry.substitute in CATALOGUE
    assert entry.kind == "preemption" or entry.spans(), "no release of the data has its flag"
    assert entry.kind not in ("int", "float") or entry.minimum is not None


@pytest.mark.parametrize("version", DRIVEN)
def test_the_defaults_of_every_release_are_values_it_takes(version: str) -> None:
    for name, value in engine(version).defaults.items():
        assert CATALOGUE[name].complaint(value, version) is None


def test_every_term_of_the_guides_has_an_answer() -> None:
    found = {str(entry["term"]): entry for entry in terms()}
    assert found.keys() >= ISSUE_TERMS
    newest = engine(table().versions[-1])
    for entry in found.values():
        assert str(entry["says"]).endswith(".")
        named = entry["knobs"]
        assert isinstance(named, list)
        for name in named:
            assert CATALOGUE[name].flag_in(newest) or CATALOGUE[name].kind == "preemption"
        said = str(entry["says"]).lower()
        assert named or "no flag" in said


@pytest.mark.parametrize("name", names())
def test_every_shipped_space_is_on_the_page(name: str) -> None:
    assert f"| `{name}` |" in PAGE.read_text()


def test_a_knob_by_another_spelling_and_an_unknown_one() -> None:
    assert knob("max-num-seqs") is CATALOGUE["max_num_seqs"]
    with pytest.raises(BadInput, match="did you mean 'watermark'"):
        knob("watermarks")


def test_a_catalogue_with_a_wrong_key_is_refused() -> None:
    with pytest.raises(BadInput, match=r"x: unknown key 'tirades' \(did you mean 'trades'"):
        catalogue.parse("x: {type: int, tirades: a, source: b}", "mine.yaml")


def test_the_rows_of_an_engine() -> None:
    found = {row.name: row for row in knob_rows(engine(platform="cpu"))}
    assert set(found) == set(CATALOGUE)
    assert found["max_num_seqs"].why_not is None
    assert found["max_num_seqs"].default == 128
    assert "has no effect on cpu" in (found["async_scheduling"].why_not or "")
    assert found["scheduling_policy"].choices == ("fcfs", "priority")


def test_the_findings_on_a_space() -> None:
    space = parse(
        """
accept: [stream_interval]
knobs:
  max_num_seqs: [8, 1024]
  max_num_batched_tokens: [512, 2048]
  kv_cache_dtype: [auto, fp8]
  speculative_config: {values: [{method: ngram}], default: true}
  watermark: [0.0, 0.1]
  stream_interval: [1, 2]
  tensor_parallel_size: [1, 16]
""",
        where="mine.yaml",
    )
    found = [(finding.kind, finding.about, finding.text) for finding in check_space(space, engine("0.20.2"))]
    said = {(kind, about): text for kind, about, text in found}
    assert "does not have it" in said["dropped", "watermark"]
    assert "needs 16 GPUs" in said["dropped", "tensor_parallel_size=16"]
    assert "quality" in said["note", "kv_cache_dtype"]
    assert "bursts" in said["note", "stream_interval"]
    texts = [text for _, _, text in found]
    assert any("users' own prompts" in text for text in texts)
    assert any(text.startswith("up to 16 shapes to compile") for text in texts)
    assert any("% of the combinations are known to fail" in text for text in texts)
    assert check_space(space, engine("0.20.2")) == check_space(space, engine("0.20.2"))


def test_a_space_for_another_release_is_one_error() -> None:
    space = parse("vllm: '>=0.40'\nknobs: {block_size: [16]}", where="mine.yaml")
    (only,) = check_space(space, engine())
    assert only.kind == "error"
    assert ">=0.40" in only.text
