"""Every knob on every release: the words it compiles to, or the refusal, against a table written by hand."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from tests.knobs.conftest import DRIVEN, OLDER, engine
from tuner.errors import BadInput, UnsupportedKnob
from tuner.knobs import arguments
from tuner.knobs import space as spaces
from tuner.knobs.arguments import compile_candidate, fixed
from tuner.knobs.catalogue import CATALOGUE, matches, table
from tuner.knobs.discover import facts_of_version
from tuner.knobs.space import load

EXPECTED: Mapping[str, Any] = yaml.safe_load((Path(__file__).parent / "expected.yaml").read_text())


def _expected(spans: Mapping[str, str], version: str) -> str | None:
    for span, words in spans.items():
        first, _, last = (part.strip() for part in span.partition("-"))
        within = not last or Version(version) < Version(last + ".9999")
        if Version(version) >= Version(first) and within:
            return words
    return None


def test_the_table_has_every_knob() -> None:
    assert set(EXPECTED) | {"preemption"} == set(CATALOGUE)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_knob_compiles_on_every_release_as_the_table_says(name: str) -> None:
    row = EXPECTED[name]
    for version in DRIVEN:
        words = _expected(row["argv"], version)
        variables = _expected(row.get("env", {}), version)
        if words is None and variables is None:
            _refused(name, version)
            continue
        compiled = compile_candidate({name: row["value"]}, engine(version))
        given = " ".join(compiled.argv), " ".join(f"{key}={value}" for key, value in compiled.env.items())
        assert given == (words or "", variables or ""), version


def _refused(name: str, version: str) -> None:
    """The refusal names the knob, the version, and the substitute of the table where that one can be used."""
    row = EXPECTED[name]
    with pytest.raises(UnsupportedKnob) as refused:
        compile_candidate({name: row["value"]}, engine(version))
    said = str(refused.value)
    assert said.startswith(f"{name}: vLLM {version} ")
    instead = row.get("instead")
    assert said.endswith(
        f"use {instead} instead" if instead and _can(instead, version) else "does the same"
    ), said


def _can(name: str, version: str) -> bool:
    row = EXPECTED[name]
    return _expected(row["argv"], version) is not None or _expected(row.get("env", {}), version) is not None


@pytest.mark.parametrize("name", EXPECTED)
def test_older_releases_refuse_every_knob(name: str) -> None:
    row = EXPECTED[name]
    for version in OLDER:
        has = row["older"] == "all" or (row["older"] != "none" and version in row["older"])
        with pytest.raises(UnsupportedKnob) as refused:
            compile_candidate({name: row["value"]}, engine(version))
        said = str(refused.value)
        assert said.startswith(f"{name}: vLLM {version} ")
        assert ("is older than 0.10" in said) == has
        assert ("does not have it" in said) != has


PREEMPTION = [
    ("0.10.2.post2", "cuda", {}, "recompute", ""),
    ("0.10.2.post2", "cuda", {"VLLM_USE_V1": "0"}, "recompute", "--preemption-mode recompute"),
    ("0.10.2.post2", "cuda", {"VLLM_USE_V1": "0"}, "swap:8", "--preemption-mode swap --swap-space 8"),
    ("0.11.2", "cuda", {}, "offload:16", "--kv-offloading-size 16 --kv-offloading-backend native"),
    ("0.32.0", "cuda", {}, "offload:0.5", "--kv-offloading-size 0.5 --kv-offloading-backend native"),
    ("0.32.0", "rocm", {}, "offload:16", "--kv-offloading-size 16 --kv-offloading-backend native"),
    ("0.32.0", "cpu", {}, "recompute", ""),
    ("0.33.0", "cuda", {}, "recompute", ""),
]


@pytest.mark.parametrize(("version", "platform", "env", "mode", "words"), PREEMPTION)
def test_preemption_compiles_for_the_release(
    version: str, platform: Any, env: dict[str, str], mode: str, words: str
) -> None:
    compiled = compile_candidate({"preemption": mode}, engine(version, platform), env=env)
    assert " ".join(compiled.argv) == words


PREEMPTION_REFUSED = [
    ("0.9.2", "cuda", "swap:4", "older than 0.10"),
    ("0.10.2.post2", "cuda", "swap:4", "VLLM_USE_V1=0"),
    ("0.10.2.post2", "cuda", "offload:4", "use recompute instead"),
    ("0.11.0", "cuda", "swap:4", "use recompute instead"),
    ("0.11.0", "cuda", "offload:4", "since 0.11.2"),
    ("0.11.2", "cuda", "swap:4", "use offload:4 instead"),
    ("0.17.1", "cuda", "swap:4", "use offload:4 instead"),
    ("0.32.0", "cuda", "swap:4", "gone since 0.11.0"),
    ("0.32.0", "cpu", "swap:4", "use recompute instead"),
    ("0.32.0", "cpu", "offload:4", "host memory already"),
]


@pytest.mark.parametrize(("version", "platform", "mode", "says"), PREEMPTION_REFUSED)
def test_preemption_is_refused_aloud(version: str, platform: Any, mode: str, says: str) -> None:
    with pytest.raises(UnsupportedKnob) as refused:
        compile_candidate({"preemption": mode}, engine(version, platform))
    assert mode in str(refused.value)
    assert version in str(refused.value)
    assert says in str(refused.value)


def test_a_v0_pin_does_not_swap_where_v0_is_gone() -> None:
    with pytest.raises(UnsupportedKnob, match="no swapping"):
        compile_candidate({"preemption": "swap:4"}, engine("0.11.0"), env={"VLLM_USE_V1": "0"})


@pytest.mark.parametrize("name", spaces.names())
def test_every_level_of_a_shipped_space_exists_in_every_release(name: str) -> None:
    space = load(name)
    for version in DRIVEN:
        facts = engine(version, "cpu" if name == "cpu" else "cuda")
        if not matches(version, space.vllm):
            with pytest.raises(BadInput, match="is for vLLM"):
                space.restricted(facts)
            continue
        left = space.restricted(facts)
        for knob, levels in left.levels.items():
            words = [word for value in levels for word in compile_candidate({knob: value}, facts).argv]
            assert {word for word in words if word.startswith("--")} <= table().flags_of(version)
        for knob in space.levels.keys() - left.levels.keys():
            assert not _can(knob, version), f"{knob} was dropped: {left.dropped[knob]}"


def test_platforms_that_a_knob_does_not_act_on_are_refused() -> None:
    with pytest.raises(UnsupportedKnob, match="has no effect on cpu"):
        compile_candidate({"async_scheduling": True}, engine(platform="cpu"))


def test_block_sizes_follow_the_release() -> None:
    with pytest.raises(UnsupportedKnob, match=r"256 is not offered in vLLM 0\.11\.0; it takes 1, 8, 16"):
        compile_candidate({"block_size": 256}, engine("0.11.0"))
    assert compile_candidate({"block_size": 256}, engine("0.11.2")).argv == ("--block-size", "256")
    assert compile_candidate({"block_size": 48}, engine("0.18.1")).argv == ("--block-size", "48")


CHOICES = [
    ("prefix_caching_hash_algo", "builtin", "0.10.1", "0.10.2"),
    ("prefix_caching_hash_algo", "xxhash", "0.13.0", "0.12.0"),
    ("kv_cache_dtype", "bfloat16", "0.11.0", "0.10.2"),
    ("kv_cache_dtype", "float16", "0.18.1", "0.14.1"),
    ("kv_cache_dtype", "int8_per_token_head", "0.26.0", "0.18.1"),
    ("attention_backend", "TRITON_ATTN", "0.11.0", "0.10.2"),
    ("attention_backend", "TRITON_ATTN_VLLM_V1", "0.10.2", None),
]


@pytest.mark.parametrize(("name", "value", "has", "lacks"), CHOICES)
def test_words_follow_the_release(name: str, value: str, has: str, lacks: str | None) -> None:
    entry = CATALOGUE[name]
    assert entry.complaint(value, has) is None
    if lacks is not None:
        assert "is not offered in vLLM" in (entry.complaint(value, lacks) or "")


def test_the_engines_own_choices_stand_over_the_data() -> None:
    facts = replace(engine("0.11.0"), choices={"block_size": (16, 512)})
    assert compile_candidate({"block_size": 512}, facts).argv == ("--block-size", "512")
    with pytest.raises(UnsupportedKnob, match="it takes 16, 512"):
        compile_candidate({"block_size": 32}, facts)


def test_one_capture_size_is_not_what_the_old_spelling_means() -> None:
    with pytest.raises(UnsupportedKnob, match="largest size"):
        compile_candidate({"cudagraph_capture_sizes": "[8]"}, engine("0.11.0"))
    assert compile_candidate({"cudagraph_capture_sizes": "[8]"}, engine()).argv[1:] == ("8",)


def test_a_switch_without_its_no_form_cannot_be_turned_off() -> None:
    facts = replace(engine(), flags=engine().flags - {"--no-enforce-eager"})
    with pytest.raises(UnsupportedKnob, match="so only true is possible"):
        compile_candidate({"enforce_eager": False}, facts)


def test_none_is_left_to_the_engine_and_the_order_is_by_name() -> None:
    compiled = compile_candidate({"max_num_seqs": 8, "block_size": None, "enforce_eager": True}, engine())
    assert compiled.argv == ("--enforce-eager", "--max-num-seqs", "8")


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        ({"max_num_seq": 8}, "did you mean 'max_num_seqs'"),
        ({"max_num_seqs": "8k"}, "not a whole number"),
        ({"max_num_seqs": True}, "not a whole number"),
        ({"max_num_seqs": 0}, "below 1"),
        ({"gpu_memory_utilization": 1.5}, "above 1"),
        ({"enable_prefix_caching": "yes"}, "not true or false"),
        ({"scheduling_policy": "lifo"}, "it takes fcfs, priority"),
        ({"preemption": "swap"}, "'swap:<GiB>'"),
        ({"cudagraph_capture_sizes": "[0]"}, "list of whole numbers"),
        ({"speculative_config": "ngram"}, "not an object"),
    ],
)
def test_bad_values_are_named(candidate: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says.replace("[", r"\[")):
        compile_candidate(candidate, engine())


def test_fixed_arguments_are_exact_names() -> None:
    facts = engine()
    args = {
        "max-model-len": 16384,
        "enable_prefix_caching": False,
        "trust-remote-code": True,
        "cudagraph-capture-sizes": [1, 2],
        "hf-overrides": {"a": 1},
        "tokenizer": "x/y",
    }
    assert fixed(args, facts) == (
        *("--max-model-len", "16384", "--no-enable-prefix-caching", "--trust-remote-code"),
        *("--cudagraph-capture-sizes", "1", "2", "--hf-overrides", '{"a":1}', "--tokenizer", "x/y"),
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"max-num-seq": 3}, "no argument 'max-num-seq'.*did you mean '--max-num-seqs'"),
        ({"swap-space": 4}, "vLLM 0.32.0 has no argument 'swap-space'"),
        ({"max-model-len": None}, "leave the line out"),
        ({"headless": False}, "cannot be false"),
    ],
)
def test_fixed_arguments_that_cannot_be(args: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        fixed(args, engine())


def test_numbers_are_written_without_exponent() -> None:
    assert arguments.number(0.00001) == "0.00001"
    assert arguments.number(8589934592.0) == "8589934592"


def test_between_releases_the_one_before_counts() -> None:
    assert facts_of_version("0.32.3+cu129").flags == facts_of_version("0.32.0").flags
    assert facts_of_version("0.99").flags == facts_of_version(table().versions[-1]).flags
