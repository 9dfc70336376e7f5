"""The search and the replay mean the same by every name."""

import numpy as np
import pytest

from tuner.measures import measure_of
from tuner.records import Outcome, Slo
from tuner.replay import jobs, measure
from tuner.search import requests

SLO = Slo(ttft_ms=300, tpot_ms=60, e2e_ms=1000)


def outcome(row: int) -> Outcome:
    rng = np.random.default_rng(row)
    stamps = 0.1 * row + np.cumsum(rng.random(1 + row % 7) * 0.2)
    tokens = rng.integers(1, 4, len(stamps)).astype(np.int32)
    return Outcome(
        row=row,
        scheduled_s=0.1 * row,
        first_token_s=float(stamps[0]),
        last_token_s=float(stamps[-1]),
        output_tokens=int(tokens.sum()),
        chunk_s=stamps,
        chunk_tokens=tokens,
        error={5: "reset", 6: jobs.CANCELLED}.get(row % 31),
    )


def test_one_meaning_per_name() -> None:
    assert requests.CANCELLED == jobs.CANCELLED
    everything = [outcome(row) for row in range(200)]
    for single in everything:
        for kind, theirs in (("ttft", measure.ttft_ms), ("tpot", measure.tpot_ms), ("e2e", measure.e2e_ms)):
            assert requests.latency_ms(single, kind) == pytest.approx(theirs(single), nan_ok=True)
        assert requests.is_good(single, SLO) == measure.is_good(single, SLO)
    folded = measure.fold(everything, 20.0, SLO)
    kept = [o for o in everything if o.error != jobs.CANCELLED]
    for name in ("ttft_p50_ms", "tpot_p90_ms", "e2e_mean_ms", "e2e_p95_ms"):
        kind, share = measure_of(name).latency or ("", None)
        values = np.array([requests.latency_ms(o, kind) for o in kept])
        assert requests.fold_latency(values, share) == pytest.approx(folded[name])
