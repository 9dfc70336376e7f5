"""`tuner compare`: arms launched in turns on the virtual clock, until every difference is known."""

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.tuning.studies import STUDY, tuner, write
from tuner.commands.compare import command_lines
from tuner.conclusions import Conclusion, Difference, Judgement
from tuner.errors import BadInput, NotFound
from tuner.history.store import Store
from tuner.records import Candidate, Value
from tuner.tuning import next_trial as seeds
from tuner.tuning.comparison import arm_of, compared, tells_more
from tuner.tuning.study import Prepared, load

CALM = (
    STUDY.replace("  kind: simulated\n", "  kind: simulated\n  clock: virtual\n")
    .replace("plan: quick", "plan: brief")
    .replace("baseline: {max_num_seqs: 4}", "baseline: {max_num_seqs: 64}")
    .replace("[{start_s: 20, duration_s: 1.0}]", "[{start_s: 0, duration_s: 25}]")
    + "objectives: [ttft_p50_ms, tpot_p50_ms]\n"
)
NOISE = {"TUNER_SIM_HIDDEN": json.dumps([{"launch_noise": 0.01}])}
SLOW = "version: 0.33.0\nslower: 1.15\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study, and a release of the simulated engine that is 15 % slower."""
    write(tmp_path, CALM)
    (tmp_path / "slow.yaml").write_text(SLOW)
    return tmp_path


def ran(folder: Path, *words: object, code: int = 0, more: Mapping[str, str] = NOISE) -> Conclusion:
    done = tuner(folder / "home", "compare", *words, "--study", "study.yaml", "--json", cwd=folder, more=more)
    assert done.returncode == code, (done.returncode, done.stderr)
    found = json.loads(done.stdout)["conclusion"]
    found.pop("confirmed")
    return Conclusion.from_json(found)


def store_of(folder: Path) -> Store:
    return Store(f"sqlite:///{folder / 'home' / 'tuner.db'}", create=False)


def test_a_slower_release_is_found_before_the_budget_is_spent_and_fails_the_pipeline(folder: Path) -> None:
    said = ran(folder, "today", "today@slow.yaml", "--fail-if", "worse:5%", code=22)
    (arm,) = said.finalists
    assert said.baseline is not None
    assert (said.baseline.name, arm.name) == ("today", "today@0.33.0")
    assert (said.baseline.engine, arm.engine) == ("0.32.0", "0.33.0")
    tpot = arm.change("tpot_p50_ms")
    assert tpot is not None
    assert tpot.change is not None
    assert tpot.change > 0.1
    assert tpot.word == "worse"
    assert said.winner is None
    assert said.repeats < 6, "it stops as soon as it knows"
    assert "today@0.33.0 against today: ttft_p50_ms" in said.sentence
    assert "Every difference is known" in said.sentence
    run = store_of(folder).run(said.run_id)
    assert run.reason == "every difference is known"
    told: Any = run.summary["compared"]
    assert [(each["name"], each["engine"]["version"]) for each in told] == [
        ("today", "0.32.0"), ("today@0.33.0", "0.33.0"),
    ], "each arm with its own engine"  # fmt: skip
    assert [sorted(each["engine"]["env"]) for each in told] == [[], ["TUNER_SIM_RELEASE"]]
    assert told == store_of(folder).study(run.study_id).spec["arms"]


def test_arms_that_differ_only_in_their_environment_are_told_with_it(folder: Path) -> None:
    store = Store("sqlite://")
    prepared = prepared_of(folder, store)
    arms = [
        arm_of(f"{name}=env VLLM_X={name} vllm serve m", prepared, store, base=folder) for name in ("a", "b")
    ]
    told: Any = compared(arms, margin=0.1).study.spec["arms"]
    assert [each["engine"]["env"]["VLLM_X"] for each in told] == ["a", "b"]


def test_a_configuration_beside_itself_raises_no_alarm_and_is_settled(folder: Path) -> None:
    said = ran(folder, "today", "again=today", "--fail-if", "worse:15%", "--fail-if", "open")
    (arm,) = said.finalists
    assert {c.word for c in arm.changes} == {"open"}
    assert said.repeats < 6
    assert all(c.within is not None and c.within < 0.15 for c in arm.changes)
    assert "those that are not clear are the same within 15 %" in said.sentence
    assert said.winner is None


