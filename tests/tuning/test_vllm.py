"""The whole path on the real vLLM (CPU build): one study with a kill in its middle and a second run, and a
second night of other traffic. At most nineteen launches.
"""

import asyncio
import json
import os
import signal
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.tiny import ENV
from tests.engine.real import INTERPRETER, model
from tests.history.records import newest_conclusion
from tests.service.surfaces import assert_one_truth, frozen
from tests.tuning.studies import TRACE, command, environment, tuner, wait_for
from tests.tuning.test_end_to_end import ours, run_of, store_of
from tuner.adapters import adapter_of
from tuner.conclusions import Conclusion
from tuner.engine.metrics import identity_of
from tuner.engine.server import serve
from tuner.knobs.catalogue import read_back
from tuner.records import Launch, LaunchSpec, RunState, Trial, TrialState
from tuner.simulator.cost import coefficients_of
from tuner.traffic import trace as traces
from tuner.tuning.next_trial import fronts_of, last_calibration, propose
from tuner.tuning.study import load

pytestmark = pytest.mark.vllm

SPACE = """\
about: >-
  7 is no block size of the CPU kernel; 28 blocks hold two prompts, not their answers; every engine
  recomputes what it preempts.
vllm: ">=0.11.2"
knobs:
  block_size: [7, 32]
  max_num_seqs: {values: [8, 16], when: {block_size: 32}}
  num_gpu_blocks_override: {values: [28], default: true, when: {max_num_seqs: 16}}
  preemption: {values: [recompute], default: true, when: {block_size: 32}}
"""
STUDY = """\
name: cpu
model: model
workload: chat
trace: latest:conversation
space: space.yaml
engine:
  kind: vllm
  python: PYTHON
  args:
    {load-format: dummy, skip-tokenizer-init: true, max-model-len: 640, dtype: float32, enforce-eager: true}
  env: {VLLM_CPU_KVCACHE_SPACE: 1, HF_HUB_OFFLINE: 1}
baseline: {max_num_seqs: 1, max_num_batched_tokens: 1024}
slices: [{start_s: 5, duration_s: 2}]
plan: {base: quick, tail_limit_s: 300, lateness_ms: 10000, most_repeats: 2}
slo: {ttft_ms: 600000, tpot_ms: 60000}
live_limits: off
budget: {trials: 5}
"""
WORDS = ("--check-rules", "--all-trials")
TODAY = ("--max-num-batched-tokens", "1024")
"""What runs today and no knob of the space turns."""
EVENING = (
    STUDY.replace("name: cpu", "name: evening")
    .replace("latest:conversation", "latest:evening")
    .replace("most_repeats: 2", "repeats: 1, most_repeats: 1")
    .replace("duration_s: 2", "duration_s: 1")
)
"""The second night: the same node and workload, other traffic."""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the study was tuned to its end, its controller killed once in the middle of trial 1."""
    home = fresh(tmp_path_factory, "cpu")
    model(home / "model")
    (home / "space.yaml").write_text(SPACE)
    study = put(home, "study.yaml", STUDY)
    with (home / "first.log").open("w") as log:
        controller = subprocess.Popen(
            command("tune", study, *WORDS), env=environment(home), stderr=log, stdout=log
        )
        try:
            wait_for(lambda: _started(home) or controller.poll() is not None)
            assert controller.poll() is None, (home / "first.log").read_text()
        finally:
            controller.send_signal(signal.SIGKILL)
            controller.wait()
    wait_for(lambda: not ours(home))
    tune(home, study)
    return home


def fresh(folders: pytest.TempPathFactory, name: str) -> Path:
    """A home that has the trace; skips where there is no vLLM."""
    if not INTERPRETER or not Path(INTERPRETER).exists():
        pytest.skip("TUNER_TEST_VLLM names no interpreter; `make test-vllm` installs one")
    home = folders.mktemp(name)
    taken = tuner(home, "trace", "import", TRACE, "--name", "conversation", "--max-len", 600)
    assert taken.returncode == 0, taken.stderr
    return home


def put(home: Path, name: str, text: str) -> Path:
    """A study file in the home."""
    path = home / name
    path.write_text(text.replace("PYTHON", INTERPRETER))
    return path


def tune(home: Path, study: Path, *words: object) -> str:
    """Run a study to its end; what the command said."""
    done = subprocess.run(
        command("tune", study, *WORDS, *words), env=environment(home), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def said_of(home: Path, name: str) -> Conclusion:
    """The last conclusion of a study."""
    store = store_of(home)
    found = newest_conclusion(store, store.study(name).id)
    store.close()
    assert found is not None
    return found


def _started(home: Path) -> bool:
    """Whether the engine of trial 1 runs: its process tree is there and has said something."""
    logs = list(home.glob("trials/*/0001-0/engine.log"))
    return bool(logs) and logs[0].stat().st_size > 0 and bool(ours(home))


def trials_of(home: Path, name: str = "cpu") -> tuple[Trial, ...]:
    store = store_of(home)
    return store.trials(store.study(name).id)


def launches_of(home: Path, name: str = "cpu") -> tuple[Launch, ...]:
    store = store_of(home)
    return tuple(store.launches(store.study(name).id))


def test_no_engine_is_left(tuned: Path) -> None:
    assert ours(tuned) == []


def test_baseline_and_four_candidates_were_decided(tuned: Path) -> None:
    decided = [t for t in trials_of(tuned) if t.state in (TrialState.COMPLETE, TrialState.INFEASIBLE)]
    assert [t.number for t in decided] == [0, 1, 2, 3, 4]
    assert decided[0].is_baseline
    assert run_of(tuned).state is RunState.FINISHED


def test_19_6_five_trials_are_five_numbers(tuned: Path) -> None:
    assert {t.number for t in trials_of(tuned)} == {0, 1, 2, 3, 4}
    assert len(launches_of(tuned)) <= 3 * 5


def test_19_1_every_engine_runs_with_what_runs_today(tuned: Path) -> None:
    """In the command line of each launch, and in the configuration that each engine reports."""
    found = launches_of(tuned)
    assert len(found) >= 6
    for launch in found:
        assert launch.argv[launch.argv.index(TODAY[0]) :][:2] == TODAY, launch.argv
    assert {t.candidate["max_num_batched_tokens"] for t in trials_of(tuned)} == {1024}
    served = [t for t in trials_of(tuned) if t.state is TrialState.COMPLETE]
    assert [t.effective["max_num_batched_tokens"] for t in served] == [1024] * 4
    shown = tuner(tuned, "front", "cpu", "--json")
    assert all(
        row["candidate"]["max_num_batched_tokens"] == 1024 for row in json.loads(shown.stdout)["front"]
    )


def test_19_5_no_two_trials_are_one_effective_configuration(tuned: Path) -> None:
    """The space also asks for the preemption that the engine has anyway."""
    served = [t for t in trials_of(tuned) if t.state is TrialState.COMPLETE]
    assert len({identity_of(t.effective) for t in served}) == len(served) == 4
    assert all("preemption" not in t.candidate for t in trials_of(tuned))


def test_the_killed_attempt_is_aborted_and_repeated_as_it_was(tuned: Path) -> None:
    first, second = [t for t in trials_of(tuned) if t.number == 1][:2]
    assert (first.state, first.cause) == (TrialState.ABORTED, "controller")
    assert (second.candidate, second.seed, second.origin) == (first.candidate, first.seed, first.origin)


def test_history_alone_gives_every_candidate_again(tuned: Path) -> None:
    from dataclasses import replace

    prepared = load(tuned / "study.yaml", store=store_of(tuned), now=datetime.now(UTC))
    trials = trials_of(tuned)
    for trial in trials:
        found = propose(replace(prepared, rules=False), [t for t in trials if t.number < trial.number])
        assert found is not None
        assert (found.candidate, found.seed) == (trial.candidate, trial.seed)


def test_a_block_size_that_the_backend_refuses_is_infeasible(tuned: Path) -> None:
    (refused,) = (t for t in trials_of(tuned) if t.state is TrialState.INFEASIBLE)
    asked = {"block_size": 7, "max_num_batched_tokens": 1024}
    assert (dict(refused.candidate), refused.cause) == (asked, "block_size")
    assert refused.measurement is None


def test_few_blocks_force_real_preemptions(tuned: Path) -> None:
    (short,) = (
        t
        for t in trials_of(tuned)
        if t.state is TrialState.COMPLETE and t.candidate.get("num_gpu_blocks_override") == 28
    )
    assert short.measurement is not None
    assert short.measurement.values["preemptions"] > 0


def test_every_surface_tells_the_same(tuned: Path) -> None:
    """What the run of the real engine found, on the command line, the pages, over HTTP and in the report."""
    said, study = said_of(tuned, "cpu"), store_of(tuned).study("cpu")
    assert said.run_id == run_of(tuned).id
    assert said.cost.gpus == 0, "a CPU has no GPU-hours"
    assert_one_truth(tuned, study, said)


def test_the_profile_is_pulled_and_the_engine_is_launched_with_it(tuned: Path) -> None:
    """The challenger's, where the run found one; else the baseline's, which every run publishes."""
    summary = run_of(tuned).summary
    alias = "baseline" if summary["winner"] is None else "challenger"
    number = summary["baseline" if summary["winner"] is None else "winner"]
    pulled = tuned / "vllm.yaml"
    words = ("--model", tuned / "model", "--alias", alias, "--format", "vllm-yaml", "-o", pulled)
    done = tuner(tuned, "profile", "resolve", *words)
    assert done.returncode == 0, done.stderr
    asked = yaml.safe_load(pulled.read_text())
    winner = next(t for t in trials_of(tuned) if t.number == number and not t.cause)
    spec = LaunchSpec(
        launch_id=f"pulled-{os.getpid()}",
        command=(INTERPRETER, *adapter_of("vllm").command),
        model=str(tuned / "model"),
        argv=("--config", str(pulled)),
        served_name="pulled",
        directory=str(tuned / "pulled"),
        env=ENV,
        asked=winner.candidate,
        read_back=read_back(),
    )

    async def effective() -> dict[str, object]:
        async with serve(spec) as server:
            return dict(server.effective)

    found = asyncio.run(effective())
    assert asked["max-num-seqs"] == winner.candidate["max_num_seqs"]
    for name, value in winner.candidate.items():
        assert found[name] == value


@dataclass(frozen=True)
class Again:
    """A home whose study ran a second time: both conclusions, and what was told of the first one before."""

    home: Path
    first: Conclusion
    second: Conclusion
    before: dict[str, object]


@pytest.fixture(scope="module")
def again(tuned: Path) -> Again:
    first = said_of(tuned, "cpu")
    before = frozen(tuned, first)
    tune(tuned, tuned / "study.yaml")
    return Again(tuned, first, said_of(tuned, "cpu"), before)


def test_29_a_second_run_changes_no_earlier_row(again: Again) -> None:
    assert again.second.run_id != again.first.run_id
    assert again.second.at > again.first.at
    now, before = frozen(again.home, again.first), dict(again.before)
    nights, told = now.pop("nights"), before.pop("nights")
    assert now == before
    assert isinstance(nights, list)
    assert isinstance(told, list)
    assert all(row in told for row in nights), "the night's best may now be the second run's"


def test_29_every_surface_tells_what_the_second_run_concluded(again: Again) -> None:
    assert_one_truth(again.home, store_of(again.home).study("cpu"), again.second)


def test_19_5_a_second_run_measures_no_configuration_as_a_new_trial(again: Again) -> None:
    """All of the space was measured; what is left differs by the engine's own preemption alone."""
    candidates = {t.candidate for t in trials_of(again.home) if not t.is_baseline}
    assert len(candidates) == 4
    assert all(t.is_baseline for t in trials_of(again.home) if t.number > 4)


