"""A study file is read whole or refused in one sentence naming the file, the line, the key and the cure."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.tuning.studies import STUDY, write
from tuner.errors import BadInput
from tuner.settings import shipped
from tuner.tuning import study
from tuner.tuning.study import StudyFile, parse, read

GOOD = """\
name: chat
model: tiny
trace: conv.csv
space: bursty-mixed
engine:
  kind: simulated
  env: {A: 1, B: true}
"""


def test_defaults_are_those_of_the_manual() -> None:
    study = parse(GOOD, name="x.yaml")
    assert (study.plan, study.winner, study.seed, study.speed) == ("standard", "slo", 0, 1.0)
    assert study.objectives == ["ttft_p95_ms", "tpot_p95_ms", "goodput_rps"]
    assert study.engine.env == {"A": "1", "B": "true"}
    assert study.budget.trials == 40


BAD = {
    "unknown key": (GOOD + "sead: 1\n", "x.yaml line 8: unknown key 'sead' (did you mean 'seed'?)"),
    "unknown key inside": (
        GOOD + "slo: {ttft: 3}\n",
        "line 8: unknown key 'slo.ttft' (did you mean 'ttft_ms'?)",
    ),
    "unknown key in a list": (
        GOOD + "slices: [{start: 1}]\n",
        "unknown key 'slices.0.start' (did you mean 'start_s'?)",
    ),
    "unknown word": (
        GOOD + "plan: fast\n",
        "line 8: plan: Input should be 'quick', 'brief', 'standard' or 'thorough', not 'fast'",
    ),
    "twice": (GOOD + "name: b\n", "line 8: key 'name' occurs twice"),
    "no yaml": ("name: [", "not YAML"),
    "a list": ("- name", "a study file is a mapping"),
    "empty": ("", "a study file is a mapping"),
    "missing": (GOOD.replace("trace: conv.csv\n", ""), "x.yaml: key 'trace' is missing"),
    "objective": (
        GOOD + "objectives: [ttft_p95]\n",
        "'ttft_p95' is not a measurement (did you mean 'ttft_p95_ms'?)",
    ),
    "no interpreter": (GOOD.replace("simulated", "vllm"), "kind: vllm needs python"),
    "kind": (
        GOOD.replace("simulated", "vlm"),
        "engine.kind: Input should be 'vllm' or 'simulated', not 'vlm'",
    ),
    "zero": (
        GOOD + "budget: {trials: 0}\n",
        "budget.trials: Input should be greater than or equal to 1, not 0",
    ),
    "weights": (GOOD + "winner: {wights: {a: 1}}\n", "unknown key 'winner.wights' (did you mean 'weights'?)"),
    "mapping": (GOOD + "baseline: [1]\n", "line 8: baseline: Input should be a valid dictionary"),
    "number": (GOOD + "speed: quick\n", "line 8: speed: Input should be a valid number"),
    "too fast": (GOOD + "speed: 1e308\n", "line 8: speed: Input should be less than or equal to 1000"),
    "too slow": (GOOD + "speed: 1e-9\n", "line 8: speed: Input should be greater than or equal to 0.001"),
    "no seed": (GOOD + "seed: 99999999999999999999\n", "line 8: seed: Input should be less than"),
    "too many": (GOOD + "budget: {trials: 9999999999}\n", "line 8: budget.trials: Input should be less than"),
    "longer than a year": (
        GOOD + "slices: [{start_s: 0, duration_s: 1e300}]\n",
        "duration_s: Input should be less than or equal to 31622400",
    ),
    "repeats": (GOOD + "plan: {repeats: 1000000000}\n", "plan.repeats: Input should be less than"),
    "29b3 a weight of no objective": (
        GOOD + "winner: {weights: {ttft_p95: 2}}\n",
        "winner.weights: 'ttft_p95' is not an objective of this study (did you mean 'ttft_p95_ms'?)",
    ),
    "29b3 a measurement that is no objective": (
        GOOD + "winner: {weights: {e2e_p95_ms: 2}}\n",
        "'e2e_p95_ms' is not an objective",
    ),
    "29b3 a negative weight": (
        GOOD + "winner: {weights: {ttft_p95_ms: -1}}\n",
        "must be a number ≥ 0, not -1",
    ),
    "29b3 no weight": (GOOD + "winner: {weights: {ttft_p95_ms: 0}}\n", "at least one weight must be above 0"),
    "29b3 no weights": (GOOD + "winner: {weights: {}}\n", "at least one weight must be above 0"),
    "29b3 a cost without a price": (
        GOOD + "objectives: [cost_per_million_tokens]\n",
        "the objective cost_per_million_tokens needs price_per_gpu_hour",
    ),
    "29b3 a speed without limits": (GOOD + "objectives: [max_speed]\n", "max_speed needs a limit under slo"),
    "29b3 nothing to search on": (
        GOOD + "slices: [{start_s: 0, duration_s: 9, held_out: true}]\n",
        "every slice is held out",
    ),
    "29b3 one name twice": (
        GOOD + "slices: [{start_s: 0, duration_s: 9, name: a}, {start_s: 9, duration_s: 9, name: a}]\n",
        "two of them are named 'a'",
    ),
    "29b3 one argument twice": (
        GOOD + "  args: {max-model-len: 1, max_model_len: 2}\n",
        "'max-model-len' and 'max_model_len' are the same argument",
    ),
    "29b3 a hidden engine": (GOOD.replace("A: 1", "VLLM_API_KEY: x"), "VLLM_API_KEY would hide the engine"),
    "29b3 no variable": (
        GOOD.replace("A: 1", "'A=B': x"),
        "'A=B' is not the name of an environment variable",
    ),
    "word or list": (GOOD + "slices: peak\n", "line 8: slices: Input should be 'auto'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case: str) -> None:
    text, sentence = BAD[case]
    with pytest.raises(BadInput) as caught:
        parse(text, name="x.yaml")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere\.yaml"):
        read(tmp_path / "nowhere.yaml")


def test_every_key_is_in_the_documented_study() -> None:
    text = shipped("data", "study.yaml").read_text()
    missing = [key for key in StudyFile.model_fields if f"{key}:" not in text]
    assert missing == []


def test_what_history_keeps_of_a_study_holds_no_secret(tmp_path: Path) -> None:
    """By name and by shape, in environment and fixed arguments; what is none is kept as it is."""
    secrets = (
        "engine:\n  kind: simulated\n  env: {MY_KEY: canary-1, PROXY: 'http://u:canary-2@p:1',"
        " B: 'Bearer canary-3abcdef', TOKENIZERS_PARALLELISM: 'false'}"
    )
    path = write(tmp_path, STUDY.replace("engine:\n  kind: simulated", secrets))
    prepared = study.load(path, store=None, now=datetime.now(UTC))
    kept = json.dumps([prepared.study.spec, prepared.study.identity])
    assert "canary" not in kept
    assert kept.count('"MY_KEY": "***"') == 2
    assert kept.count('"PROXY": "http://u:***@p:1"') == 2
    assert kept.count('"TOKENIZERS_PARALLELISM": "false"') == 2
    assert prepared.file.engine.env["MY_KEY"] == "canary-1"
