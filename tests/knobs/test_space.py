"""Search spaces: what a file may say, what an error says, and what of a space an engine can turn."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.knobs.conftest import DRIVEN, engine
from tuner.errors import BadInput, NotFound
from tuner.knobs import space as spaces
from tuner.knobs.arguments import compile_candidate, known_violation
from tuner.knobs.catalogue import CATALOGUE, matches
from tuner.knobs.model import shapes
from tuner.knobs.space import SearchSpace, load
from tuner.records import Candidate, Value
from tuner.settings import shipped


def space(text: str) -> SearchSpace:
    return spaces.parse(text, where="mine.yaml")


def test_levels_from_every_notation() -> None:
    made = space("""
knobs:
  max_num_seqs: {from: 16, to: 64, per_octave: 2, multiple: 8}
  max-num-batched-tokens: {values: [512, 2048]}
  gpu_memory_utilization: {from: 0.8, to: 0.9, step: 0.05}
  block_size: [16, 32]
  watermark: [0, 0.1]
  enable_prefix_caching: [default, true, false]
  cudagraph_capture_sizes: {values: [[1, 2, 4]], default: true}
  preemption: recompute
""")
    assert dict(made.levels) == {
        "max_num_seqs": (16, 24, 32, 48, 64),
        "max_num_batched_tokens": (512, 2048),
        "gpu_memory_utilization": (0.8, 0.85, 0.9),
        "block_size": (16, 32),
        "watermark": (0.0, 0.1),
        "enable_prefix_caching": (None, True, False),
        "cudagraph_capture_sizes": (None, "[1,2,4]"),
        "preemption": ("recompute",),
    }


def test_a_geometric_range_starts_and_ends_where_it_says() -> None:
    made = space("knobs: {max_num_seqs: {from: 4, to: 1024, per_octave: 4}}")
    levels = made.levels["max_num_seqs"]
    assert levels[0] == 4
    assert levels[-1] == 1024
    assert len(levels) == len(set(levels))
    assert list(levels) == sorted(levels, key=lambda value: int(value or 0))


ERRORS = [
    ("knobs: {max_num_seq: [1]}", "no knob is named 'max_num_seq' (did you mean 'max_num_seqs'?)"),
    ("nobs: {}", "unknown key 'nobs' (did you mean 'knobs'?)"),
    ("knobs: {max_num_seqs: {valeus: [1]}}", "max_num_seqs: unknown key 'valeus' (did you mean 'values'?)"),
    ("1: 2\nknobs: {block_size: [16]}", "unknown key '1'; known are name, about, vllm, accept, knobs"),
    ("knobs: {}", "'knobs' is empty"),
    ("knobs: {max_num_seqs: []}", "max_num_seqs: the range is empty"),
    ("knobs: {max_num_seqs: [default]}", "max_num_seqs: the range is empty"),
    (
        "knobs: {max_num_seqs: {from: 8, to: 4, step: 1}}",
        "the range is empty: 'from' is 8, which is more than 'to' (4)",
    ),
    ("knobs: {max_num_seqs: {from: 8, to: 16}}", "give either 'step' (linear) or 'per_octave'"),
    ("knobs: {max_num_seqs: {from: 8, to: 16, step: 0}}", "not a number above 0"),
    ("knobs: {max_num_seqs: {from: 8, to: many, step: 1}}", "'to' is not a number"),
    ("knobs: {max_num_seqs: {from: 0, to: 8, per_octave: 1}}", "'from' of a geometric range must be above 0"),
    ("knobs: {max_num_seqs: {from: 1, to: 100000, step: 1}}", "more than 4096 levels"),
    ("knobs: {max_num_seqs: {values: [1], from: 1, to: 2}}", "give either 'values' or 'from' and 'to'"),
    ("knobs: {max_num_seqs: {when: {block_size: 16}}}", "give either 'values' or 'from' and 'to'"),
    ("knobs: {max_num_seqs: [8, 8]}", "max_num_seqs: a value occurs twice"),
    ("knobs: {max_num_seqs: [8k]}", "max_num_seqs: '8k' is not a whole number"),
    ("knobs: {gpu_memory_utilization: [1.2]}", "gpu_memory_utilization: 1.2 is above 1"),
    ("knobs: {scheduling_policy: [lifo]}", "lifo is not offered; it takes fcfs, priority"),
    ("knobs: {enable_prefix_caching: [1]}", "1 is not true or false"),
    ("knobs: {preemption: [offload]}", "'offload:<GiB>'"),
    (
        "knobs: {stream_interval: [1, 4]}",
        "stream_interval is not changed by default: With a value above 1, the client gets tokens in bursts",
    ),
    ("knobs: {max_model_len: [1024]}", "write 'accept: [max_model_len]'"),
    ("vllm: about 0.10\nknobs: {block_size: [16]}", "'about 0.10' is not a version range"),
    ("knobs: {block_size: [16, 32}", "mine.yaml line 1: not YAML"),
    ("- 1", "expected keys and values"),
    (
        "knobs: {block_size: {values: [16], when: {blok: 1}}}",
        "block_size: when: 'blok' is not a knob of this space (did you mean 'block_size'?)",
    ),
    (
        "knobs: {block_size: {values: [16], when: {max_num_seqs: 9}}, max_num_seqs: [8]}",
        "block_size: when: max_num_seqs never has the value 9",
    ),
    (
        "knobs: {block_size: {values: [16], when: {max_num_seqs: 8}}, "
        "max_num_seqs: {values: [8], when: {block_size: 16}}}",
        "conditions go in a circle: ",
    ),
    ("knobs: {block_size: {values: [16], when: {block_size: 16}}}", "conditions go in a circle: "),
    (
        "knobs: {enable_chunked_prefill: [true, false], "
        "long_prefill_token_threshold: {values: [512], when: {enable_chunked_prefill: true}}, "
        "watermark: {values: [0.1], "
        "when: {long_prefill_token_threshold: 512, enable_chunked_prefill: false}}}",
        "contradictory conditions: watermark: nothing in the space makes its condition",
    ),
    (
        "knobs: {gpu_memory_utilization: [0.8], kv_cache_memory_bytes: [1073741824]}",
        "kv_cache_memory_bytes overrides gpu_memory_utilization",
    ),
]


@pytest.mark.parametrize(("text", "says"), ERRORS)
def test_a_wrong_file_gets_one_clear_sentence(text: str, says: str) -> None:
    with pytest.raises(BadInput) as refused:
        space(text)
    assert says in str(refused.value)
    assert str(refused.value).startswith(("mine.yaml", "space 'space'"))
    assert "\n" not in str(refused.value)


def test_never_knobs_can_be_accepted() -> None:
    made = space("accept: [stream_interval]\nknobs: {stream_interval: [1, 4]}")
    assert made.levels["stream_interval"] == (1, 4)


def test_an_unknown_space_names_the_shipped_ones() -> None:
    with pytest.raises(NotFound, match=r"did you mean 'interactive'\?.*bursty-mixed, cpu, demo, full"):
        load("interactiv")
    assert load("search_spaces/voice.yaml").name == "voice"


def test_a_file_is_loaded_by_path(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("knobs: {block_size: [16, 32]}")
    assert load(path).name == "own"
    assert load(str(path)).levels["block_size"] == (16, 32)


CONDITIONAL = """
knobs:
  enable_chunked_prefill: [true, false]
  long_prefill_token_threshold: {values: [0, 512], when: {enable_chunked_prefill: true}}
  long_prefill_token_threshold_adaptive: {values: [false, true], when: {long_prefill_token_threshold: 512}}
  max_num_active_seqs: {values: [8], default: true}
