"""A candidate is today's configuration with the space's knobs turned: proposed, launched and published whole.

Row M1 of the mission: with `baseline: {block_size: 64}` and a space of one knob candidates did without it.
"""

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.tuning.studies import STUDY, VIRTUAL, tuner, write
from tests.tuning.test_next_trial import measured, values
from tuner.history.store import Store
from tuner.records import Candidate, Value
from tuner.search.guides import heuristics
from tuner.tuning.attempt import fits, widest
from tuner.tuning.next_trial import at_levels, propose
from tuner.tuning.study import Prepared, load

NOW = datetime(2026, 1, 1, tzinfo=UTC)
INHERITED: Mapping[str, Value] = {"block_size": 64, "kv_cache_dtype": "fp8", "watermark": 0.05}
TODAY = "{max_num_seqs: 4, block_size: 64, kv_cache_dtype: fp8, watermark: 0.05}"
RELEASED = "da80e881d5fd11cefb8d4e29819b0bd9b0a70979abf175ed9faee2b3c4f9f8a2"
"""The study of tests/tuning/studies.py as revision e5fb70b identified it."""


def study(folder: Path, baseline: str = TODAY, **more: str) -> Path:
    text = STUDY.replace("{max_num_seqs: 4}", baseline)
    for old, new in more.items():
        text = text.replace(old, new)
    return write(folder, study=text)


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    return load(study(tmp_path), store=None, now=NOW)


def inherits(candidate: Mapping[str, Value]) -> bool:
    return {name: candidate.get(name) for name in INHERITED} == dict(INHERITED)


def test_M1_every_proposal_inherits_whoever_makes_it(prepared: Prepared) -> None:
    trials = [measured(0, prepared.baseline, values(900.0))]
    origins = set()
    for number in range(1, 9):
        found = propose(prepared, trials)
        if found is None:
            break
        assert inherits(found.candidate), found
        origins.add(found.origin.partition(":")[0])
        tail = 900.0 / (1 + number % 3)
        trials.append(measured(number, found.candidate, values(tail), origin=found.origin))
    assert len(trials) == 9  # all of the space but what runs today
    assert len(origins) > 1
    assert all(inherits(c) for _, c in heuristics(prepared.space, prepared.baseline))


def test_M1_running_engines_inherit(prepared: Prepared) -> None:
    asked = prepared.space.canonical({"max_num_seqs": 64, "max_num_batched_tokens": 8192})
    for wide in widest(prepared, asked):
        assert inherits(wide)
        limits = fits(prepared, wide, asked, {})
        assert limits is not None
        assert limits["watermark"] == 0.05


def test_M1_a_seed_of_elsewhere_takes_on_what_runs_here(prepared: Prepared) -> None:
    trials = [measured(0, prepared.baseline, values(900.0))]
    seed = Candidate({"max_num_seqs": 60, "max_num_batched_tokens": 2048, "block_size": 16})
    found = propose(prepared, trials, seeds=[("node a", seed)])
    assert found is not None
    assert found.origin == "node a"
    assert found.candidate == Candidate({"max_num_seqs": 64, "max_num_batched_tokens": 2048, **INHERITED})
    assert inherits(at_levels(prepared, trials))


def test_a_study_that_inherits_nothing_is_the_one_that_was_begun_before(tmp_path: Path) -> None:
    assert load(write(tmp_path), store=None, now=NOW).study.id == RELEASED


def test_trials_without_the_inherited_knobs_are_not_resumed(prepared: Prepared) -> None:
    assert prepared.study.identity["inherited"] == dict(INHERITED)
    assert {k: v for k, v in prepared.study.identity.items() if k != "inherited"}["baseline"]


def test_M1_what_is_launched_and_published_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path, VIRTUAL.replace("{max_num_seqs: 4}", TODAY))
    done = tuner(tmp_path, "tune", path, "--trials", 4, "--all-trials")
    assert done.returncode == 0, done.stderr
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}", create=False)
    found = store.study("tiny")
    for launch in store.launches(found.id):
        text = shlex.join(launch.argv)
        for flag in ("--block-size 64", "--kv-cache-dtype fp8", "--watermark 0.05"):
            assert flag in text, text
    run = store.runs(found.id)[0]
    assert run.summary["winner"] is not None, run.summary
    profile = store.profile(run.summary["profiles"]["challenger"]["id"])  # type: ignore[index, call-overload, arg-type]
    assert inherits(profile.candidate)
    assert profile.evidence["inherited"] == dict(INHERITED)
    assert shlex.join(profile.argv).count("--kv-cache-dtype fp8") == 1
    shown = tuner(tmp_path, "profile", "show", profile.id)
    assert "inherited" in shown.stdout, shown
