"""A/A: how often a study crowns a winner over a baseline that nothing can beat.

    python benchmarks/search_aa.py [--studies 100] [--noise 0.03]

An engine whose timing ignores its knobs, though they change its effective configuration. Each study searches,
picks finalists by policy, measures them and the baseline again (three repeats each, noise per launch) and
gives the verdict as `tuner tune` does: better in an objective, by the paired interval, for any finalist.
"""

import argparse
import math
from collections.abc import Mapping

import numpy as np

from tuner.records import Candidate, Measurement, Outcome, Slo, Trial, TrialState, Value
from tuner.search import pareto
from tuner.search.candidate_sources import suggest
from tuner.search.compare import compare, pooled_noise

OBJECTIVES = ("ttft_p95_ms", "tpot_p95_ms", "goodput_rps")
SLO = Slo(ttft_ms=250, attainment=0.8)
LEVELS: Mapping[str, tuple[Value, ...]] = {
    "max_num_seqs": (32, 64, 128, 256),
    "max_num_batched_tokens": (1024, 2048, 4096),
    "block_size": (16, 32),
}
ROWS, WINDOW_S, FINALISTS, REPEATS = 300, 60.0, 3, 3


class Space:
    levels = LEVELS

    def contains(self, candidate: Candidate) -> bool:
        return all(candidate.get(k) in v for k, v in LEVELS.items())

    def canonical(self, candidate: Candidate) -> Candidate:
        return candidate


def replayed(rng: np.random.Generator, noise: float) -> list[Outcome]:
    """The same bursts for everybody, noise per request, and one factor for the whole launch."""
    bursts = np.repeat(np.exp(0.5 * np.random.default_rng(3).standard_normal(ROWS // 10)), 10)
    level = math.exp(noise * rng.standard_normal())
    ttft = 0.12 * level * bursts * np.exp(0.15 * rng.standard_normal(ROWS))
    gap = 0.02 * level * bursts**0.3 * np.exp(0.05 * rng.standard_normal(ROWS))
    at = np.linspace(0, WINDOW_S, ROWS, endpoint=False)
    tokens = np.ones(21, dtype=np.int32)
    return [
        Outcome(
            row=i, scheduled_s=float(at[i]), first_token_s=float(at[i] + ttft[i]),
            last_token_s=float(at[i] + ttft[i] + 20 * gap[i]), output_tokens=21, chunk_tokens=tokens,
        )
        for i in range(ROWS)
    ]  # fmt: skip


def measured(outcomes: list[Outcome]) -> dict[str, float]:
    ttft = np.array([(o.first_token_s or 0) - o.scheduled_s for o in outcomes]) * 1e3
    tpot = np.array([(o.last_token_s or 0) - (o.first_token_s or 0) for o in outcomes]) * 50
    good = float(np.mean(ttft <= (SLO.ttft_ms or math.inf)))
    return {
        "ttft_p95_ms": float(np.percentile(ttft, 95)), "tpot_p95_ms": float(np.percentile(tpot, 95)),
        "goodput_rps": good * ROWS / WINDOW_S, "slo_attainment": good,
    }  # fmt: skip


def study(seed: int, noise: float, trials_limit: int) -> list[str]:
    """The metrics by which some finalist was called better than the baseline."""
    from datetime import UTC, datetime

    rng = np.random.default_rng(seed)
    base = Candidate({"max_num_seqs": 128, "max_num_batched_tokens": 2048, "block_size": 16})
    trials: list[Trial] = []
    while len(trials) < trials_limit:
        found = suggest(
            Space(), trials, seed=seed, number=len(trials), objectives=OBJECTIVES, slo=SLO, baseline=base,
            known=lambda c: None,
        )  # fmt: skip
        if found is None:
            break
        values = measured(replayed(rng, noise))
        trials.append(
            Trial(
                id=len(trials), study_id="aa", run_id="aa", number=len(trials), candidate=found.candidate,
                state=TrialState.COMPLETE, origin=found.origin, measurements=(Measurement(values=values),),
                effective=dict(found.candidate), started_at=datetime(2026, 1, 1, tzinfo=UTC),
            )
        )  # fmt: skip
    left, finalists = [t for t in trials if not t.is_baseline], []
    for _ in range(FINALISTS):
        finalists.append(pareto.choose(left, "slo", SLO, OBJECTIVES))
        left = [t for t in left if t.number != finalists[-1].number]
    entrants = [[{"peak": replayed(rng, noise)} for _ in range(REPEATS)] for _ in range(FINALISTS + 1)]
    better = []
    for metric in OBJECTIVES:
        spread, freedom = pooled_noise(entrants, metric, slo=SLO)
        for other in entrants[1:]:
            found_ = compare(
                entrants[0], other, metric, slo=SLO, seed=seed, family=FINALISTS * len(OBJECTIVES),
                noise=spread, freedom=freedom,
            )  # fmt: skip
            better += [metric] if found_.verdict == "better" else []
    return better


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=100)
    parser.add_argument("--noise", type=float, default=0.03)
    parser.add_argument("--trials", type=int, default=10)
    asked = parser.parse_args()
    winners = [found for seed in range(asked.studies) if (found := study(seed, asked.noise, asked.trials))]
    print(f"{len(winners)} of {asked.studies} studies crowned a winner at {asked.noise:.0%} noise: {winners}")


if __name__ == "__main__":
    main()