"""


def test_inactive_knobs_are_dropped_and_their_children_too() -> None:
    made = space(CONDITIONAL)
    wild = {
        "enable_chunked_prefill": False,
        "long_prefill_token_threshold": 512,
        "long_prefill_token_threshold_adaptive": True,
        "max_num_active_seqs": None,
    }
    assert made.canonical(wild) == Candidate({"enable_chunked_prefill": False})
    assert not made.contains(wild)
    assert made.contains({"enable_chunked_prefill": False})


@pytest.mark.parametrize(
    ("candidate", "inside"),
    [
        ({"enable_chunked_prefill": True, "long_prefill_token_threshold": 0}, True),
        ({"enable_chunked_prefill": True, "long_prefill_token_threshold": 0, "max_num_active_seqs": 8}, True),
        ({"enable_chunked_prefill": True}, False),
        ({"enable_chunked_prefill": 1, "long_prefill_token_threshold": 0}, False),
        ({"enable_chunked_prefill": True, "long_prefill_token_threshold": 7}, False),
        ({"enable_chunked_prefill": False, "block_size": 16}, False),
        ({}, False),
    ],
)
def test_contains(candidate: dict[str, Value], inside: bool) -> None:
    assert space(CONDITIONAL).contains(candidate) is inside


SHIPPED = {name: load(name) for name in spaces.names()}


def test_the_shipped_spaces_are_these() -> None:
    assert set(SHIPPED) == {
        *("interactive", "bursty-mixed", "long-generation", "voice", "translation", "rag-long-context"),
        *("cpu", "full", "demo", "kernels"),
    }


@pytest.mark.parametrize("name", spaces.names())
def test_a_shipped_space_says_for_whom_and_keeps_answers_as_they_are(name: str) -> None:
    made = SHIPPED[name]
    text = shipped("search_spaces", f"{name}.yaml").read_text()
    assert text.startswith("# For ")
    assert "# Why these" in text
    assert made.about
    assert made.name == name
    assert made.changes_output == (("attention_backend",) if name == "kernels" else ())
    assert made.needs_raw == ()
    assert not any(CATALOGUE[knob].never for knob in made.levels)


@given(st.data(), st.sampled_from(spaces.names()))
def test_canonical_points_are_inside_and_stay_as_they_are(data: st.DataObject, name: str) -> None:
    made = SHIPPED[name]
    drawn = {knob: data.draw(st.sampled_from(levels)) for knob, levels in made.levels.items()}
    point = made.canonical(drawn)
    assert made.contains(point)
    assert made.canonical(point) == point


def test_the_digest_is_of_content_not_of_the_name() -> None:
    text = "knobs: {block_size: [16, 32]}"
    one, two = space(f"name: a\n{text}"), space(f"name: b\nabout: other\n{text}")
    assert one.digest == two.digest
    assert space("knobs: {block_size: [16, 64]}").digest != one.digest
    assert space("knobs: {watermark: [0, 0.1]}").digest == space("knobs: {watermark: [0.0, 0.1]}").digest


def test_restricting_drops_what_the_engine_lacks_and_says_so() -> None:
    left = SHIPPED["bursty-mixed"].restricted(engine("0.10.2.post2"))
    assert "watermark" not in left.levels
    assert "does not have it" in left.dropped["watermark"]
    assert not [name for name, why in left.dropped.items() if why.startswith(f"{name.partition('=')[0]}:")]
    assert left.levels["preemption"] == ("recompute",)
    assert "since 0.11.2" in left.dropped["preemption=offload:8"]
    assert SHIPPED["bursty-mixed"].restricted(engine()).dropped == {}


def test_restricting_drops_a_knob_whose_condition_died() -> None:
    made = space("""
