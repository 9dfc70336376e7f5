"""Prompts: exact lengths, one block id the same tokens, other salts nothing in common, in any process."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traffic.conftest import make
from tuner.replay.feeder import Prompts, plain_range, salt, tokens

DIGEST_CODE = """
import hashlib
from tests.traffic.conftest import make
from tuner.replay.feeder import Prompts, salt
trace = make([40, 33, 100], ids=[[1, 2, 3], [1, 2], []])
prompts = Prompts(trace, 32_000, salt(7, 3, 1))
print(hashlib.sha256(b"".join(prompts.token_json(row) for row in range(3))).hexdigest())
"""


def test_prompts_are_byte_identical_in_any_process() -> None:
    """docs/cases.md R12: prompts seeded with hash(str) differ from process to process."""
    said = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST_CODE], capture_output=True, text=True, check=True, env=environment
        )
        said.add(done.stdout.strip())
    trace = make([40, 33, 100], ids=[[1, 2, 3], [1, 2], []])
    here = Prompts(trace, 32_000, salt(7, 3, 1))
    said.add(hashlib.sha256(b"".join(here.token_json(row) for row in range(3))).hexdigest())
    assert len(said) == 1


def test_these_tokens_stay_the_same_in_later_versions() -> None:
    """Stored studies compare trials across versions of the tuner: the PRNG is part of the contract."""
    trace = make([20], ids=[[5, 6]])
    text = Prompts(trace, 32_000, salt(0, 1, 0)).token_json(0)
    assert hashlib.sha256(text).hexdigest() == (
        "bd4c51603c869772b896594c8c9f421b07c814c40653f63d6ea42014b626e6fe"
    )


@given(st.integers(1, 200), st.integers(0, 14), st.integers(1, 40))
def test_lengths_are_exact_and_json_says_the_same(length: int, blocks: int, size: int) -> None:
    blocks = min(blocks, -(-length // size))
    trace = make([length], ids=[list(range(blocks))], block_size=size)
    prompts = Prompts(trace, 32_000, b"salt")
    found = prompts.tokens(0)
    assert found.dtype == np.int32
    assert len(found) == length
    assert json.loads(prompts.token_json(0)) == found.tolist()
    low, high = plain_range(32_000)
    assert found.min() >= low
    assert found.max() < high


def test_prefixes_are_shared_exactly_as_ids_say() -> None:
    trace = make([48, 48, 40], ids=[[1, 2, 3], [1, 2, 4], [1, 2, 3]])
    prompts = Prompts(trace, 32_000, b"salt")
    first, second, partial = (prompts.tokens(row) for row in range(3))
    assert (first[:32] == second[:32]).all()
    assert (first[32:] != second[32:]).any()
    assert (partial == first[:40]).all()


def test_rows_without_ids_share_nothing_and_tails_are_unique() -> None:
    """docs/cases.md R12: rows without hash ids must not become empty prompts."""
    trace = make([32, 32, 40, 40], ids=[[], [], [9, 8], [9, 8]])
    prompts = Prompts(trace, 32_000, b"salt")
    assert not set(prompts.tokens(0).tolist()) & set(prompts.tokens(1).tolist())
    assert (prompts.tokens(2)[:32] == prompts.tokens(3)[:32]).all()
    assert (prompts.tokens(2)[32:] != prompts.tokens(3)[32:]).any()


def test_another_number_or_repeat_gives_other_tokens_of_the_same_shape() -> None:
    trace = make([64, 64], ids=[[1, 2, 3, 4], [1, 2, 5, 6]])
    seen = []
    for number, repeat in ((1, 0), (2, 0), (1, 1)):
        prompts = Prompts(trace, 32_000, salt(0, number, repeat))
        rows = [prompts.tokens(row) for row in range(2)]
        assert (rows[0][:32] == rows[1][:32]).all()
        seen.append({tuple(row[start : start + 16]) for row in rows for start in range(0, 64, 16)})
    assert not seen[0] & seen[1]
    assert not seen[0] & seen[2]


def test_the_fragment_cache_is_bounded_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = make([512 * 40] * 2, ids=[list(range(40)), list(range(40))], block_size=512)
    monkeypatch.setattr("tuner.replay.feeder._CACHE_BYTES", 1)
    small = Prompts(trace, 32_000, b"salt")
    assert small.token_json(0) == small.token_json(1) == Prompts(trace, 32_000, b"salt").token_json(0)
    assert len(small._fragments) == 16


def test_a_vocabulary_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        Prompts(make([4]), 10, b"salt")
    assert tokens(make([4]), 0, b"salt", 64).max() < 64
