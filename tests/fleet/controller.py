"""A controller as a process: tunes a study under a lease of seconds, for tests that stop or race it."""

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path

from tuner.errors import TunerError
from tuner.fleet import nodes
from tuner.history.store import Store
from tuner.tuning.run import RunLimits, tune
from tuner.tuning.study import load


def now() -> datetime:
    return datetime.now(UTC)


def main(study: Path, home: Path, url: str, ttl_s: float) -> int:
    """0 when the run ended, else the exit code of what was told."""
    store = Store(url)
    prepared = load(study, store=store, now=now())
    try:
        with nodes.held(store, prepared.node.name, clock=now, ttl_s=ttl_s) as held:
            print("leased", flush=True)
            work = tune(prepared, held, home=home, limits=RunLimits(trials=50, early=False), clock=now)
            asyncio.run(work)
    except TunerError as error:
        print(f"told: {error}", flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])))
