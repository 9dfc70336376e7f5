"""The whole path on the real vLLM (CPU build): at most nine launches, one study, one kill in its middle."""

import asyncio
import os
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from benchmarks.tiny import ENV
from tests.engine.real import INTERPRETER, model
from tests.service.surfaces import assert_one_truth
from tests.tuning.studies import TRACE, command, environment, tuner, wait_for
from tests.tuning.test_end_to_end import ours, run_of, store_of
from tuner.adapters import adapter_of
from tuner.engine.server import serve
from tuner.knobs.catalogue import read_back
from tuner.records import LaunchSpec, RunState, Trial, TrialState
from tuner.tuning.next_trial import propose
from tuner.tuning.study import load

pytestmark = pytest.mark.vllm

SPACE = """\
about: 7 is no block size of the CPU kernel; 28 blocks hold two prompts, not their answers.
vllm: ">=0.11.2"
knobs:
  block_size: [7, 32]
  max_num_seqs: {values: [8, 16], when: {block_size: 32}}
  num_gpu_blocks_override: {values: [28], default: true, when: {max_num_seqs: 16}}
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
baseline: {max_num_seqs: 1}
slices: [{start_s: 5, duration_s: 4}]
plan: {base: quick, tail_limit_s: 300, lateness_ms: 10000}
slo: {ttft_ms: 600000, tpot_ms: 60000}
live_limits: off
budget: {trials: 5}
"""
WORDS = ("--check-rules", "--all-trials")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the study was tuned to its end, its controller killed once in the middle of trial 1."""
    if not INTERPRETER or not Path(INTERPRETER).exists():
        pytest.skip("TUNER_TEST_VLLM names no interpreter; `make test-vllm` installs one")
    home = tmp_path_factory.mktemp("cpu")
    model(home / "model")
    (home / "space.yaml").write_text(SPACE)
    study = home / "study.yaml"
    study.write_text(STUDY.replace("PYTHON", INTERPRETER))
    taken = tuner(home, "trace", "import", TRACE, "--name", "conversation", "--max-len", 600)
    assert taken.returncode == 0, taken.stderr
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
    done = subprocess.run(
        command("tune", study, *WORDS), env=environment(home), capture_output=True, text=True, check=False
    )
    (home / "second.log").write_text(done.stderr)
    assert done.returncode == 0, done.stderr
    return home


def _started(home: Path) -> bool:
    """Whether the engine of trial 1 runs: its process tree is there and has said something."""
    logs = list(home.glob("trials/*/0001-0/engine.log"))
    return bool(logs) and logs[0].stat().st_size > 0 and bool(ours(home))


def trials_of(home: Path) -> tuple[Trial, ...]:
    store = store_of(home)
    return store.trials(store.study("cpu").id)


def test_no_engine_is_left(tuned: Path) -> None:
    assert ours(tuned) == []


def test_baseline_and_four_candidates_were_decided(tuned: Path) -> None:
    decided = [t for t in trials_of(tuned) if t.state in (TrialState.COMPLETE, TrialState.INFEASIBLE)]
    assert [t.number for t in decided] == [0, 1, 2, 3, 4]
    assert decided[0].is_baseline
    assert run_of(tuned).state is RunState.FINISHED


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
    assert (dict(refused.candidate), refused.cause) == ({"block_size": 7}, "block_size")
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
    store = store_of(tuned)
    study = store.study("cpu")
    said = store.latest_conclusion(study.id)
    store.close()
    assert said is not None
    assert said.run_id == run_of(tuned).id
    assert said.cost.unit == "hours", "a CPU has no GPU-hours"
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
