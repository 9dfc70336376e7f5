"""A knob is added in one place, its catalogue entry, which also says how its value is read back."""

from pathlib import Path

import pytest

from tests.engine.helpers import spec
from tuner.engine import failures, metrics
from tuner.engine.metrics import differences, read_effective, unproved_knobs
from tuner.errors import BadInput
from tuner.knobs import catalogue, space
from tuner.knobs.arguments import compile_candidate
from tuner.records import JSON, Candidate, EngineFacts

DOCS = Path(__file__).parents[2] / "docs" / "extending.md"
ENTRY = next(part for part in DOCS.read_text().split("```") if "frobnication:" in part).removeprefix("yaml\n")
FACTS = EngineFacts(kind="vllm", version="0.32.0", platform="cuda", flags=frozenset({"--frob-level"}))
SAID: JSON = {"vllm_config": {"frob_config": {"level": 4}}}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue with the entry of docs/extending.md, and nothing else."""
    monkeypatch.setitem(catalogue.CATALOGUE, "frobnication", catalogue.parse(ENTRY)["frobnication"])


def test_22_a_made_up_knob_is_one_entry(made_up: None, tmp_path: Path) -> None:
    """From a space to argv, and back from each way in which an engine tells it."""
    file = tmp_path / "space.yaml"
    file.write_text("name: frob\nabout: a made-up knob\nknobs: {frobnication: [1, 4, 8]}\n")
    assert space.load(str(file)).levels["frobnication"] == (1, 4, 8)
    compiled = compile_candidate({"frobnication": 8}, FACTS)
    assert compiled.argv == ("--frob-level", "8")
    launch = spec(tmp_path, asked={"frobnication": 8}, read_back=catalogue.read_back())
    label = metrics.parse('vllm:cache_config_info{frob_level="4"} 1\n')
    silent = metrics.parse("")
    assert read_effective(launch, silent, SAID, "")["frobnication"] == 4
    assert read_effective(launch, label, None, "")["frobnication"] == 4
    assert read_effective(launch, silent, None, "INFO Frobnicating at level 4")["frobnication"] == "4"
    assert "frobnication" not in read_effective(launch, silent, None, "")


def test_22_a_made_up_knob_that_the_engine_runs_otherwise_is_a_difference(made_up: None) -> None:
    asked = Candidate({"frobnication": 8})
    rules = catalogue.read_back()
    assert differences(asked, {"frobnication": 4}, rules) == {"frobnication": (8, 4)}
    cut = {"frobnication": 4, "max_num_seqs": 4}
    assert differences(asked, cut, rules) == {}
    less = {"frobnication": 3, "max_num_seqs": 4}
    assert differences(asked, less, rules) == {"frobnication": (8, 3)}
    assert unproved_knobs(asked, {}) == ("frobnication",)


def test_22_a_refused_flag_of_a_made_up_knob_is_the_candidates_fault(made_up: None) -> None:
    """Its flag has another name than the knob: the launch tells which flags the candidate added."""
    text = "usage: x\napi_server.py: error: argument --frob-level: invalid int value: '8.5'\n"
    argv = compile_candidate({"frobnication": 8}, FACTS).argv
    ours = failures.classify(text, 2, "startup", asked=("frobnication", *argv))
    theirs = failures.classify(text, 2, "startup", asked=("max_num_seqs",))
    assert (ours.outcome, theirs.outcome) == ("infeasible", "study")


def test_22_an_unknown_way_to_read_a_knob_back_is_refused() -> None:
    with pytest.raises(BadInput, match="frobnication: effective: unknown key 'pth'"):
        catalogue.parse(ENTRY.replace("    path:", "    pth:"))
