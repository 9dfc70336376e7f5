"""One study, driven once on the simulated engine with noise and a planted winner, then read everywhere."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.service.surfaces import assert_one_truth, frozen, plain, read
from tests.tuning.studies import SPACE, STUDY, write
from tuner.commands import plan, tune
from tuner.conclusions import Conclusion, Judgement
from tuner.history.store import Store
from tuner.records import Study
from tuner.report import words
from tuner.tuning.context import RunEvent
from tuner.tuning.run import RunLimits
from tuner.tuning.virtual import HIDDEN

PLAN = "plan: {base: brief, repeats: 3, finalists: 2, tail_limit_s: 60}\nprice_per_gpu_hour: 2.5"
NOISY = (
    STUDY.replace("plan: quick", PLAN)
    .replace("kind: simulated", "kind: simulated\n  clock: virtual")
    .replace("duration_s: 1.0}]", "duration_s: 4.0}, {start_s: 40, duration_s: 4.0, held_out: true}]")
)
NOISE = {"from_s": 0, "launch_noise": 0.005}
PLANTED = SPACE.replace("[4, 16, 64]", "[4, 32, 64]").replace("[512, 2048, 8192]", "[2048]")
"""The baseline's four sequences queue; sixty-four do not, and a step takes longer."""


@dataclass(frozen=True)
class Told:
    """A study's first and second conclusion, and what was told of the first before the second run."""

    home: Path
    study: Study
    first: Conclusion
    second: Conclusion
    before: dict[str, object]


def drive(home: Path, slower: float | None = None) -> Conclusion:
    """One run of the study in this process; from its confirmation on the machine is so many times slower."""
    store = Store(f"sqlite:///{home / 'tuner.db'}")

    def listen(event: RunEvent) -> None:
        if event.kind == "confirm" and slower is not None:
            os.environ[HIDDEN] = json.dumps([{**NOISE, "slower": slower}])

    try:
        prepared = plan.prepared_study(home / "study.yaml")
        run = tune.on_its_node(prepared, store, RunLimits(trials=4, early=False), quiet=True, listen=listen)
        said = store.conclusion(run.id)
        assert said is not None
        return said
    finally:
        store.close()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    home = tmp_path_factory.mktemp("truth")
    write(home, NOISY, PLANTED)
    script = f"import sys; open({str(home / 'told.json')!r}, 'w').write(sys.stdin.read())"
    hook = [{"on": ["promotion"], "command": [sys.executable, "-c", script]}]
    (home / "notify.yaml").write_text(yaml.safe_dump(hook))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNER_HOME", str(home))
        patch.delenv("TUNER_DATABASE_URL", raising=False)
        patch.setenv(HIDDEN, json.dumps([NOISE]))
        first = drive(home)
        store = Store(f"sqlite:///{home / 'tuner.db'}", create=False)
        study = store.study(first.study_id)
        store.close()
        assert_one_truth(home, study, first)
        before = frozen(home, first)
        second = drive(home, slower=1.6)
    return Told(home, study, first, second, before)


def test_the_planted_winner_is_told_the_same_on_every_surface(told: Told) -> None:
    """The surfaces were read before the second run; see `assert_one_truth`."""
    assert told.first.outcome is Judgement.TRADE_OFF
    assert told.first.confirmed
    arm = told.first.arm(told.first.winner)
    assert arm is not None
    assert arm.candidate["max_num_seqs"] in (32, 64)
    made = {c.metric: c for c in arm.changes if c.where == "confirm"}
    assert (made["ttft_p95_ms"].word, made["tpot_p95_ms"].word) == ("better", "worse")


def test_a_trade_off_is_called_so_in_the_first_line(told: Told) -> None:
    assert "trade-off" in words.headline(told.first).split(".")[0]


def test_a_second_run_changes_no_earlier_row(told: Told) -> None:
    assert told.second.run_id != told.first.run_id
    assert frozen(told.home, told.first) == told.before


def test_a_machine_that_slows_down_is_not_trusted_on_any_surface(told: Told) -> None:
    assert told.second.outcome is Judgement.NOT_TRUSTED
    assert told.second.winner is None
    assert told.second.drift
    assert_one_truth(told.home, told.study, told.second)
    shown = read(told.home, told.study, told.second)
    for name in ("front", "run status", "report", "markdown", "page study"):
        assert "not to be trusted" in shown.texts[name], name
        if name != "run status":
            at = shown.texts[name].index(plain(words.headline(told.second)))
            last = shown.texts[name].index(plain(words.headline(told.first)))
            assert at < last, "what was confirmed before comes second"


def test_what_a_simulated_engine_takes_is_no_gpu_hours(told: Told) -> None:
    cost = told.first.cost
    assert (cost.gpus, cost.unit) == (0, "hours")
    assert cost.search_s > 0
    assert cost.confirm_s > 0
    assert "GPU-hours" not in words.cost(cost)
