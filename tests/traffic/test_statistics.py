"""Numbers of a trace against known truths, and what is advised from them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traffic.conftest import make
from tuner.replay.feeder import Prompts
from tuner.traffic.importers import read_any
from tuner.traffic.statistics import PREFILL_S, describe, dispersion, series
from tuner.traffic.structure import (
    infer_sessions,
    new_tokens,
    predicted_hits,
    prefers_live_history,
    reuse_by_capacity,
)
from tuner.traffic.trace import Trace, bundled


def test_the_numbers_of_the_azure_trace(real: Callable[[str], Path]) -> None:
    """Against the figures published with the trace."""
    numbers = describe(read_any(real("AzureLLMInferenceTrace_conv.csv")))
    assert numbers.request_rps == pytest.approx(5.53, abs=0.01)
    assert numbers.arrival_cv == pytest.approx(1.09, abs=0.01)
    assert numbers.dispersion["1s"] == pytest.approx(1.4, abs=0.05)
    assert numbers.dispersion["10s"] == pytest.approx(4.0, abs=0.2)
    assert (numbers.input_len["p50"], numbers.input_len["p99"]) == (1020, 4142)
    assert (numbers.output_len["p50"], numbers.output_len["p99"]) == (129, 601)
    assert numbers.reuse is None


def test_reuse_of_the_mooncake_trace_by_cache_size(real: Callable[[str], Path]) -> None:
    trace = read_any(real("mooncake_conversation_trace.jsonl"))
    found = reuse_by_capacity(trace, [400_000, 1_600_000, 10_000_000, None])
    assert list(found.values()) == pytest.approx([0.044, 0.068, 0.291, 0.374], abs=0.01)


def test_concurrency_is_exact_where_times_were_observed() -> None:
    trace = make([10] * 100, columns={"obs_e2e_s": [2.5] * 100})  # one a second, each 2.5 s
    numbers = describe(trace)
    assert numbers.concurrency_source == "observed"
    assert numbers.concurrency["p50"] in (2, 3)
    assert numbers.concurrency["p100"] == 3
    assert numbers.concurrency["mean"] == pytest.approx(2.5, abs=0.05)
    estimated = describe(make([8000] * 100, output=0), speed=2.0)
    assert estimated.concurrency["mean"] == pytest.approx(2.0, abs=0.05)
    assert PREFILL_S * 8000 == 1.0


def test_dispersion_of_poisson_is_one_and_of_bursts_is_not() -> None:
    chance = np.random.default_rng(1)
    calm = np.sort(chance.random(20_000) * 2000)
    assert dispersion(calm, 1.0) == pytest.approx(1.0, abs=0.1)
    assert dispersion(np.repeat(np.sort(chance.random(2000) * 2000), 10), 1.0) == pytest.approx(10, rel=0.15)
    assert dispersion(calm[:5], 60.0) is None


def test_advice_rests_on_the_numbers() -> None:
    trace = make([100] * 200, columns={"max_tokens": [4096] * 200, "n": [2] * 200})
    said = " | ".join(describe(trace).advice)
    assert "p99 concurrency 1" in said
    assert "clients ask for max_tokens 4,096 (median)" in said
    assert "100.0% of requests ask for n > 1" in said
    assert "no block ids" in said
    unique = make([32] * 200, ids=[[2 * row, 2 * row + 1] for row in range(200)])
    assert "enable_prefix_caching does not help" in " ".join(describe(unique).advice)
    shared = make([32] * 200, ids=[[0, 1]] * 200)
    assert "prefix reuse up to 99.5%" in " ".join(describe(shared).advice)
    assert describe(make([1])).advice == ()


def test_numbers_become_json() -> None:
    text = json.dumps(describe(bundled()).as_json(), allow_nan=False)
    assert json.loads(text)["requests"] == len(bundled())
    json.dumps(describe(make([5])).as_json(), allow_nan=False)


class Engine:
    """A prefix cache that compares real tokens: the truth that predictions are held against."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.cached: set[tuple[int, ...]] = set()

    def serve(self, tokens: Sequence[int]) -> int:
        """Cached tokens of a prompt: whole blocks from its start, never all; then it is cached."""
        size, found = self.block_size, 0
        while found + size < len(tokens) and tuple(tokens[: found + size]) in self.cached:
            found += size
        self.cached.update(tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size))
        return found


