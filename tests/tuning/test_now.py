"""What a run does right now is in a file while it runs, and nowhere once it has ended."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median

import pytest

from tests.history.records import a_launch, a_run, a_study, start
from tests.tuning.studies import SPACE, STUDY, VIRTUAL, answer, tuner, write
from tuner.commands import plan, tune
from tuner.history.store import Store
from tuner.records import Candidate, RunState, Study, Trial, repeat_of
from tuner.replay.plan import PLANS
from tuner.replay.prepare import SHOWN, Progress, _shown
from tuner.report.words import seconds
from tuner.tuning import now as right_now
from tuner.tuning.confirm import expected
from tuner.tuning.context import LAUNCH_S, SIMULATED_LAUNCH_S, RunEvent, usual_launch_s
from tuner.tuning.now import path_of, read, told_live
from tuner.tuning.run import RunLimits
from tuner.tuning.study import load

AT = datetime(2026, 3, 1, tzinfo=UTC)
TRIAL = Trial(id=1, study_id="s", run_id="r", number=7, candidate=Candidate(), started_at=AT)


def replaying(done_s: float, running: float = 3.0, part: str = "peak") -> RunEvent:
    progress = Progress(phase="window", slice=part, done_s=done_s, total_s=60.0, engine={"running": running})
    return RunEvent(kind="phase", text="window", trial=TRIAL, progress=progress)


def test_I27_3_the_file_holds_phase_slice_and_the_engine_s_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(right_now, "EVERY_S", 0.0)
    heard: list[RunEvent] = []
    tell = told_live(tmp_path, "r", PLANS["standard"], heard.append, lambda: AT)
    tell(RunEvent(kind="started", text="tpe", trial=TRIAL))
    found = read(tmp_path, "r")
    assert found is not None
    assert (found.phase, found.trial) == ("launching", 7)
    assert found.to_confirm == PLANS["standard"].repeats * (1 + PLANS["standard"].finalists)
    for done, running in ((0.0, 1.0), (2.0, 4.0), (4.0, 9.0)):
        tell(replaying(done, running))
    found = read(tmp_path, "r")
    assert found is not None
    assert (found.phase, found.slice, found.done_s, found.total_s) == ("window", "peak", 4.0, 60.0)
    assert found.engine == {"at_s": [0.0, 2.0, 4.0], "running": [1.0, 4.0, 9.0]}
    tell(replaying(1.0, 2.0, "calm"))
    found = read(tmp_path, "r")
    assert found is not None
    assert found.engine == {"at_s": [1.0], "running": [2.0]}, "another slice begins anew"
    said = "confirmation: launch 2 of 6"
    tell(RunEvent(kind="confirm", text=said, stage="confirmation", done=1, total=6, trial=TRIAL))
    found = read(tmp_path, "r")
    assert found is not None
    assert found.confirming == (1, 6)
    assert len(heard) == 6, "every event goes on to who listens"


def test_I27_3_a_file_that_cannot_be_written_or_read_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "live").write_text("in the way")
    told_live(tmp_path, "r", PLANS["quick"], lambda _: None, lambda: AT)(replaying(1.0))
    assert read(tmp_path, "r") is None
    (tmp_path / "live").unlink()
    (tmp_path / "live").mkdir()
    path_of(tmp_path, "r").write_text(json.dumps({"run": 3}))
    assert read(tmp_path, "r") is None


def test_I27_3_scrapes_tell_what_is_shown_at_once() -> None:
    lines = [
        "# HELP x", 'vllm:num_requests_running{model_name="m"} 15.0',
        'vllm:num_requests_waiting{model_name="m"} 2',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.25', 'vllm:num_preemptions_total{model_name="m"} 1',
        "process_open_fds 12", "",
    ]  # fmt: skip
    body = "\n".join(lines).encode()
    wanted = dict(zip(SHOWN, (15.0, 2.0, 0.25, 1.0), strict=True))
    assert _shown([b"HTTP/1.1 200 OK\r\n\r\n", body], "vllm") == wanted
    at = body.index(b"15.0") + 1
    parts = (body[:at], body[at:], b"")
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    assert _shown([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunked], "vllm") == wanted
    assert _shown([b"HTTP/1.1 503 Busy\r\n\r\n"], "vllm") == {}


def test_I27_3_a_run_leaves_no_file_when_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, STUDY.replace("kind: simulated", "kind: simulated\n  clock: virtual"), SPACE)
    monkeypatch.setenv("TUNER_HOME", str(tmp_path))
    monkeypatch.delenv("TUNER_DATABASE_URL", raising=False)
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    seen: set[bool] = set()
    tune.on_its_node(
        plan.prepared_study(tmp_path / "study.yaml"), store, RunLimits(trials=1, early=False), quiet=True,
        listen=lambda event: seen.add(any((tmp_path / "live").glob("*.json"))),
    )  # fmt: skip
    run = store.runs()[0]
    store.close()
    assert True in seen, "it was there while the run went on"
    assert read(tmp_path, run.id) is None
    assert run.state is RunState.FINISHED


def test_I27_3_the_end_of_the_whole_run_counts_the_confirmation(tmp_path: Path) -> None:
    from tests.history.records import finished
    from tuner.service.pages.studies import phase_of
    from tuner.tuning.now import RunNow, left_s

    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    run = a_run(store, a_study())
    finished(store, start(store, run, 0))
    trials = store.trials(run.study_id)
    later = run.started_at + timedelta(minutes=3)
    searching = RunNow(run=run.id, at=later, to_confirm=6)
    assert run.trials_limit == 40
    assert left_s(run, trials, searching, later) == 90.0 * (39 + 6)
    confirming = RunNow(
        run=run.id, at=later, confirming=(2, 6), phase="window", slice="peak", done_s=34, total_s=60
    )
    assert left_s(run, trials, confirming, later) == 90.0 * 4
    longer = [replace(each, held_out_s=60.0) for each in (searching, confirming)]
    assert [left_s(run, trials, each, later) for each in longer] == [90.0 * 39 + 150.0 * 6, 150.0 * 4], (
        "a launch of the confirmation also replays the held-out slice"
    )
    assert phase_of(confirming) == "confirming 3 of 6: replaying peak, 34 of 60 s"
    assert left_s(run, (), searching, later) is None, "nothing is known before a trial has ended"
    store.close()


def ready(store: Store, study: Study, name: str, took: float) -> None:
    store.add_study(study)
    store.add_launch(replace(a_launch(study, name), timeline={"ready_s": took}))


def test_A9_a_launch_is_expected_to_take_what_launches_took_on_this_node(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    path = write(tmp_path, STUDY, SPACE)
    prepared = load(path, store=store, now=AT)
    real = replace(prepared, facts=replace(prepared.facts, kind="vllm"))
    assert usual_launch_s(None, prepared) == usual_launch_s(store, prepared) == SIMULATED_LAUNCH_S
    assert usual_launch_s(store, real) == LAUNCH_S
    engine = prepared.study.engine_version
    ready(store, a_study("far", node="elsewhere", engine=engine), "L1", 900.0)
    ready(store, a_study("old", node=prepared.study.node, engine="0.1"), "L2", 800.0)
    assert usual_launch_s(store, real) == LAUNCH_S, "neither another node nor another version counts"
    other = replace(a_study("other", node=prepared.study.node, engine=engine), model="another")
    ready(store, other, "L3", 150.0)
    assert usual_launch_s(store, real) == 150.0
    ready(store, prepared.study, "L4", 30.0)
    assert usual_launch_s(store, real) == 30.0, "the study's own count first"
    store.close()


def test_A9_the_confirmation_is_expected_to_take_what_launches_took(tmp_path: Path) -> None:
    """A demo said six minutes for half a minute: its confirmation was planned with a guess of 57 s a launch
    while its engines were ready after 1 s. The run's own decisions and the dry run use the same times."""
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    prepared = load(write(tmp_path, STUDY, SPACE), store=store, now=AT)
    real = replace(prepared, facts=replace(prepared.facts, kind="vllm"))
    replay = 1.0 + 0.5 + 6.0  # the slice, the load before it, and at most what the plan's limits allow
    before, plan = expected(real, store)
    assert (before.trial_s, before.confirm_launch_s) == (replay + LAUNCH_S, replay + LAUNCH_S)
    for number, took in enumerate((9.0, 8.0, 4.0)):
        ready(store, prepared.study, f"L{number}", took)
    after, plan = expected(real, store)
    assert (after.trial_s, after.confirm_launch_s) == (replay + 8.0, replay + 8.0)
    assert after.confirm_s == plan.seconds == (replay + 8.0) * 2 * (1 + prepared.plan.finalists)
    store.close()


