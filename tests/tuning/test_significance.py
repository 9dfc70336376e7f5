"""Paired comparison: its coverage on data of known truth, its verdicts, and what it refuses."""

import math

import numpy as np
import pytest

from tuner.errors import BadInput
from tuner.metrics import percentiles
from tuner.records import Outcome, Slo
from tuner.tuning import significance as module
from tuner.tuning.significance import Comparison, Passes, Spread, compare, compare_values, spread_of

QUIET = Spread(share=0.005, freedom=6)


def passes(
    ratio: float, seed: int, *, repeats: int = 3, drift: float = 0.0, failed: int = 0
) -> list[dict[str, list[Outcome]]]:
    """Requests with bursts that both sides share, times `ratio`, and noise per repeat."""
    shared, own = np.random.default_rng(1), np.random.default_rng(seed)
    load = np.exp(0.5 * np.repeat(shared.standard_normal(40), 15))
    times = np.arange(600) * 0.5
    found = []
    for _ in range(repeats):
        level = math.exp(drift * own.standard_normal())
        ttft = 0.1 * load * ratio * level * np.exp(0.1 * own.standard_normal(600))
        rows = []
        for row, (at, first) in enumerate(zip(times, ttft, strict=True)):
            rows.append(
                Outcome(
                    row=row,
                    scheduled_s=float(at),
                    first_token_s=float(at + first),
                    last_token_s=float(at + first + 1.0),
                    output_tokens=11,
                    chunk_tokens=np.ones(11, dtype=np.int32),
                    error="cut" if row < failed else None,
                )
            )
        found.append({"peak": rows})
    return found


def value_of(rows: dict[str, list[Outcome]], metric: str) -> float:
    """The metric of one repeat, as a measurement has it."""
    ttft = [1e3 * ((o.first_token_s or 0) - o.scheduled_s) for o in rows["peak"] if o.ok]
    return float(np.percentile(ttft, {"ttft_p95_ms": 95, "ttft_p50_ms": 50, "e2e_p95_ms": 95}[metric]))


def noise(*entrants: Passes, metric: str = "ttft_p95_ms") -> Spread:
    return spread_of([[value_of(dict(rows), metric) for rows in each] for each in entrants])  # type: ignore[arg-type]


def ttft(other: float, **more: float) -> Comparison:
    base, new = passes(1.0, 2), passes(other, 3)
    return compare(base, new, "ttft_p95_ms", spread=noise(base, new), **more)  # type: ignore[arg-type]


def test_a_real_difference_is_found_with_its_size() -> None:
    found = ttft(0.8)
    assert found.word == "better"
    assert found.log_ratio == pytest.approx(math.log(0.8), abs=0.05)
    assert found.low < math.log(0.8) < found.high
    assert ttft(1.25).word == "worse"
    assert (found.repeats, found.rows) == (3, 1800)


def test_the_same_is_not_better() -> None:
    assert ttft(1.0).word == "open"


@pytest.mark.slow
def test_noise_between_repeats_widens_the_interval() -> None:
    wrong = 0
    for seed in range(12):
        base, other = passes(1, 100 + seed, drift=0.03), passes(1, 500 + seed, drift=0.03)
        wrong += compare(base, other, "ttft_p95_ms", seed=seed, spread=noise(base, other)).word != "open"
    assert wrong <= 2


def test_one_repeat_decides_nothing_unless_the_noise_is_known_from_elsewhere() -> None:
    base, other = passes(1.0, 2, repeats=1), passes(0.5, 3, repeats=1)
    alone = compare(base, other, "ttft_p95_ms", spread=Spread())
    assert (alone.word, alone.low, alone.high) == ("open", -math.inf, math.inf)
    assert compare(base, other, "ttft_p95_ms", spread=Spread(share=0.03, freedom=6)).word == "better"
    assert compare(base, other, "ttft_p95_ms", spread=Spread(share=0.3, freedom=6)).word == "open"


def test_one_repeat_without_a_number_decides_nothing_either() -> None:
    base, other = passes(1.0, 2, repeats=1), passes(1.0, 3, repeats=1, failed=100)
    assert compare(base, other, "ttft_p95_ms", spread=Spread()).word == "open"


def test_noise_pooled_over_entrants_finds_what_two_repeats_cannot() -> None:
    entrants = [
        passes(ratio, seed, drift=0.03) for seed, ratio in ((11, 1.0), (12, 0.8), (13, 1.1), (14, 0.9))
    ]
    pooled = noise(*entrants)
    assert pooled.freedom == 8
    assert 0.01 < pooled.share < 0.06
    few = Spread(share=pooled.share, freedom=2)
    alone = compare(entrants[0], entrants[1], "ttft_p95_ms", family=9, spread=few)
    found = compare(entrants[0], entrants[1], "ttft_p95_ms", family=9, spread=pooled)
    assert found.high - found.low < alone.high - alone.low
    assert (alone.word, found.word) == ("open", "better")


def test_less_than_two_per_cent_decides_nothing() -> None:
    sure = Spread(share=0.0, freedom=10)
    assert module.compare_values("max_speed", [1.0, 1.0], [1.01, 1.01], spread=sure).word == "open"  # type: ignore[union-attr]
    assert module.compare_values("max_speed", [1.0, 1.0], [1.03, 1.03], spread=sure).word == "better"  # type: ignore[union-attr]


def test_the_values_told_are_those_whose_ratio_is_told() -> None:
    found = ttft(0.8)
    assert (found.other - found.base) / found.base == pytest.approx(found.change)


