"""Turns a candidate into argv and environment of an installed engine, or refuses it and names a substitute;
and rules for candidates that are known to fail, from vLLM's source and its error messages.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tuner.adapters import adapter_of
from tuner.errors import BadInput, UnsupportedKnob, nearest
from tuner.knobs.catalogue import (
    CATALOGUE,
    OLDEST,
    PREEMPTION,
    Knob,
    knob,
    matches,
    negation,
    parse_version,
    table,
)
from tuner.knobs.model import ModelFacts
from tuner.records import EngineFacts, Value, canonical_json

OFFLOAD_PLATFORMS = ("cuda", "rocm", "xpu")

# Versions that read a knob from the environment (VLLM_ATTENTION_BACKEND).
_ENV_UNTIL = "<0.16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a candidate adds to the command line and to the environment of the engine."""

    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def compile_candidate(
    candidate: Mapping[str, Value], facts: EngineFacts, *, env: Mapping[str, str] | None = None
) -> Compiled:
    """argv and environment of a candidate, with knobs in the order of their names. A None value adds nothing.

    `env` is the environment of every launch of the study (it may select the V0 engine). UnsupportedKnob names
    the knob, the version and the nearest substitute; BadInput an unknown knob or a value of the wrong type.
    """
    argv: list[str] = []
    added: dict[str, str] = {}
    for name in sorted(candidate):
        value = candidate[name]
        if value is None:
            continue
        if (reason := refusal(name, value, facts, env=env)) is not None:
            raise UnsupportedKnob(reason)
        entry = knob(name)
        if entry.kind == "preemption":
            argv += _preemption(str(value), facts, env or {})
        elif (flag := entry.flag_in(facts)) is not None:
            argv += _written(entry, flag, value)
        elif entry.env is not None:
            added[entry.env] = str(value)
    return Compiled(argv=tuple(argv), env=added)


def takes(name: str, value: Value, facts: EngineFacts) -> bool:
    """Whether an engine can be launched with this value of a knob."""
    try:
        compile_candidate({name: value}, facts)
    except BadInput:
        return False
    return True


def title(facts: EngineFacts) -> str:
    """What an engine is called in sentences."""
    return adapter_of(facts.kind).title.format(version=facts.version)


def refusal(
    name: str, value: Value, facts: EngineFacts, *, env: Mapping[str, str] | None = None
) -> str | None:
    """Why this engine does not take this value, with the nearest substitute, or None. BadInput as above."""
    entry = knob(name)
    if value is None:
        return None
    if (wrong := entry.complaint(value)) is not None:
        raise BadInput(wrong)
    if entry.kind == "preemption":
        return _preemption_refusal(str(value), facts, env or {})
    return (
        _absence(entry, facts) or _not_offered(entry, value, facts) or _spelling_refusal(entry, value, facts)
    )


def _absence(entry: Knob, facts: EngineFacts) -> str | None:
    """Why the engine does not have the knob or ignores it, or None."""
    here = f"{entry.name}: {title(facts)}"
    if entry.flag_in(facts) is None and not _by_environment(entry, facts):
        history = _history(entry) if adapter_of(facts.kind).releases else ""
        return f"{here} does not have it{history}{_instead(entry, facts)}"
    if parse_version(facts.version) < OLDEST:
        return f"{here} is older than {OLDEST}, the oldest that the tuner supports; upgrade it"
    if not matches(facts.version, entry.usable):
        why = entry.never or "its feature is gone"
        return f"{here} accepts it, but it has no effect there ({why}){_instead(entry, facts)}"
    if entry.platforms and facts.platform not in entry.platforms:
        return f"{entry.name}: it has no effect on {facts.platform}, only on {', '.join(entry.platforms)}"
    return None


def _not_offered(entry: Knob, value: Value, facts: EngineFacts) -> str | None:
    """Why the engine does not take the value, by its own list of choices or by the catalogue, or None."""
    if entry.name not in facts.choices:
        return entry.complaint(value, facts.version)
    if value in facts.choices[entry.name]:
        return None
    listed = ", ".join(str(choice) for choice in facts.choices[entry.name])
    return f"{entry.name}: {value} is not offered in {title(facts)}; it takes {listed}"


def fixed(args: Mapping[str, object], facts: EngineFacts, *, where: str = "engine.args") -> tuple[str, ...]:
    """argv of the fixed arguments of a study. Names are exact long names, with dashes or underscores. Values
    may be booleans, lists and objects.

    BadInput names an unknown key. vLLM itself would also accept any unique beginning of a flag.
    """
    argv: list[str] = []
    for key, value in args.items():
        flag = "--" + key.lstrip("-").replace("_", "-")
        if flag not in facts.flags:
            close = nearest(flag, facts.flags)
            raise BadInput(f"{where}: {title(facts)} has no argument '{key}'{close}")
        argv += _fixed(flag, value, facts, where)
    return tuple(argv)


def _written(entry: Knob, flag: str, value: Value) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else negation(flag)]
    if entry.kind == "ints":
        return [flag, *(str(item) for item in json.loads(str(value)))]
    return [flag, number(value) if isinstance(value, int | float) else str(value)]


def number(value: float) -> str:
    """A number without exponent and without `.0`, so that argparse reads it as int or float."""
    return str(int(value)) if float(value).is_integer() else f"{value:.10f}".rstrip("0")