def test_a_launch_is_expected_to_take_what_launches_of_the_study_took(tmp_path: Path) -> None:
    """Their replays too: those of the simulated engine end long before the limits of the plan."""
    part = ", {start_s: 40, duration_s: 9, held_out: true}]"
    path = write(tmp_path, VIRTUAL.replace("duration_s: 1.0}]", "duration_s: 1.0}" + part), SPACE)
    assert tuner(tmp_path, "tune", path, "--trials", 4, "--all-trials").returncode == 0
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    prepared = load(path, store=store, now=AT)
    estimate, foreseen = expected(prepared, store)
    trials, launches = store.trials(prepared.study.id), store.launches(prepared.study.id)
    spans = [(t.ended_at - t.started_at).total_seconds() for t in trials if t.ended_at and not t.screened]
    again = [each.whole_s for each in launches if repeat_of(each.directory) and each.whole_s]
    assert estimate.trial_s == pytest.approx(median(spans))
    assert foreseen.launch_s == pytest.approx(median(again))
    assert foreseen.seconds == pytest.approx(sum(again))
    told = answer(tmp_path, "tune", path, "--dry-run", "--json")["seconds"]
    assert isinstance(told, dict)
    assert sum(told.values()) == pytest.approx(estimate.trial_s)
    guess, _ = expected(prepared, None)
    assert guess.trial_s > 2 * estimate.trial_s
    store.close()


