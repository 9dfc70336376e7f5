"""What the benchmarks with a planted truth share: a study of the simulated engine in virtual time, and a file
of rows that goes on where it ends.
"""

import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tuner.records import JSON
from tuner.settings import shipped
from tuner.tuning.study import Prepared, parse, prepare
from tuner.tuning.virtual import HIDDEN

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NOISE = 0.01
"""By how much launches of one configuration differ: one standard deviation."""


def study(draw: random.Random, folder: Path, more: Mapping[str, JSON]) -> Prepared:
    """A study with a stretch of the bundled trace, a seed and a start-up time drawn for it, and the keys
    `more` of a study file.
    """
    duration = 25 + draw.randrange(10)
    ready = f"{30 + draw.random():.3f}"
    start, seed = draw.randrange(100 - duration), draw.randrange(10**6)
    text = json.dumps({
        "name": "case", "model": "Qwen/Qwen2.5-7B-Instruct", "space": "bursty-mixed", "plan": "brief",
        "trace": str(shipped("data", "traces", "azure-conversation-slice.parquet")),
        "engine": {"kind": "simulated", "clock": "virtual", "args": {"max-model-len": 16384},
                   "env": {"TUNER_SIM_STARTUP_S": ready}},
        "slices": [{"start_s": start, "duration_s": duration}], "seed": seed, **more,
    })  # fmt: skip
    return prepare(parse(text, name="case"), name="case", base=folder, store=None, now=NOW)


def rows(
    out: Path, key: str, cases: Sequence[JSON], run: Callable[[int, Path], dict[str, JSON]]
) -> list[dict[str, JSON]]:
    """The rows of a file, after those that it lacks were run and appended: `run` takes a case's place in
    `cases` and an empty folder, and gives its row, whose `key` is the case.
    """
    os.environ[HIDDEN] = json.dumps([{"launch_noise": NOISE}])
    found = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {row[key] for row in found}
    for place, case in enumerate(cases):
        if case in done:
            continue
        with tempfile.TemporaryDirectory() as folder, out.open("a") as file:
            found.append(run(place, Path(folder)))
            file.write(json.dumps(found[-1], sort_keys=True) + "\n")
    return found
