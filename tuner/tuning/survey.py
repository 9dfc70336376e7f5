"""The engine of a study: how its file describes it, and what the host that runs it answers."""

import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from tuner.adapters import adapter_of, adapters
from tuner.engine.gpu import ORDER, Gpus
from tuner.errors import BadInput, NotFound
from tuner.history.store import Store
from tuner.knobs.arguments import fixed
from tuner.knobs.catalogue import CATALOGUE
from tuner.knobs.discover import GpuKind, discover, facts_of_help, on_device
from tuner.knobs.space import SearchSpace
from tuner.records import EngineFacts, Node
from tuner.simulator.cost import card_of
from tuner.simulator.options import parser as simulated_flags
from tuner.simulator.options import release_of
from tuner.yamltext import Section

# Flags that the tuner sets itself or that would hide the engine from it.
OURS = ("model", "host", "port", "served-model-name", "uds", "api-key", "root-path", "ssl-keyfile")

# Environment variables that change where the engine listens or whom it answers.
HIDING = ("VLLM_API_KEY", "VLLM_PORT")

Scalar = bool | int | float | str | None

Argument = Scalar | list[Scalar] | dict[str, JsonValue]


class EngineFile(Section):
    """Which engine: `args` are fixed arguments (long flag without dashes → value) of every candidate.

    `command` comes before the interpreter, `stop_command` runs first at each stop (docs/engine.md). A
    simulated engine has `cards` of the preset `card`.
    """

    kind: str = "vllm"
    python: str = ""
    command: tuple[str, ...] = ()
    args: dict[str, Argument] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    stop_command: tuple[str, ...] = ()
    card: str = "h100-80"
    cards: int = Field(default=1, ge=1, le=64)
    clock: Literal["real", "virtual"] = "real"

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind not in adapters():
            raise ValueError(f"Input should be {' or '.join(map(repr, adapters()))}, not '{kind}'")
        return kind

    @field_validator("env", mode="before")
    @classmethod
    def _numbers_are_text(cls, env: object) -> object:
        return (
            {
                k: v if isinstance(v, str) else str(v).lower() if isinstance(v, bool) else str(v)
                for k, v in env.items()
            }
            if isinstance(env, dict)
            else env
        )

    @field_validator("args")
    @classmethod
    def _named_once(cls, args: dict[str, Argument]) -> dict[str, Argument]:
        seen: dict[str, str] = {}
        for key in args:
            flag = key.lstrip("-").replace("_", "-")
            if flag in seen:
                raise ValueError(f"'{seen[flag]}' and '{key}' are the same argument: give it once")
            seen[flag] = key
        return args

    @field_validator("env")
    @classmethod
    def _names_of_variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(
                    f"'{name}' is not the name of an environment variable, or its value has a NUL"
                )
            if name in HIDING:
                raise ValueError(f"{name} would hide the engine from the tuner; leave it out")
        return env

    @model_validator(mode="after")
    def _what_goes_together(self) -> "EngineFile":
        simulated = adapter_of(self.kind).simulated
        if not simulated and not self.python:
            raise ValueError(
                f"kind: {self.kind} needs python: the interpreter that has {self.kind} installed"
            )
        if not simulated and self.cards != 1:
            raise ValueError("cards is for kind: simulated; a real engine finds its node's GPUs")
        if not simulated and self.clock == "virtual":
            raise ValueError("clock: virtual is for kind: simulated; a real engine runs in real time")
        if simulated and (self.python or self.command or self.stop_command):
            raise ValueError(
                f"kind: {self.kind} takes card, cards, args and env, but not python, command or stop_command"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """A host's answer about an engine on it: how it is started there, its facts, and the host as a node."""

    command: tuple[str, ...]
    facts: EngineFacts
    node: Node


def survey(engine: EngineFile, *, base: Path, name: str = "local") -> Surveyed:
    """Ask this host's interpreter; launches no engine. `base` is where relative paths begin."""
    command, adapter = engine_command(engine, base), adapter_of(engine.kind)
    if adapter.simulated:  # a part of this program: no process is needed
        facts = facts_of_help(adapter, simulated_flags(release_of(engine.env)).format_help())
        card = card_of(engine.card)
        several = f"x{engine.cards}" if engine.cards > 1 else ""
        gpu = GpuKind(name=card.title, memory_gib=card.memory_gib, count=engine.cards)
        is_cpu = card.platform == "cpu"
        facts = on_device(facts, "cpu" if is_cpu else "cuda", None if is_cpu else gpu)
        node = Node(name=name, gpu_class=f"sim-{engine.card}{several}")
    else:
        facts = discover(command, env={ORDER: "PCI_BUS_ID", **engine.env})
        node = local_node(name, facts, engine.env)
    return Surveyed(command=command, facts=facts, node=node)


def engine_command(engine: EngineFile, base: Path) -> tuple[str, ...]:
    """The words before the engine's own arguments. BadInput when the interpreter does not exist."""
    if engine.stop_command and shutil.which(engine.stop_command[0]) is None:
        raise BadInput(f"engine.stop_command: there is no program {engine.stop_command[0]!r}")
    adapter = adapter_of(engine.kind)
    if adapter.simulated:
        return (sys.executable, *adapter.command)
    python = Path(engine.python).expanduser()
    if not engine.command:
        python = python if python.is_absolute() else base / python
        if not python.is_file():
            raise BadInput(
                f"engine.python: there is no interpreter at {python}; name the python that has vllm"
            )
    return (*engine.command, str(python) if not engine.command else engine.python, *adapter.command)


def flag_name(key: str) -> str:
    """`max_model_len`, `max-model-len` and `--max-model-len` are one flag: the last."""
    return "--" + key.lstrip("-").replace("_", "-")


def fixed_arguments(
    args: Mapping[str, Argument], facts: EngineFacts, space: SearchSpace, name: str
) -> tuple[str, ...]:
    """What every candidate of a study is launched with. BadInput for what the tuner sets, the space turns or
    the engine does not take. `name` is what errors call the study file.
    """
    for key in args:
        flag = flag_name(key).removeprefix("--")
        if flag in OURS:
            raise BadInput(f"{name}: engine.args.{key}: the tuner sets --{flag} itself; leave it out")
        if flag.replace("-", "_") in space.levels:
            raise BadInput(
                f"{name}: engine.args.{key}: the space changes this knob; put today's value under baseline:"
            )
        taken = facts.choices.get(flag.replace("-", "_"))
        value = args[key]
        if taken is not None and not isinstance(value, list | dict | bool) and value not in taken:
            listed = ", ".join(str(choice) for choice in taken)
            raise BadInput(f"{name}: engine.args.{key}: the engine does not take {value}; it takes {listed}")
        entry = CATALOGUE.get(flag.replace("-", "_"))
        plain = isinstance(value, str) and re.fullmatch(r"auto|[\d.]+[kmgtKMGT]?", value)
        checked = entry and entry.kind in ("int", "float") and value != -1 and not plain
        if entry and checked and (wrong := entry.complaint(value)):  # type: ignore[arg-type]
            raise BadInput(f"{name}: engine.args.{key}: {wrong.removeprefix(entry.name + ': ')}")
    return fixed(args, facts, where=f"{name}: engine.args")


def named(name: str, host: Surveyed, store: Store | None) -> Surveyed:
    """The registered node that a study file names in place of `local`. BadInput if its GPUs are not this
    host's."""
    if name == "local":
        return host
    if store is None:
        raise NotFound(f"there is no node '{name}'; `tuner node add` registers one")
    node = store.node(name)
    missing = [uuid for uuid in node.gpus if uuid not in host.node.gpus]
    if missing and not adapter_of(host.facts.kind).simulated:
        raise BadInput(
            f"node: {node.name} has GPU {missing[0]}, but this host does not have it. Run this command on"
            f" host {node.host}, or register this host under another name ('tuner node add')"
        )
    return replace(host, node=node)


def local_node(name: str, facts: EngineFacts, env: Mapping[str, str]) -> Node:
    """This host as a node, by the GPUs that `env` shows: its class is card-memory x count, or the platform
    without GPUs.
    """
    if not facts.gpu_name:
        return Node(name=name, gpu_class=facts.platform)
    card = re.sub(r"[^a-z0-9]+", "-", facts.gpu_name.lower().removeprefix("nvidia ")).strip("-")
    memory = f"-{facts.gpu_memory_gib:.0f}" if facts.gpu_memory_gib else ""
    return Node(
        name=name,
        gpu_class=f"{card}{memory}x{max(1, facts.gpu_count)}",
        gpus=Gpus.open(env).uuids,
        gpu_memory_gib=facts.gpu_memory_gib,
    )