knobs:
  block_size: [16]
  watermark: [0.0, 0.1]
  enforce_eager: {values: [true, false], when: {watermark: 0.1}}
""")
    left = made.restricted(engine("0.22.1"))
    assert set(left.levels) == {"block_size"}
    assert "nothing in the space makes its condition" in left.dropped["enforce_eager"]


def test_a_space_for_other_versions_is_refused() -> None:
    with pytest.raises(BadInput, match=r"space 'cpu' is for vLLM >=0\.11\.2, but 0\.10\.2 is installed"):
        SHIPPED["cpu"].restricted(engine("0.10.2", "cpu"))


def test_a_space_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(BadInput, match="has none of its knobs"):
        space("knobs: {watermark: [0.1]}").restricted(engine("0.20.2"))


VIOLATIONS = [
    (
        {"max_num_seqs": 512, "max_num_batched_tokens": 256},
        "max_num_batched_tokens 256 is below max_num_seqs 512",
    ),
    ({"max_num_seqs": 16, "max_num_active_seqs": 32}, "max_num_active_seqs 32 is above max_num_seqs 16"),
    (
        {"max_num_scheduled_tokens": 16384},
        "max_num_scheduled_tokens 16384 is above max_num_batched_tokens 8192",
    ),
    (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
        "must be at least max_model_len 16384",
    ),
    (
        {"long_prefill_token_threshold": 20000},
        "long_prefill_token_threshold 20000 is above max_model_len 16384",
    ),
    ({"kv_cache_memory_bytes": 1, "gpu_memory_utilization": 0.9}, "only one of them"),
    ({"block_size": 24}, "block_size 24 is not a multiple of 16"),
    ({"block_size": 128, "attention_backend": "FLASHINFER"}, "not among those of FLASHINFER: 16, 32, 64"),
    ({"tensor_parallel_size": 4, "data_parallel_size": 4}, "needs 16 GPUs, but there are 8"),
    ({"tensor_parallel_size": 8}, "does not divide 28 heads"),
]


@pytest.mark.parametrize(("candidate", "says"), VIOLATIONS)
def test_known_violations(candidate: dict[str, Value], says: str) -> None:
    qwen = shapes()["Qwen/Qwen2.5-7B-Instruct"]
    assert says in (known_violation(candidate, engine(), 16384, qwen) or "")


@pytest.mark.parametrize(
    "candidate",
    [
        {},
        {"max_num_batched_tokens": 512},  # the engine lowers its own default of max_num_seqs
        {"enable_chunked_prefill": False},  # and raises its own default of the budget
        {"performance_mode": "throughput", "max_num_scheduled_tokens": 16384},
        {"max_num_seqs": 16, "max_num_active_seqs": 16},
        {"block_size": 64, "attention_backend": "FLASHINFER"},
    ],
)
def test_what_the_engine_mends_itself_is_no_violation(candidate: dict[str, Value]) -> None:
    assert known_violation(candidate, engine(), 16384) is None


def test_a_block_size_on_cpu_is_learned_not_known() -> None:
    assert known_violation({"block_size": 48}, engine(platform="cpu")) is None
    named: dict[str, Value] = {"block_size": 48, "attention_backend": "CPU_ATTN"}
    assert "not a multiple of 32" in (known_violation(named, engine(platform="cpu")) or "")


@pytest.mark.parametrize("name", [name for name in spaces.names() if name != "cpu"])
def test_every_space_for_gpus_that_turns_the_step_budget_turns_the_captured_graphs(name: str) -> None:
    made = SHIPPED[name]
    assert "max_num_batched_tokens" in made.levels
    assert None in made.levels["max_cudagraph_capture_size"]
    for version in DRIVEN:
        if matches(version, made.vllm):
            left = made.restricted(engine(version))
            assert 2048 in left.levels["max_cudagraph_capture_size"], version


GRAPHS = [
    ({"max_num_batched_tokens": 256, "max_cudagraph_capture_size": 2048}, None),  # all is captured anyway
    ({"max_num_batched_tokens": 1024, "max_cudagraph_capture_size": 2048}, 1024),  # as 1024 does
    ({"max_num_batched_tokens": 640, "max_cudagraph_capture_size": 2048}, 1024),
    ({"max_num_batched_tokens": 1088, "max_cudagraph_capture_size": 2048}, 2048),
    ({"max_num_batched_tokens": 8192, "max_cudagraph_capture_size": 2048}, 2048),
    ({"max_num_batched_tokens": 8192, "max_cudagraph_capture_size": 512}, None),
    ({"max_num_batched_tokens": 8192, "max_num_seqs": 64, "max_cudagraph_capture_size": 512}, 512),
    ({"max_num_batched_tokens": 8192, "max_num_seqs": 64, "max_cudagraph_capture_size": 128}, None),
    ({"max_num_batched_tokens": 8192, "max_cudagraph_capture_size": 64}, 64),
    ({"max_cudagraph_capture_size": 512}, None),
    ({"max_cudagraph_capture_size": 1024}, 1024),
]


@pytest.mark.parametrize(("asked", "kept"), GRAPHS)
def test_graphs_go_with_the_step_budget(asked: dict[str, Value], kept: int | None) -> None:
    made = load("full")
    found = made.canonical(asked)
    assert found.get("max_cudagraph_capture_size") == kept
    assert made.canonical(found) == found


INHERITING = """
knobs:
  max_num_seqs: [64, 128]
  gpu_memory_utilization: [0.8, 0.9]
  enable_chunked_prefill: [true, false]
  long_prefill_token_threshold: {values: [0, 512], when: {enable_chunked_prefill: true}}
