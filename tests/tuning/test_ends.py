"""Issue 29 B: how a study, a run and a budget end."""

import json
import math
import os
import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_root_causes import LOGS
from tests.history.records import a_measurement, a_run, finished, start
from tests.tuning import breaking
from tests.tuning.studies import SPACE, STUDY, VIRTUAL, answer, tuner, write
from tuner.commands import plan
from tuner.commands.common import model_name
from tuner.errors import Aborted, Infeasible, StudyFailed
from tuner.history.store import Store
from tuner.knobs.model import from_config
from tuner.metrics import CANCELLED, CUT
from tuner.records import (
    Candidate,
    Launch,
    Measurement,
    Outcome,
    Run,
    RunState,
    SliceMeasurement,
    Trial,
    TrialState,
)
from tuner.replay import outcomes
from tuner.tuning.attempt import blamed, errors_of, failing
from tuner.tuning.context import LaunchBudget, most_launches
from tuner.tuning.run import hopeless, never_started
from tuner.tuning.study import Prepared, load

NOW = datetime(2026, 11, 28, tzinfo=UTC)


def store_of(home: Path) -> Store:
    return Store(f"sqlite:///{home / 'tuner.db'}", create=False)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_29b2_two_candidates_that_fail_alike_at_start_up_end_the_run(tmp_path: Path) -> None:
    """No pattern knows this fault, and no knob of the space acts on it: four launches, not sixteen."""
    study = breaking.study(tmp_path, LOGS / "unknown-root-cause.log")
    done = tuner(tmp_path, "tune", study, "--trials", 8)
    assert done.returncode == 7, done.stderr
    assert "AttributeError: the plugin 'gizmo' has no entry point" in done.stderr
    assert len(breaking.launches(tmp_path)) == 4
    run = store_of(tmp_path).runs()[0]
    assert run.state is RunState.FAILED
    assert store_of(tmp_path).last_success() == {}


MEMORY = (
    "ValueError: Available memory on node 0 (16.38/19.71 GiB) on startup is less than desired CPU memory"
    " utilization (0.92, 18.14 GiB)."
)