@pytest.mark.slow
def test_arms_are_interleaved_in_fresh_processes_on_the_same_requests(folder: Path) -> None:
    ran(folder, "today", "defaults", "few='--max-num-seqs 16'".replace("'", ""))
    store = store_of(folder)
    (study,) = store.studies()
    launches = [each.directory or "" for each in store.launches(study.id)]
    order = [(int(d.split("/")[-1][:4]), int(d.split("-")[-2])) for d in launches]
    assert [n for n, r in order if r == 1] == [0, 1, 2]
    told = " ".join(tuner(folder / "home", "front", study.id, "--timings").stdout.split())
    assert "First values are from the first launch of each arm, confirmed values from" in told
    assert " comparison 1 " in told
    assert " confirmation 1 " not in told
    for kind in ("html", "md"):
        report = tuner(folder / "home", "report", study.id, "--format", kind, "-o", "-").stdout
        assert "trial 2 (comparison 2)" in report
        assert "(confirmation" not in report
        assert "tuner tune study.yaml" not in report, "no study file has arms"
    head = tuner(folder / "home", "trial", "show", study.id, 1).stdout.splitlines()[2].split("  ")
    assert [name.strip() for name in head if name][:3] == ["measurement", "first launch", "comparison 1"]
    assert [n for n, r in order if r == 2] == [2, 1, 0]
    assert len({each.id for each in store.launches(study.id)}) == len(launches)
    rows = {t.number: t.measurements[0].values["requests"] for t in store.trials(study.id)}
    assert len(set(rows.values())) == 1


def test_the_log_of_a_comparison_counts_its_launches_from_the_first_one(folder: Path) -> None:
    words = ("today", "few='--max-num-seqs 16'".replace("'", ""), "--study", "study.yaml", "--rounds", 2)
    done = tuner(folder / "home", "compare", *words, cwd=folder, more=NOISE)
    assert re.findall(r"\((\w+ \d\S* \w+)\)", done.stderr) == [
        f"comparison {launches}/4 launches" for launches in (1, 2, 2, 3)
    ]
    assert "search" not in done.stderr


def test_a_better_arm_is_a_winner_that_run_status_shows_and_the_history_only_counts(folder: Path) -> None:
    said = ran(folder, "old=today@slow.yaml", "today")
    assert (said.outcome, said.winner) == (Judgement.CLEAR_WINNER, 1)
    assert said.profiles == {}, "a comparison publishes nothing"
    shown = tuner(folder / "home", "run", "status", said.run_id)
    assert "clear winner: today against old" in shown.stdout
    words = ("history", "--model", "Qwen/Qwen2.5-7B-Instruct", "--node", "local", "--workload", "chat")
    table = tuner(folder / "home", *words, "--metric", "tpot_p50_ms")
    assert table.stdout.splitlines() == [
        "no run has measured tpot_p50_ms yet",
        "left out: 1 run of comparisons and upgrade checks; see `tuner run list`",
    ]
    assert json.loads(tuner(folder / "home", *words, "--metric", "tpot_p50_ms", "--json").stdout) == []


def test_an_arm_that_does_not_serve_is_dropped_and_fails_the_pipeline(folder: Path) -> None:
    said = ran(folder, "today", "none=--gpu-memory-utilization 0.1", "--fail-if", "worse:50%", code=22)
    (arm,) = said.finalists
    assert arm.dropped is not None
    assert "KV" in arm.dropped or "cache" in arm.dropped
    assert said.winner is None


def test_the_budget_ends_a_comparison_that_is_open_and_says_so(folder: Path) -> None:
    loud = {"TUNER_SIM_HIDDEN": json.dumps([{"launch_noise": 0.12}])}
    said = ran(folder, "today", "b=today", "--rounds", 3, "--fail-if", "open", code=23, more=loud)
    assert "Open after 3 rounds (all 3 rounds are used)" in said.sentence
    assert "of b" in said.sentence


@pytest.mark.slow
def test_a_comparison_seeds_no_study_and_leaves_the_studys_own_trials_alone(folder: Path) -> None:
    ran(folder, "today", "defaults")
    store = store_of(folder)
    prepared = load(folder / "study.yaml", store=store, now=store.studies()[0].created_at)
    assert prepared.study.id not in {s.id for s in store.studies()}
    assert seeds.fronts_of(store, prepared) == ()


