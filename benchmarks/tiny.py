"""A tiny model without weights on the CPU build of vLLM, where benchmarks and tests need a real engine.

In float32 the engine serves uncompiled, which makes a launch cheap (docs/engine.md).
"""

import sys
import uuid
from pathlib import Path

from tuner.commands.tune import write_tiny_model
from tuner.knobs.catalogue import read_back
from tuner.records import LaunchSpec

LENGTH = 2048
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
ARGS = {
    "load-format": "dummy",
    "skip-tokenizer-init": True,
    "max-model-len": LENGTH,
    "enforce-eager": True,
    "dtype": "float32",  # else it becomes bfloat16, whatever the model says
}
WORDS = tuple(w for name, v in ARGS.items() for w in (f"--{name}", *([] if v is True else [str(v)])))


def write(directory: Path, **changes: object) -> str:
    """The model's directory: four layers of Qwen2, with other values of its configuration where given."""
    write_tiny_model(directory, **changes)
    return str(directory)


def launch(python: str | None, model: str, directory: Path, *argv: str) -> LaunchSpec:
    """A fresh engine of the tiny model: the real one where a Python is given, else the simulated one."""
    real = (python or "", "-m", "vllm.entrypoints.openai.api_server")
    return LaunchSpec(
        read_back=read_back(),
        launch_id=uuid.uuid4().hex,
        command=real if python else (sys.executable, "-m", "tuner.simulator.app"),
        model=model,
        argv=(*WORDS, *argv) if python else ("--max-model-len", str(LENGTH), *argv),
        served_name="study",
        directory=str(directory),
        env={**ENV, "TUNER_SIM_CARD": "cpu"},
        ready_timeout_s=600.0,
        stop_timeout_s=60.0,
    )
