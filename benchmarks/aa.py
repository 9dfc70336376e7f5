"""A/A: how often a run crowns a winner or marks drift where nothing differs, and how often it finds a gain.

    python -m benchmarks.aa [--studies 100] [--noise 0.03 0.10 0.20] [--gain 0 0.3]

No engine is launched. Each night has a baseline and two finalists that differ by `gain` (0: not at all).
Every launch is slower or faster by a factor of its own (`noise`, log-normal, one for TTFT and one for the
time per token), every request has noise too. The launches go through the same rounds, looks, comparison,
drift rule and verdict as a run's (plan `standard`: 3 repeats, up to 6 while the answer is open).
"""

import argparse
import math
import tempfile
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from tuner.conclusions import Conclusion, RunCost
from tuner.records import (
    Candidate,
    Measurement,
    Outcome,
    Purpose,
    Run,
    RunState,
    SliceMeasurement,
    Slo,
    Study,
    Trial,
    TrialState,
)
from tuner.replay import outcomes
from tuner.replay.plan import PLANS
from tuner.tuning.concluding import Repeats, WinnerCriteria, conclude, is_open

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OBJECTIVES = ("ttft_p95_ms", "tpot_p95_ms", "goodput_rps")
SLO = Slo(ttft_ms=300.0, attainment=0.7)
STUDY = Study(
    id="aa", name="aa", model="m", node="n", gpu_class="g", workload="w", engine_version="v",
    trace_digest="t", space_digest="x", slices=(), objectives=OBJECTIVES, slo=SLO, seed=0, identity={},
    spec={}, created_at=NOW,
)  # fmt: skip
ROWS, WINDOW_S, FINALISTS, TOKENS = 100, 60.0, 2, 21
ASKED = WinnerCriteria(study=STUDY, plan=PLANS["standard"], policy="slo", not_worse={})


@dataclass(frozen=True)
class Truth:
    """How launches differ (standard deviation of a log), and by which share the finalists are faster."""

    noise: float
    gain: float = 0.0


def launch(
    rng: np.random.Generator, truth: Truth, number: int, purpose: Purpose, repeat: int, folder: Path
) -> Measurement:
    """One launch: the same bursts for everybody, noise per request, and factors of its own."""
    bursts = np.repeat(np.exp(0.5 * np.random.default_rng(3).standard_normal(ROWS // 10)), 10)
    faster = 1.0 if number == 0 else 1.0 - truth.gain
    first, step = np.exp(truth.noise * rng.standard_normal(2)) * faster
    ttft = 0.12 * first * bursts * np.exp(0.15 * rng.standard_normal(ROWS))
    gap = 0.02 * step * bursts**0.3 * np.exp(0.05 * rng.standard_normal(ROWS))
    at = np.linspace(0, WINDOW_S, ROWS, endpoint=False)
    rows = [
        Outcome(
            row=i, scheduled_s=float(at[i]), sent_s=float(at[i]), first_token_s=float(at[i] + ttft[i]),
            last_token_s=float(at[i] + ttft[i] + (TOKENS - 1) * gap[i]), output_tokens=TOKENS,
            chunk_s=np.array([at[i] + ttft[i], at[i] + ttft[i] + (TOKENS - 1) * gap[i]]),
            chunk_tokens=np.array([1, TOKENS - 1], np.int32),
        )
        for i in range(ROWS)
    ]  # fmt: skip
    good = float(np.mean(ttft <= (SLO.ttft_ms or math.inf) / 1000))
    values = {
        "ttft_p95_ms": 1000 * float(np.percentile(ttft, 95)),
        "tpot_p95_ms": 1000 * float(np.percentile(gap, 95)),
        "goodput_rps": good * ROWS / WINDOW_S, "slo_attainment": good, "requests": float(ROWS), "failed": 0.0,
    }  # fmt: skip
    path = folder / f"{number}-{purpose}-{repeat}.parquet"
    if purpose != "search":
        outcomes.write(path, rows)
    part = SliceMeasurement(name="peak", window_s=WINDOW_S, values=values, outcomes_file=str(path))
    return Measurement(values=values, slices=(part,), purpose=purpose, repeat=repeat)


def night(seed: int, truth: Truth) -> Conclusion:
    """One run's confirmation, from its first round to its conclusion."""
    rng = np.random.default_rng([seed, round(1000 * truth.noise)])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trials = [
            Trial(
                id=n, study_id="aa", run_id="aa", number=n, candidate=Candidate({"max_num_seqs": 64 + n}),
                state=TrialState.COMPLETE, origin="search" if n else "baseline", started_at=NOW,
                measurements=(launch(rng, truth, n, "search", 0, folder),),
            )
            for n in range(1 + FINALISTS)
        ]  # fmt: skip
        measured: dict[int, list[Measurement]] = {t.number: [] for t in trials}
        found = Repeats(base=trials[0], finalists=trials[1:], measured=measured, dropped={}, earlier={})
        for repeat in range(1, ASKED.plan.most + 1):
            if repeat > ASKED.plan.repeats and not is_open(ASKED, found):
                break
            for trial in trials:
                measured[trial.number].append(launch(rng, truth, trial.number, "confirm", repeat, folder))
        run = Run(id="aa", study_id="aa", state=RunState.RUNNING, started_at=NOW)
        return conclude(ASKED, run, found, RunCost(), NOW)


def main() -> None:
    """A table row per noise and gain."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=100)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.03, 0.10, 0.20])
    parser.add_argument("--gain", type=float, nargs="+", default=[0.0, 0.1, 0.3])
    asked = parser.parse_args()
    print("| noise between launches | true gain | nights | winners | drift | mean repeats | outcomes |")
    print("|--:|--:|--:|--:|--:|--:|---|")
    for gain in asked.gain:
        for noise in asked.noise:
            said = [night(seed, Truth(noise, gain)) for seed in range(asked.studies)]
            words = ", ".join(
                f"{n} {word}" for word, n in Counter(c.outcome.value for c in said).most_common()
            )
            won, drifted = sum(c.winner is not None for c in said), sum(bool(c.drift) for c in said)
            mean = sum(c.repeats for c in said) / len(said)
            print(
                f"| {noise:.0%} | {gain:.0%} | {len(said)} | {won} | {drifted} | {mean:.1f} | {words} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