@pytest.mark.parametrize(
    ("change", "within", "reach", "more"),
    [
        (0.01, 0.06, 0.08, False),  # smaller than the margin, and it leans to no side
        (0.05, 0.08, 0.06, True),  # smaller than the margin, and leans: it may become clear
        (-0.05, 0.08, 0.06, True),
        (0.05, 0.08, 0.03, False),  # leans, but not for the noise between launches
        (0.01, 0.019, 0.03, False),  # nobody changes an engine for so little
        (0.01, 0.20, 0.08, True),  # not yet smaller than the margin
        (0.01, 0.20, 0.04, False),  # the requests differ too much
        (0.01, None, math.inf, True),
    ],
)
def test_another_round_is_measured_only_where_it_may_tell_more(
    change: float, within: float | None, reach: float, more: bool
) -> None:
    found = Difference(
        metric="tpot_p50_ms", before=1.0, after=1.0 + change, change=change, low=-1.0, high=None, word="open",
        repeats=2, within=within,
    )  # fmt: skip
    assert tells_more(found, reach, 0.10) is more


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("today",), "two to 5 arms"),
        (("today", "today"), "two arms have the name 'today'"),
        (("today", "todya"), "did you mean 'today'?"),
        (("today", "today@nowhere.yaml"), "with a release of the simulated engine"),
        (("today", "--max-num-seq 4 --nonsense 1"), "nonsense"),
        (("today", "defaults", "--fail-if", "better:5%"), "worse:5%"),
    ],
)
def test_a_wrong_arm_is_named(folder: Path, words: tuple[str, ...], part: str) -> None:
    words = tuple(f"b={w}" if w.startswith("--max") else w for w in words)
    done = tuner(folder / "home", "compare", *words, "--study", "study.yaml", cwd=folder)
    assert done.returncode in (2, 4), done.stderr
    assert part in done.stderr


def prepared_of(folder: Path, store: Store) -> Prepared:
    return load(folder / "study.yaml", store=store, now=NOW)


NOW = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "name", "knobs"),
    [
        ("today", "today", {"max_num_seqs": 64}),
        ("defaults", "defaults", {}),
        ("few=--max-num-seqs 8", "few", {"max_num_seqs": 8}),
        ("vllm serve Qwen/X --max-num-seqs 8", "vllm serve Qwen/X --max-num-seqs 8", {"max_num_seqs": 8}),
        ("vllm.yaml", "vllm.yaml", {"max_num_batched_tokens": 512}),
    ],
)
def test_an_arm_is_read_from_what_people_have(
    folder: Path, text: str, name: str, knobs: Mapping[str, Value]
) -> None:
    (folder / "vllm.yaml").write_text("model: Qwen/X\nmax-num-batched-tokens: 512\n")
    store = Store("sqlite://")
    arm = arm_of(text, prepared_of(folder, store), store, base=folder)
    assert (arm.name, arm.candidate) == (name, Candidate(knobs))


def test_a_knob_of_an_arm_that_the_study_fixes_is_written_once(folder: Path) -> None:
    prepared = prepared_of(folder, Store("sqlite://"))
    assert prepared.fixed == ("--max-model-len", "16384")
    arm = arm_of("few=--max-model-len 8192 --max-num-seqs 8", prepared, None, base=folder)
    ((_, today), (_, few)) = command_lines(
        compared([arm_of("today", prepared, None, base=folder), arm], margin=0.1)
    )
    assert today[today.index("--max-model-len") + 1] == "16384"
    assert few[few.index("--max-model-len") + 1] == "8192"
    assert few.count("--max-model-len") == 1


def test_over_http_no_file_no_command_line_and_no_interpreter_is_an_arm(folder: Path) -> None:
    (folder / "vllm.yaml").write_text("model: Qwen/X\nmax-num-batched-tokens: 512\n")
    store = Store("sqlite://")
    prepared = prepared_of(folder, store)
    for text in ("vllm.yaml", "--max-num-seqs 8", "vllm serve x", "today@slow.yaml", "today@/bin/python3"):
        with pytest.raises(NotFound):
            arm_of(text, prepared, store, base=folder, files=False)


def test_a_comparison_is_a_study_of_its_own_for_each_choice_of_arms(folder: Path) -> None:
    store = Store("sqlite://")
    prepared = prepared_of(folder, store)
    one, two, slow = (
        arm_of(t, prepared, store, base=folder) for t in ("today", "defaults", "today@slow.yaml")
    )
    ids = {compared(arms, margin=0.1).study.id for arms in ([one, two], [two, one], [one, slow])}
    assert len({prepared.study.id, *ids}) == 4
    with pytest.raises(BadInput, match="at least 2 rounds"):
        compared([one, two], margin=0.1, rounds=1)