def _fixed(flag: str, value: object, facts: EngineFacts, where: str) -> list[str]:
    if value is None:
        raise BadInput(f"{where}: '{flag[2:]}' has no value; leave the line out for the engine's default")
    if value is True:
        return [flag]
    if value is False:
        if negation(flag) not in facts.flags:
            raise BadInput(f"{where}: '{flag[2:]}' cannot be false in {title(facts)}; leave it out")
        return [negation(flag)]
    if isinstance(value, list):
        return [flag, *(str(item) for item in value)]
    if isinstance(value, dict):
        return [flag, canonical_json(value)]
    return [flag, number(value) if isinstance(value, int | float) else str(value)]


def _by_environment(entry: Knob, facts: EngineFacts) -> bool:
    return entry.env is not None and matches(facts.version, f">=0.10,{_ENV_UNTIL}")


def _spelling_refusal(entry: Knob, value: Value, facts: EngineFacts) -> str | None:
    """Why the flag of this version cannot express the value, or None."""
    flag = entry.flag_in(facts)
    if value is False and flag is not None and negation(flag) not in facts.flags:
        return f"{entry.name}: {title(facts)} has no {negation(flag)}, so only true is possible"
    if flag == "--cuda-graph-sizes" and entry.kind == "ints" and len(json.loads(str(value))) == 1:
        return f"{entry.name}: {title(facts)} would read one number as the largest size. Give two or more"
    return None


def _history(entry: Knob) -> str:
    """ " (present since A until B)" from the shipped data."""
    spans = entry.spans()
    if not spans:
        return ""
    first, last = spans[0][0], spans[-1][1]
    known = table().versions[0]
    since = "from the first known release" if first == known else f"since {first}"
    return f" (present {since}{f' until {last}' if last else ''})"


def _instead(entry: Knob, facts: EngineFacts) -> str:
    """The end of a refusal: the substitute, if it can be used there."""
    other = CATALOGUE.get(entry.substitute or "")
    acts = other is not None and other.acts_on(facts.platform) and matches(facts.version, other.usable)
    if other is None or not acts or not (other.flag_in(facts) or _by_environment(other, facts)):
        return "; nothing there does the same"
    return f"; use {other.name} instead"


def _pins_v0(facts: EngineFacts, env: Mapping[str, str]) -> bool:
    return env.get("VLLM_USE_V1") == "0" and "--preemption-mode" in facts.flags


def _preemption(value: str, facts: EngineFacts, env: Mapping[str, str]) -> list[str]:
    found = PREEMPTION.fullmatch(value)
    how, size = (found[1] or "recompute", found[2]) if found else ("recompute", None)
    if how == "offload":
        return ["--kv-offloading-size", str(size), "--kv-offloading-backend", "native"]
    if not _pins_v0(facts, env):
        return []
    return ["--preemption-mode", how, *(["--swap-space", str(size)] if size else [])]


def _preemption_refusal(value: str, facts: EngineFacts, env: Mapping[str, str]) -> str | None:
    offloads = facts.platform in OFFLOAD_PLATFORMS and "--kv-offloading-size" in facts.flags
    name = f"preemption: {value}: {title(facts)}"
    if parse_version(facts.version) < OLDEST:
        return f"{name} is older than {OLDEST}, the oldest that the tuner supports; upgrade it"
    size = value.partition(":")[2]
    if value.startswith("swap"):
        if _pins_v0(facts, env):
            return None
        if "--preemption-mode" in facts.flags:
            return (
                f"{name} swaps only in its V0 engine. Use recompute, or set VLLM_USE_V1=0 in engine.env, "
                "so that the baseline also runs in V0"
            )
        close = f"offload:{size}" if offloads else "recompute"
        return f"{name} has no swapping (--preemption-mode is gone since 0.11.0); use {close} instead"
    if value.startswith("offload") and not offloads:
        if facts.platform not in OFFLOAD_PLATFORMS:
            return f"{name} on {facts.platform} keeps KV blocks in host memory already; use recompute instead"
        close = f"swap:{size}" if _pins_v0(facts, env) else "recompute"
        return f"{name} has no --kv-offloading-size (present since 0.11.2); use {close} instead"
    return None


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
    removed if the engine's default captures the same: no graph is larger than the step budget.
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
        yield (
            f"without chunked prefill, max_num_batched_tokens {tokens} must be at least max_model_len "
            f"{max_model_len}"
        )
    threshold = _integer("long_prefill_token_threshold", asked, facts)
    if threshold and threshold > max_model_len:
        yield f"long_prefill_token_threshold {threshold} is above max_model_len {max_model_len}"


def _memory(asked: Mapping[str, Value]) -> Iterator[str]:
    if "kv_cache_memory_bytes" in asked and "gpu_memory_utilization" in asked:
        yield "kv_cache_memory_bytes overrides gpu_memory_utilization: a space can change only one of them"


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
        yield f"block_size {size} is not a multiple of {multiple}, which the attention kernels need"


def _parallel(asked: Mapping[str, Value], facts: EngineFacts, model: ModelFacts | None) -> Iterator[str]:
    sizes = {
        name: _integer(name, asked, facts) or 1
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    }
    need = 1
    for size in sizes.values():
        need *= size
    if facts.platform != "cpu" and facts.gpu_count and need > facts.gpu_count:
        yield f"tensor x pipeline x data parallel needs {need} GPUs, but there are {facts.gpu_count}"
    if model is not None and model.heads % sizes["tensor_parallel_size"]:
        yield f"tensor_parallel_size {sizes['tensor_parallel_size']} does not divide {model.heads} heads"
    if model is not None and sizes["pipeline_parallel_size"] > model.layers:
        yield f"pipeline_parallel_size {sizes['pipeline_parallel_size']} is above the {model.layers} layers"
