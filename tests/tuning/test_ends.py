"""Issue 29 B: how a study, a run and a budget end."""

from pathlib import Path

import pytest

from tests.engine.test_root_causes import LOGS
from tests.tuning import breaking
from tests.tuning.studies import STUDY, tuner
from tuner.history.store import Store
from tuner.records import RunState, TrialState

SPACE_DTYPE = """\
about: Number formats.
vllm: ">=0.10"
knobs:
  dtype: [bfloat16, float16]
  max_num_seqs: [4, 16]
"""


def store_of(home: Path) -> Store:
    return Store(f"sqlite:///{home / 'tuner.db'}", create=False)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("driver-too-old", 0, "The NVIDIA driver on your system is too old (found version 11080)"),
        ("bfloat16", 1, "Bfloat16 is only supported on GPUs with compute capability of at least 8.0"),
        ("remote-code", 1, "contains custom code which must be executed"),
        ("damaged-weights", 1, "Error while deserializing header: HeaderTooLarge"),
        ("gated", 1, "You are trying to access a gated repo"),
        ("container-image", 125, "docker"),
    ],
)
def test_29b1_a_fault_of_the_study_ends_it_at_the_first_launch(
    tmp_path: Path, name: str, code: int, words: str
) -> None:
    """One launch, exit code 7, the root cause as the sentence, and no success."""
    study = breaking.study(tmp_path, LOGS / f"{name}.log", code=code)
    done = tuner(tmp_path, "tune", study, "--trials", 8)
    assert done.returncode == 7, done.stderr
    assert words in done.stderr
    assert len(breaking.launches(tmp_path)) == 1
    store = store_of(tmp_path)
    run = store.runs()[0]
    assert run.state is RunState.FAILED
    assert words in (run.reason or "")
    assert store.last_success() == {}
    assert [t.state for t in store.trials(run.study_id)] == [TrialState.ABORTED]


def test_29b1_a_refused_fixed_argument_is_not_the_candidates_fault(tmp_path: Path) -> None:
    text = STUDY.replace(
        "args: {max-model-len: 16384}", "args: {max-model-len: 16384, compilation-config: 3}"
    )
    study = breaking.study(tmp_path, LOGS / "compilation-config.log", code=2, text=text)
    done = tuner(tmp_path, "tune", study, "--trials", 6)
    assert done.returncode == 7, done.stderr
    assert "--compilation-config" in done.stderr
    assert len(breaking.launches(tmp_path)) == 1


def test_29b1_mamba_blocks_are_the_candidates_fault_at_once(tmp_path: Path) -> None:
    """The knob is turned: other candidates go on."""
    study = breaking.study(tmp_path, LOGS / "mamba-blocks.log", when="--max-num-seqs (16|64)( |$)")
    done = tuner(tmp_path, "tune", study, "--trials", 4)
    assert done.returncode == 0, done.stderr
    store = store_of(tmp_path)
    trials = store.trials(store.runs()[0].study_id)
    failed = [t for t in trials if t.cause == "mamba_blocks"]
    assert failed
    assert all(t.state is TrialState.INFEASIBLE and t.attempt == 0 for t in failed)
    assert failed[0].violation.kv == pytest.approx(1 - 969 / 1024)
    assert "max_num_seqs" in (failed[0].reason or "")