@pytest.fixture(scope="module")
def evening(again: Again) -> Path:
    """The home after a night of other traffic, too short for more than its first proposal."""
    home = again.home
    taken = tuner(home, "trace", "import", TRACE, "--name", "evening", "--max-len", 590)
    assert taken.returncode == 0, taken.stderr
    tune(home, put(home, "evening.yaml", EVENING), "--trials", 2)
    return home


def test_19_2_a_second_night_begins_with_the_first_ones_winner_and_calibration(evening: Path) -> None:
    store = store_of(evening)
    first, second = store.study("cpu"), store.study("evening")
    assert first.trace_digest != second.trace_digest
    prepared = load(evening / "evening.yaml", store=store, now=datetime.now(UTC))
    assert prepared.study.id == second.id
    (seed,) = (t for t in trials_of(evening, "evening") if t.number == 1)
    seeds = fronts_of(store, prepared)
    assert seed.origin == seeds[0][0]
    assert seed.origin.startswith("same node: cpu/")
    begun_with = next(t for t in trials_of(evening) if f"cpu/{t.number}" in seed.origin and not t.cause)
    assert begun_with.state is TrialState.COMPLETE
    for name in ("block_size", "max_num_seqs", "num_gpu_blocks_override"):
        assert seed.candidate.get(name) == begun_with.candidate.get(name)
    last = next(run for run in store.runs(first.id) if run.ended_at is not None)
    fitted = last.summary["calibration"]
    assert isinstance(fitted, dict)
    assert last_calibration(store, prepared, None) == coefficients_of(fitted["coefficients"])


