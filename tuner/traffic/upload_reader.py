"""Reads an uploaded trace in a separate process, with limits on memory and time.

`python -m tuner.traffic.upload_reader` takes {source, target, unit} as JSON on standard input, and writes the
trace to `target`. It answers with one JSON object: the trace's digest and notes, or the sentence that refuses
it.
"""

import json
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import processes
from tuner.errors import BadInput, Unavailable
from tuner.records import JSON

# Limits of the process: a hostile file must not take the host's memory or time.
MEMORY_BYTES = 1536 * 1024**2
TIME_S = 120.0

# A larger trace is refused: the service reads what it keeps when a study asks for it.
MOST_REQUESTS, MOST_BLOCKS = 1_000_000, 16_000_000
MOST_NOTES = 64 * 1024  # bytes of JSON
_REFUSED = 2  # exit code


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A trace that was read and written: what the history keeps of it."""

    digest: str
    meta: Mapping[str, JSON]


def take(source: Path, target: Path, unit: str | None) -> Taken:
    """Reads the trace in `source` (any format) in another process and writes it to `target` as Parquet.

    BadInput if it is not a trace, or needs more memory or time than allowed. Unavailable if the disk fails.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    asked = json.dumps({"source": str(source), "target": str(target), "unit": unit})
    done = processes.run(
        [sys.executable, "-m", "tuner.traffic.upload_reader"],
        timeout_s=TIME_S,
        env={"PYTHONPATH": path, "TUNER_DATABASE_URL": None, "OMP_NUM_THREADS": "1"},
        stdin=asked,
    )
    if done.code == 0:
        return Taken(**json.loads(done.out))
    if done.code == _REFUSED:
        said = json.loads(done.out)
        raise (BadInput if said["error"] == "BadInput" else Unavailable)(said["sentence"])
    why = f"{TIME_S:.0f} s" if done.code is None else f"{MEMORY_BYTES // 1024**2} MiB"
    raise BadInput(f"the upload takes more than {why} to read; send a part of it, or import it on the host")


def main() -> int:
    """Answers one request. The exit code shows a MemoryError, or that the operating system killed the
    process.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(TIME_S), int(TIME_S) + 1))
    os.umask(0o077)
    asked = json.loads(sys.stdin.read())
    try:
        answer = _answer(Path(asked["source"]), Path(asked["target"]), asked["unit"])
    except (BadInput, Unavailable) as error:
        sentence = str(error).replace(asked["source"], "the upload")
        sys.stdout.write(json.dumps({"error": type(error).__name__, "sentence": sentence[:2000]}))
        return _REFUSED
    sys.stdout.write(json.dumps(answer))
    return 0


def _answer(source: Path, target: Path, unit: str | None) -> dict[str, Any]:
    from tuner.traffic import importers
    from tuner.traffic import trace as traces

    trace = importers.read_any(source, unit=unit)
    if len(trace) > MOST_REQUESTS or len(trace.blocks) > MOST_BLOCKS:
        raise BadInput(
            f"{source}: {len(trace):,} requests with {len(trace.blocks):,} blocks; an upload may have at most"
            f" {MOST_REQUESTS:,} with {MOST_BLOCKS:,}: send a slice of it"
        )
    meta = {**trace.meta, "requests": len(trace), "duration_s": trace.duration_s}
    if len(json.dumps(meta)) > MOST_NOTES:
        raise BadInput(f"{source}: the trace's notes are larger than {MOST_NOTES:,} bytes")
    digest = traces.write(trace, target)
    return {"digest": digest, "meta": meta}


if __name__ == "__main__":
    sys.exit(main())
