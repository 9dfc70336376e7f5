"""The engine's command line: names, defaults and refusals of vLLM 0.32's OpenAI server, or of another
`Release`.
"""

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, field_validator

from tuner import yamltext
from tuner.errors import BadInput, nearest
from tuner.knobs.catalogue import human_readable_int
from tuner.knobs.model import ModelFacts
from tuner.records import Value, canonical_json
from tuner.simulator.cost import Budget, Card, Coefficients, StepCost
from tuner.simulator.state import SchedulerLimits

VERSION = "0.32.0"

# The environment variable that makes the simulated engine another release: its JSON.
VARIABLE = "TUNER_SIM_RELEASE"

Flag = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]+$")]


class Release(yamltext.Section):
    """A release of the simulated engine beside the usual one. `slower` multiplies every step's time,
    `defaults` maps flags (without dashes in front) to their new default, `renamed` old flags to new ones,
    `gone` lists flags that it no longer takes.
    """

    version: Annotated[str, Field(pattern=r"^\d+\.\d+[0-9a-z.+]*$")] = VERSION
    slower: float = Field(default=1.0, gt=0, le=100)
    defaults: dict[Flag, Value] = Field(default_factory=dict)
    renamed: dict[Flag, Flag] = Field(default_factory=dict)
    gone: tuple[Flag, ...] = ()

    @field_validator("defaults", "renamed", "gone", mode="before")
    @classmethod
    def _dashes(cls, found: object) -> object:
        if isinstance(found, dict):
            return {str(name).replace("_", "-"): value for name, value in found.items()}
        return [str(name).replace("_", "-") for name in found] if isinstance(found, list | tuple) else found

    def environment(self) -> dict[str, str]:
        """What starts the simulated engine as this release."""
        return {VARIABLE: canonical_json(self.model_dump(mode="json", exclude_defaults=True))}

    def check(self, flags: Mapping[str, object]) -> None:
        """BadInput for a flag that the engine never had; `flags` with dashes."""
        for name in (*self.defaults, *self.renamed, *self.gone):
            if f"--{name}" not in flags:
                known = [flag.removeprefix("--") for flag in flags]
                raise BadInput(f"{VARIABLE}: the simulated engine has no flag '{name}'{nearest(name, known)}")


def release_of(env: Mapping[str, str]) -> Release:
    """The release that an environment asks for. BadInput if its JSON is none."""
    text = env.get(VARIABLE)
    if not text:
        return Release()
    try:
        return yamltext.validated(Release, json.loads(text), VARIABLE)
    except ValueError as error:
        raise BadInput(f"{VARIABLE} is not JSON: {error}") from error


def read_release(path: Path) -> Release:
    """A release from a YAML or JSON file. BadInput names the file and the key."""
    found = yamltext.load(yamltext.read(path, "the release file"), str(path))
    return yamltext.validated(Release, found.value, str(path))


PROG = "api_server.py"

# The one `--scheduler-cls` that is known here (see `live`).
LIVE_LIMITS = "live_limits.LiveLimits"


def _optional_int(text: str) -> int | None:
    return None if text in ("", "None") else human_readable_int(text)


