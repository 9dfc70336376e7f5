"""What `tuner demo` writes before it tunes: a study, a trace, and for a real engine a tiny model."""

import json
import shutil
from pathlib import Path

from tuner.settings import shipped

TRACE = "azure-conversation-slice.parquet"

TINY_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
"""The config.json of a Qwen2 with four layers: 3.4 million weights, which vLLM draws at random."""

SIMULATED = """\
# Written by `tuner demo`: the simulated engine on a slice of the Azure conversation trace.
name: demo
model: Qwen/Qwen2.5-7B-Instruct
workload: chat
trace: azure-conversation-slice.parquet
space: demo
engine: {kind: simulated, card: h100-80, args: {max-model-len: 16384}}
baseline: {max_num_seqs: 16}
slices: [{start_s: 78, duration_s: 6, name: burst}]
speed: 2.0
plan: quick
slo: {ttft_ms: 500, tpot_ms: 50, attainment: 0.95}
budget: {trials: 10}
seed: 7
"""

REAL = """\
# Written by `tuner demo --python`: vLLM on a tiny model with random weights, and a slice of the Azure
# conversation trace.
name: demo
model: tiny-model
workload: chat
trace: azure-conversation-slice.parquet
space: demo-space.yaml
engine:
  kind: vllm
  python: PYTHON
  # Uncompiled in float32, a launch on a CPU takes seconds instead of a minute.
  args:
    {load-format: dummy, skip-tokenizer-init: true, max-model-len: 8192, dtype: float32, enforce-eager: true}
  env: {VLLM_CPU_KVCACHE_SPACE: 1, HF_HUB_OFFLINE: 1}
baseline: {max_num_seqs: 4}
slices: [{start_s: 78, duration_s: 2, name: burst}]
speed: 0.1
plan: {base: quick, tail_limit_s: 240, lateness_ms: 1000, repeats: 1, most_repeats: 1}
slo: {ttft_ms: 5000, tpot_ms: 500, e2e_ms: 60000}
live_limits: off
budget: {trials: 3}
seed: 7
"""

SPACE = """\
about: Few levels, for a first look at a real engine on a CPU.
vllm: ">=0.11.2"
knobs:
  max_num_seqs: [4, 8, 32]
  max_num_batched_tokens: [1024, 2048, 4096]
"""


def write_study(folder: Path, python: Path | None) -> Path:
    """The demo's study file in a folder, with all that it names. With a Python it launches that vLLM."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(shipped("data", "traces", TRACE), folder)
    study = folder / "demo.yaml"
    if python is None:
        study.write_text(SIMULATED)
        return study
    write_tiny_model(folder / "tiny-model", max_position_embeddings=8192)
    (folder / "demo-space.yaml").write_text(SPACE)
    study.write_text(REAL.replace("PYTHON", json.dumps(str(python))))
    return study


def write_tiny_model(folder: Path, **changes: object) -> None:
    """A folder with the tiny model's config.json, with other values where given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_MODEL | changes))