@pytest.mark.parametrize("held_out", [False, True])
def test_A9_the_dry_run_has_one_sum(tmp_path: Path, held_out: bool) -> None:
    """Trials and a confirmation that uses up the launches beside them take what all launches take."""
    part = ", {start_s: 40, duration_s: 9, held_out: true}" if held_out else ""
    study = STUDY.replace("duration_s: 1.0}", "duration_s: 1.0}" + part)
    study = study.replace("plan: quick", "plan: {base: quick, repeats: 3, finalists: 1}")
    prepared = load(write(tmp_path, study, SPACE), store=None, now=AT)
    each = sum(plan.seconds(prepared).values())
    foreseen, _ = plan.planned(prepared, None)
    trials, launches = plan.budget_words(3, each, foreseen, screens=True)
    whole = 3 * each + foreseen.seconds
    assert f"confirmation). They take at most {seconds(whole)};" in launches
    assert f"about {seconds(3 * each)}, or less" in trials
    alone, _ = plan.budget_words(3, each, foreseen)
    assert alone == f"Trials: at most 3, with the baseline. They take about {seconds(3 * each)}."
    said = plan.confirmation_words(foreseen, foreseen, {})
    assert f"about {seconds(foreseen.seconds)}. It is not known how much" in said
    assert "one repeat" not in said
    once = replace(foreseen, rounds=1)
    more = plan.confirmation_words(once, once, {})
    assert "it adds repeats, up to 3" in more
    assert more.endswith("so one repeat decides nothing.")
