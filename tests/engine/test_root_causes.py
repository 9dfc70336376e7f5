"""Issue 29 B: what ended an engine is told by the root cause of its log, and blamed on whom it belongs to."""

from pathlib import Path

import pytest

from tuner.engine.failures import classify
from tuner.engine.log import root_cause

LOGS = Path(__file__).parents[1] / "data" / "engine-logs"

STUDY_FAULTS = [
    ("driver-too-old", 1, "driver", "RuntimeError: The NVIDIA driver on your system is too old"),
    ("no-gpu", 1, "driver", "Error 803: system has unsupported display driver"),
    ("nvml-mismatch", 1, "driver", "Driver/library version mismatch"),
    ("no-kernel", 0, "image", "CUDA error: no kernel image is available for execution on the device"),
    ("container-image", 125, "image", "docker"),
    ("no-module", 1, "interpreter", "No module named 'vllm'"),
    ("gated", 1, "model_gated", "OSError: You are trying to access a gated repo. Make sure to have access"),
    ("remote-code", 1, "remote_code", "contains custom code which must be executed"),
    ("unknown-architecture", 1, "model_unknown", "does not recognize this architecture"),
    ("damaged-weights", 1, "weights", "SafetensorError: Error while deserializing header: HeaderTooLarge"),
    ("bfloat16", 1, "dtype", "ValueError: Bfloat16 is only supported on GPUs with compute capability"),
    ("dtype-of-quantization", 1, "dtype", "torch.bfloat16 is not supported for quantization method gptq"),
    (
        "fp8-on-old-card",
        1,
        "quantization",
        "The quantization method fp8 is not supported for the current GPU",
    ),
    ("compilation-config", 2, "bad_flag", "argument --compilation-config/-O: 1 validation error for"),
    ("invalid-choice", 2, "bad_flag", "argument --kv-cache-dtype: invalid choice: 'fp9'"),
    ("type-error", 2, "bad_flag", "argument --speculative-config/-sc: Value {method: ngram}"),
    ("fixed-json", 2, "bad_flag", "Please specify kv_role when kv_connector is set"),
]


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text()


@pytest.mark.parametrize(("name", "code", "kind", "words"), STUDY_FAULTS, ids=[s[0] for s in STUDY_FAULTS])
def test_a_fault_of_the_study_is_told_by_its_root_cause(name: str, code: int, kind: str, words: str) -> None:
    """29 B1: whatever the candidate asked for, and whatever code the server ended with."""
    for exit_code in {code, 0 if code == 1 else code}:
        found = classify(log(name), exit_code, "startup", asked=["max_num_seqs", "max_num_batched_tokens"])
        assert (found.kind, found.outcome, found.retries) == (kind, "study", 0)
        assert words in found.reason
        assert "exit code" not in found.reason
        assert found.violation.err is None


@pytest.mark.parametrize(
    ("name", "asked", "there"), [("mamba-blocks", 1024, 969), ("mamba-blocks-multiprocess", 256, 64)]
)
def test_too_many_sequences_for_the_mamba_cache_are_graded(name: str, asked: int, there: int) -> None:
    """29 B1: at once, by its numbers, and by the name of the knob."""
    found = classify(log(name), 1, "startup", asked=["max_num_seqs"])
    assert (found.kind, found.outcome, found.retries) == ("mamba_blocks", "infeasible", 0)
    assert found.violation.kv == pytest.approx(1 - there / asked)
    assert "max_num_seqs" in found.reason
    assert f"{asked} needed, {there} available" in found.reason


def test_an_unknown_end_is_told_by_the_last_line_of_its_own_traceback() -> None:
    """Not by a warning, an error that was retried, a follow-up, or the wrapper around it all."""
    found = classify(log("unknown-root-cause"), 0, "startup", asked=["max_num_seqs"])
    assert (found.kind, found.outcome) == ("engine_dead", "infeasible")
    assert found.reason == "the engine died: AttributeError: the plugin 'gizmo' has no entry point"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: boom", "RuntimeError: boom"),
        ("vllm-1  | ValueError: none\nvllm-1  | INFO 01-01 00:00:00 [a.py:1] bye", "ValueError: none"),
        ("2026-01-01T00:00:00Z (EngineCore pid=3) KeyError: 'x'", "KeyError: 'x'"),
        ("(APIServer pid=1) (EngineCore_DP0 pid=68) ERROR 02-06 16:34:06 [a.py:9] OSError: x", "OSError: x"),
        ("ERROR 04-08 19:59:10 engine.py:400] Error in execution: gone", "Error in execution: gone"),
        ("/torch/cuda/__init__.py:129: UserWarning: CUDA initialization: driver is too old", None),
        ("(EngineCore pid=3) INFO 01-01 00:00:00 [a.py:1] RuntimeError: not one", None),
        ("", None),
    ],
)  # fmt: skip
def test_a_line_is_read_whoever_wrote_something_in_front_of_it(text: str, line: str | None) -> None:
    found = root_cause(text)
    assert (None if found is None else found.line) == line


def test_a_warning_of_an_old_driver_does_not_hide_what_ended_the_engine() -> None:
    """A CPU build on a machine with an old driver warns, and fails of something else."""
    text = (
        "/torch/cuda/__init__.py:129: UserWarning: CUDA initialization: The NVIDIA driver on your system is"
        " too old (found version 11080).\n"
        "(EngineCore pid=7) ERROR 01-01 00:00:00 [core.py:1] ValueError: No available memory for the cache"
        " blocks. Try increasing `gpu_memory_utilization`.\n"
    )
    assert classify(text, 1, "startup").kind == "no_kv_memory"


@pytest.mark.parametrize("name", ["driver-too-old", "gated", "damaged-weights"])
def test_a_study_fault_told_as_information_is_none(name: str) -> None:
    """The same words as a message at level INFO end nothing."""
    text = "\n".join(f"INFO 01-01 00:00:00 [a.py:1] {line}" for line in log(name).splitlines())
    assert classify(text, 1, "startup").outcome == "infeasible"
