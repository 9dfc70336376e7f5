"""One study, driven once on the simulated engine with noise and a planted winner, then read everywhere."""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from tests.history.records import a_conclusion, a_measurement, a_run, a_study, finished, start
from tests.service.surfaces import assert_one_truth, frozen, plain, read
from tests.tuning.studies import SPACE, STUDY, write
from tuner.commands import plan, tune
from tuner.conclusions import Conclusion, Difference, Judgement
from tuner.history.store import Store
from tuner.records import RunState, Study
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


def at_home(home: Path, patch: pytest.MonkeyPatch) -> None:
    """The environment of a run whose launches differ by NOISE."""
    patch.setenv("TUNER_HOME", str(home))
    patch.delenv("TUNER_DATABASE_URL", raising=False)
    patch.setenv(HIDDEN, json.dumps([NOISE]))


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
        at_home(home, patch)
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


def test_the_run_after_one_that_is_not_trusted_begins_with_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that stays slower every later run was not trusted either: its search had no baseline of
    its own.
    """
    write(tmp_path, NOISY, PLANTED)
    at_home(tmp_path, monkeypatch)
    first = drive(tmp_path, slower=1.6)
    assert first.outcome is Judgement.NOT_TRUSTED
    second, third = drive(tmp_path), drive(tmp_path)
    assert second.outcome is third.outcome is Judgement.TRADE_OFF
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    trials = store.trials(first.study_id)
    study = store.study(first.study_id)
    store.close()
    bases = [t for t in trials if t.is_baseline]
    assert [(t.run_id, t.number) for t in bases] == [(first.run_id, 0), (second.run_id, 4)]
    assert [each.baseline and each.baseline.trial for each in (first, second, third)] == [0, 4, 4]
    assert_one_truth(tmp_path, study, third)


def test_what_a_simulated_engine_takes_is_no_gpu_hours(told: Told) -> None:
    cost = told.first.cost
    assert cost.gpus == 0
    assert cost.search_s > 0
    assert cost.confirm_s > 0
    assert "GPU-hours" not in words.cost(cost)


@pytest.mark.parametrize("compared", [False, True])
def test_B7_the_held_out_slice_is_shown_on_every_surface(tmp_path: Path, compared: bool) -> None:
    """Its repeats were measured and shown nowhere where today's configuration had not served."""
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    study = a_study()
    run = a_run(store, study)
    finished(store, start(store, run, 0, origin="baseline"), a_measurement(210.0))
    finished(store, start(store, run, 2), a_measurement(88.0))
    made = a_conclusion(run, profiles={})
    arm, base = made.finalists[0], made.baseline
    assert base is not None
    held = Difference(metric="ttft_p95_ms", where="held_out", before=300.0, after=231.0, change=-0.23,
                      low=-0.3, high=-0.2, word="better", repeats=3)  # fmt: skip
    arm = replace(arm, held_out={"ttft_p95_ms": 231.0, "slo_attainment": 0.873})
    if compared:
        arm = replace(arm, changes=(*arm.changes, held))
    else:
        arm = replace(arm, changes=())
        base = replace(base, dropped="it did not serve", attainment=None, misses_slo_by=None, confirmed={})
        made = replace(made, outcome=Judgement.BASELINE_FAILED)
    said = replace(made, finalists=(arm,), baseline=base)
    store.save_run(replace(run, state=RunState.FINISHED, ended_at=said.at), said)
    assert store.conclusion(run.id) == said
    store.close()
    shown = read(tmp_path, study, said)
    for name in ("front", "run status", "report", "markdown", "page study"):
        text = shown.texts[name]
        assert "87.3 %" in text, name
        assert ("−23 %" in text) == compared, name
        assert ("231 ms" in text) != compared, name
        assert "the held-out slice" in text or name in ("front", "run status"), name
