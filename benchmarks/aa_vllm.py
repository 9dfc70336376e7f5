"""A/A on the real vLLM (CPU build, a tiny model): studies over knobs without effect at their load.

    python -m benchmarks.aa_vllm --python VLLM/bin/python --folder DIR [--studies 20] [--lock FILE] [--table]

Each study has a home of its own, so that it knows of no earlier noise. Few requests come at once and hold a
few blocks, so that neither the number of sequences, the queue's policy nor the watermark can act. A row per
study is added to DIR/rows.jsonl; those that are there are not run again, so it can be stopped and started at
any time. `--lock` is held while a study runs: one engine at a time on a machine that others use too.
`--table` only prints.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from benchmarks.tiny import ENV, write
from tuner.history.store import Store
from tuner.records import JSON
from tuner.settings import shipped

TRACE = shipped("data", "traces", "azure-conversation-slice.parquet")
SPACE: JSON = {
    "about": "Knobs that cannot act where no request waits and the cache is nearly empty.",
    "vllm": ">=0.11.2",
    "knobs": {
        "max_num_seqs": [64, 128],
        "scheduling_policy": ["fcfs", "priority"],
        "watermark": [0.0, 0.01, 0.05],
    },
}  # fmt: skip


def study_of(python: str, seed: int) -> JSON:
    """As few launches as the rules allow: three trials, one finalist, one repeat at first."""
    return {
        "name": f"aa-{seed}", "model": "model", "workload": "aa", "trace": "latest:aa", "space": "space.yaml",
        "engine": {
            "kind": "vllm", "python": python, "env": dict(ENV),
            "args": {"load-format": "dummy", "skip-tokenizer-init": True, "max-model-len": 640,
                     "dtype": "float32", "enforce-eager": True},
        },
        "baseline": {}, "slices": [{"start_s": 5 + 2 * seed, "duration_s": 8}], "speed": 0.5,
        "plan": {"base": "brief", "repeats": 1, "most_repeats": 3, "finalists": 1, "tail_limit_s": 60,
                 "lateness_ms": 10000},
        "slo": {"ttft_ms": 5000, "tpot_ms": 500}, "live_limits": "off", "budget": {"trials": 3}, "seed": seed,
    }  # fmt: skip


def tuner(home: Path, *words: object) -> "subprocess.CompletedProcess[str]":
    """Our command line with a home of its own."""
    env = {**os.environ, "TUNER_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[1])}
    line = ["nice", "-n", "5", sys.executable, "-m", "tuner", *map(str, words)]
    return subprocess.run(line, env=env, capture_output=True, text=True, check=False)


def measured(folder: Path, python: str, seed: int) -> dict[str, JSON]:
    """One study from nothing to its conclusion, as a row."""
    home, began = folder / f"study-{seed:02d}", time.monotonic()
    home.mkdir(parents=True, exist_ok=True)
    write(home / "model")
    (home / "space.yaml").write_text(yaml.safe_dump(SPACE))
    (home / "study.yaml").write_text(yaml.safe_dump(study_of(python, seed)))
    imported = tuner(home, "trace", "import", TRACE, "--name", "aa", "--max-len", 600)
    done = tuner(home, "tune", home / "study.yaml", "--all-trials")
    (home / "tune.log").write_text(imported.stderr + done.stderr + done.stdout)
    row: dict[str, JSON] = {
        "study": seed,
        "exit": done.returncode,
        "seconds": round(time.monotonic() - began),
    }
    store = Store(f"sqlite:///{home / 'tuner.db'}", create=False)
    said = store.conclusions()
    launches = sum(len(store.launches(study.id)) for study in store.studies())
    store.close()
    if not said:
        return {**row, "outcome": "none", "why": done.stderr[-400:]}
    return {**row, "launches": launches, "conclusion": said[-1].to_json()}


@contextmanager
def held(path: Path | None) -> Iterator[None]:
    """The lock, when there is one; the kernel gives it back however we end."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def table(rows: list[dict[str, JSON]]) -> str:
    """The rows for people, and how many crowned a winner."""
    lines = [
        "| study | outcome | repeats | TTFT p95 | TPOT p95 | noise of TTFT | launches | s |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    winners = 0
    for row in rows:
        said = row.get("conclusion")
        if not isinstance(said, dict):
            lines.append(f"| {row['study']} | failed: exit {row['exit']} | | | | | | {row['seconds']} |")
            continue
        winners += said["winner"] is not None
        arms = said["finalists"]
        changes = arms[0]["changes"] if isinstance(arms, list) and arms else []
        told = {c["metric"]: f"{100 * c['change']:+.0f} % ({c['word']})" for c in changes}
        share = next((n["share"] for n in said["noise"] if n["metric"] == "ttft_p95_ms"), None)
        noise = "" if share is None else f"{100 * float(share):.1f} %"
        lines.append(
            f"| {row['study']} | {said['outcome']} | {said['repeats']} | {told.get('ttft_p95_ms', '')} |"
            f" {told.get('tpot_p95_ms', '')} | {noise} | {row['launches']} | {row['seconds']} |"
        )
    counted = sum(isinstance(row.get("conclusion"), dict) for row in rows)
    return "\n".join([*lines, "", f"{winners} of {counted} studies crowned a winner."])


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", help="The interpreter that has vllm.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--studies", type=int, default=20)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    path = asked.folder / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {row["study"] for row in rows}
    for seed in range(asked.studies):
        if asked.table or seed in done:
            continue
        with held(asked.lock):
            rows.append(measured(asked.folder, asked.python, seed))
        with path.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        time.sleep(5)  # others who wait for the lock get it
    print(table(rows))


if __name__ == "__main__":
    main()