"""
TODAY: dict[str, Value] = {
    "block_size": 64, "kv_cache_dtype": "fp8", "max_num_seqs": 32, "long_prefill_token_threshold": 128,
}  # fmt: skip


def test_a_candidate_inherits_what_the_space_does_not_turn() -> None:
    made = space(INHERITING).restricted(engine(), baseline=TODAY)
    assert made.inherited == {"block_size": 64, "kv_cache_dtype": "fp8"}
    point = {"max_num_seqs": 128, "gpu_memory_utilization": 0.9, "enable_chunked_prefill": False}
    whole = made.canonical({**point, "long_prefill_token_threshold": 512, "block_size": 16})
    assert whole == Candidate({**point, **made.inherited})  # what the space turns off is off, today or not
    assert made.contains(whole)
    assert not made.contains(point)
    assert not made.contains({**whole, "block_size": 16})
    assert made.digest == space(INHERITING).digest


def test_a_knob_of_today_that_the_engine_cannot_turn_is_inherited() -> None:
    made = space("knobs: {max_num_seqs: [64, 128], block_size: [16, 24]}")
    left = made.restricted(engine("0.10.2", "cpu"), baseline={"block_size": 32, "max_num_seqs": 8})
    assert set(left.levels) == {"max_num_seqs", "block_size"}
    one = space("vllm: '>=0.10'\nknobs: {max_num_seqs: [64, 128], watermark: [0.1]}")
    older = one.restricted(engine("0.20.2"), baseline={"watermark": 0.2, "max_num_seqs": 8})
    assert set(older.levels) == {"max_num_seqs"}
    assert older.inherited == {"watermark": 0.2}


def test_a_condition_on_a_knob_of_today_holds_by_its_value_today() -> None:
    made = space("""
