"""What differs between engines, as one record per kind of engine; a kind is one file of this package.

A file here that defines `ADAPTER` adds a kind of engine: `engine.kind` of a study file then takes its name.
All other code asks `adapter_of(kind)`. The record also holds what differs between versions of one engine: old
and new names of metrics, old and new error messages, and the versions whose limits can change.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tuner.errors import BadInput, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLimitsFile:
    """How scheduler limits change while an engine runs. `file` is copied onto the engine's Python path.
    `argv` are the arguments that make the engine use it. `knobs` are the limits that it can change.
    """

    file: Path
    argv: tuple[str, ...]
    knobs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAdapter:
    """The facts of one kind of engine. If an engine does not have a feature, leave its field at the default.

    `title` is the engine's name in sentences, with {version}. `command` follows the interpreter and starts
    the OpenAI-compatible server. A `simulated` engine is a part of the tuner: the tuner's own interpreter
    starts it, it has no weights and uses no GPU, its card is `engine.card`, and it may run on a virtual
    clock.
    """

    kind: str
    title: str
    command: tuple[str, ...]
    simulated: bool = False
    speaks_as: str | None = None
    """The vLLM release whose defaults the engine has; its flags are read from `--help`. None: the vLLM in the
    interpreter gives flags and defaults (knobs/probe.py)."""
    releases: bool = False
    """Whether data/vllm_flags.json says which release of the engine has which flag."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables for the engine. The study's `engine.env` overrides them; None removes a variable."""
    config_path: str = "/server_info?config_format=json"
    config_key: str = "vllm_config"
    """The URL path at which a ready engine gives its configuration as JSON, and the key that holds it."""
    kv_tokens_path: str = "cache_config.kv_cache_size_tokens"
    """Where this configuration has the size of the KV cache in tokens."""
    reset_path: str = "/reset_prefix_cache"
    """The URL path that empties the prefix cache."""
    metrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our name (`engine.metrics.SERIES`) → the engine's names, newest first. What it lacks is left out."""
    config_metric: str = ""
    """The metric whose labels hold the configuration."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Kind of failure (`engine.failures.KINDS`) → a pattern of the log lines that show it."""
    compile_cache: Mapping[str, str] = field(default_factory=dict)
    """Environment variable → folder below the compile cache's root. Empty: it keeps no compiled code."""
    live_limits: LiveLimitsFile | None = None
    block_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Attention backend → the block sizes that its kernels take, if they take only a few."""
    block_multiples: Mapping[str, int] = field(default_factory=dict)
    """Attention backend ("" = any other) → a number; every block size must be a multiple of it."""
    graph_tokens: int | None = None
    """The largest step, in tokens, that the engine captures as a CUDA graph by default (and at most
    2 x max_num_seqs). None: it captures no graphs."""

    def uses_gpus(self, platform: str) -> bool:
        """Whether the engine uses GPUs of its host when it runs on this platform."""
        return not self.simulated and platform != "cpu"

    @property
    def live_knobs(self) -> tuple[str, ...]:
        """The knobs that can change while the engine runs."""
        return () if self.live_limits is None else self.live_limits.knobs


@cache
def adapters() -> Mapping[str, EngineAdapter]:
    """Every kind of engine by name, vLLM first."""
    names = [each.name for each in pkgutil.iter_modules(__path__)]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    found: list[EngineAdapter] = [module.ADAPTER for module in modules if hasattr(module, "ADAPTER")]
    return {each.kind: each for each in sorted(found, key=lambda each: (each.kind != "vllm", each.kind))}


def adapter_of(kind: str) -> EngineAdapter:
    """The adapter of a kind of engine. BadInput names the nearest one."""
    known = adapters()
    if kind not in known:
        raise BadInput(f"no engine is named '{kind}'{nearest(kind, known)}; known: {', '.join(known)}")
    return known[kind]


def adapter_in(command: Sequence[str]) -> EngineAdapter:
    """The adapter whose module a launch command names; vLLM's if the command names none."""
    found = (each for each in adapters().values() if each.command[-1] in command)
    return next(found, adapter_of("vllm"))
