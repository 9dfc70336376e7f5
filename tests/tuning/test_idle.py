"""Knobs that cannot act at the load that was measured are no finalists."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tuner.records import (
    Candidate,
    EngineFacts,
    Measurement,
    Outcome,
    SliceMeasurement,
    Trial,
    TrialState,
    Value,
)
from tuner.replay import outcomes
from tuner.tuning.finalists import cannot_act, crowd_of

CPU = EngineFacts(kind="vllm", version="0.32.0", platform="cpu", flags=frozenset())
CARD = replace(CPU, platform="cuda")


def requests(together: int, prompt: int = 100) -> list[Outcome]:
    """Three waves of so many requests, one second each, ten seconds apart."""
    return [
        Outcome(
            row=10 * wave + i, scheduled_s=10.0 * wave, sent_s=10.0 * wave, first_token_s=10.0 * wave + 0.5,
            last_token_s=10.0 * wave + 1, end_s=10.0 * wave + 1, input_tokens=prompt, output_tokens=5,
        )
        for wave in range(3)
        for i in range(together)
    ]  # fmt: skip


def trial(folder: Path, number: int, together: int = 4, prompt: int = 100, **effective: Value) -> Trial:
    """A trial whose engine runs so, and had so many requests at once."""
    path = folder / f"{number}.parquet"
    outcomes.write(path, requests(together, prompt))
    part = SliceMeasurement(name="peak", window_s=30.0, values={}, outcomes_file=str(path))
    return Trial(
        id=number + 1, study_id="s", run_id="r", number=number, state=TrialState.COMPLETE,
        origin="search" if number else "baseline", candidate=Candidate(effective if number else {}),
        effective=effective, started_at=datetime(2026, 3, 1, tzinfo=UTC),
        measurements=(Measurement(values={}, slices=(part,)),),
    )  # fmt: skip


def test_the_crowd_is_what_was_on_its_way_at_once() -> None:
    found = crowd_of([requests(4, 100), requests(2, 250)])
    assert (found.requests, found.tokens, found.longest) == (4, 500, 250)


@pytest.mark.parametrize(
    ("knob", "before", "after", "idle"),
    [
        ("max_num_seqs", 256, 64, True),
        ("max_num_seqs", 256, 4, True),
        ("max_num_seqs", 256, 3, False),
        ("max_num_seqs", 2, 256, False),
        ("max_num_batched_tokens", 8192, 2048, True),
        ("max_num_batched_tokens", 8192, 256, False),
        ("long_prefill_token_threshold", 0, 100, True),
        ("long_prefill_token_threshold", 0, 99, False),
        ("block_size", 16, 32, False),
    ],
)
def test_a_knob_above_everything_that_was_there_at_once_cannot_act(
    tmp_path: Path, knob: str, before: int, after: int, idle: bool
) -> None:
    base = trial(tmp_path, 0, **{knob: before})
    said = cannot_act(base, trial(tmp_path, 1, **{knob: after}), CPU)
    assert (said is not None) == idle
    assert said is None or f"{knob} {after} has no effect" in said


def test_both_loads_count(tmp_path: Path) -> None:
    base = trial(tmp_path, 0, max_num_seqs=256)
    assert cannot_act(base, trial(tmp_path, 1, together=80, max_num_seqs=64), CPU) is None


def test_one_knob_that_can_act_is_enough(tmp_path: Path) -> None:
    base = trial(tmp_path, 0, max_num_seqs=256, block_size=16)
    assert cannot_act(base, trial(tmp_path, 1, max_num_seqs=64, block_size=32), CPU) is None
    assert cannot_act(base, trial(tmp_path, 1, max_num_seqs=64, block_size=16), CPU) is not None


def test_an_engine_that_follows_with_another_setting_can_differ(tmp_path: Path) -> None:
    base = trial(tmp_path, 0, max_num_seqs=256, max_cudagraph_capture_size=512)
    other = trial(tmp_path, 1, max_num_seqs=64, max_cudagraph_capture_size=128)
    assert cannot_act(base, other, CARD) is None


def test_fewer_sequences_capture_fewer_graphs_on_a_card(tmp_path: Path) -> None:
    base = trial(tmp_path, 0, max_num_seqs=1024)
    assert cannot_act(base, trial(tmp_path, 1, max_num_seqs=64), CARD) is None
    assert cannot_act(base, trial(tmp_path, 1, max_num_seqs=256), CARD) is not None


def test_without_the_requests_nothing_is_said(tmp_path: Path) -> None:
    base, other = trial(tmp_path, 0, max_num_seqs=256), trial(tmp_path, 1, max_num_seqs=64)
    (tmp_path / "1.parquet").unlink()
    assert cannot_act(base, other, CPU) is None
    assert cannot_act(base, replace(other, measurements=()), CPU) is None
