"""Live limits of the simulated engine: the words of `engine/live_limits.py`, spoken over a Unix socket."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.adapters.live_limits import NAMES
from tuner.simulator.scheduler import Scheduler
from tuner.simulator.state import Limits


class Refused(Exception):
    """The change is not made; the sentence says why."""


async def serve(scheduler: Scheduler, path: str) -> asyncio.Server:
    """Answer one JSON line per connection: {"limits": {…}} changes an idle engine, {} asks."""
    launched = scheduler.limits

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply = _reply(scheduler, launched, await reader.readline())
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()
        writer.close()

    Path(path).unlink(missing_ok=True)
    return await asyncio.start_unix_server(answer, path)


def _reply(scheduler: Scheduler, launched: Limits, line: bytes) -> dict[str, Any]:
    reply: dict[str, Any] = {"ok": False, "base": "Scheduler", "launched": _shown(launched)}
    try:
        asked = json.loads(line)
        if "limits" in asked:
            change(scheduler, launched, asked["limits"])
        reply |= {"ok": True, "limits": _shown(scheduler.limits)}
    except Refused as refused:
        reply["error"] = str(refused)
    except (ValueError, TypeError) as error:
        reply["error"] = f"{type(error).__name__}: {error}"
    return reply


def change(scheduler: Scheduler, launched: Limits, wanted: Mapping[str, Any]) -> None:
    """Every limit as wanted, else as launched. Refused while requests run, and above what was launched."""
    unfinished = len(scheduler.running) + len(scheduler.waiting)
    if unfinished:
        raise Refused(f"busy: {unfinished} unfinished requests")
    unknown = sorted(set(wanted) - set(NAMES))
    if unknown:
        raise Refused(f"unknown limit {', '.join(unknown)}")
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if wanted.get(name, 0) > getattr(launched, name):
            raise Refused(f"{name} {wanted[name]} is above the launched {getattr(launched, name)}")
    limits = replace(launched, **{name: value for name, value in wanted.items() if value is not None})
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise Refused(
            f"max_num_batched_tokens {limits.max_num_batched_tokens} is below max_num_seqs"
            f" {limits.max_num_seqs}"
        )
    scheduler.limits = limits
    scheduler.watermark = int(limits.watermark * limits.num_blocks)


def _shown(limits: Limits) -> dict[str, Any]:
    return {name: getattr(limits, name) for name in NAMES}
