"""Curtailment is exact, and estimates keep to the bounds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tuner.records import Outcome, Slice, Slo
from tuner.search import trial_view
from tuner.tuning import early_stopping as module
from tuner.tuning.early_stopping import Case, Judge, Rival

OBJECTIVES = ("ttft_p95_ms", "e2e_p95_ms", "goodput_rps")
SLO = Slo(ttft_ms=200, e2e_ms=2000, attainment=0.9)
COUNT, WINDOW = 400, 100.0
PEAK = Slice(name="peak", start_s=0, duration_s=WINDOW)


@dataclass(frozen=True)
class Seen:
    slice: Slice
    now_s: float
    outcomes: Sequence[Outcome]
    waiting_s: Sequence[float] = ()


def replayed(slowness: float, seed: int, spread: float = 0.2, tail: float = 1.0) -> list[Outcome]:
    """All outcomes of a replay, in order of their end."""
    rng, load = np.random.default_rng(seed), np.random.default_rng(9)
    bursts = np.repeat(np.exp(0.4 * load.standard_normal(COUNT // 20)), 20)
    found = []
    for row in range(COUNT):
        at = row * WINDOW / COUNT
        late = tail if row > COUNT / 2 else 1.0
        ttft = 0.1 * slowness * late * bursts[row] * float(np.exp(spread * rng.standard_normal()))
        found.append(
            Outcome(
                row=row,
                scheduled_s=at,
                first_token_s=at + ttft,
                last_token_s=at + 10 * ttft,
                end_s=at + 10 * ttft,
                output_tokens=10,
                chunk_tokens=np.ones(10, dtype=np.int32),
            )
        )
    return sorted(found, key=lambda o: o.end_s or 0)


def full(case: Case, outcomes: Sequence[Outcome]) -> dict[str, float]:
    columns = case.rows(outcomes).columns()
    values = {n: columns.fold(n) for n in (*OBJECTIVES, "slo_attainment")}
    return {**values, "goodput_rps": float(columns.good.sum()) / WINDOW}


EMPTY = Case(objectives=OBJECTIVES, slo=SLO, planned=COUNT, window_s=WINDOW, corner={})


def case_against(*rivals: float) -> Case:
    found = [
        Rival(label=str(i), values=full(EMPTY, o), columns=EMPTY.rows(o).columns())
        for i, o in enumerate(replayed(slowness, 50 + n) for n, slowness in enumerate(rivals))
    ]
    baseline = [found[0].values[n] for n in OBJECTIVES]
    return Case(
        objectives=OBJECTIVES,
        slo=SLO,
        planned=COUNT,
        window_s=WINDOW,
        corner=dict(zip(OBJECTIVES, trial_view.corner_of(OBJECTIVES, baseline, SLO), strict=True)),
        rivals=tuple(found),
    )


def run(case: Case, outcomes: Sequence[Outcome]) -> tuple[str | None, float, Judge]:
    """Play the outcomes to a judge: its word, and the share of the window it took."""
    judge = Judge(case)
    for now in np.arange(1.0, WINDOW + 60, 0.5):
        ended = [o for o in outcomes if (o.end_s or 0) <= now]
        waiting = [o.scheduled_s for o in outcomes if o.scheduled_s <= now < (o.end_s or 0)]
        reason = judge(Seen(PEAK, float(now), ended, waiting))
        if reason is not None:
            return reason, min(now / WINDOW, 1.0), judge
    return None, 1.0, judge


def test_what_cannot_matter_is_stopped_early() -> None:
    reason, share, _ = run(case_against(1.0, 0.9), replayed(6.0, 1))
    assert reason is not None
    assert "is certain to" in reason
    assert share < 0.6


@pytest.mark.parametrize("slowness", [0.5, 0.8, 0.95, 1.0, 1.02, 1.2, 2.0, 5.0])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_curtailment_never_stops_what_would_have_entered(slowness: float, seed: int) -> None:
    case = case_against(1.0, 0.9)
    outcomes = replayed(slowness, seed)
    values = full(case, outcomes)
    reason, _, _ = run(case, outcomes)
    beaten = any(
        values["ttft_p95_ms"] >= r.values["ttft_p95_ms"]
        and values["e2e_p95_ms"] >= r.values["e2e_p95_ms"]
        and values["goodput_rps"] <= r.values["goodput_rps"]
        for r in case.rivals
    )
    if reason is not None:
        assert beaten


def test_bounds_hold_at_every_moment() -> None:
    outcomes = replayed(1.5, 4)
    values = full(EMPTY, outcomes)
    for count in (0, 1, 40, 200, 399, 400):
        best = module.bounds(EMPTY, EMPTY.rows(outcomes[:count]).columns())
        assert best["ttft_p95_ms"] <= values["ttft_p95_ms"] + 1e-9
        assert best["e2e_p95_ms"] <= values["e2e_p95_ms"] + 1e-9
        assert best["goodput_rps"] >= values["goodput_rps"] - 1e-9
    assert best["goodput_rps"] == pytest.approx(values["goodput_rps"])


def test_while_nothing_meets_the_slo_the_nearest_to_it_is_kept() -> None:
    slow = case_against(1.0, 0.9)
    short = tuple(replace(r, values={**r.values, "slo_attainment": 0.5}) for r in slow.rivals)
    case = replace(slow, rivals=short)
    best = {"ttft_p95_ms": 1.0, "e2e_p95_ms": 1e6, "goodput_rps": 99.0, "slo_attainment": 0.6}
    assert module.curtail(case, best) is None
    assert module.curtail(case, {**best, "slo_attainment": 0.4}) is not None
    met = replace(slow, rivals=tuple(replace(r, values={**r.values, "slo_attainment": 0.95}) for r in short))
    assert module.curtail(met, best) is not None


def test_what_lies_outside_the_region_goes_on_where_the_front_decides() -> None:
    case = case_against(1.0)
    best = {"ttft_p95_ms": 1.0, "e2e_p95_ms": 1e6, "goodput_rps": 0.0, "slo_attainment": 0.0}
    assert module.curtail(case, best) is not None
    assert module.curtail(replace(case, by_slo=False), best) is None


def test_ages_count_before_a_request_ends() -> None:
    nothing = EMPTY.rows().columns()
    stuck = module.bounds(EMPTY, nothing, ages_s=[30.0] * 200)
    assert stuck["e2e_p95_ms"] == 30_000
    assert stuck["goodput_rps"] == 2.0


def test_an_estimate_scales_a_finished_trial_by_the_same_requests() -> None:
    case = case_against(1.0)
    judge = Judge(case)
    judge(Seen(PEAK, 60.0, replayed(1.4, 1)[:200]))
    estimate = judge.estimate()
    assert estimate["ttft_p95_ms"] == pytest.approx(1.4 * case.rivals[0].values["ttft_p95_ms"], rel=0.25)


def test_an_estimate_is_never_better_than_what_is_possible() -> None:
    case = case_against(1.0)
    judge = Judge(case)
    outcomes = [o for o in replayed(3.0, 1, tail=5.0)][:300]
    judge(Seen(PEAK, 90.0, outcomes))
    best = module.bounds(case, case.rows(outcomes).columns())
    estimate = judge.estimate()
    assert estimate["ttft_p95_ms"] >= best["ttft_p95_ms"]
    assert estimate["goodput_rps"] <= best["goodput_rps"]
    assert Judge(EMPTY).estimate() == {}
