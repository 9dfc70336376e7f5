"""Numbers on vLLM's command line, read as its own parser reads them."""

import math
import re


def _flags(names: str) -> frozenset[str]:
    return frozenset(f"--{name}" for name in names.split())


_INTEGERS = _flags(
    """
    port grpc-port data-parallel-supervisor-port dp-supervisor-probe-failure-threshold max-log-len
    sse-keep-alive-interval ssl-cert-reqs h11-max-incomplete-event-size h11-max-header-count seed max-logprobs
    renderer-num-workers safetensors-prefetch-num-threads safetensors-prefetch-block-size nnodes node-rank
    mamba-cache-philox-rounds master-port distributed-timeout-seconds cpu-distributed-timeout-seconds
    numa-bind-nodes dcp-kv-cache-interleave-size cp-kv-cache-interleave-size prefill-context-parallel-size
    data-parallel-rank data-parallel-start-rank data-parallel-size-local data-parallel-rpc-port ubatch-size
    elastic-ep-max-dp-size dbo-decode-token-threshold dbo-prefill-token-threshold dp-sync-interval
    max-parallel-loading-workers prefix-cache-retention-interval mamba-block-size prefix-match-unit
    replayssm-buffer-len offload-group-size offload-num-in-group offload-prefetch-step max-loras max-lora-rank
    max-cpu-loras max-lora-cls-labels mm-shm-cache-max-object-size-mb spec-tokens shutdown-timeout
    """
)
"""Flags of whole numbers that are no knobs, by the parser of 0.32."""
_FLOATS = _flags(
    """
    dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s device-memory-utilization kv-offloading-size
    mm-processor-cache-gb mm-encoder-fp8-scale-save-margin video-pruning-rate mm-ipc-gpu-memory-gb
    kv-cache-metrics-sample
    """
)
"""Flags of numbers that are no knobs, by the same parser."""
_WITH_UNIT = _flags(
    """
    max-model-len max-num-batched-tokens max-num-scheduled-tokens max-num-queued-tokens kv-cache-memory-bytes
    safetensors-prefetch-block-size
    """
)
"""Flags of whole numbers that take 1k, 1.5k (thousands) and 1K (1,024) too; all others refuse a unit."""
_OPTIONAL = _flags(
    """
    distributed-timeout-seconds cpu-distributed-timeout-seconds kv-cache-memory-bytes kv-offloading-size
    mamba-block-size max-cpu-loras max-lora-cls-labels max-num-active-seqs max-num-queued-reqs
    max-num-queued-tokens max-num-scheduled-tokens max-parallel-loading-workers num-gpu-blocks-override
    numa-bind-nodes prefix-cache-retention-interval prefix-match-unit video-pruning-rate
    """
)
"""Flags for which an empty word and None mean: not given. All others refuse them."""
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_readable_int(text: str) -> int:
    """`8k` is 8000, `1.5k` 1500, `8K` 8192. ValueError otherwise, also for `1.5K`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text.strip())
    if found is None:
        return int(text)
    number, unit = found.groups()
    return int(float(number) * _UNITS[unit]) if unit.islower() else int(number) * _UNITS[unit]


def wanted(flag: str, kind: str) -> str | None:
    """What a flag takes: a whole number, a number, or None for anything else. `kind` is that of its knob
    (empty: it is no knob).
    """
    if kind in ("int", "ints") or flag in _INTEGERS:
        return "a whole number"
    return "a number" if kind == "float" or flag in _FLOATS else None


def read(flag: str, kind: str, text: str) -> int | float | None:
    """The number that a flag gets; None where vLLM takes the word for not given, or chooses (`auto`).
    ValueError where vLLM's parser or its check of the value refuses it, such as `1e3` for a whole number.
    """
    if flag in _OPTIONAL and text in ("", "None"):
        return None
    if flag == "--max-model-len" and text.strip().lower() in ("auto", "-1"):
        return None
    try:
        if wanted(flag, kind) == "a whole number":
            return human_readable_int(text) if flag in _WITH_UNIT else int(text)
        value = float(text)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value