# vLLM's flags with a value: (type, default).
_VALUES: Mapping[str, tuple[type | object, Value]] = {
    "--host": (str, None),
    "--port": (int, 8000),
    "--model": (str, "Qwen/Qwen3-0.6B"),
    "--max-model-len": (human_readable_int, None),
    "--seed": (int, 0),
    "--tokenizer": (str, None),
    "--tokenizer-mode": (str, "auto"),
    "--revision": (str, None),
    "--load-format": (str, "auto"),
    "--download-dir": (str, None),
    "--generation-config": (str, "auto"),
    "--tensor-parallel-size": (int, 1),
    "--pipeline-parallel-size": (int, 1),
    "--distributed-executor-backend": (str, None),
    "--block-size": (int, None),
    "--gpu-memory-utilization": (float, 0.92),
    "--kv-cache-memory-bytes": (_optional_int, None),
    "--num-gpu-blocks-override": (_optional_int, None),
    "--kv-offloading-size": (float, None),
    "--max-num-batched-tokens": (human_readable_int, None),
    "--max-num-scheduled-tokens": (_optional_int, None),
    "--max-num-seqs": (int, None),
    "--max-num-active-seqs": (_optional_int, None),
    "--long-prefill-token-threshold": (int, 0),
    "--watermark": (float, 0.0),
    "--stream-interval": (int, 1),
    "--max-cudagraph-capture-size": (int, None),
    "--optimization-level": (str, "2"),
    "--shutdown-timeout": (int, 0),
    "--api-key": (str, None),
    "--root-path": (str, None),
    "--max-log-len": (_optional_int, None),
    "--chat-template": (str, None),
}
_CHOICES: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    "--dtype": (("auto", "bfloat16", "float", "float16", "float32", "half"), "auto"),
    "--kv-cache-dtype": (("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"), "auto"),
    "--prefix-caching-hash-algo": (("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"), "sha256"),
    "--scheduling-policy": (("fcfs", "priority"), "fcfs"),
    "--kv-offloading-backend": (("lmcache", "native"), "native"),
    "--performance-mode": (("balanced", "interactivity", "throughput"), "balanced"),
    "--uvicorn-log-level": (("critical", "debug", "error", "info", "trace", "warning"), "info"),
}
_SWITCHES: Mapping[str, bool | None] = {
    "--trust-remote-code": False,
    "--enforce-eager": False,
    "--skip-tokenizer-init": False,
    "--disable-cascade-attn": None,
    "--enable-prefix-caching": None,
    "--enable-chunked-prefill": None,
    "--long-prefill-token-threshold-adaptive": False,
    "--scheduler-reserve-full-isl": True,
    "--async-scheduling": None,
    "--enable-prompt-tokens-details": False,
    "--enable-force-include-usage": False,
    "--enable-server-load-tracking": False,
    "--enable-request-id-headers": False,
    "--enable-log-requests": False,
    "--enable-log-outputs": False,
    "--disable-uvicorn-access-log": False,
    "--disable-fastapi-docs": False,
    "--enable-logging-iteration-details": False,
    "--enable-mfu-metrics": False,
    "--kv-cache-metrics": False,
}


class _Parser(argparse.ArgumentParser):
    """Takes underscores for dashes in option names, as vLLM's parser does."""

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        dashed = []
        for word in args or ():
            name, equals, value = word.partition("=")
            dashed.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
        return super().parse_args(dashed, namespace)


def parser(release: Release | None = None) -> argparse.ArgumentParser:
    """vLLM's flags that a simulated engine takes; all others are refused as argparse does, exit code 2."""
    release = release or Release()
    release.check({**_VALUES, **_CHOICES, **_SWITCHES})
    about = f"vLLM OpenAI-Compatible RESTful API server, simulated; it speaks as {release.version} does."
    made = _Parser(prog=PROG, description=about)
    made.add_argument("model_tag", nargs="?", default=None)
    made.add_argument("--served-model-name", nargs="+", default=None)
    made.add_argument("--disable-log-stats", action="store_true")
    made.add_argument("--scheduler-cls", choices=[LIVE_LIMITS], default=None)
    made.add_argument("--cudagraph-capture-sizes", nargs="+", type=int, default=None)

    def add(flag: str, default: Value, **how: Any) -> None:
        name = flag.removeprefix("--")
        if name not in release.gone:
            shown = "--" + release.renamed.get(name, name)
            chosen = release.defaults.get(name, default)
            made.add_argument(shown, dest=name.replace("-", "_"), default=chosen, **how)
        else:
            made.set_defaults(**{name.replace("-", "_"): release.defaults.get(name, default)})

    for flag, (kind, default) in _VALUES.items():
        add(flag, default, type=kind)
    for flag, (choices, choice) in _CHOICES.items():
        add(flag, choice, choices=choices)
    for flag, switch in _SWITCHES.items():
        add(flag, switch, action=argparse.BooleanOptionalAction)
    return made


class StartRefused(Exception):
    """The engine does not start: vLLM's exception class and words. `where` is the process that raises it."""

    def __init__(self, kind: str, text: str, *, where: str = "APIServer") -> None:
        super().__init__(text)
        self.kind = kind
        self.where = where