def test_29_40_memory_that_no_knob_asks_less_of_ends_the_run(tmp_path: Path) -> None:
    """The space turns max_num_seqs, but an engine's share of the memory does not depend on it."""
    (tmp_path / "oom.log").write_text(MEMORY)
    done = tuner(tmp_path, "tune", breaking.study(tmp_path, tmp_path / "oom.log"), "--trials", 8)
    assert done.returncode == 7, done.stderr
    assert "18.14 GiB needed (0.92 of the memory), 16.38 of 19.71 GiB free" in done.stderr
    assert len(breaking.launches(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("trials", [3, 5])
def test_19_6_the_budget_of_trials_is_a_budget(tmp_path: Path, trials: int) -> None:
    """Trial numbers, the baseline's and every relaunch included; launches at most three times as many."""
    study = write(tmp_path, VIRTUAL)
    done = tuner(tmp_path, "tune", study, "--trials", trials, "--all-trials")
    assert done.returncode == 0, done.stderr
    store = store_of(tmp_path)
    run = store.runs()[0]
    assert len({t.number for t in store.trials(run.study_id)}) == trials
    assert len(store.launches(run.study_id)) <= 3 * trials
    finalists = run.summary.get("finalists")
    assert finalists, run.summary


def test_19_6_the_dry_run_says_numbers_launches_and_hours(tmp_path: Path) -> None:
    said = tuner(tmp_path, "tune", write(tmp_path), "--trials", 3, "--dry-run").stdout
    assert "Trials: at most 3, with the baseline" in said
    assert "Launches: at most 9 (one per trial, and 6 for retries" in said
    assert "Fewer than 4 trials may leave no launches for the confirmation." in " ".join(said.split())
    enough = tuner(tmp_path, "tune", write(tmp_path), "--trials", 4, "--dry-run").stdout
    assert "may leave no launches" not in enough
    assert answer(tmp_path, "tune", tmp_path / "study.yaml", "--dry-run", "--json")["launches"] == 9


def test_the_dry_run_says_what_the_window_is_too_short_for(tmp_path: Path) -> None:
    """10 hours have time for everything, the time of the confirmation alone has time for nothing else."""
    asked = ("tune", write(tmp_path), "--trials", 6, "--dry-run")
    took: Any = answer(tmp_path, *asked, "--json")
    confirmation_s = took["confirmation"]["seconds"]
    whole_s = confirmation_s + 6 * (took["seconds"]["replay"] + took["seconds"]["launch"])

    def said(hours: float) -> str:
        return " ".join(tuner(tmp_path, *asked, "--hours", f"{hours:.4f}").stdout.split())

    assert "is too short for" not in said(10)
    early = "is too short for all trials: the search ends early, so that the confirmation fits."
    assert early in said(0.9 * whole_s / 3600)
    alone = "is too short for trials and a confirmation: the run may end without a confirmation."
    assert alone in said(confirmation_s / 3600)
    assert "The window of 36 s is too short" in said(0.01), "all of it, however long the command takes"


def test_the_window_is_too_short_only_for_what_the_run_does(tmp_path: Path) -> None:
    asked = "plan: {base: quick, finalists: 1, repeats: 2}"
    prepared = load(write(tmp_path, STUDY.replace("plan: quick", asked)), store=None, now=NOW)
    full, _ = plan.planned(prepared, None)
    _, none = plan.planned(prepared, 1)
    took = full.seconds
    assert plan.window_words(took + 11, 1, 10.0, full) == "", "the only trial leaves the time"
    assert "may end without a confirmation." in plan.window_words(took + 11, None, 10.0, full)
    assert "so that the confirmation fits" in plan.window_words(2 * took, 1, 1.5 * took, full)
    assert plan.window_words(took + 11, 0, 10.0, full) == ""
    assert "for the confirmation: the run may end without it." in plan.window_words(took - 1, 0, 10.0, full)
    assert plan.window_words(5.0, 1, 10.0, none).endswith("too short for all trials: the search ends early.")


def test_the_dry_run_counts_the_hours_that_a_stopped_run_has_spent(tmp_path: Path) -> None:
    file = write(tmp_path)
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    run = a_run(store, load(file, store=store, now=NOW).study)
    row = store.add_launch(Launch(id="a", study_id=run.study_id, argv=(), started_at=run.started_at))
    store.finish_launch(replace(row, ended_at=row.started_at + timedelta(seconds=150)))
    done = tuner(tmp_path, "tune", file, "--hours", "0.05", "--dry-run")
    assert "The window of 30 s is too short" in done.stdout, done.stderr


def test_the_dry_run_says_that_a_run_uses_the_node(tmp_path: Path) -> None:
    """Also a run of another study; not one whose process is gone."""
    file = write(tmp_path)
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    run = a_run(store, load(file, store=store, now=NOW).study)
    other = write(tmp_path, STUDY.replace("name: tiny", "name: other"))
    sentence = f"run {run.id} is using node 'local': `tuner tune` is refused until it ends."
    store.save_run(replace(run, host=socket.gethostname(), pid=os.getpid()))
    assert sentence in tuner(tmp_path, "tune", other, "--dry-run").stderr
    store.save_run(replace(run, host=socket.gethostname(), pid=None))
    assert "is using node" not in tuner(tmp_path, "tune", other, "--dry-run").stderr


def test_the_dry_run_of_a_stopped_run_says_what_it_continues(tmp_path: Path) -> None:
    """The interrupted trial comes next; a run that only confirms launches the finalists."""
    file = write(tmp_path)
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    run = a_run(store, load(file, store=store, now=NOW).study)
    search_twice(store, run)
    start(store, run, 2)
    said = " ".join(tuner(tmp_path, "tune", file, "--trials", 5, "--dry-run").stdout.split())
    assert f"This continues run {run.id}: 2 of 5 trials and 0 of 15 launches are done." in said
    told = answer(tmp_path, "tune", file, "--trials", 5, "--dry-run", "--json")
    assert told["continues"] == {"run": run.id, "trials": 2, "launches": 0}
    assert seqs_of(told) == {"baseline": "4", "next": "66"}
    alone = answer(tmp_path, "tune", file, "--confirm-only", "--dry-run", "--json")
    assert seqs_of(alone) == {
        "baseline": "4",
        "trial 1": "65",
    }
    store.save_run(replace(run, state=RunState.FINISHED, ended_at=run.started_at))
    store.close()
    assert answer(tmp_path, "tune", file, "--dry-run", "--json")["continues"] is None


def test_a_run_that_searched_is_not_said_to_only_confirm(tmp_path: Path) -> None:
    """It was killed in its confirmation, and is continued with --confirm-only."""
    file = write(tmp_path, VIRTUAL)
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    run = a_run(store, load(file, store=store, now=NOW).study)
    search_twice(store, run)
    done = tuner(tmp_path, "tune", file, "--confirm-only")
    assert done.returncode == 0, done.stderr
    ended = store.run(run.id)
    assert (ended.state, ended.reason) == (RunState.FINISHED, "no more trials were asked for")
    new = tuner(tmp_path, "tune", file, "--confirm-only")
    assert "only confirms, without a search" in new.stdout, new.stderr
    store.close()


def search_twice(store: Store, run: Run) -> None:
    """A baseline and a better trial, both complete."""
    for number, origin, ttft in ((0, "baseline", 210.0), (1, "tpe", 90.0)):
        values = {"ttft_p95_ms": ttft, "tpot_p95_ms": 20.0, "goodput_rps": 5.0, "slo_attainment": 1.0}
        made = a_measurement(values={**values, "requests": 100.0, "failed": 0.0})
        finished(store, start(store, run, number, origin=origin), made)


def seqs_of(told: dict[str, object]) -> dict[str, str]:
    """The max_num_seqs of each command line."""
    lines = told["commands"]
    assert isinstance(lines, dict)
    return {name: line[line.index("--max-num-seqs") + 1] for name, line in lines.items()}


def test_the_repeats_of_the_dry_run_fit_into_its_launches(tmp_path: Path) -> None:
    """A run confirms fewer finalists where its launches are not enough to measure each twice."""
    asked = "plan: {base: quick, finalists: 2, repeats: %d, most_repeats: 3}"
    few, more = (
        load(write(tmp_path, STUDY.replace("plan: quick", asked % repeats)), store=None, now=NOW)
        for repeats in (2, 3)
    )

    def said(prepared: Prepared, trials: int, *, screens: bool = True) -> str:
        return plan.confirmation_words(*plan.planned(prepared, trials), {}, screens=screens)

    assert "at most 2 finalists, 2 times each." in said(few, 4)
    assert "up to 3 " in said(few, 4)
    assert "The launches that are not for trials are enough for 2 repeats." in said(few, 4)
    assert "are enough for" not in said(few, 5)
    assert "at most 2 finalists, 2 times each." in said(more, 4), "no more than the launches are enough for"
    assert "enough for 2 repeats." in said(more, 4)
    assert "at most 1 finalist, 2 times each." in said(few, 2)
    assert "are enough for 1 of 2 finalists and 2 repeats. If trials are screened, more" in said(few, 2)
    assert "screened" not in said(few, 2, screens=False)
    none = "The launches that are not for trials are too few for a confirmation: it needs at least 4."
    assert said(more, 1) == said(few, 1) == none
    assert [plan.confirmation(few, 1)[name] for name in ("repeats", "seconds")] == [0, 0]
    told = plan.confirmation(few, 2)
    assert (told["finalists"], told["repeats"], told["most_repeats"]) == (1, 2, 2)


def test_19_6_the_launch_over_the_budget_is_never_begun() -> None:
    budget = LaunchBudget(most=most_launches(1), begun=1)
    budget.take()
    budget.take()
    with pytest.raises(Aborted, match="the budget of 3 launches is spent") as caught:
        budget.take()
    assert caught.value.cause == "budget"
    assert budget.begun == 3
    assert LaunchBudget().left == math.inf


def test_29b2_a_knob_of_the_space_that_acts_on_the_cause_keeps_the_run_going(tmp_path: Path) -> None:
    prepared = load(write(tmp_path), store=None, now=NOW)
    run = [ended(0, 4, "no_kv_memory"), ended(1, 16, "no_kv_memory"), ended(2, 64, "no_kv_memory")]
    assert hopeless(prepared, run) is None, "max_num_seqs is turned"
    run = [ended(0, 4, "init_timeout"), ended(1, 16, "init_timeout")]
    assert hopeless(prepared, run) == run[1]
    assert hopeless(prepared, [run[0], replace(run[1], candidate=run[0].candidate)]) is None
    assert hopeless(prepared, [run[0], replace(run[1], reason="another reason")]) is None
    assert hopeless(prepared, [run[0], replace(run[1], cause="errors")]) is None
    fails = StudyFailed("the card does not take it", cause="dtype", evidence="set the `dtype` flag")
    assert isinstance(blamed(prepared, fails, served=False), StudyFailed)
    assert isinstance(blamed(prepared, fails, served=True), Infeasible), "another candidate served"
    space = SPACE.replace("knobs:", "knobs:\n  dtype: [bfloat16, float16]")
    with_dtype = write(tmp_path, f"{STUDY}quality: off\n", space)
    turns = load(with_dtype, store=None, now=NOW)
    assert isinstance(blamed(turns, fails, served=False), Infeasible)
    driver = StudyFailed("too old", cause="driver", evidence="RuntimeError: too old")
    assert isinstance(blamed(turns, driver, served=True), StudyFailed)


def test_29b1_a_configuration_that_only_the_study_fixes_is_the_studys(tmp_path: Path) -> None:
    prepared = load(write(tmp_path), store=None, now=NOW)
    fixed = Infeasible("refused", cause="config_invalid", evidence="max_model_len: must be positive")
    assert isinstance(blamed(prepared, fixed, served=False), StudyFailed)
    both = Infeasible("refused", cause="config_invalid", evidence="max_num_seqs (8) over max_model_len")
    assert isinstance(blamed(prepared, both, served=False), Infeasible)


def ended(number: int, seqs: int, cause: str) -> Trial:
    return Trial(
        id=number, study_id="s", run_id="r", number=number, candidate=Candidate({"max_num_seqs": seqs}),
        state=TrialState.INFEASIBLE, cause=cause, reason=f"{cause}: 90{number} s", started_at=NOW,
    )  # fmt: skip


def test_24_3_a_failure_names_its_kind(tmp_path: Path) -> None:
    """By the outcomes that the measurement keeps; ids in a message do not make kinds of it."""
    late = "no complete answer within the deadline of 60 s"
    values = {"failed": 32.0, "requests": 533.0}
    assert failing(values, {late: 32}) == f"32 of 533 requests: {late}"
    assert failing(values, {late: 30, "HTTP 500": 2}) == f"32 of 533 requests failed: 30 {late}; 2 HTTP 500"
    path = tmp_path / "a.parquet"
    errors = [late, late, None, CANCELLED, "HTTP 400: 0123456789abcdef", "HTTP 400: fedcba9876543210", CUT]
    outcomes.write(path, [Outcome(row=n, scheduled_s=0.0, error=each) for n, each in enumerate(errors)])
    part = SliceMeasurement(name="peak", window_s=1.0, values={}, outcomes_file=str(path))
    assert errors_of(Measurement(values={}, slices=(part,))) == {
        late: 2, "HTTP 400: …": 2, "still ran at the end of the tail (plan: tail_limit_s)": 1,
    }  # fmt: skip
    path.unlink()
    assert errors_of(Measurement(values={}, slices=(part,))) == {}


REFUSED = {
    "more than the model": (("len: 16384", "len: 99999"), "99999 is too large"),
    "in thousands": (("len: 16384", "len: 40K"), "40K is too large"),
    "in the baseline": (("{max_num_seqs: 4}", "{max_model_len: 40000}"), "baseline.max_model_len: 40000 is"),
    "above its range": (("len: 16384", "len: 16384, gpu-memory-utilization: 1.5"), "1.5 is above 1"),
    "no number": (("len: 16384", "len: abc"), "engine.args.max-model-len: 'abc' is not a whole number"),
    "a switch": (("len: 16384", "len: 16384, kv_cache_memory_bytes: true"), "True is not a whole number"),
    "more cards than there are": (("{max_num_seqs: 4}", "{tensor_parallel_size: 16}"),
                                  "needs 16 GPUs, but there are 1"),
    "more cards, fixed": (("len: 16384", "len: 16384, pipeline-parallel-size: 2"), "needs 2 GPUs"),
    "a head for three cards": (("{max_num_seqs: 4}", "{tensor_parallel_size: 3}"), "baseline cannot start"),
    "a budget below the sequences": (("{max_num_seqs: 4}", "{max_num_seqs: 4, max_num_batched_tokens: 1}"),
                                     "max_num_batched_tokens 1 is below max_num_seqs 4"),
    "a weight": (("seed: 3", "winner: {weights: {ttft_p95: 2}}"),
                 "'ttft_p95' is not an objective of this study"),
    "a stop command": (("kind: simulated", "kind: vllm\n  python: /bin/sh\n  stop_command: [no-such]"),
                       "there is no program 'no-such'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_29b3_what_the_file_tells_is_refused_before_anything_is_written(tmp_path: Path, case: str) -> None:
    """Exit code 2: nothing was launched, and no database was made."""
    (old, new), sentence = REFUSED[case]
    assert old in STUDY
    home = tmp_path / "home"
    done = tuner(home, "tune", write(tmp_path, STUDY.replace(old, new)))
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert not (home / "tuner.db").exists()
    assert not (home / "trials").exists()


def test_29c_a_longer_request_than_the_model_takes_does_not_ask_for_a_longer_engine(tmp_path: Path) -> None:
    shape = {"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    path = tmp_path / "config.json"
    for rope, longest in [
        (None, 1000), ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),
        ({"type": "linear", "factor": 2.0}, 2000), ({"rope_type": "llama3", "factor": 8.0}, 1000),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
    ]:  # fmt: skip
        path.write_text(json.dumps({**shape, "max_position_embeddings": 1000, "rope_scaling": rope}))
        assert from_config("m", path).longest == longest, rope
    prepared = load(write(tmp_path), store=None, now=NOW)
    assert "max_model_len 40000" in (prepared.known_failure(Candidate({"max_model_len": 40000})) or "")
    lifted = STUDY.replace(
        "max-model-len: 16384}", "max-model-len: 99999}\n  env: {VLLM_ALLOW_LONG_MAX_MODEL_LEN: 1}"
    )
    assert load(write(tmp_path, lifted), store=None, now=NOW).max_model_len == 99999


def test_29b2_the_next_run_begins_with_the_baseline_that_never_started(tmp_path: Path) -> None:
    """What hindered it may have been mended; a study in which anything was measured goes on."""
    base = replace(ended(0, 4, "crashed"), origin="baseline", run_id="night-1")
    other = replace(ended(1, 16, "crashed"), run_id="night-1")
    assert never_started([base, other], "night-2") == base
    assert never_started([base, other], "night-1") is None
    again = replace(base, id=9, run_id="night-2", attempt=1)
    assert never_started([base, other, again], "night-2") is None, "it was tried tonight"
    served = replace(other, measurements=(Measurement(values={}),))
    assert never_started([base, served], "night-2") is None
    assert never_started([replace(base, cause="errors")], "night-2") is None


def test_29c_a_model_and_its_full_path_are_one_model(tmp_path: Path) -> None:
    """One study, one history, one profile key; the command line takes either."""
    shape = {"vocab_size": 999, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
             "max_position_embeddings": 32768}  # fmt: skip
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(shape))
    found = set()
    for name in ("tiny", "./tiny", str(tmp_path / "tiny"), f"{tmp_path}/../{tmp_path.name}/tiny/"):
        path = write(tmp_path, STUDY.replace("model: Qwen/Qwen2.5-7B-Instruct", f"model: {name}"))
        study = load(path, store=None, now=NOW).study
        found.add((study.id, study.model))
    assert len(found) == 1
    assert {model for _, model in found} == {str((tmp_path / "tiny").resolve())}
    assert model_name(f"{tmp_path}/tiny/") == str((tmp_path / "tiny").resolve())
    assert model_name("Qwen/Qwen2.5-7B-Instruct") == "Qwen/Qwen2.5-7B-Instruct"
