"""On the real vLLM (CPU build): a study of which today's configuration does not start, so that nobody knows
its answers. Two engines serve, one or two do not start.
"""

import json
from pathlib import Path

import pytest

from tests.engine.real import INTERPRETER, random_weights
from tests.tuning.studies import TRACE, tuner
from tests.tuning.test_vllm import STUDY, put, said_of, trials_of, tune
from tuner.records import TrialState
from tuner.tuning.quality import AGREEMENT

pytestmark = pytest.mark.vllm

ORDERED = """\
about: Every candidate computes in another format than today's; the CPU has one attention backend.
vllm: ">=0.11.2"
knobs:
  block_size: [7, 32]
  dtype: [bfloat16]
  attention_backend: {values: [FLASHINFER], default: true, when: {block_size: 32}}
"""
BROKEN = (
    STUDY.replace("name: cpu", "name: broken").replace("workload: chat", "workload: broken")
    .replace("model: model", "model: weights").replace("space.yaml", "ordered.yaml")
    .replace("{load-format: dummy, ", "{").replace(", dtype: float32", "")
    .replace("{max_num_seqs: 1, max_num_batched_tokens: 1024}", "{block_size: 7, dtype: float32}")
    .replace("duration_s: 2", "duration_s: 1").replace("trials: 5", "trials: 4")
)  # fmt: skip
"""Today's configuration does not start, so nobody knows its answers; the model has weights."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the study was tuned to its end."""
    if not INTERPRETER or not Path(INTERPRETER).exists():
        pytest.skip("TUNER_TEST_VLLM names no interpreter; `make test-vllm` installs one")
    home = tmp_path_factory.mktemp("broken")
    random_weights(home / "weights")
    (home / "ordered.yaml").write_text(ORDERED)
    taken = tuner(home, "trace", "import", TRACE, "--name", "conversation", "--max-len", 600)
    assert taken.returncode == 0, taken.stderr
    (home / "broken.log").write_text(tune(home, put(home, "broken.yaml", BROKEN)))
    return home


def test_19_7_a_configuration_of_today_that_does_not_start_is_not_published(broken: Path) -> None:
    first, *_ = trials_of(broken, "broken")
    assert first.is_baseline
    assert (first.state, first.cause, first.measurement) == (TrialState.INFEASIBLE, "block_size", None)
    assert said_of(broken, "broken").profiles == {}
    words = ("--model", broken / "weights", "--workload", "broken", "--alias", "baseline")
    assert tuner(broken, "profile", "resolve", *words).returncode == 4
    shown = json.loads(tuner(broken, "front", "broken", "--json").stdout)
    assert not shown["baseline"] or not shown["baseline"].get("values")


def test_19_4_what_nobody_could_judge_is_no_finalist(broken: Path) -> None:
    """It served; its answers have none of the baseline's to be compared with."""
    (served,) = (t for t in trials_of(broken, "broken") if t.state is TrialState.COMPLETE)
    assert served.candidate["dtype"] == "bfloat16"
    assert served.measurement is not None
    assert AGREEMENT not in served.measurement.values
    said = said_of(broken, "broken")
    assert (said.winner, said.finalists) == (None, ())
    assert "its answers were not judged" in said.sentence


def test_19_5_a_knob_that_the_engine_does_not_take_does_not_pass(broken: Path) -> None:
    """The CPU build keeps the backend in its configuration, and computes with its own."""
    (lost,) = (t for t in trials_of(broken, "broken") if "attention_backend" in t.candidate)
    assert (lost.state, lost.cause) == (TrialState.INFEASIBLE, "not_effective")
    assert "attention_backend" in (lost.reason or "")
