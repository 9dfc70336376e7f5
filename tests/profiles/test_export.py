"""The formats of a profile."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.history.records import NOW
from tuner.errors import BadInput
from tuner.profiles.export import FORMATS, as_mapping, render, split_flags
from tuner.records import Candidate, Profile, ProfileKey

ARGV = (
    "--max-num-seqs",
    "128",
    "--no-enable-prefix-caching",
    "--enable-chunked-prefill",
    "--gpu-memory-utilization=0.9",
    "--long-prefill-token-threshold",
    "-1",
    "--compilation-config",
    '{"level": 3, "sizes": [1, 2]}',
    "--max-model-len",
    "8k",
    "--cuda-graph-sizes",
    "1",
    "2",
    "--quantization",
    "null",
)


def a_profile(argv: tuple[str, ...] = ARGV, env: dict[str, str] | None = None) -> Profile:
    return Profile(
        id=7,
        key=ProfileKey(model="Qwen/Qwen2.5-7B-Instruct", target="n1", workload="chat"),
        version=3,
        candidate=Candidate({"max_num_seqs": 128}),
        engine_version="0.32.0",
        gpu_class="h100-80x1",
        study_id="ab" * 32,
        trial_id=17,
        argv=argv,
        env={"VLLM_ATTENTION_BACKEND": "FLASH_ATTN"} if env is None else env,
        evidence={"confirmed": True},
        digest="cd" * 32,
        created_at=NOW,
    )


def test_the_trial_is_told_by_its_number_in_the_study() -> None:
    profile = replace(a_profile(), evidence={"trial_number": 3})
    assert "# trial: 3\n" in render(profile, "vllm-yaml")
    assert "# trial: 17\n" in render(a_profile(), "vllm-yaml")


def test_vllm_yaml_has_dash_keys_no_false_and_no_null() -> None:
    text = render(a_profile(), "vllm-yaml")
    assert yaml.safe_load(text) == {
        "compilation-config": '{"level": 3, "sizes": [1, 2]}',
        "cuda-graph-sizes": [1, 2],
        "enable-chunked-prefill": True,
        "gpu-memory-utilization": 0.9,
        "long-prefill-token-threshold": -1,
        "max-model-len": "8k",
        "max-num-seqs": 128,
        "no-enable-prefix-caching": True,
        "quantization": "null",
    }
    assert "# version: 3\n" in text
    assert "# needs in the environment: VLLM_ATTENTION_BACKEND=FLASH_ATTN\n" in text


@pytest.mark.parametrize(
    "word", ["128", "0.90", "1e3", "1e-05", "08", "true", "yes", "null", "1_000", "0x10", "~"]
)
def test_a_word_reads_back_as_the_same_word(word: str) -> None:
    loaded = yaml.safe_load(render(a_profile(("--flag", word)), "vllm-yaml"))
    assert str(loaded["flag"]) == word
    assert not isinstance(loaded["flag"], bool)


def test_args_and_env_are_read_back_by_a_shell_s_rules_and_sorted() -> None:
    flags = split_flags(shlex.split(render(a_profile(), "args")))
    assert list(flags) == sorted(split_flags(ARGV), key=lambda flag: flag.name)
    lines = [line for line in render(a_profile(), "env").splitlines() if not line.startswith("#")]
    values = dict(line.split("=", 1) for line in lines)
    assert split_flags(shlex.split(values["VLLM_ADDITIONAL_ARGS"])) == flags
    assert yaml.safe_load(render(a_profile(), "configmap"))["data"]["args"] == render(a_profile(), "args")
    assert values["VLLM_ATTENTION_BACKEND"] == "FLASH_ATTN"


def test_json_holds_the_profile_without_time_stamps() -> None:
    told = json.loads(render(a_profile(), "json"))
    assert told["argv"] == list(ARGV)
    assert told["digest"] == "cd" * 32
    assert "2026" not in render(a_profile(), "json")


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_the_same_text_each_time(format: str) -> None:
    assert render(a_profile(), format) == render(a_profile(), format)
    assert render(a_profile(), format).endswith("\n")


def test_the_documentation_has_a_row_for_every_format() -> None:
    table = (Path(__file__).parents[2] / "docs" / "profiles.md").read_text().partition("## Formats")[2]
    assert [name for name in FORMATS if f"\n| `{name}` |" not in table] == []


def test_an_empty_profile_is_an_empty_mapping() -> None:
    assert yaml.safe_load(render(a_profile((), {}), "vllm-yaml")) == {}


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(BadInput, match="did you mean 'vllm-yaml'"):
        render(a_profile(), "vllm-yml")


def test_what_cannot_be_taken_apart_is_refused() -> None:
    with pytest.raises(BadInput, match="belongs to no flag"):
        split_flags(("stray",))
    with pytest.raises(BadInput, match="twice"):
        as_mapping(("--a", "1", "--a", "2"))
    with pytest.raises(BadInput, match="line break"):
        render(a_profile(env={"A": "1\n2"}), "env")


@pytest.mark.parametrize("format", [name for name in FORMATS if name not in ("json", "args")])
def test_a_masked_secret_is_named_but_never_set(format: str) -> None:
    text = render(a_profile(env={"HF_TOKEN": "***", "VLLM_X": "1"}), format)
    assert text.startswith("# needs in the environment (not kept here): HF_TOKEN\n")
    assert "HF_TOKEN" not in text.split("\n", 1)[1]
