"""An upgrade check between two real CPU builds of vLLM, between which a default moved: six launches of a tiny
model.
"""

import json
import os
from pathlib import Path

import pytest

from tests.engine.real import INTERPRETER, model
from tests.tuning.studies import TRACE, tuner
from tests.tuning.test_vllm import STUDY
from tuner.conclusions import UpgradeFinding
from tuner.engine.metrics import same_value
from tuner.history.store import Store
from tuner.knobs.catalogue import CATALOGUE
from tuner.search.trial_view import DERIVED
from tuner.tuning.upgrade import PINNED

pytestmark = pytest.mark.vllm_full

OLD = os.environ.get("TUNER_TEST_VLLM_OLD", "")
SPACE = 'about: One knob.\nvllm: ">=0.11.2"\nknobs:\n  max_num_seqs: [8, 16]\n'


def test_25_an_upgrade_between_two_real_builds_names_every_default_that_moved(tmp_path: Path) -> None:
    """vLLM 0.20 takes 92 % of the memory where 0.19 took 90 %."""
    for interpreter in (OLD, INTERPRETER):
        if not interpreter or not Path(interpreter).exists():
            pytest.skip("`make test-vllm-full` installs both builds")
    model(tmp_path / "model")
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "study.yaml").write_text(
        STUDY.replace("PYTHON", OLD).replace("baseline: {max_num_seqs: 1,", "baseline: {max_num_seqs: 16,")
    )
    taken = tuner(tmp_path, "trace", "import", TRACE, "--name", "conversation", "--max-len", 600)
    assert taken.returncode == 0, taken.stderr
    words = ("upgrade-check", "study.yaml", "--to", INTERPRETER, "--alias", "today", "--rounds", 2, "--json")
    done = tuner(tmp_path, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)["run"]
    found = UpgradeFinding.from_json(run["summary"]["upgrade"])
    assert (found.old.split("+")[0], found.new.split("+")[0]) == ("0.19.1", "0.32.0")
    assert found.compiles
    assert run["state"] == "FINISHED"
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}", create=False)
    said = store.conclusion(run["id"])
    assert said is not None
    assert said.repeats == 2
    assert said.baseline is not None
    assert said.baseline.dropped is None
    assert said.finalists[0].changes
    before, after = (each.effective for each in store.launches(said.study_id)[:2])
    both = before.keys() & after.keys() & CATALOGUE.keys()
    told = {name for name in both if not same_value(before[name], after[name])}
    assert told - {"max_num_seqs", *DERIVED} <= {m.name for m in found.moved}
    moved = {m.name: (m.before, m.after) for m in found.moved}
    assert moved["gpu_memory_utilization"] == (0.9, 0.92)
    assert PINNED in [arm.name for arm in said.finalists], "the new version ran with the old default too"
    print(found.sentence, *(f"{n}: {b} -> {a}" for n, (b, a) in moved.items()), sep="\n")
