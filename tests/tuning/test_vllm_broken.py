"""On the real vLLM (CPU build): a study of which today's configuration does not start, and a knob that the
engine does not take. One engine serves.
"""

import json
from pathlib import Path

import pytest

from tests.engine.real import random_weights
from tests.tuning.studies import tuner
from tests.tuning.test_vllm import STUDY, fresh, put, said_of, trials_of, tune
from tuner.records import TrialState

pytestmark = pytest.mark.vllm

ORDERED = """\
about: 7 is no block size of the CPU kernel, which is the only attention backend there is.
vllm: ">=0.11.2"
knobs:
  block_size: [7, 32]
  attention_backend: {values: [FLASHINFER], default: true, when: {block_size: 32}}
"""
BROKEN = (
    STUDY.replace("name: cpu", "name: broken").replace("workload: chat", "workload: broken")
    .replace("model: model", "model: weights").replace("space.yaml", "ordered.yaml")
    .replace("{load-format: dummy, ", "{")
    .replace("{max_num_seqs: 1, max_num_batched_tokens: 1024}", "{block_size: 7}")
    .replace("most_repeats: 2", "repeats: 1, most_repeats: 1")
    .replace("duration_s: 2", "duration_s: 1").replace("trials: 5", "trials: 3")
)  # fmt: skip
"""Today's configuration does not start; the model has weights."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the study was tuned to its end."""
    home = fresh(tmp_path_factory, "broken")
    random_weights(home / "weights")
    (home / "ordered.yaml").write_text(ORDERED)
    (home / "broken.log").write_text(tune(home, put(home, "broken.yaml", BROKEN)))
    return home


def test_19_7_a_configuration_of_today_that_does_not_start_is_not_published(broken: Path) -> None:
    first, *_ = trials_of(broken, "broken")
    assert first.is_baseline
    assert (first.state, first.cause, first.measurement) == (TrialState.INFEASIBLE, "block_size", None)
    assert "baseline" not in said_of(broken, "broken").profiles
    words = ("--model", broken / "weights", "--workload", "broken", "--alias", "baseline")
    assert tuner(broken, "profile", "resolve", *words).returncode == 4
    shown = json.loads(tuner(broken, "front", "broken", "--json").stdout)
    assert not shown["baseline"] or not shown["baseline"].get("values")


def test_19_5_a_knob_that_the_engine_does_not_take_does_not_pass(broken: Path) -> None:
    """The CPU build keeps the backend in its configuration, and computes with its own."""
    (lost,) = (t for t in trials_of(broken, "broken") if "attention_backend" in t.candidate)
    assert (lost.state, lost.cause) == (TrialState.INFEASIBLE, "not_effective")
    assert "attention_backend" in (lost.reason or "")
