"""Changes a running engine's scheduler limits between replays, through the adapter's file on its path."""

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tuner.adapters import adapter_of, live_limits
from tuner.leftovers import private_directory
from tuner.records import JSON, LaunchSpec, Value

ANSWER_S = 5.0


class Running(Protocol):
    """What this module uses of a running engine (`engine.server.Server`)."""

    @property
    def spec(self) -> LaunchSpec: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What to add to a launch so that its limits can be changed."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The engine's answer: its limits now and as launched, the scheduler's base class, or why it refused.
    `steps` are its counters (`live_limits.Steps`), empty if it does not count.
    """

    ok: bool
    limits: Mapping[str, Value]
    launched: Mapping[str, Value]
    base: str | None = None
    error: str | None = None
    steps: Mapping[str, Any] = field(default_factory=dict)


def install(
    directory: Path, launch_id: str, pythonpath: str | None = None, engine: str = "vllm"
) -> Installed:
    """Put the adapter's file into `directory/live_limits`, and add the arguments that make the engine use it.

    The socket is in the launch's temporary directory, which is removed with the engine. `pythonpath` is the
    engine's PYTHONPATH so far.
    """
    how = adapter_of(engine).live_limits
    if how is None:
        raise ValueError(f"the limits of {engine} cannot change while it runs")
    home = directory / "live_limits"
    home.mkdir(parents=True, exist_ok=True)
    shutil.copy(how.file, home / how.file.name)
    paths = [str(home), *([pythonpath] if pythonpath else [])]
    address = private_directory(launch_id) / "limits"
    env = {live_limits.VARIABLE: str(address), "PYTHONPATH": os.pathsep.join(paths)}
    return Installed(argv=how.argv, env=env)


def changeable(
    launched: Mapping[str, Value], wanted: Mapping[str, Value], knobs: Sequence[str] = live_limits.NAMES
) -> dict[str, Value] | None:
    """The limits that turn one configuration into another, None if that needs a relaunch.

    Both are whole configurations (effective values of every knob in question). No limit may rise above what
    was launched; a knob that is not among `knobs` must be equal.
    """
    differ = {k for k in {*launched, *wanted} if launched.get(k) != wanted.get(k)}
    if not differ <= set(knobs) or any(wanted.get(name) is None for name in differ):
        return None  # what is left out returns to its launched value, which is another one
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        most, asked = launched.get(name), wanted.get(name)
        if name in differ and (
            not isinstance(most, int) or not isinstance(asked, int) or isinstance(asked, bool) or asked > most
        ):
            return None
    return {name: wanted[name] for name in knobs if wanted.get(name) is not None}


async def change(server: Running, limits: Mapping[str, Value], *, patience_s: float = 10.0) -> bool:
    """Set the limits (those left out return to their launched values) and read them back.

    Waits up to `patience_s` for an engine that still works on requests. False, whatever the reason: relaunch.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        state = await ask(server, {"limits": dict(limits)})
        if state.ok or not (state.error or "").startswith("busy") or loop.time() >= deadline:
            return state.ok
        await asyncio.sleep(0.1)


async def ask(server: Running, question: JSON) -> State:
    """One question over the socket; {} asks for the limits. A silent engine is an answer that is not ok."""
    path = server.spec.env.get(live_limits.VARIABLE)
    if not path:
        return _silent("this engine was launched without live limits")
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(json.dumps(question).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
            writer.close()
        said = json.loads(line)
    except (OSError, TimeoutError, ValueError) as error:
        return _silent(f"no answer: {type(error).__name__}: {error}")
    if not isinstance(said, dict):
        return _silent("the answer cannot be read")
    return State(
        ok=said.get("ok") is True,
        limits=_mapping(said.get("limits")),
        launched=_mapping(said.get("launched")),
        base=said.get("base"),
        error=said.get("error"),
        steps=_mapping(said.get("steps")),
    )


def stepped(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """What a scheduler did between two of its `steps`, `seconds` apart: percentiles of the requests in a
    step and of its milliseconds, and blocks allocated and evicted a second. Also the share of the blocks in
    use that no token filled (0 if requests share blocks). Empty if the scheduler does not count.
    """
    if not before or not after or seconds <= 0:
        return {}
    made = {name: after[name] - before[name] for name in ("allocated", "evicted", "held", "filled")}
    found = {f"blocks_{name}_per_s": made[name] / seconds for name in ("allocated", "evicted")}
    if made["held"]:
        found["kv_fragmentation"] = max(0.0, 1 - made["filled"] / (made["held"] * after["block_size"]))
    for name, ours, unit in (("batch", "batch_requests", 1.0), ("seconds", "step_ms", 1e3)):
        counts = {float(k): n - before[name].get(k, 0) for k, n in after[name].items()}
        values = np.repeat(sorted(counts), [counts[key] for key in sorted(counts)])
        if len(values):
            for share in (50, 95):
                found[f"{ours}_p{share}"] = float(np.percentile(values, share)) * unit
    return found


def _silent(error: str) -> State:
    return State(ok=False, limits={}, launched={}, error=error)


def _mapping(value: object) -> Mapping[str, Value]:
    return value if isinstance(value, dict) else {}