def _invalid(config: str, words: str, given: str) -> StartRefused:
    text = f"1 validation error for {config}\n  Value error, {words} [type=value_error, input_value={given}"
    return StartRefused("pydantic_core._pydantic_core.ValidationError", f"{text}, input_type=ArgsKwargs]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The engine's effective configuration, after vLLM's rules have filled in what was left open."""

    model: str
    names: tuple[str, ...]
    host: str
    port: int
    limits: SchedulerLimits
    budget: Budget
    user_block_size: bool
    prompt_details: bool
    access_log: bool
    stream_interval: int
    offload_gib: float
    ranks: int
    given: Mapping[str, Value | list[str]]
    whole: Mapping[str, Value | list[str]]
    """All arguments, given or not; `given` are those that are not the release's defaults."""
    replicas: int = 1  # engines that share the requests; the process of the simulated engine has one

    def cost(self, facts: ModelFacts, card: Card, coefficients: Coefficients) -> StepCost:
        """What this engine's steps take."""
        return StepCost(
            facts,
            card.group(self.ranks),
            coefficients,
            block_size=self.limits.block_size,
            capture_most=self.budget.capture_most,
            kv_scale=self.budget.kv_scale,
            overlapped=self.limits.async_scheduling or card.platform == "cpu",
        )

    def with_blocks(self, blocks: int, swap_blocks: int = 0) -> "Options":
        """The same, with the number of KV blocks that the memory profile gave, and those in host memory."""
        return replace(self, limits=replace(self.limits, num_blocks=blocks, swap_blocks=swap_blocks))


def host_blocks(facts: ModelFacts, options: Options, gib: float | None = None) -> int:
    """Blocks of preempted requests that host memory holds: swap and offload alike. Default: the option's."""
    per_block = facts.kv_bytes_per_token * options.budget.kv_scale * options.limits.block_size
    return int((options.offload_gib if gib is None else gib) * 2**30 // per_block)


@functools.cache
def plain_arguments(release: str | None = None) -> Mapping[str, Any]:
    """Every argument at its default, in the release that VARIABLE would name so."""
    return MappingProxyType(vars(parser(release_of({VARIABLE: release or ""})).parse_args([])))


def resolve(
    argv: Sequence[str], card: Card, facts: ModelFacts, env: Mapping[str, str], gpus: int = 1
) -> Options:
    """Fill in the platform's defaults and check the rules: SystemExit(2) from argparse, or StartRefused."""
    return settle(parser(release_of(env)).parse_args(list(argv)), card, facts, env, gpus)


def settle(
    args: argparse.Namespace, card: Card, facts: ModelFacts, env: Mapping[str, str], gpus: int = 1
) -> Options:
    """The same for parsed arguments, on a number of cards. StartRefused from a rule."""
    replicas = getattr(args, "data_parallel_size", None) or 1  # no flag of the simulated engine's process
    world = args.tensor_parallel_size * args.pipeline_parallel_size * replicas
    if world > gpus:
        words = f"World size ({world}) is larger than the number of available GPUs ({gpus}) in this node."
        raise _invalid("ParallelConfig", words, "ArgsKwargs((), {'pipeline_parallel_size'...")
    model = args.model_tag or args.model
    length = args.max_model_len or facts.max_len
    if length > facts.max_len and env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        raise _invalid(
            "ModelConfig",
            f"User-specified max_model_len ({length}) is greater than the derived max_model_len "
            f"(max_position_embeddings={float(facts.max_len)} or model_max_length=None in model's "
            "config.json). To allow overriding this maximum, set the env var "
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1.",
            "ArgsKwargs((), {'model': ...})",
        )
    limits, plain = _limits(args, card, length), plain_arguments(env.get(VARIABLE))
    return Options(
        model=model,
        names=tuple(args.served_model_name or (model,)),
        host=args.host or "0.0.0.0",
        port=args.port,
        limits=limits,
        budget=_budget(args, limits, (card, facts), env.get("VLLM_CPU_KVCACHE_SPACE")),
        user_block_size=args.block_size is not None,
        prompt_details=args.enable_prompt_tokens_details,
        access_log=not args.disable_uvicorn_access_log
        and args.uvicorn_log_level in ("info", "debug", "trace"),
        stream_interval=max(1, args.stream_interval),
        offload_gib=args.kv_offloading_size or 0.0,
        ranks=args.tensor_parallel_size,
        given={name: value for name, value in vars(args).items() if value != plain.get(name)},
        replicas=replicas,
        whole=vars(args),
    )


def _budget(
    args: argparse.Namespace, limits: SchedulerLimits, on: tuple[Card, ModelFacts], space: str | None
) -> Budget:
    card, facts = on
    sizes = {"auto": facts.dtype_bytes, "bfloat16": 2, "float16": 2}
    capture = args.max_cudagraph_capture_size
    if args.cudagraph_capture_sizes:
        capture = max(args.cudagraph_capture_sizes)
    if capture is None:
        capture = min(2 * limits.max_num_seqs, 512)
    eager = args.enforce_eager or card.platform == "cpu"
    kv_bytes = args.kv_cache_memory_bytes
    if kv_bytes is None and card.platform == "cpu" and space:
        kv_bytes = int(float(space) * 2**30)
    return Budget(
        utilization=args.gpu_memory_utilization,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=max(limits.max_num_batched_tokens, args.max_num_batched_tokens or 0),
        block_size=limits.block_size,
        kv_scale=sizes.get(args.kv_cache_dtype, 1) / facts.dtype_bytes,
        capture_most=0 if eager else min(capture, limits.max_num_batched_tokens),
        kv_bytes=kv_bytes,
        blocks=args.num_gpu_blocks_override,
    )


def _limits(args: argparse.Namespace, card: Card, length: int) -> SchedulerLimits:
    if not 0 < args.gpu_memory_utilization <= 1:
        edge = "greater than 0" if args.gpu_memory_utilization <= 0 else "less than or equal to 1"
        raise StartRefused(
            "pydantic_core._pydantic_core.ValidationError",
            "1 validation error for CacheConfig\ngpu_memory_utilization\n  Input should be "
            f"{edge} [type={'greater_than' if edge.startswith('greater') else 'less_than_equal'}, "
            f"input_value={args.gpu_memory_utilization}, input_type=float]",
        )
    factor = 2 if args.performance_mode == "throughput" else 1
    seqs, batched = args.max_num_seqs, args.max_num_batched_tokens
    chunked = args.enable_chunked_prefill is not False
    if batched is None:
        batched = card.max_num_batched_tokens * factor
        batched = batched if chunked else max(length, batched)
        batched = min(batched, seqs * length) if seqs else batched
    if seqs is None:
        seqs = min(card.max_num_seqs * factor, batched)
    _check(args, seqs, batched, length, chunked)
    return SchedulerLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=min(batched, args.max_num_scheduled_tokens or batched),
        block_size=args.block_size or card.block_size,
        max_model_len=length,
        max_num_active_seqs=args.max_num_active_seqs,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=args.long_prefill_token_threshold_adaptive,
        scheduler_reserve_full_isl=args.scheduler_reserve_full_isl,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=args.enable_prefix_caching is not False,
        policy=args.scheduling_policy,
        watermark=args.watermark,
        async_scheduling=args.async_scheduling is not False and card.platform != "cpu",
    )


def _check(args: argparse.Namespace, seqs: int, batched: int, length: int, chunked: bool) -> None:
    given = "ArgsKwargs((), {'runner_t..., 'stream_interval': 1})"
    if seqs < 1:
        raise _invalid("SchedulerConfig", "max_num_seqs must be greater than or equal to 1.", given)
    if batched < seqs:
        words = f"max_num_batched_tokens ({batched}) must be greater than or equal to max_num_seqs ({seqs})."
        raise _invalid("SchedulerConfig", words, given)
    if not chunked and batched < length:
        words = f"max_num_batched_tokens ({batched}) is smaller than max_model_len ({length})."
        raise _invalid("SchedulerConfig", words, given)
    if args.long_prefill_token_threshold > length:
        words = f"long_prefill_token_threshold ({args.long_prefill_token_threshold}) cannot be greater "
        raise _invalid("SchedulerConfig", f"{words}than the max_model_len ({length}).", given)
    if args.max_num_active_seqs is not None and args.max_num_active_seqs > seqs:
        words = f"max_num_active_seqs ({args.max_num_active_seqs}) cannot be greater than max_num_seqs"
        raise _invalid("SchedulerConfig", f"{words} ({seqs}).", given)