@pytest.mark.slow
def test_equal_finalists_are_seldom_called_winners() -> None:
    wrong = 0
    for seed in range(5):
        entrants = [passes(1.0, 100 * seed + i, drift=0.03) for i in range(4)]
        better = False
        for metric in ("ttft_p95_ms", "e2e_p95_ms", "ttft_p50_ms"):
            spread = noise(*entrants, metric=metric)
            for other in entrants[1:]:
                found = compare(entrants[0], other, metric, family=9, spread=spread)
                better |= found.word == "better"
        wrong += better
    assert wrong <= 1


def looked_at(true: float, noise: float, seed: int) -> tuple[bool, bool]:
    """(called different, called the same) in any look at two metrics over six rounds; the first metric truly
    differs by the log ratio, the second does not.
    """
    rng = np.random.default_rng(seed)
    logs = noise * rng.standard_normal((2, 2, 6))
    logs[0, 1] += true
    differs, same = False, [False, False]
    for rounds in range(2, 7):
        for metric in range(2):
            base, other = np.exp(logs[metric, :, :rounds])
            spread = spread_of([list(base), list(other)])
            found = module.compare_values(
                "ttft_p50_ms", list(base), list(other), spread=spread, family=2 * 5, metrics=2
            )
            assert found is not None
            differs |= found.word != "open"
            same[metric] |= found.within < 0.10
    return differs, all(same)


def test_looking_after_every_round_seldom_calls_the_same_what_differs_nor_differs_what_is_the_same() -> None:
    """Both errors stay below 5 % over all looks and metrics together, here as shares of 400 comparisons."""
    edge = [looked_at(math.log(1.10), 0.03, seed)[1] for seed in range(400)]
    assert sum(edge) <= 0.05 * 400, "a difference of the margin itself is called the same"
    equal = [looked_at(0.0, 0.03, seed) for seed in range(400)]
    assert sum(differs for differs, _ in equal) <= 0.05 * 400
    assert sum(same for _, same in equal) >= 0.6 * 400, "equal sides are seldom called the same"


def test_the_same_is_known_sooner_than_a_difference_is_clear() -> None:
    """Each one-sided test may err with the whole share, and metrics are not charged for each other."""
    base, other = [1.0, 1.02, 0.98], [1.01, 1.0, 1.0]
    found = module.compare_values(
        "ttft_p50_ms", base, other, spread=spread_of([base, other]), family=10, metrics=2
    )
    assert found is not None
    assert found.within < math.expm1(found.high)
    alone = module.compare_values(
        "ttft_p50_ms", base, other, spread=spread_of([base, other]), family=10, metrics=1
    )
    assert alone is not None
    assert found.within < alone.within
    unknown = module.compare_values("ttft_p50_ms", [1.0], [1.0], spread=Spread())
    assert unknown is not None
    assert unknown.within == math.inf


def test_more_candidates_need_more_evidence() -> None:
    one, many = ttft(0.95), ttft(0.95, family=8)
    assert many.low <= one.low
    assert many.high >= one.high


def test_goodput_and_time_per_token() -> None:
    slo = Slo(ttft_ms=150)
    good = compare(passes(1.0, 2), passes(0.5, 3), "goodput_rps", slo=slo, spread=QUIET)
    assert good.word == "better"
    assert good.other > good.base
    same = compare(passes(1.0, 2), passes(0.5, 3), "tpot_p95_ms", spread=QUIET)
    assert same.base == pytest.approx(100.0)
    assert same.word == "open"


def test_failures_are_infinite_and_decide_nothing_by_themselves() -> None:
    found = compare(passes(1.0, 2), passes(1.0, 3, failed=100), "ttft_p95_ms", spread=QUIET)
    assert found.other == math.inf
    assert found.word == "worse"
    both = compare(passes(1.0, 2, failed=100), passes(1.0, 3, failed=100), "ttft_p95_ms", spread=QUIET)
    assert both.word == "open"


def test_percentile_is_numpys_on_unit_weights() -> None:
    values = np.random.default_rng(0).random(57)
    for share in (0.5, 0.9, 0.95, 0.99):
        assert percentiles(values, share, np.ones((1, 57)))[0] == pytest.approx(
            np.percentile(values, share * 100)
        )
    doubled = np.percentile(np.repeat(values, 2), 95)
    assert percentiles(values, 0.95, np.full((1, 57), 2.0))[0] == pytest.approx(doubled)


def test_what_it_refuses() -> None:
    with pytest.raises(BadInput, match="did you mean 'ttft_p95_ms'"):
        compare(passes(1, 1), passes(1, 2), "tft_p95_ms", spread=QUIET)
    with pytest.raises(BadInput, match="no request in common"):
        compare(passes(1, 1), [{"other": []}], "ttft_p95_ms", spread=QUIET)


@pytest.mark.parametrize("metric", ["goodput_rps", "slo_attainment", "request_rps"])
def test_A5_what_counts_requests_is_compared_by_all_requests_of_the_repeats(metric: str) -> None:
    """(9, 27) good requests of two repeats are more than (21, 13), whatever their geometric means are."""
    base, other = ([passes(1.0, 1, failed=n)[0] for n in failed] for failed in ((60, 140), (180, 0)))
    spread = Spread(share=0.01, freedom=50)
    found = compare(base, other, metric, slo=Slo(ttft_ms=1e6), spread=spread)
    assert found.change == pytest.approx((1200 - 180) / (1200 - 200) - 1)
    assert found.low < found.log_ratio < found.high
    values = compare_values(metric, [21.0, 13.0], [9.0, 27.0], spread=spread)
    assert values is not None
    assert (values.base, values.other) == (17.0, 18.0)
    assert values.change == pytest.approx(1 / 17)
