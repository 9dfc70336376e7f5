"""The simulated engine (tuner.simulator): it speaks as vLLM 0.32 does, on a card that the study names."""

from dataclasses import replace

from tuner.adapters.vllm import ADAPTER as VLLM

ADAPTER = replace(
    VLLM,
    kind="simulated",
    title="the simulated engine",
    command=("-m", "tuner.simulator.app"),
    simulated=True,
    speaks_as="0.32.0",
    releases=False,
    compile_cache={},
    block_sizes={},
    block_multiples={},
    graph_tokens=None,
)
