"""What `tuner demo` writes before it tunes: a study, a trace, and for a real engine a tiny model."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.commands.common import say
from tuner.errors import BadInput
from tuner.measures import many
from tuner.settings import shipped

if TYPE_CHECKING:
    from tuner.traffic.trace import Trace


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

LONGEST = 8192
"""Tokens of prompt and answer that the tiny model takes."""

REAL = f"""\
# Written by `tuner demo --python`: vLLM on a tiny model with random weights.
model: tiny-model
space: demo-space.yaml
engine:
  kind: vllm
  python: PYTHON
  # Uncompiled in float32, a launch on a CPU takes seconds instead of a minute.
  args:
    {{load-format: dummy, skip-tokenizer-init: true, max-model-len: {LONGEST}, dtype: float32,
     enforce-eager: true}}
  env: {{VLLM_CPU_KVCACHE_SPACE: 1, HF_HUB_OFFLINE: 1}}
baseline: {{max_num_seqs: 4}}
slo: {{ttft_ms: 5000, tpot_ms: 500, e2e_ms: 60000}}
live_limits: off
seed: 7
"""

BURST = f"""\
name: demo
workload: chat
trace: {TRACE}
slices: [{{start_s: 78, duration_s: 2, name: burst}}]
speed: 0.1
plan: {{base: quick, tail_limit_s: 240, lateness_ms: 1000, repeats: 1, most_repeats: 1}}
budget: {{trials: 3}}
"""
"""Two seconds of the bundled trace, and one repeat: a look at the path of a run, no answer."""

OWN = """\
name: own-traffic
workload: own-traffic
trace: own-traffic.parquet
slices: auto
# So fast that a CPU keeps up: few requests run at once.
speed: SPEED
# A slice lasts up to ten times slice_s.
plan:
  {base: brief, slice_s: SLICE, tail_limit_s: 240, lateness_ms: 1000, finalists: 1, repeats: 3,
   most_repeats: 3}
budget: {trials: 4}
"""

# The mean load that a CPU gets: about a third of what two cores served in docs/results/simulator-cpu.md with
# 8 sequences at once, so that bursts fit.
TOKENS_S, REQUESTS_S = 1500.0, 2.0

# A slice lasts at most so many seconds, or as long as so many requests take if that is longer.
SLICE_S, REQUESTS = 60.0, 40

SPACE = """\
about: Few levels, for a first look at a real engine on a CPU.
vllm: ">=0.11.2"
knobs:
  max_num_seqs: [4, 8, 32]
  max_num_batched_tokens: [1024, 2048, 4096]
"""


def write_study(folder: Path, python: Path | None, own: "Trace | None" = None) -> Path:
    """The demo's study file in a folder, with all that it names. With a Python it launches that vLLM, on the
    own trace where one is given, without the requests that the tiny model does not take.

    BadInput when no request is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    study = folder / ("demo.yaml" if own is None else "own-traffic.yaml")
    if own is None:
        shutil.copy(shipped("data", "traces", TRACE), folder)
    if python is None:
        study.write_text(SIMULATED)
        return study
    part = BURST if own is None else _own(folder, own)
    write_tiny_model(folder / "tiny-model", max_position_embeddings=LONGEST)
    (folder / "demo-space.yaml").write_text(SPACE)
    study.write_text(REAL.replace("PYTHON", json.dumps(str(python))) + part)
    return study


def _own(folder: Path, own: "Trace") -> str:
    """Write the own trace; what the study says of it."""
    from tuner.traffic import trace as traces
    from tuner.traffic.structure import up_to

    kept = up_to(own, LONGEST)
    if not len(kept):
        raise BadInput(f"every request of the trace has more than the {LONGEST} tokens that the model takes")
    if left_out := len(own) - len(kept):
        say(f"left out: {left_out} of {many(len(own), 'request')}, longer than the model's {LONGEST} tokens")
    traces.write(kept, folder / "own-traffic.parquet")
    speed, slice_s = pace(kept)
    return OWN.replace("SPEED", f"{speed:g}").replace("SLICE", f"{slice_s:g}")


def pace(trace: "Trace") -> tuple[float, float]:
    """The speed at which a CPU keeps up with the mean load of a trace, and the plan's seconds of a slice (a
    tenth of the longest), so that one holds enough requests.
    """
    from tuner.tuning.studyfile import MOST_SPEED

    tokens = float(trace.input_len.sum(dtype="int64") + trace.output_len.sum(dtype="int64"))
    lasts_s = max(tokens / TOKENS_S, len(trace) / REQUESTS_S)
    speed = min(max(float(f"{trace.duration_s / lasts_s:.2g}"), 1 / MOST_SPEED), MOST_SPEED)
    return speed, round(max(SLICE_S, REQUESTS * lasts_s / len(trace)) / 10, 1)


def write_tiny_model(folder: Path, **changes: object) -> None:
    """A folder with the tiny model's config.json, with other values where given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_MODEL | changes))
