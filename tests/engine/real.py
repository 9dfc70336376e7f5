"""The real vLLM (CPU build) that `make test-vllm` installs, and a tiny model for it."""

import os
from pathlib import Path

import pytest

from benchmarks.tiny import ENV, WORDS, write
from tests.engine.helpers import spec
from tuner.records import LaunchSpec, Value

INTERPRETER = os.environ.get("TUNER_TEST_VLLM", "")
MODEL = Path(INTERPRETER).parents[1] / "tiny-model" if INTERPRETER else Path()
"""In one place for all tests: what the engine compiles for it is kept under its path."""


def model(directory: Path) -> str:
    """A model of four layers without weights."""
    return write(
        directory, max_position_embeddings=4096, torch_dtype="bfloat16", bos_token_id=0, eos_token_id=1
    )


def real(directory: Path, *argv: str, asked: dict[str, Value] | None = None, **changes: object) -> LaunchSpec:
    """A launch of the real engine, uncompiled: in float32 it serves (docs/engine.md). Skips without one."""
    if not Path(INTERPRETER).exists() or not INTERPRETER:
        pytest.skip("TUNER_TEST_VLLM names no interpreter; `make test-vllm` installs one")
    defaults: dict[str, object] = {
        "command": (INTERPRETER, "-m", "vllm.entrypoints.openai.api_server"),
        "model": model(MODEL),
        "argv": (*WORDS, "--max-num-seqs", "16", *argv),
        "env": ENV,
        "ready_timeout_s": 600.0,
        "stop_timeout_s": 60.0,
    }
    return spec(directory, asked=asked, **{**defaults, **changes})  # type: ignore[arg-type]