PROMPT = st.tuples(st.lists(st.integers(0, 3), max_size=6), st.integers(1, 110))
PROMPTS = st.lists(PROMPT, min_size=1, max_size=12)


@given(PROMPTS, st.sampled_from([1, 4, 8, 16, 24, 32, 48, 128]))
@settings(max_examples=80, deadline=None)
def test_predicted_hits_are_the_engines_own(prompts: list[tuple[list[int], int]], block_size: int) -> None:
    """Exact for engine blocks smaller than, equal to, larger than and odd to the trace's blocks."""
    ids = [blocks[: -(-length // 16)] for blocks, length in prompts]
    trace = make([length for _, length in prompts], ids=ids, output=1)
    made, engine = Prompts(trace, 32_000, b"salt"), Engine(block_size)
    truth = [engine.serve(made.tokens(row).tolist()) for row in range(len(trace))]
    assert predicted_hits(trace, range(len(trace)), block_size).tolist() == truth


def test_a_small_cache_forgets_the_oldest() -> None:
    trace = make([64, 64, 64], ids=[[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4]], output=1)
    assert predicted_hits(trace, [0, 1, 2], 16).tolist() == [0, 0, 48]
    assert predicted_hits(trace, [0, 1, 2], 16, 64).tolist() == [0, 0, 0]
    assert predicted_hits(trace, [0, 2], 16, 64).tolist() == [0, 48]


def chat() -> Trace:
    """A system prompt for all, two conversations of three turns, and a stranger."""
    system = [0, 1]
    ids = [[*system, 10, 11], [*system, 20, 21]]
    ids += [ids[0] + [12, 13], ids[1] + [22, 23]]
    ids += [ids[2] + [14, 15], [*system, 90, 91]]
    return make([16 * len(one) for one in ids], ids=ids, columns={"obs_e2e_s": [0.25] * 6})


def test_sessions_are_told_from_blocks() -> None:
    found = infer_sessions(chat())
    assert found.parent.tolist() == [-1, -1, 0, 1, 2, -1]
    assert found.turn.tolist() == [0, 0, 1, 1, 2, -1]
    assert found.session.tolist() == [0, 1, 0, 1, 0, -1]
    assert found.think_s[[2, 3, 4]] == pytest.approx([1.75, 1.75, 1.75])
    assert infer_sessions(make([5, 6])).parent.tolist() == [-1, -1]


def test_live_history_adds_what_the_turn_adds() -> None:
    found = infer_sessions(chat())
    assert new_tokens(found).tolist() == [-1, -1, 32 - 10, 32 - 10, 32 - 10, -1]
    assert prefers_live_history(found)
    assert not prefers_live_history(chat())


def test_turns_with_long_answers_are_told_to_want_live_history() -> None:
    ids = [[100 * talk + block for block in range(3 + 2 * turn)] for turn in range(2) for talk in range(12)]
    plain = make([16 * len(one) for one in ids], ids=ids)
    assert any("--infer-sessions" in sentence for sentence in describe(plain).advice)
    numbers = describe(infer_sessions(plain))
    assert numbers.new_tokens is not None
    assert numbers.new_tokens["p50"] == 32 - 10
    assert any("history: live" in sentence for sentence in numbers.advice)


def test_sessions_of_the_mooncake_trace(real: Callable[[str], Path]) -> None:
    found = infer_sessions(read_any(real("mooncake_conversation_trace.jsonl")))
    assert 0.25 < float((found.parent >= 0).mean()) < 0.387


def test_a_picture_is_drawn_from_what_adds_up() -> None:
    trace = make([10] * 100, columns={"obs_e2e_s": [2.5] * 100})
    drawn = series(trace, bins=9)
    span = drawn["start_s"][1]
    assert sum(drawn["request_rps"]) * span == pytest.approx(100)
    assert sum(drawn["input_tokens_per_s"]) * span == pytest.approx(1000)
    assert set(drawn["concurrency"][1:-1]) <= {2, 3}