def test_19_3_raw_history_is_refused_before_a_launch(tuned: Path) -> None:
    before = len(launches_of(tuned))
    asked = put(tuned, "raw.yaml", STUDY + "history: raw\n")
    done = tuner(tuned, "tune", asked)
    assert done.returncode == 2
    assert "a trace keeps no text" in done.stderr
    assert len(launches_of(tuned)) == before


def test_19_4_without_weights_no_knob_that_changes_the_output_is_turned(tuned: Path) -> None:
    (tuned / "format.yaml").write_text(SPACE + "  dtype: [float32, bfloat16]\n")
    text = STUDY.replace("space.yaml", "format.yaml").replace(", dtype: float32", "")
    asked = put(
        tuned, "format-study.yaml", text.replace("{max_num_seqs: 1,", "{max_num_seqs: 1, dtype: float32,")
    )
    done = tuner(tuned, "tune", asked, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "dtype=bfloat16: it changes the answers, and without weights" in done.stderr
    assert "bfloat16" not in done.stdout


def test_19_7_a_beam_search_is_refused_before_a_launch(tuned: Path) -> None:
    before = len(launches_of(tuned))
    whole = traces.read(TRACE)
    beams = whole.changed(beam=np.full(len(whole), 2, np.int16))
    traces.write(beams, tuned / "beams.parquet")
    asked = put(tuned, "beams.yaml", STUDY.replace("latest:conversation", "beams.parquet"))
    done = tuner(tuned, "tune", asked)
    assert done.returncode == 2
    assert "beam searches. vLLM does not stream them" in done.stderr
    assert len(launches_of(tuned)) == before
