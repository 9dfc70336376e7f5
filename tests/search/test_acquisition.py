"""What a predictor's errors do to its proposals: cliffs are shunned, and what was measured near teaches."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tests.search import world
from tests.search.world import OBJECTIVES, World
from tuner.records import Candidate, Measurement, Prediction, Slo, Trial, TrialState
from tuner.search import acquisition
from tuner.search.acquisition import Predict, SearchState, StudyView
from tuner.search.trial_view import encode

SPACE = World(levels={"max_num_seqs": (64, 128, 256), "max_num_batched_tokens": (512, 1024, 8192)})
BASE = {"ttft_p95_ms": 400.0, "tpot_p95_ms": 60.0, "goodput_rps": 10.0}
SAFE, CLIFF = Candidate({"max_num_batched_tokens": 1024}), Candidate({"max_num_batched_tokens": 512})
BESIDE = Candidate({"max_num_batched_tokens": 512, "max_num_seqs": 128})


def _values(ttft: float, tpot: float, goodput: float) -> dict[str, float]:
    return dict(zip(OBJECTIVES, (ttft, tpot, goodput), strict=True))


def _predict(candidates: Sequence[Candidate]) -> list[Prediction]:
    """At 512 tokens a step the queue grows without end once steps are a little slower than predicted."""
    found = []
    for candidate in candidates:
        tokens = candidate.get("max_num_batched_tokens", 8192)
        fast, middle, slow = {
            8192: (_values(380, 57, 10.5), BASE, _values(420, 63, 9.5)),
            1024: (_values(250, 27, 20), _values(260, 28, 20), _values(280, 30, 20)),
            512: (_values(230, 24, 20), _values(250, 25, 20), _values(9000, 26, 1.0)),
        }[int(tokens or 0)]
        found.append(Prediction(values=middle, fast=fast, slow=slow))
    return found


def _trial(number: int, candidate: Candidate, values: Mapping[str, float], kind: str = "full") -> Trial:
    made = world.trial(number, candidate, origin="tpe" if number else "baseline")
    return replace(made, measurements=(Measurement(values=dict(values), kind=kind),))  # type: ignore[arg-type]


def _problem(trials: Sequence[Trial], predict: Predict = _predict, space: World = SPACE) -> SearchState:
    history = StudyView(space=space, trials=trials, objectives=OBJECTIVES, slo=Slo())
    found = history.problem(predict)
    assert found is not None
    return found


def _gains(trials: Sequence[Trial], pool: Sequence[Candidate], predict: Predict = _predict) -> list[float]:
    problem = _problem(trials, predict)
    points = [encode(SPACE, world.DEFAULTS).point(c) or () for c in pool]
    expected = acquisition.mixtures(problem, points)
    return [float(g) for g in acquisition.gains(problem, points, expected, np.random.default_rng(1))]


def test_what_collapses_when_steps_are_slower_is_not_proposed_first() -> None:
    base = _trial(0, Candidate(), BASE)
    safe, cliff = _gains([base], [SAFE, CLIFF])
    assert safe > 1.2 * cliff > 0


def test_a_neighbour_that_was_slower_teaches_and_one_that_was_as_predicted_too() -> None:
    base = _trial(0, Candidate(), BASE)
    before = _gains([base], [CLIFF])[0]
    slower = _trial(1, BESIDE, _values(9000, 26, 1.0), "estimate")
    assert _gains([base, slower], [CLIFF])[0] < 0.7 * before
    fine = _trial(1, BESIDE, {**BASE, "goodput_rps": 20.0, "tpot_p95_ms": 25.0, "ttft_p95_ms": 250.0})
    one, other = _gains([base, fine], [CLIFF, SAFE])
    assert one >= 0
    assert other < _gains([base], [SAFE])[0]


def test_an_error_that_all_predictions_share_is_taken_out() -> None:
    """The predictor says half of every latency; once that is seen, less is expected of others."""
    half = [replace(p, fast={}, slow={}) for p in _predict([Candidate(), SAFE])]
    low = [{n: v / 2 if n.endswith("_ms") else v for n, v in p.values.items()} for p in half]

    def predict(candidates: Sequence[Candidate]) -> list[Prediction]:
        own = (c.get("max_num_batched_tokens", 8192) == 8192 for c in candidates)
        return [Prediction(values=low[0] if default else low[1]) for default in own]

    trials = [_trial(0, Candidate(), BASE), _trial(1, SAFE, half[1].values)]
    twin = Candidate({"max_num_batched_tokens": 1024, "max_num_seqs": 128})
    before, after = (_gains(trials[:count], [twin], predict)[0] for count in (1, 2))
    assert after < 0.7 * before


def test_a_relaunched_candidate_is_known_by_what_the_engine_runs() -> None:
    """A knob that another switches on stays in the key where the switch is left at the engine's default."""
    switched = World(
        levels={"enable_chunked_prefill": (True, False), "long_prefill_token_threshold": (0, 512)},
        inactive=lambda c: () if c.get("enable_chunked_prefill") else ("long_prefill_token_threshold",),
    )
    place = encode(switched, {"enable_chunked_prefill": True, "long_prefill_token_threshold": 0})
    whole = Candidate({"enable_chunked_prefill": True, "long_prefill_token_threshold": 512})
    short = Candidate({"long_prefill_token_threshold": 512})
    assert place.completed(whole).digest == place.completed(short).digest
    assert place.completed(short)["long_prefill_token_threshold"] == 512
    off = Candidate({"enable_chunked_prefill": False, "long_prefill_token_threshold": 512})
    assert place.completed(off).digest == place.completed(Candidate({"enable_chunked_prefill": False})).digest


