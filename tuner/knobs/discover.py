"""Asks an interpreter about its engine: exact flags, version, platform, devices. The question runs in another
process, and the answer is cached by interpreter and version. No engine is imported here.
"""

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from tuner.adapters import EngineAdapter, adapter_in
from tuner.errors import BadInput, Unavailable
from tuner.knobs.catalogue import CATALOGUE, table
from tuner.knobs.probe import MARK
from tuner.records import EngineFacts, digest_of
from tuner.settings import Settings, shipped

Platform = Literal["cuda", "cpu", "rocm", "xpu", "tpu"]
# The variables that decide which devices the engine sees.
_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "VLLM_TARGET_DEVICE")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """One kind of device: name, GiB of memory of one, and how many."""

    name: str
    memory_gib: float
    count: int = 1


def discover(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 180.0
) -> EngineFacts:
    """Facts of the engine that a launch command starts. The command may end in `-m MODULE`.

    `env` is added to our environment. BadInput when the interpreter or its vLLM is missing or broken;
    Unavailable when it does not answer in time.
    """
    interpreter = interpreter_of(command)
    adapter = adapter_in(command)
    if adapter.speaks_as is not None:
        return _facts_of_help(adapter, command, env or {}, timeout_s)
    who = _ask(interpreter, ("identity",), env, timeout_s)
    seen = {name: (env or {}).get(name, os.environ.get(name)) for name in _DEVICES}
    key = digest_of({"command": list(interpreter), "who": who, "env": seen, "probe": _script()})
    kept = Settings().home / "cache" / "engines" / f"{key[:32]}.json"
    answer: dict[str, Any] | None = None
    with contextlib.suppress(OSError, ValueError):
        answer = json.loads(kept.read_text())
    if answer is None:
        answer = _ask(interpreter, (), env, timeout_s)
        if answer.get("platform") == "cpu" or answer.get(
            "gpu_count"
        ):  # a host that had lost its GPU is asked again
            _remember(kept, answer)
    return facts_of_answer(answer, adapter.kind)


def interpreter_of(command: Sequence[str]) -> tuple[str, ...]:
    """The words before `-m` or `-c` in a launch command: the interpreter, and a prefix if there is one."""
    for position, word in enumerate(command):
        if word in ("-m", "-c"):
            return tuple(command[:position])
    return tuple(command)


def facts_of_answer(answer: Mapping[str, Any], kind: str = "vllm") -> EngineFacts:
    """Facts from the output of the probe."""
    facts = EngineFacts(
        kind=kind,
        version=str(answer["version"] or "dev"),
        platform=cast(Platform, answer.get("platform") or "cuda"),
        flags=frozenset(answer["flags"]),
        gpu_name=answer.get("gpu_name"),
        gpu_memory_gib=answer.get("gpu_memory_gib"),
        gpu_count=int(answer.get("gpu_count") or 0),
        choices={name: tuple(found) for name, found in answer["choices"].items() if name in CATALOGUE},
    )
    told = {
        name: answer["defaults"][name]
        for name, entry in CATALOGUE.items()
        if answer["defaults"].get(name) is not None and entry.acts_on(facts.platform)
    }
    return replace(facts, defaults={**with_defaults(facts).defaults, **told})


def facts_of_version(
    version: str,
    platform: Platform = "cuda",
    *,
    kind: str = "vllm",
    gpu: GpuKind | None = None,
) -> EngineFacts:
    """Facts of a release from shipped data only; the device need not be in this host."""
    plain = EngineFacts(kind=kind, version=version, platform=platform, flags=table().flags_of(version))
    return on_device(plain, platform, gpu)


def on_device(facts: EngineFacts, platform: Platform, gpu: GpuKind | None) -> EngineFacts:
    """The same engine on another device, with the defaults for that device."""
    moved = replace(
        facts,
        platform=platform,
        gpu_name=gpu.name if gpu else None,
        gpu_memory_gib=gpu.memory_gib if gpu else None,
        gpu_count=gpu.count if gpu else 0,
    )
    return with_defaults(moved)


def with_defaults(facts: EngineFacts) -> EngineFacts:
    """The facts with the defaults that the catalogue knows, for knobs that have an effect here."""
    found = {
        name: entry.default_for(facts)
        for name, entry in CATALOGUE.items()
        if entry.kind == "preemption" or (entry.flag_in(facts) is not None and entry.acts_on(facts.platform))
    }
    return replace(facts, defaults={name: value for name, value in found.items() if value is not None})


def _facts_of_help(
    adapter: EngineAdapter, command: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> EngineFacts:
    from tuner import processes

    done = processes.run((*command, "--help"), timeout_s=timeout_s, env=env)
    if done.code != 0:
        raise BadInput(
            f"{adapter.title.format(version=adapter.speaks_as)} does not answer --help: {_last(done.err)}"
        )
    return facts_of_help(adapter, done.out)


def facts_of_help(adapter: EngineAdapter, text: str) -> EngineFacts:
    """The flags that an engine's `--help` lists; defaults are those of the vLLM release in `speaks_as`."""
    flags = frozenset(re.findall(r"--[a-z][a-z0-9-]+", text)) - {"--help"}
    facts = facts_of_version(str(adapter.speaks_as), "cuda", kind=adapter.kind)
    spoken = re.search(r"it speaks as (\S+)\s+does", text)  # argparse may break the line
    if spoken is not None:
        facts = replace(facts, version=spoken[1])
    return with_defaults(replace(facts, flags=flags))


def _ask(
    interpreter: Sequence[str], args: Sequence[str], env: Mapping[str, str] | None, timeout_s: float
) -> dict[str, Any]:
    """The probe's answer. BadInput or Unavailable as for discover."""
    from tuner import processes

    named = " ".join(interpreter)
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", **(env or {})}
    done = processes.run((*interpreter, "-c", _script(), *args), timeout_s=timeout_s, env=quiet)
    if done.code is None:
        raise Unavailable(f"{named} did not list the flags of its vLLM within {timeout_s:g} s; try again")
    lines = [line for line in done.out.splitlines() if line.startswith(MARK)]
    if done.code != 0 or not lines:
        raise BadInput(f"{named} is not a usable Python interpreter: {_last(done.err)}")
    answer: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    if "error" in answer:
        raise BadInput(f"{named}: {answer['error']}; name the interpreter that has vLLM installed")
    return answer


def _script() -> str:
    return shipped("knobs", "probe.py").read_text()


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"


def _remember(path: Path, answer: Mapping[str, Any]) -> None:
    """Cache an answer. Where the folder cannot be written, the question is asked again next time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(answer))
        draft.replace(path)
