"""Rules for candidates that are known to fail, from vLLM's source and its error messages."""

from collections.abc import Iterator, Mapping, Sequence

from tuner.adapters import adapter_of
from tuner.knobs.catalogue import CATALOGUE
from tuner.knobs.model import ModelFacts
from tuner.records import EngineFacts, Value


def known_violation(
    candidate: Mapping[str, Value],
    facts: EngineFacts,
    max_model_len: int | None = None,
    model: ModelFacts | None = None,
) -> str | None:
    """The first known reason why a candidate cannot start or serve, as one sentence, or None."""
    return next(iter(violations(candidate, facts, max_model_len, model)), None)


def violations(
    candidate: Mapping[str, Value],
    facts: EngineFacts,
    max_model_len: int | None = None,
    model: ModelFacts | None = None,
) -> tuple[str, ...]:
    """All known reasons, a sentence each."""
    asked = {name: value for name, value in candidate.items() if value is not None}
    return (*refusals(asked, facts, max_model_len, model), *_memory(asked), *_blocks(asked, facts))


def refusals(
    asked: Mapping[str, Value], facts: EngineFacts, max_model_len: int | None, model: ModelFacts | None
) -> tuple[str, ...]:
    """What vLLM itself refuses at start-up, whatever the card and its kernels are, a sentence each."""
    return (*_budget(asked, facts, max_model_len), *_parallel(asked, facts, model))


GRAPHS = "max_cudagraph_capture_size"
_DEFAULT_GRAPHS = adapter_of("vllm").graph_tokens or 0


def with_acting_graphs(candidate: Mapping[str, Value], levels: Sequence[Value]) -> dict[str, Value]:
    """The candidate with the lowest limit on captured graphs that captures the same graphs. The limit is
    removed where the engine's default captures the same: no graph is larger than the step budget.
    """
    kept = dict(candidate)
    asked, budget = kept.get(GRAPHS), kept.get("max_num_batched_tokens")
    if not isinstance(asked, int):
        return kept
    seqs = kept.get("max_num_seqs")
    own = min(2 * seqs, _DEFAULT_GRAPHS) if isinstance(seqs, int) else _DEFAULT_GRAPHS
    most = budget if isinstance(budget, int) else max(asked, own)
    if min(asked, most) == min(own, most):
        del kept[GRAPHS]
    else:
        same = (level for level in levels if isinstance(level, int) and min(asked, most) <= level <= asked)
        kept[GRAPHS] = min(same, default=asked)
    return kept


def effective(name: str, asked: Mapping[str, Value], facts: EngineFacts) -> Value:
    """The value of a knob: as asked, else the engine's default by rule, else None."""
    if name in asked:
        return asked[name]
    value = CATALOGUE[name].default_for(facts)
    doubled = name in ("max_num_seqs", "max_num_batched_tokens")
    if doubled and asked.get("performance_mode") == "throughput" and isinstance(value, int):
        return value * 2
    return value


def _integer(name: str, asked: Mapping[str, Value], facts: EngineFacts) -> int | None:
    value = effective(name, asked, facts)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _budget(asked: Mapping[str, Value], facts: EngineFacts, max_model_len: int | None) -> Iterator[str]:
    seqs = _integer("max_num_seqs", asked, facts)
    tokens = _integer("max_num_batched_tokens", asked, facts)
    active = _integer("max_num_active_seqs", asked, facts)
    scheduled = _integer("max_num_scheduled_tokens", asked, facts)
    both = "max_num_seqs" in asked and "max_num_batched_tokens" in asked
    if seqs and tokens and tokens < seqs and (both or "max_num_batched_tokens" not in asked):
        yield f"max_num_batched_tokens {tokens} is below max_num_seqs {seqs}"
    if seqs and active and active > seqs:
        yield f"max_num_active_seqs {active} is above max_num_seqs {seqs}"
    if tokens and scheduled and scheduled > tokens:
        yield f"max_num_scheduled_tokens {scheduled} is above max_num_batched_tokens {tokens}"
    if max_model_len is None:
        return
    whole = asked.get("enable_chunked_prefill") is False
    if whole and "max_num_batched_tokens" in asked and tokens and tokens < max_model_len:
        yield f"unchunked, max_num_batched_tokens {tokens} must reach max_model_len {max_model_len}"
    threshold = _integer("long_prefill_token_threshold", asked, facts)
    if threshold and threshold > max_model_len:
        yield f"long_prefill_token_threshold {threshold} is above max_model_len {max_model_len}"


def _memory(asked: Mapping[str, Value]) -> Iterator[str]:
    if "kv_cache_memory_bytes" in asked and "gpu_memory_utilization" in asked:
        yield "kv_cache_memory_bytes overrides gpu_memory_utilization: only one of them can be turned"


def _blocks(asked: Mapping[str, Value], facts: EngineFacts) -> Iterator[str]:
    """Rules for the named backend. On CPU the model decides the backend, so little is known before
    a launch.
    """
    size, backend = asked.get("block_size"), str(asked.get("attention_backend"))
    adapter = adapter_of(facts.kind)
    multiple = adapter.block_multiples.get(backend, adapter.block_multiples.get(""))
    if not isinstance(size, int) or multiple is None:
        return
    allowed = adapter.block_sizes.get(backend, ())
    if allowed and size not in allowed:
        listed = ", ".join(str(item) for item in allowed)
        yield f"block_size {size} is not among those of {backend}: {listed}"
    elif size % multiple and (facts.platform == "cuda" or backend == "CPU_ATTN"):
        yield f"block_size {size} is no multiple of {multiple}, which the attention kernels need"


def _parallel(asked: Mapping[str, Value], facts: EngineFacts, model: ModelFacts | None) -> Iterator[str]:
    sizes = {
        name: _integer(name, asked, facts) or 1
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    }
    need = 1
    for size in sizes.values():
        need *= size
    if facts.platform != "cpu" and facts.gpu_count and need > facts.gpu_count:
        yield f"tensor x pipeline x data parallel needs {need} GPUs and there are {facts.gpu_count}"
    if model is not None and model.heads % sizes["tensor_parallel_size"]:
        yield f"tensor_parallel_size {sizes['tensor_parallel_size']} does not divide {model.heads} heads"
    if model is not None and sizes["pipeline_parallel_size"] > model.layers:
        yield f"pipeline_parallel_size {sizes['pipeline_parallel_size']} is above the {model.layers} layers"
