"""The real vLLM (CPU build) that `make test-vllm` installs, and a tiny model for it."""

import json
import os
from pathlib import Path

import pytest

from tests.engine.helpers import spec
from tuner.records import LaunchSpec, Value

INTERPRETER = os.environ.get("TUNER_TEST_VLLM", "")
MODEL = Path(INTERPRETER).parents[1] / "tiny-model" if INTERPRETER else Path()
"""In one place for all tests: what the engine compiles for it is kept under its path."""
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def model(directory: Path) -> str:
    """A model of four layers without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPE))
    return str(directory)


def real(directory: Path, *argv: str, asked: dict[str, Value] | None = None, **changes: object) -> LaunchSpec:
    """A launch of the real engine, uncompiled: in float32 it serves (docs/engine.md). Skips without one."""
    if not Path(INTERPRETER).exists() or not INTERPRETER:
        pytest.skip("TUNER_TEST_VLLM names no interpreter; `make test-vllm` installs one")
    defaults: dict[str, object] = {
        "command": (INTERPRETER, "-m", "vllm.entrypoints.openai.api_server"),
        "model": model(MODEL),
        "argv": (
            *("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "2048"),
            *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16", *argv),
        ),
        "env": ENV,
        "ready_timeout_s": 600.0,
        "stop_timeout_s": 60.0,
    }
    return spec(directory, asked=asked, **{**defaults, **changes})  # type: ignore[arg-type]
