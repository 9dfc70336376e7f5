"""The real vLLM (CPU build) that `make test-vllm` installs, and a tiny model for it."""

import json
import os
from pathlib import Path

import numpy as np
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


def random_weights(directory: Path) -> None:
    """The same model in four layers with weights, drawn at random, so that its answers can be compared."""
    model(directory)
    shape = json.loads((directory / "config.json").read_text())
    hidden, inner, vocabulary = (shape[f"{n}_size"] for n in ("hidden", "intermediate", "vocab"))
    kept = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(shape["num_hidden_layers"]):
        sizes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kept, hidden),
                 "self_attn.v_proj": (kept, hidden), "self_attn.o_proj": (hidden, hidden),
                 "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
                 "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
                 "post_attention_layernorm": (hidden,)}  # fmt: skip
        biases = {f"self_attn.{n}_proj.bias": sizes[f"self_attn.{n}_proj"][:1] for n in "qkv"}
        all_of_it = {**{f"{name}.weight": size for name, size in sizes.items()}, **biases}
        shapes |= {f"model.layers.{layer}.{name}": size for name, size in all_of_it.items()}
    rng, head, body = np.random.default_rng(1), {}, b""
    for name, size in shapes.items():
        raw = (rng.standard_normal(size) * 0.05).astype(np.float32).tobytes()
        head[name] = {"dtype": "F32", "shape": size, "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(head).encode()
    file = directory / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


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