knobs:
  max_num_seqs: [64, 128]
  watermark: [0.0, 0.1]
  scheduler_reserve_full_isl: {values: [true, false], when: {watermark: 0.1}}
""")
    gone = engine("0.22.1")  # has no watermark
    assert "scheduler_reserve_full_isl" not in made.restricted(gone).levels
    made = space("""
knobs:
  max_num_seqs: [64, 128]
  max_num_active_seqs: {values: [16], when: {preemption: "offload:8"}}
  preemption: ["offload:8"]
""")
    cpu = engine(platform="cpu")
    assert "max_num_active_seqs" not in made.restricted(cpu).levels
    held = made.restricted(cpu, baseline={"preemption": "offload:8"})
    assert held.active("max_num_active_seqs", {})


def test_a_level_that_clashes_with_a_knob_of_today_is_dropped_with_the_reason() -> None:
    made = space("knobs: {max_num_seqs: [64, 128], gpu_memory_utilization: [0.8, 0.9]}")
    left = made.restricted(engine(), baseline={"kv_cache_memory_bytes": 2**30})
    assert set(left.levels) == {"max_num_seqs"}
    assert "baseline: kv_cache_memory_bytes is 1073741824" in left.dropped["gpu_memory_utilization"]
    made = space("knobs: {max_num_seqs: [64, 128, 1024]}")
    left = made.restricted(engine(), baseline={"max_num_batched_tokens": 512})
    assert left.levels["max_num_seqs"] == (64, 128)
    assert "is below max_num_seqs 1024" in left.dropped["max_num_seqs=1024"]


def test_a_level_that_another_knob_of_the_space_can_rescue_stays() -> None:
    made = space("knobs: {max_num_seqs: [64, 1024], max_num_batched_tokens: [2048, 8192]}")
    left = made.restricted(engine(), baseline={"max_num_active_seqs": 1024})
    assert left.levels["max_num_batched_tokens"] == (2048, 8192)


def test_M21_the_presets_hold_what_their_guides_found_best() -> None:
    """Voice: larger batches and another block size; translation: 16 sequences and 0.3 of a card."""
    voice, translation = SHIPPED["voice"].levels, SHIPPED["translation"].levels
    assert len(voice["block_size"]) > 1
    assert max(int(v or 0) for v in voice["max_num_seqs"]) >= 500
    assert {1, 2, 4, 8, 16, 32} <= set(translation["max_num_seqs"])
    assert 0.3 in translation["gpu_memory_utilization"]


@pytest.mark.parametrize(
    ("row", "knob", "value", "where"),
    [
        ("M16", "num_gpu_blocks_override", 4096, ("full", "kernels")),
        ("M16", "gpu_memory_utilization", 0.3, ("full", "kernels", "translation")),
        ("M18", "attention_backend", "FLASHINFER", ("kernels",)),
        ("M18", "enforce_eager", True, ("full", "kernels")),
        ("M18", "max_cudagraph_capture_size", 2048, ("full", "kernels", "voice")),
        ("M18", "async_scheduling", False, ("full", "kernels", "interactive")),
        ("M22", "pipeline_parallel_size", 2, ("full",)),
        ("M22", "data_parallel_size", 2, ("full",)),
    ],
)
def test_M16_M18_kernels_graphs_pages_and_layouts_are_turned_by_shipped_spaces_and_read_back(
    row: str, knob: str, value: Value, where: tuple[str, ...]
) -> None:
    for name in where:
        left = SHIPPED[name].restricted(engine())
        assert value in left.levels[knob], (row, name)
        compiled = compile_candidate({knob: value}, engine())
        assert any(word.startswith("--") for word in compiled.argv), (row, name)
    entry = CATALOGUE[knob]
    assert entry.effective, f"{knob} must be read back from the engine"


def test_M18_a_space_without_graphs_sizes_none() -> None:
    made = SHIPPED["kernels"]
    eager = made.canonical({"enforce_eager": True, "max_cudagraph_capture_size": 2048})
    assert "max_cudagraph_capture_size" not in eager


def _each(*values: Value) -> dict[str, Value]:
    """Every knob that a space may turn, with the first of the values that it takes."""
    found = {
        name: value
        for name, knob in CATALOGUE.items()
        for value in values[::-1]
        if not knob.never and name != "kv_cache_memory_bytes" and knob.complaint(value) is None
    }
    return {name: next(v for v in values if CATALOGUE[name].complaint(v) is None) for name in found}


def test_20_attack_conditions_that_share_their_parents_are_followed_once() -> None:
    knobs, names = {}, list(found := _each(True, 2, 0.5, "auto", "fcfs", "sha256", "balanced"))
    for place, name in enumerate(names):
        knobs[name] = {"values": [found[name]], "when": {n: found[n] for n in names[:place]} or None}
    made = space(json.dumps({"knobs": knobs}))
    assert len(made.levels) > 30
    assert made.active(names[-1], found)
    assert not made.active(names[-1], {**found, names[0]: None})


def test_20_attack_a_condition_on_many_levels_is_judged_at_once() -> None:
    names = [name for name, value in _each(1024).items() if CATALOGUE[name].complaint(4096) is None]
    first, second, last, *others = names
    knobs: dict[str, Any] = {name: {"from": 1024, "to": 4096, "step": 1} for name in others}
    knobs |= {first: [1024, 2048], second: {"values": [1024], "when": {first: 2048}}}
    knobs[last] = {"values": [1024], "when": {first: 1024, second: 1024, **dict.fromkeys(others, 4096)}}
    assert len(others) > 4
    with pytest.raises(BadInput, match="contradictory conditions"):
        space(json.dumps({"knobs": knobs}))


def test_20_attack_a_condition_that_takes_too_long_to_judge_is_refused() -> None:
    *others, last = (found := _each(True, 2, 0.5))
    first, *rest = others
    knobs: dict[str, Any] = {name: {"values": ["default", found[name]]} for name in rest}
    knobs[first] = {"values": [found[first]], "when": {rest[0]: found[rest[0]], rest[1]: "default"}}
    knobs[last] = {"values": [found[last]], "when": dict.fromkeys(rest[2:], "default")}
    knobs[last]["when"] |= {first: found[first], rest[1]: found[rest[1]]}
    with pytest.raises(BadInput, match="depends on too many knobs"):
        space(json.dumps({"knobs": knobs}))
