"""The search with live limits against the search without, on a real vLLM (the CPU build, a tiny model).

    python -m benchmarks.live_limits HOME --python PYTHON --arm auto|off [--limit-s 600]
    python -m benchmarks.live_limits HOME

`tuner tune` measures a baseline and twelve candidates of a small space, once with `live_limits: auto` and
once with `off`. The bench ends a run when its search has measured them (no confirmation), or after --limit-s;
the same command goes on where it ended. Without --arm both histories are read: the seconds of the two
searches (what the bench cut left out), and whether screened and relaunched candidates come in the same order.
Without --python the simulated engine stands in, which shows only that the path works.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.simulator import spearman
from benchmarks.tiny import ARGS, ENV, LENGTH, write
from tuner.errors import TunerError
from tuner.history.store import Store
from tuner.records import Trial, TrialState
from tuner.settings import shipped

TRACE = shipped("data", "traces", "azure-conversation-slice.parquet")
ARMS = ("auto", "off")
TRIALS = 13
DECIDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.INFEASIBLE)
SHOWN = ("ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms")
IDLE_S = 20.0
"""Longer between two trials means that nobody was tuning."""
SPACE = """\
about: Limits that a running engine can change.
vllm: ">=0.11.2"
knobs:
  max_num_seqs: [2, 4, 8, 16]
  max_num_batched_tokens: [32, 128, 512, 1024]
"""


def study(python: str | None, arm: str) -> dict[str, object]:
    """The study file of an arm. A SLO that everybody keeps, so that no replay is cut short."""
    real = {"kind": "vllm", "python": python, "args": ARGS, "env": ENV}
    return {
        "name": f"live-{arm}",
        "model": "model",
        "workload": "chat",
        "trace": "latest:conversation",
        "space": "space.yaml",
        "engine": real if python else {"kind": "simulated", "args": {"max-model-len": LENGTH}},
        "baseline": {"max_num_seqs": 4, "max_num_batched_tokens": 512},
        "slices": [{"start_s": 20, "duration_s": 16}],
        "speed": 2,
        "plan": {"base": "quick", "tail_limit_s": 300, "lateness_ms": 1000},
        "slo": {"ttft_ms": 600000, "tpot_ms": 60000},
        "live_limits": arm,
        "budget": {"trials": TRIALS},
    }


def prepare(home: Path, python: str | None) -> None:
    """What both arms need, once."""
    if (home / "space.yaml").exists():
        return
    write(home / "model")
    words = ("trace", "import", TRACE, "--name", "conversation", "--max-len", 1000)
    subprocess.run([sys.executable, "-m", "tuner", *map(str, words)], env=environment(home), check=True)
    for arm in ARMS:
        (home / f"{arm}.yaml").write_text(json.dumps(study(python, arm), indent=1))
    (home / "space.yaml").write_text(SPACE)


def environment(home: Path) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TUNER_")}
    return {**plain, "TUNER_HOME": str(home)}


def searched(home: Path, arm: str) -> list[Trial]:
    """Every attempt of an arm's search, in order; what was relaunched for the confirmation is not its."""
    store = Store(f"sqlite:///{home / 'tuner.db'}", create=False)
    try:
        return [t for t in store.trials(store.study(f"live-{arm}").id) if t.origin != "relaunched"]
    except TunerError:
        return []
    finally:
        store.close()


def tune(home: Path, arm: str, limit_s: float) -> bool:
    """Search until all candidates are measured or the time is over; whether they are."""
    words = [sys.executable, "-m", "tuner", "tune", str(home / f"{arm}.yaml"), "--all-trials"]
    end = time.monotonic() + limit_s
    with (home / f"{arm}.log").open("a") as log:
        controller = subprocess.Popen(words, env=environment(home), stdout=log, stderr=log)
        while controller.poll() is None:
            done = sum(t.state in DECIDED for t in searched(home, arm)) >= TRIALS
            if done or time.monotonic() > end:
                controller.send_signal(signal.SIGINT)
                controller.wait()
            time.sleep(0.2)
    return sum(t.state in DECIDED for t in searched(home, arm)) >= TRIALS


def seconds(trials: Sequence[Trial]) -> float:
    """Of a search: its trials, and what was thought between them. Interrupted attempts are left out."""
    ended = [t for t in trials if t.state in DECIDED and t.ended_at]
    total, last = 0.0, None
    for trial in ended:
        gap = (trial.started_at - last).total_seconds() if last else 0.0
        last = trial.ended_at or trial.started_at
        total += (last - trial.started_at).total_seconds() + (gap if gap < IDLE_S else 0.0)
    return total


def both(home: Path) -> dict[str, dict[str, Mapping[str, float]]]:
    """Arm → configuration → numbers; in the arm with live limits only what was screened."""
    return {
        arm: {
            f"{t.candidate['max_num_seqs']} {t.candidate['max_num_batched_tokens']}": t.measurement.values
            for t in searched(home, arm)
            if t.state is TrialState.COMPLETE and t.measurement and t.screened == (arm == "auto")
        }
        for arm in ARMS
    }


def report(home: Path) -> bool:
    """Print both searches; whether the targets are met."""
    spent = {arm: seconds(searched(home, arm)) for arm in ARMS}
    found = both(home)
    common = [key for key in found["off"] if key in found["auto"]]
    print(
        "| max_num_seqs max_num_batched_tokens | " + " | ".join(f"{n} relaunched / screened" for n in SHOWN)
    )
    print("|---" * (1 + len(SHOWN)) + "|")
    for key in common:
        cells = " | ".join(f"{found['off'][key][n]:.0f} / {found['auto'][key][n]:.0f}" for n in SHOWN)
        print(f"| {key} | {cells} |")
    print()
    ranks = {n: spearman(*([found[arm][key][n] for key in common] for arm in ("off", "auto"))) for n in SHOWN}
    for name, rank in ranks.items():
        print(f"{name}: rank correlation of {len(common)} candidates {rank:.3f}")
    for arm in ARMS:
        trials = [t for t in searched(home, arm) if t.state in DECIDED]
        screened = sum(t.screened for t in trials)
        print(f"live_limits {arm}: {len(trials)} trials, {screened} of them screened, {spent[arm]:.0f} s")
    print(f"share {spent['auto'] / spent['off']:.2f}")
    agree = all(rank >= 0.9 for name, rank in ranks.items() if name.startswith(("ttft", "e2e")))
    return agree and len(common) >= 6 and spent["auto"] <= 0.5 * spent["off"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("home", type=Path)
    parser.add_argument("--python", help="of the CPU build of vLLM")
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    home = given.home.resolve()
    if given.arm is None:
        return 0 if report(home) else 1
    home.mkdir(parents=True, exist_ok=True)
    prepare(home, given.python)
    return 0 if tune(home, given.arm, given.limit_s) else 3


if __name__ == "__main__":
    sys.exit(main())