def test_a_knob_without_a_predicted_gain_is_left_where_the_baseline_has_it() -> None:
    """Memory and block size change nothing here; fewer tokens do, and fewer sequences too little."""
    space = World(levels={**SPACE.levels, "gpu_memory_utilization": (0.8, 0.9), "block_size": (16, 32)})

    def predict(candidates: Sequence[Candidate]) -> list[Prediction]:
        found = []
        for candidate, expected in zip(candidates, _predict(candidates), strict=True):
            less = 0.999 if candidate.get("max_num_seqs") == 64 else 1.0
            values = {n: v * less if n.endswith("_ms") else v for n, v in expected.values.items()}
            found.append(replace(expected, values=values, feasible=candidate.get("block_size") != 16))
        return found

    asked = Candidate(
        {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "gpu_memory_utilization": 0.8, "block_size": 32}
    )
    base = _trial(0, Candidate(), {n: v for n, v in _predict([Candidate()])[0].values.items()})
    place = encode(space, world.DEFAULTS)
    point = acquisition.without_idle_knobs(_problem([base], predict, space), place.point(asked) or ())
    assert dict(place.candidate(point)) == {**asked, "max_num_seqs": 256, "gpu_memory_utilization": 0.9}


def test_a_predicted_failure_is_a_probability_and_one_that_works_outweighs_the_prediction() -> None:
    """Where every candidate is predicted to fail, each still has its gain, and once one works half of it."""
    base = _trial(0, Candidate(), BASE)

    def pessimist(candidates: Sequence[Candidate]) -> list[Prediction]:
        return [replace(p, feasible=False) for p in _predict(candidates)]

    def gain(trials: Sequence[Trial]) -> float:
        return _gains(trials, [SAFE], pessimist)[0]

    first = _gains([base], [SAFE])[0]
    assert gain([base]) > 0.4 * first  # the baseline itself was predicted to fail
    failed = [
        replace(base, number=n, origin="search", state=TrialState.INFEASIBLE, measurements=())
        for n in range(1, 9)
    ]
    assert 0 < gain([base, *failed]) < 0.2 * first
